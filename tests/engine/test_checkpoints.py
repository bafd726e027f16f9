# SPDX-License-Identifier: Apache-2.0
"""Parity on every kind of checkpoint, one engine after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.checkpoints import CASES
from tests.engine.harness import BLOCKS, NOISY, assert_parity, load_reference, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("mha", "predicts_mask")])
def test_every_checkpoint(checkpoint: Callable[[str], Path], name: str) -> None:
    folder = checkpoint(name)
    model = load_reference(folder)
    with running(folder) as engine:
        assert_parity(engine, model, 20, BLOCKS)
        assert_parity(engine, model, 7, {**BLOCKS, "cfg_scale": 0.7})
        assert_parity(engine, model, 20, {**NOISY, "temperature": 0.8})
        assert_parity(engine, model, 13, {"gen_length": 32, "block_length": 16, "threshold": 0.7})
