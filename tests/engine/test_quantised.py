# SPDX-License-Identifier: Apache-2.0
"""Quantised weights in an engine: batches, caches, chunks, and the log line."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, random_prompt
from tests.engine.harness import BLOCKS, as_request, running, shrink

DREAM = {"gen_length": 16, "steps": 4}
QUICK = {**BLOCKS, "steps": 8}
# Family, --quantization, parameters, caches, and KiB of a pool that is too small for a whole step.
CASES: list[tuple[str, str, dict[str, Any], tuple[str, ...], int]] = [
    ("llada", "fp8", QUICK, ("none", "dual"), 0),
    ("llada", "int4", QUICK, ("none",), 112),
    ("llada", "int4 with an fp8 head", QUICK, ("none",), 112),
    ("dream", "nf4", DREAM, ("none",), 112),
    ("moe", "fp8", QUICK, ("none",), 128),
    ("moe", "int4", QUICK, ("dual",), 0),
    ("llada2", "fp8", {"gen_length": 16}, ("exact", "none"), 0),
    ("sdar_moe", "nf4", {"gen_length": 16}, ("exact",), 0),
]


@pytest.mark.parametrize(("family", "quantization", "parameters", "caches", "budget_kib"), CASES)
def test_answers_depend_neither_on_neighbours_nor_on_chunks(
    family: str,
    quantization: str,
    parameters: dict[str, Any],
    caches: tuple[str, ...],
    budget_kib: int,
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path / family, family=family, seed=14)
    asks = [
        as_request(random_prompt(length, seed), **parameters, cache=cache)
        for cache in caches
        for seed, length in enumerate((5, 33))
    ]
    kind, _, head = quantization.partition(" ")
    settings = {"additional_config": {"dllm": {"fp8_head": bool(head)}}}
    with running(folder, quantization=kind, **settings) as engine:
        together = [answer.token_ids for answer in engine.ask(*asks)]
        assert [engine.ask(ask)[0].token_ids for ask in asks] == together
        assert all(len(tokens) == parameters["gen_length"] for tokens in together)
        if budget_kib:
            shrink(engine.runner, budget_kib * 1024)
            answers = [engine.ask(ask)[0] for ask in asks]
            assert [answer.token_ids for answer in answers] == together
