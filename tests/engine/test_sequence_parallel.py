# SPDX-License-Identifier: Apache-2.0
"""Rows that are divided over ranks give the tokens, trajectories and memory of one rank.

Ranks are threads here (`tests/engine/ranks.py`) and processes in
tests/engine/test_tensor_parallel.py.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.executor import Executor

from tests.checkpoints import random_prompt
from tests.engine.cases import CUT, SCHEMA, SHORT, guided_asks, mixed_asks, whole_asks
from tests.engine.harness import Request, engine_config, finish, running, start, tokens
from tests.engine.ranks import Ranked, ranked
from vllm.diffusion.engine.executor import RanksExecutor
from vllm.diffusion.engine.worker.pool_budget import planning_budget
from vllm.diffusion.memory import Plan, Planner
from vllm.diffusion.memory.plan import ChunkRows, Residency

DIVIDED = Plan(Residency(False, shards=2), CUT.rows)
# Scored positions: the first and the last row of every 16.
READ = [0, 15, 16, 31, 32, 47, 48, 63]
SCORED = Request(random_prompt(64, 9), {"score": {"positions": READ, "token_ids": [[5, 6]] * 8}})


def use(plan: Plan, ranks: Ranked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all ranks follow a plan, and the same plan for one rank if the step has a cache."""
    alone = replace(plan, layout=plan.layout._replace(shards=1))
    for runner in ranks.runners:
        monkeypatch.setattr(runner.planner, "plan", lambda step, *_: alone if step.keeps else plan)


@pytest.mark.parametrize("family", ["mha", "dream", "moe_dense_mix", "diffullama", "qk_norm"])
def test_divided_steps_give_the_same_tokens(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same alone, in a batch, with guidance, sampled, whole and in chunks."""
    own = Request(random_prompt(33, 5), SHORT)
    with running(checkpoint(family)) as engine:
        whole, alone = tokens(engine.ask(*whole_asks())), tokens(engine.ask(own))
    with ranked(checkpoint(family), 2) as (engine, ranks):
        assert tokens(engine.ask(*whole_asks())) == whole
        assert tokens(engine.ask(own)) == alone
        use(DIVIDED, ranks, monkeypatch)
        assert tokens(engine.ask(*whole_asks())) == whole
        assert ranks.num_exchanges > 0
        assert engine.is_idle() and ranks.are_idle()


def test_head_groups_host_rows_and_kept_keys_give_the_same_tokens(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with a cache are not divided: every rank computes them as a whole."""
    with running(checkpoint("mha")) as engine:
        wanted, whole = tokens(engine.ask(*mixed_asks())), tokens(engine.ask(*whole_asks()))
    with ranked(checkpoint("mha"), 2) as (engine, ranks):
        assert tokens(engine.ask(*mixed_asks())) == wanted
        assert ranks.num_exchanges == 0
        for on_host in (False, True):
            use(Plan(Residency(False, 2, on_host, shards=2), CUT.rows), ranks, monkeypatch)
            assert tokens(engine.ask(*whole_asks())) == whole
        assert engine.is_idle() and ranks.are_idle()


def test_four_ranks_divide_few_rows(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five rows, the first two ranks have two each, the third has one and the last has none."""
    few = Request([7], {**SHORT, "gen_length": 4, "block_length": 4})
    with running(checkpoint("mha")) as engine:
        wanted, whole = tokens(engine.ask(few)), tokens(engine.ask(*whole_asks()))
    with ranked(checkpoint("mha"), 4) as (engine, ranks):
        assert tokens(engine.ask(few)) == wanted
        on_host = Residency(False, host_residual=True, shards=4)
        use(Plan(on_host, CUT.rows._replace(attend=1)), ranks, monkeypatch)
        assert tokens(engine.ask(few)) == wanted
        use(Plan(Residency(False, shards=4), CUT.rows), ranks, monkeypatch)
        assert tokens(engine.ask(*whole_asks())) == whole
        assert engine.is_idle() and ranks.are_idle()


def test_records_are_bit_equal(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are equal to the bit if chunks have the same number of rows on one and two ranks."""
    answers = []
    for shards in (1, 2):
        with ranked(checkpoint("mha"), shards) as (engine, ranks):
            # With rows in host memory, one rank computes the same products.
            layout = Residency(False, host_residual=True, shards=shards)
            use(Plan(layout, ChunkRows(16, 16, 16, 4)), ranks, monkeypatch)
            answers += engine.ask(replace(SCORED, sampling={"max_tokens": 1}))
            assert (ranks.num_exchanges > 0) == (shards > 1)
    one, two = (answer.report["scores"] for answer in answers)
    assert one == two


def test_guided_answers_are_those_of_one_rank(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank samples guided steps in parts; they also contain rows of other requests."""
    guided = guided_asks(["semi_ar", "guidance"], 0.0, json=SCHEMA)
    guided += guided_asks(["dream"], 0.7, regex="[a-z]{3,8}!")
    guided.append(replace(guided[0], sampling={"logprobs": 2}))
    with running(checkpoint("mha")) as engine:
        wanted = tokens(engine.ask(*guided, *whole_asks()))
    with ranked(checkpoint("mha"), 2) as (engine, ranks):
        use(DIVIDED, ranks, monkeypatch)
        assert tokens(engine.ask(*guided, *whole_asks())) == wanted
        assert ranks.num_exchanges > 0
        assert engine.is_idle() and ranks.are_idle()


def test_only_steps_of_enough_rows_are_divided(checkpoint: Callable[[str], Path]) -> None:
    with ranked(checkpoint("mha"), 2, min_tokens=40) as (engine, ranks):
        engine.ask(Request(random_prompt(23), SHORT))
        assert ranks.num_exchanges == 0
        engine.ask(Request(random_prompt(24), SHORT))
        assert ranks.num_exchanges > 0


def test_slices_and_aborts(checkpoint: Callable[[str], Path]) -> None:
    """A divided step runs in slices while other requests step, and a request aborts in its step."""
    long, beside = Request(random_prompt(150, 1), {**SHORT, "cfg_scale": 1.0}), mixed_asks()
    with running(checkpoint("mha")) as engine:
        wanted = tokens(engine.ask(long, *beside))
    with ranked(checkpoint("mha"), 2, min_tokens=100) as (engine, ranks):
        upstream = engine.llm.llm_engine
        engine.cut_steps(4e-3)  # seconds of prediction, less than a step
        for gone in (True, False):
            name = start(engine, "long", long)
            names = [start(engine, str(number), ask) for number, ask in enumerate(beside)]
            for _ in range(3):
                upstream.step()
            assert all(runner.pool.has_frame for runner in ranks.runners)
            if gone:
                upstream.abort_request(["long"])
            answers = finish(engine)
            assert len(names) == len(beside) and name
            assert ("long" in answers) != gone
            assert tokens([answers[str(n)] for n in range(len(beside))]) == wanted[1:]
        assert tokens([answers["long"]]) == wanted[:1]
        assert engine.is_idle() and ranks.are_idle()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_measured_peaks_are_at_most_the_predicted_ones(
    share: float, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    request = Request(
        random_prompt(512), {**SHORT, "gen_length": 512, "block_length": 512, "steps": 2}
    )
    with ranked(checkpoint("mha"), 2, max_model_len=2048) as (engine, ranks):
        (answer,) = engine.ask(request)
        largest = answer.report["peak_bytes"]
        for runner in ranks.runners:
            shape, rows = runner.planner.shape, runner.planner.row_budget
            runner.pool.budget_bytes = int(share * largest)
            budget = planning_budget(runner.pool.budget_bytes)
            runner.planner = Planner(shape, budget, rows, shards=2, min_rows=0)
        planner, planned = ranks.runners[0].planner, list[Plan]()
        plan = planner.plan
        monkeypatch.setattr(planner, "plan", lambda *a: planned.append(plan(*a)) or planned[-1])
        again = engine.ask(request)[0]
        assert again.token_ids == answer.token_ids
        assert all(plan.layout.shards == 2 for plan in planned)
        predicted = max(plan.predicted_peak_bytes for plan in planned)
        assert 0.85 < again.report["peak_bytes"] / predicted <= 1.0


# ---- settings that exclude division ----


@pytest.mark.parametrize(
    ("family", "size", "arguments", "wanted"),
    [
        ("mha", 3, {}, "a divisor of the 4 heads of a rank (num_attention_heads)"),
        ("gqa", 4, {}, "a divisor of the 2 heads of a rank (num_key_value_heads)"),
        ("gqa", 2, {"tensor_parallel_size": 2}, "a divisor of the 1 heads of a rank"),
        ("sdar", 2, {}, "1: SDARForCausalLM is block-causal, whose steps are short"),
        (
            "mha",
            2,
            {"distributed_executor_backend": f"{__name__}.Other"},
            "1 with distributed_exec",
        ),
    ],
)
def test_what_cannot_be_divided_stops_the_start(
    family: str,
    size: int,
    arguments: dict[str, Any],
    wanted: str,
    checkpoint: Callable[[str], Path],
) -> None:
    settings = {"dllm": {"sequence_parallel_size": size}}
    with pytest.raises(Exception, match=re.escape(f"given {size}; wanted {wanted}")):
        engine_config(checkpoint(family), additional_config=settings, **arguments)


class Other(Executor):
    """An executor that starts other processes."""


def test_upstream_counts_a_process_for_every_rank(checkpoint: Callable[[str], Path]) -> None:
    settings = {"dllm": {"sequence_parallel_size": 2}}
    parallel = engine_config(
        checkpoint("mha"), additional_config=settings, tensor_parallel_size=2
    ).parallel_config
    assert (parallel.world_size, parallel.tensor_parallel_size) == (4, 2)
    executor = RanksExecutor.__new__(RanksExecutor)
    executor.parallel_config = parallel
    assert executor._get_parallel_sizes() == (2, 1, 2)
    assert executor._get_output_rank() == 0
    assert [executor._is_driver_worker(rank) for rank in range(4)] == [True, False, False, False]
