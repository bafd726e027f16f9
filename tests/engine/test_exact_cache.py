# SPDX-License-Identifier: Apache-2.0
"""Exact keys and values in pages give the tokens of full recompute under every schedule.

The engine of most tests has few pages and a small row budget, so that requests are cut into parts,
share prefixes, lose their pages and get them again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    num_cached,
    record,
    rows_of_launches,
    running,
    shrink,
    speculating,
    start,
    step,
    tokens,
    uncached,
)
from tests.engine.schedules import Arrival, arrivals, check_schedule
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.engine.scheduler import scheduler
from vllm.diffusion.engine.scheduler.paging import Paging

ROW_BUDGET = 48
NUM_PAGES = 8  # one of them is reserved by upstream
SHARED = random_prompt(130, seed=99)


def ask(prompt: list[int], **parameters: Any) -> Request:
    if "algorithm" not in parameters:
        parameters = {"algorithm": "low_confidence_dynamic", "threshold": 0.3, **parameters}
    return Request(prompt, {"ignore_eos": True, **parameters})


ASKS = [
    ask(random_prompt(20, 0), block_length=4, gen_length=16),
    ask(SHARED, block_length=4, gen_length=9),
    ask([*SHARED[:128], 7, 8, 9], block_length=4, gen_length=30),
    ask([*SHARED[:100], 3], block_length=4, gen_length=12, threshold=0.9),
    ask(SHARED, block_length=16, gen_length=20),
    ask(random_prompt(64, 1), block_length=32, gen_length=40),
    ask(random_prompt(3, 2), block_length=8, gen_length=70),
    ask(random_prompt(33, 3), block_length=7, gen_length=24),
    ask(SHARED[:64], block_length=64, gen_length=5),
    ask(random_prompt(128, 4), block_length=4, gen_length=8, temperature=0.8, seed=5),
    ask(random_prompt(41, 5), algorithm="semi_ar", block_length=8, gen_length=24),
    ask(random_prompt(90, 6), algorithm="sequential", block_length=4, gen_length=12),
    ask(random_prompt(70, 7), algorithm="joint_threshold", block_length=8, gen_length=24),
]


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(
        checkpoint("sdar"),
        max_num_batched_tokens=ROW_BUDGET,
        num_gpu_blocks_override=NUM_PAGES,
        disable_log_stats=False,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[Response]:
    """Return the response to each of `ASKS` alone with full recompute."""
    return [engine.ask(uncached(one))[0] for one in ASKS]


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the id of every request that loses its pages."""
    return record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)


@pytest.fixture
def batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that receives every later batch."""
    return record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch)


def fill_with_nan(engine: Engine) -> None:
    """Fill all pages of the store with NaN, in every layer."""
    for layer in range(len(engine.runner.model.layers)):
        engine.runner.caches.keys(layer).fill_(torch.nan)
        engine.runner.caches.values(layer).fill_(torch.nan)


def same(answers: list[Response], wanted: list[Response]) -> None:
    assert tokens(answers) == tokens(wanted)
    assert {a.finish_reason for a in answers} == {"length"}


# ---- the same tokens ---------------------------------------------------------------------------


def test_alone(
    engine: Engine, wanted: list[Response], fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.loop, "runs_ahead", fuses)
    same([engine.ask(one)[0] for one in ASKS], wanted)
    assert engine.is_idle()


def test_together_with_few_pages_and_rows(
    engine: Engine,
    wanted: list[Response],
    runs_ahead: bool,
    fuses: bool,
    batches: list[Any],
) -> None:
    """Prompts are cut into parts, and requests with full recompute share the steps."""
    asks = [*ASKS, *map(uncached, ASKS[:3])]
    same(engine.ask(*asks), [*wanted, *wanted[:3]])
    of_rule = [sum(target.eligible.size > 0 for target in batch.targets) for batch in batches]
    assert any(count < len(b.targets) for count, b in zip(of_rule, batches, strict=True))
    shared = [batch for batch in batches if len(batch.items) > 1]
    assert max(batch.num_rows for batch in shared) <= ROW_BUDGET
    assert engine.is_idle()
    assert engine.scheduler.make_stats().kv_cache_usage == 0


# Each request begins with one page and ends with three; only seven pages are free.
GROWING = [ask(random_prompt(50, seed), block_length=8, gen_length=85) for seed in range(5)]


@pytest.fixture(scope="module")
def grown(engine: Engine) -> list[Response]:
    """Return the response to each of `GROWING` alone."""
    return [engine.ask(uncached(one))[0] for one in GROWING]


def test_who_loses_its_pages_goes_on_where_it_was(
    engine: Engine, grown: list[Response], runs_ahead: bool, fuses: bool, preemptions: list[str]
) -> None:
    assert engine.scheduler.reset_prefix_cache()
    same(engine.ask(*GROWING), grown)
    assert len(preemptions) >= 2
    assert engine.is_idle()


def test_guesses_survive_the_loss_of_pages(
    engine: Engine, grown: list[Response], runs_ahead: bool, preemptions: list[str]
) -> None:
    """Draft pages behind the pages of requests lose their copies, and drafts change no token."""
    engine.runner.pages.fix(NUM_PAGES, 1000, scratch=8)
    assert engine.scheduler.reset_prefix_cache()
    drafted = engine.ask(*speculating(GROWING, 2))
    assert [(a.token_ids, a.num_steps) for a in drafted] == [
        (a.token_ids, a.num_forwards) for a in grown
    ]
    assert sum(answer.report["states_accepted"] for answer in drafted) > 0
    assert len(preemptions) >= 2
    assert engine.is_idle() and len(engine.runner.caches.free) == 8


def test_chunks_give_the_same_tokens(engine: Engine, wanted: list[Response]) -> None:
    """Steps that do not fit as a whole give the same tokens in chunks."""
    runner, planner = engine.runner, engine.runner.planner
    budget = runner.pool.budget_bytes
    try:
        shrink(runner, runner.caches.reserved_bytes + 110_000)
        same(engine.ask(*ASKS[:8]), wanted[:8])
    finally:
        runner.pool.budget_bytes, runner.planner = budget, planner


def test_what_pages_have_held_changes_nothing(engine: Engine, wanted: list[Response]) -> None:
    assert engine.scheduler.reset_prefix_cache()
    fill_with_nan(engine)
    same(engine.ask(*ASKS), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_what_pages_have_held_changes_nothing_on_a_gpu(
    eager: bool, checkpoint: Callable[[str], Path]
) -> None:
    """16-bit attention reads whole tiles of pages in place, while steps run ahead."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": NUM_PAGES, "enforce_eager": eager}
    with running(checkpoint("llada2"), dtype="bfloat16", **settings) as engine:
        fill_with_nan(engine)
        reports = [Request(one.prompt, one.extra, {"logprobs": 0}) for one in ASKS]
        for one, output in zip(reports, engine.outputs(*reports), strict=True):
            (answer,) = output.outputs
            assert len(answer.token_ids) == one.extra["gen_length"]
            actual = [entry.logprob for place in answer.logprobs for entry in place.values()]
            assert torch.tensor(actual).isfinite().all()


def test_a_block_is_committed_with_the_next_one_or_apart(
    engine: Engine, fuses: bool, batches: list[Any]
) -> None:
    """A finished block is stored with the next block by default. The last one is not stored."""
    one = ask(
        random_prompt(8, 0), algorithm="semi_ar", block_length=4, gen_length=12, steps_per_block=1
    )
    (answer,) = engine.ask(one)
    windows = [(b.positions[0], b.positions[-1] + 1) for b in batches]
    if fuses:
        assert windows == [(0, 12), (8, 16), (12, 20)]
    else:
        assert windows == [(0, 8), (8, 12), (8, 12), (12, 16), (12, 16), (16, 20)]
    assert answer.num_forwards == 3


def test_an_answer_that_ends_inside_a_block(engine: Engine) -> None:
    """The block is decoded as a whole, and its tokens do not depend on where the answer ends."""
    long = engine.ask(ask(random_prompt(21, 0), block_length=16, gen_length=40))[0].token_ids
    for length in (1, 10, 11, 12, 27):
        (answer,) = engine.ask(ask(random_prompt(21, 0), block_length=16, gen_length=length))
        assert answer.token_ids == long[:length]


def test_a_stop_token_ends_the_answer_after_its_block(
    engine: Engine, wanted: list[Response], runs_ahead: bool
) -> None:
    whole = wanted[2].token_ids
    stop = whole[12]
    place = whole.index(stop)
    one = Request(
        ASKS[2].prompt, {**ASKS[2].extra, "ignore_eos": False}, {"stop_token_ids": [stop]}
    )
    (answer,) = engine.ask(one)
    assert answer.token_ids == whole[: place + 1]
    assert engine.is_idle()


def test_blocks_are_told_as_they_are_finished(engine: Engine, wanted: list[Response]) -> None:
    upstream = engine.llm.llm_engine
    start(engine, "streamed", ASKS[0])
    lengths = []
    while upstream.has_unfinished_requests():
        lengths += [len(output.outputs[0].token_ids) for output in upstream.step()]
    assert [length for length in lengths if length] == [4, 8, 12, 16]


def test_a_request_that_is_only_read(engine: Engine) -> None:
    """A request for prompt scores takes one forward pass, and other requests run on."""
    parameters = {"score": {"positions": [3, 39], "token_ids": [[1, 2], [5, 6]]}}
    read = Request(random_prompt(40, 8), parameters, {"temperature": 1.0})
    scored, written = engine.ask(read, ASKS[0])
    assert len(scored.report["scores"]["logprobs"]) == 2
    assert len(written.token_ids) == 16


# ---- shared prefixes ---------------------------------------------------------------------------


def test_what_is_final_is_found_by_those_who_come_later(engine: Engine) -> None:
    assert engine.scheduler.reset_prefix_cache()
    assert num_cached(engine, ASKS[1]) == 0
    assert num_cached(engine, ASKS[1]) == 128
    assert num_cached(engine, ASKS[3]) == 64
    assert num_cached(engine, ask(SHARED[:128], block_length=4, gen_length=4)) == 64
    assert num_cached(engine, ASKS[4]) == 0  # another block length
    assert num_cached(engine, ASKS[4]) == 128
    assert num_cached(engine, uncached(ASKS[1])) == 0
    assert engine.scheduler.reset_prefix_cache()
    assert num_cached(engine, ASKS[1]) == 0


def test_blocks_that_do_not_tile_a_page_share_nothing(engine: Engine) -> None:
    one = ask(random_prompt(140, 9), block_length=7, gen_length=7)
    assert [num_cached(engine, one) for _ in range(2)] == [0, 0]


def test_an_answer_is_found_as_part_of_the_next_prompt(engine: Engine) -> None:
    first = ask(random_prompt(10, 10), block_length=4, gen_length=70)
    (answer,) = engine.ask(first)
    follow = ask([*first.prompt, *answer.token_ids, 5, 6], block_length=4, gen_length=8)
    assert num_cached(engine, follow) == 64
    (again,), (plain,) = engine.ask(follow), engine.ask(uncached(follow))
    assert again.token_ids == plain.token_ids


def test_the_cache_is_reset_under_running_requests(
    engine: Engine, wanted: list[Response], runs_ahead: bool
) -> None:
    upstream = engine.llm.llm_engine
    for name, one in enumerate(ASKS[:3]):
        start(engine, str(name), one)
    answers, count = dict[str, Response](), 0
    while upstream.has_unfinished_requests():
        answers |= step(engine)
        count += 1
        if count == 3:
            assert not engine.scheduler.reset_prefix_cache()
        if count in (3, 15, 16):
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    same([answers[name] for name in "012"], wanted[:3])


# ---- any schedule ------------------------------------------------------------------------------


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arrivals(len(ASKS)), st.booleans(), st.booleans())
def test_any_schedule_gives_the_same_tokens(
    engine: Engine, wanted: list[Response], schedule: list[Arrival], ahead: bool, fused: bool
) -> None:
    """Requests arrive and are aborted; the others give the tokens that they give alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DLLM_COMMIT_FUSION", str(int(fused)))
        for number, answer in check_schedule(engine, ASKS, schedule, runs_ahead=ahead):
            same([answer], [wanted[number]])


# ---- limits ------------------------------------------------------------------------------------


def test_a_request_beyond_the_store_is_refused(
    engine: Engine, checkpoint: Callable[[str], Path]
) -> None:
    too_long = ask(random_prompt(250, 0), block_length=6, gen_length=6)
    # The last block extends beyond max_model_len.
    assert len(engine.ask(too_long)[0].token_ids) == 6
    with running(checkpoint("sdar"), num_gpu_blocks_override=5) as small:
        (answer,) = small.ask(too_long)
    assert answer.finish_reason == "error"
    assert "given 258" in answer.report["error"] and "at most 256" in answer.report["error"]


def test_the_store_is_half_of_the_pool(checkpoint: Callable[[str], Path], monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(64 << 20))
    budgets = record(monkeypatch, scheduler, "make_planner", lambda _, config, budget, *__: budget)
    with running(checkpoint("sdar")) as engine:
        runner = engine.runner
        assert runner.caches.num_pages * PAGE_SIZE == runner.planner.cached_positions
        (answer,) = engine.ask(ASKS[0])
        assert len(answer.token_ids) == 16
        left = budgets[-1]  # bytes that remain for steps
        assert engine.scheduler.last_usage.budget_bytes - left == runner.caches.reserved_bytes
        assert runner.planner.budget_bytes // 3 < left
        assert left <= runner.planner.budget_bytes // 2 + (1 << 20)


def test_prefix_caching_can_be_turned_off(checkpoint: Callable[[str], Path]) -> None:
    with running(checkpoint("sdar"), enable_prefix_caching=False) as engine:
        assert [num_cached(engine, ASKS[1]) for _ in range(2)] == [0, 0]


def test_upstreams_metrics_tell_what_was_found(checkpoint: Callable[[str], Path]) -> None:
    with running(checkpoint("sdar"), disable_log_stats=False) as engine:
        assert [num_cached(engine, ASKS[1]) for _ in range(2)] == [0, 128]
        report = {
            metric.name: getattr(metric, "value", None) for metric in engine.llm.get_metrics()
        }
    assert report["vllm:prefix_cache_queries"] == 2 * len(SHARED)
    assert report["vllm:prefix_cache_hits"] == 128
    assert report["vllm:kv_cache_usage_perc"] == 0


def test_several_answers_compute_their_prompt_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other answers start after the forward pass of the first one and reuse its pages."""
    rows = rows_of_launches(engine, monkeypatch)
    noisy = {"temperature": 0.8, "n": 3, "seed": 5}
    one = ask(SHARED, block_length=4, gen_length=8, algorithm="semi_ar", temperature=0.8)
    alone, counts = [], []
    for seed in (5, 6, 7):
        assert engine.scheduler.reset_prefix_cache()
        rows.clear()
        alone += engine.ask(Request(one.prompt, one.extra, {**noisy, "n": 1, "seed": seed}))
        counts.append(sum(rows))
    assert engine.scheduler.reset_prefix_cache()
    rows.clear()
    (output,) = engine.outputs(Request(SHARED, one.extra, noisy))
    assert [list(o.token_ids) for o in output.outputs] == [a.token_ids for a in alone]
    num_shared = len(SHARED) // PAGE_SIZE * PAGE_SIZE
    assert sum(rows) == sum(counts) - 2 * num_shared
