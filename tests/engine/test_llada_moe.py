# SPDX-License-Identifier: Apache-2.0
"""LLaDA-MoE in the engine: the tokens and the forwards of the reference loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.harness import BLOCKS, NOISY, assert_parity, running
from tests.reference.models import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.harness import Engine
    from tests.reference.models import LLaDAMoEReference


@pytest.fixture(scope="module", params=["moe_fused", "moe_dense_mix", "moe_bias"])
def engine_and_reference(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Engine, LLaDAMoEReference]]:
    folder = checkpoint(request.param)
    with running(folder) as engine:
        yield engine, load_reference(folder)


@pytest.mark.parametrize(
    ("prompt_length", "asked"),
    [
        (20, BLOCKS),
        (9, {**NOISY, "temperature": 0.7}),
        (7, {"gen_length": 32, "block_length": 16, "threshold": 0.6}),
    ],
    ids=["semi_ar", "noise", "threshold"],
)
def test_parity(
    prompt_length: int,
    asked: dict[str, Any],
    engine_and_reference: tuple[Engine, LLaDAMoEReference],
) -> None:
    engine, reference = engine_and_reference
    assert_parity(engine, reference, prompt_length, asked)
    assert engine.is_idle()
