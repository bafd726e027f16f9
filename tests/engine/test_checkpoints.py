# SPDX-License-Identifier: Apache-2.0
"""Parity on every kind of checkpoint, one engine after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import CASES
from tests.engine.harness import BLOCKS, NOISY, assert_decoded, clear_cases, running
from tests.reference.models import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# Prompt length and parameters.
ASKED: list[tuple[int, dict[str, Any]]] = [
    (20, BLOCKS),
    (7, {**BLOCKS, "cfg_scale": 0.7}),
    (20, {**NOISY, "temperature": 0.8}),
    (13, {"gen_length": 32, "block_length": 16, "threshold": 0.7}),
]


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("mha", "predicts_mask")])
def test_every_checkpoint(checkpoint: Callable[[str], Path], name: str) -> None:
    folder = checkpoint(name)
    asks, wanted = clear_cases(load_reference(folder), ASKED)
    with running(folder) as engine:
        alone = [engine.ask(ask)[0] for ask in asks]
        for answers in (alone, engine.ask(*asks)):
            assert_decoded(answers, wanted)
