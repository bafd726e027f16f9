# SPDX-License-Identifier: Apache-2.0
"""Every kind of checkpoint gives the reference's tokens, with one engine after the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.models import load_reference

from tests.checkpoints import CASES
from tests.engine.harness import BLOCKS, NOISY, assert_decoded, clear_cases, running

# Prompt lengths and parameters.
Asked = list[tuple[int, dict[str, Any]]]
ASKED: Asked = [
    (20, BLOCKS),
    (7, {**BLOCKS, "cfg_scale": 0.7}),
    (20, {**NOISY, "temperature": 0.8}),
    (13, {"gen_length": 32, "block_length": 16, "threshold": 0.7}),
]
OF_EXPERTS: Asked = [
    (20, BLOCKS),
    (9, {**NOISY, "temperature": 0.7}),
    (7, {"gen_length": 32, "block_length": 16, "threshold": 0.6}),
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *((name, ASKED) for name in CASES if name not in ("mha", "predicts_mask")),
        *((name, OF_EXPERTS) for name in ("moe_fused", "moe_dense_mix", "moe_bias")),
    ],
)
def test_every_checkpoint(checkpoint: Callable[[str], Path], name: str, parameters: Asked) -> None:
    folder = checkpoint(name)
    asks, wanted = clear_cases(load_reference(folder), parameters)
    with running(folder) as engine:
        alone = [engine.ask(ask)[0] for ask in asks]
        for answers in (alone, engine.ask(*asks)):
            assert_decoded(answers, wanted)
        assert engine.is_idle()
