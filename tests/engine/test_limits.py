# SPDX-License-Identifier: Apache-2.0
"""Admission: with little memory, requests wait and their tokens do not change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.models import LLaDAReference

from tests.engine.harness import BLOCKS, assert_decoded, clear_cases, record, record_steps, running

REQUESTS: list[tuple[int, dict[str, Any]]] = [
    (20, BLOCKS),
    (5, {**BLOCKS, "cfg_scale": 1.0}),
    (1, {"gen_length": 32, "block_length": 16, "threshold": 0.6}),
    (224, {"gen_length": 32, "block_length": 32, "steps": 4}),
    (12, {"gen_length": 16, "block_length": 8, "steps": 8}),
]


def test_one_request_at_a_time(
    checkpoint: Callable[[str], Path], model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, wanted = clear_cases(model, REQUESTS)
    with running(checkpoint("mha"), max_num_seqs=1) as engine:
        steps = record_steps(engine, monkeypatch)
        assert_decoded(engine.ask(*asks), wanted)
    assert {len(step) for step in steps} == {1}
    order = list(dict.fromkeys(step[0] for step in steps))
    assert order == sorted(order)  # first come, first served; ids ascend
    assert len(steps) == sum(run.num_forwards for run in wanted)


def test_a_row_budget_bounds_shared_steps_but_no_lone_request(
    checkpoint: Callable[[str], Path], model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 128
    asks, wanted = clear_cases(model, REQUESTS)
    with running(checkpoint("mha"), max_num_batched_tokens=budget, max_num_seqs=8) as engine:
        rows_of_steps = record(
            monkeypatch, engine.runner, "launch", lambda step, ids: (len(ids), step.batch.num_rows)
        )
        assert_decoded(engine.ask(*asks), wanted)
    assert all(rows <= budget for requests, rows in rows_of_steps if requests > 1)
    assert any(requests > 1 for requests, _ in rows_of_steps)
    assert (1, 256) in rows_of_steps  # the long request runs alone, above the budget
