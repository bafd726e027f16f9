# SPDX-License-Identifier: Apache-2.0
"""The scheduler's observations reach the server's process and do not disturb other readers."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.checkpoints import random_prompt
from tests.engine.harness import BLOCKS, Engine, Request, record, running, speculating, start
from vllm.diffusion import metrics
from vllm.diffusion.engine.scheduler import observer
from vllm.diffusion.metrics import Metric, Observations, observations_in

SMALL = Request(random_prompt(5), {"gen_length": 8, "steps": 3, "ignore_eos": True})


def sent(observations: Observations) -> list[tuple[str, str, int]]:
    """Return the observations after upstream's encoding, which depends on types."""
    stats = SchedulerStats()
    observations.put_into(stats)
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(encoded).scheduler_stats
    return [(metric.name, value, times) for metric, value, times in observations_in(decoded)]


def test_observations_arrive_as_they_were_made() -> None:
    seen = Observations()
    seen.count(metrics.FORWARDS, 3)
    seen.count(metrics.FORWARDS, 4)
    seen.count(metrics.DENOISE_STEPS, 0)
    seen.count(metrics.COMMITTED_TOKENS, -3)  # a step that masks tokens again
    seen.count(metrics.REQUESTS_REFUSED, label="engine")
    seen.observe(metrics.STEP_ROWS, 64)
    seen.observe(metrics.STEP_ROWS, 64)
    seen.observe(metrics.STEP_TIME, 0.1)
    seen.observe(metrics.POOL_BUDGET, 2**37 + 1)
    assert sent(seen) == [
        ("dllm:forwards", "", 7),
        ("dllm:requests_refused", "engine", 1),
        ("dllm:step_rows", "64", 2),
        ("dllm:step_time_seconds", "0.10000000000000001", 1),
        ("dllm:activation_pool_budget_bytes", str(2**37 + 1), 1),
    ]
    assert sent(seen) == []  # observations are sent once


def test_the_newest_value_of_a_gauge_arrives_last() -> None:
    seen = Observations()
    for value in (1, 2, 1):
        seen.observe(metrics.POOL_IN_USE, value)
    assert [value for _, value, _ in sent(seen)] == ["2", "1"]


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_well_formed(metric: metrics.Metric) -> None:
    assert metric.name.startswith("dllm:")
    assert metric.doc.endswith(".")
    assert "|" not in metric.doc  # the text becomes a cell of a table
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not metric.name.endswith("_total")


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    """Start an engine with statistics that has already reported its memory."""
    with running(checkpoint("mha"), disable_log_stats=False) as engine:
        engine.ask(SMALL)
        yield engine


def test_upstreams_loggers_pass_them_by(engine: Engine) -> None:
    """An offline engine with statistics has upstream's loggers only."""
    engine.llm.llm_engine.do_log_stats()
    names = {metric.name for metric in engine.llm.get_metrics()}
    assert "vllm:generation_tokens" in names
    assert not {name for name in names if name.startswith("vllm:lora")}


def record_sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Return a list that receives every observation that is sent from now on."""
    seen: list[tuple[str, str, int]] = []

    def note(_: Any, observations: Any, stats: SchedulerStats) -> None:
        seen.extend((metric.name, value, times) for metric, value, times in observations_in(stats))

    record(monkeypatch, Observations, "put_into", note)
    return seen


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_statistics_wait_for_an_output(
    seconds: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observations of a step without output are sent with a later step, and none is lost."""
    monkeypatch.setattr(observer, "STATISTICS_S", seconds)
    seen = record_sent(monkeypatch)
    (answer,) = engine.ask(Request(random_prompt(20), {**BLOCKS, "ignore_eos": True}))
    counts = [times for name, _, times in seen if name == "dllm:forwards"]
    assert sum(counts) == answer.num_forwards == BLOCKS["steps"]
    assert (len(counts) == BLOCKS["steps"]) == (seconds == 0.0)


def test_guesses_that_come_true_are_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_sent(monkeypatch)
    asks = [Request(random_prompt(20, n), {**BLOCKS, "ignore_eos": True}) for n in range(4)]
    answers = engine.ask(*speculating(asks, 3))
    engine.is_idle()
    totals: Counter[str] = Counter()
    for name, value, times in seen:
        totals[name] += times * (float(value) if value else 1)
    for name, field in (
        ("dllm:request_steps", "num_steps"),
        ("dllm:forwards", "num_forwards"),
        ("dllm:draft_states", "states_drafted"),
        ("dllm:accepted_states", "states_accepted"),
    ):
        assert totals[name] == sum(answer.report[field] for answer in answers) > 0, name
    paces = [answer.report["num_steps"] / answer.report["num_forwards"] for answer in answers]
    assert totals["dllm:steps_per_forward"] == pytest.approx(sum(paces))
    saved = [answer.report["num_forwards_saved"] for answer in answers]
    assert saved == [answer.report["states_accepted"] for answer in answers]


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("mha", {"canvas_token_ids": list(range(30, 62)), "noise": 0.5, "edit_rounds": 3}),
        ("llada22", {"gen_length": 32, "editing_threshold": 0.0}),
    ],
    ids=["revised", "shortened"],
)
def test_no_counter_falls_when_a_step_masks_tokens_again(
    case: str,
    fields: dict[str, Any],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer, "STATISTICS_S", 0.0)
    with running(checkpoint(case), disable_log_stats=False) as engine:
        seen = record_sent(monkeypatch)
        committed = record(
            monkeypatch,
            observer.Observer,
            "progressed",
            lambda _, __, item, result: result.num_committed - item.num_committed,
        )
        engine.ask(Request(random_prompt(5), fields))
        assert engine.is_idle()
    assert min(committed) < 0
    counts = [times for name, _, times in seen if name == "dllm:committed_tokens"]
    assert sum(counts) == sum(number for number in committed if number > 0)
    assert min(counts) > 0


def test_an_abort_after_some_steps_is_an_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens per forward pass are recorded for every request that ran, also for an aborted one."""
    monkeypatch.setattr(observer, "STATISTICS_S", 0.0)
    engine.ask(SMALL)  # send the pending observations
    seen = record_sent(monkeypatch)
    upstream = engine.llm.llm_engine
    ask = Request(random_prompt(20), {**BLOCKS, "steps": 32, "ignore_eos": True})
    req_id = start(engine, "leaves", ask)
    for _ in range(5):
        upstream.step()
    upstream.abort_request([req_id], internal=True)
    assert engine.is_idle()
    counts = [times for name, _, times in seen if name == "dllm:forwards"]
    assert counts == [1] * 5
    assert ("dllm:tokens_per_forward", "1", 1) in seen


def test_what_a_step_takes_of_the_memory_is_passed_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget and the memory in use are current values; the peak is that of all steps so far."""
    monkeypatch.setattr(observer, "STATISTICS_S", 0.0)
    seen = record_sent(monkeypatch)
    engine.ask(SMALL)  # send the pending observations
    first = max(int(value) for name, value, _ in seen if name == metrics.POOL_PEAK.name)
    seen.clear()
    execute, peaks = engine.loop.execute, [first + 30, first + 70, first + 20]

    def record(message: Any) -> Any:
        output = execute(message)
        if output.results:
            known: Any = {"in_use_bytes": 10, "peak_bytes": peaks.pop(0), "planner_us": 250.0}
            output.usage = replace(output.usage, **known)
        return output

    monkeypatch.setattr(engine.loop, "execute", record)
    engine.ask(SMALL)
    budget = engine.runner.budget_bytes

    def values(metric: Metric) -> list[float]:
        return [float(value) for name, value, _ in seen if name == metric.name][:3]

    assert first > 0
    assert values(metrics.POOL_PEAK) == [first + 30, first + 70, first + 70]
    assert values(metrics.POOL_BUDGET) == [budget] * 3
    assert values(metrics.POOL_IN_USE) == [10] * 3
    assert values(metrics.PLANNER_TIME) == [250e-6] * 3


def test_a_request_that_never_fits_counts_as_such(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(50_000))
    with running(checkpoint("mha"), disable_log_stats=False) as engine:
        seen = record_sent(monkeypatch)
        large = Request(random_prompt(200), {"gen_length": 32, "cfg_scale": 1.0})
        (answer,) = engine.ask(large)
    assert answer.finish_reason == "error"
    assert ("dllm:requests_refused", "memory", 1) in seen
