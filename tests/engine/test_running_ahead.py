# SPDX-License-Identifier: Apache-2.0
"""Steps that are launched before the results of the previous step are returned."""

from typing import Any

import pytest
from reference.models import LLaDAReference

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    BLOCKS,
    Engine,
    Request,
    as_request,
    clear_case,
    finish,
    record,
    record_steps,
    start,
)
from vllm.diffusion.engine.worker.run_ahead import StepLimits
from vllm.diffusion.memory import StepShape


@pytest.fixture
def launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Launch steps ahead, and return a list that receives the requests of every step."""
    monkeypatch.setattr(engine.loop, "runs_ahead", True)
    return record_steps(engine, monkeypatch)


def test_no_step_is_launched_for_a_complete_answer(
    engine: Engine, model: LLaDAReference, launches: list[list[str]]
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    stop = wanted.ids[10]
    place = wanted.ids.index(stop)
    for ask in (
        as_request(prompt, **BLOCKS),
        Request(
            prompt,
            as_request(prompt, ignore_eos=False, **BLOCKS).extra,
            {"stop_token_ids": [stop]},
        ),
        as_request(prompt, **BLOCKS, max_tokens=10),
    ):
        launches.clear()
        (answer,) = engine.ask(ask)
        assert len(launches) == answer.num_forwards
        assert answer.token_ids in (wanted.ids, wanted.ids[: place + 1], wanted.ids[:10])
        assert engine.is_idle()


def test_a_request_that_arrives_joins_the_step_after_the_one_under_way(
    engine: Engine, model: LLaDAReference, launches: list[list[str]]
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    other, wanted_of_other = clear_case(model, 33, **BLOCKS)
    start(engine, "first", as_request(prompt, **BLOCKS))
    engine.llm.llm_engine.step()
    assert [len(step) for step in launches] == [1, 1]
    start(engine, "second", as_request(other, **BLOCKS))
    engine.llm.llm_engine.step()
    assert [len(step) for step in launches] == [1, 1, 2]
    answers = finish(engine)
    assert answers["first"].token_ids == wanted.ids
    assert answers["second"].token_ids == wanted_of_other.ids
    assert answers["second"].num_forwards == wanted_of_other.num_forwards


@pytest.mark.parametrize("cache", ["none", "frozen"])
def test_an_abort_under_way_leaves_the_others_alone(
    engine: Engine, model: LLaDAReference, launches: list[list[str]], cache: str
) -> None:
    prompt, _ = clear_case(model, 20, **BLOCKS)
    request = as_request(prompt, **BLOCKS, cache=cache)
    (alone,) = engine.ask(request)
    aborted = start(engine, "aborted", request)
    start(engine, "stays", request)
    for _ in range(3):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request([aborted], internal=True)
    start(engine, "comes", request)  # may get the memory of the aborted request
    answers = finish(engine)
    assert answers.keys() == {"stays", "comes"}
    assert answers["stays"].token_ids == answers["comes"].token_ids == alone.token_ids
    assert engine.is_idle()


def test_an_abort_of_all_requests_under_way_leaves_nothing(
    engine: Engine, model: LLaDAReference, launches: list[list[str]]
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    aborted = start(engine, "aborted", as_request(prompt, **BLOCKS))
    engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request([aborted], internal=True)
    start(engine, "comes", as_request(prompt, **BLOCKS))
    assert finish(engine)["comes"].token_ids == wanted.ids
    assert engine.is_idle()


def test_a_launch_that_fails_harms_no_result_before_it(
    engine: Engine,
    model: LLaDAReference,
    launches: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    launch = engine.runner.launch

    def fail_at_ninth(req_ids: list[str]) -> Any:
        if len(launches) == 8:
            raise MemoryError("the launch broke")
        return launch(req_ids)

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "launch", fail_at_ninth)
        (answer,) = engine.ask(as_request(prompt, **BLOCKS))
    assert answer.finish_reason == "error"
    assert "the launch broke" in answer.report["error"]
    assert len(answer.token_ids) == 16  # two finished blocks of 4 steps
    assert answer.token_ids == wanted.ids[:16]
    assert engine.is_idle()
    (again,) = engine.ask(as_request(prompt, **BLOCKS))
    assert again.token_ids == wanted.ids


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_shares_of_the_requests_step_one_behind_the_other(
    engine: Engine,
    model: LLaDAReference,
    launches: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
) -> None:
    """Requests step in two shares, so that two steps are in flight. Tokens do not change."""
    prompt, _ = clear_case(model, 20, **BLOCKS)
    asks = [as_request(prompt[i:], **BLOCKS, cache=cache) for i in range(4)]
    alone = [engine.ask(ask)[0] for ask in asks]
    monkeypatch.setattr(engine.loop, "limits", StepLimits(2 * 52))
    launches.clear()
    seen = record(
        monkeypatch,
        engine.runner,
        "collect",
        lambda _, step: (launches[len(seen) + 1 :], step.req_ids),
    )
    for i, ask in enumerate(asks):
        start(engine, str(i), ask)
    answers = finish(engine)
    for i, answer in enumerate(alone):
        assert answers[str(i)].token_ids == answer.token_ids
        assert answers[str(i)].num_forwards == answer.num_forwards
    beside = [(waiting, own) for waiting, own in seen if waiting]
    assert len(beside) > len(seen) // 2 if cache == "none" else beside
    assert all(set(waiting[0]).isdisjoint(own) for waiting, own in beside)
    assert engine.is_idle()


def test_an_abort_of_the_first_of_two_steps_under_way(
    engine: Engine,
    model: LLaDAReference,
    launches: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    monkeypatch.setattr(engine.loop, "limits", StepLimits(52))
    outputs = record(monkeypatch, engine.loop, "execute", lambda output, _: output)
    names = [start(engine, str(i), as_request(prompt, **BLOCKS)) for i in range(3)]
    for _ in range(4):
        engine.llm.llm_engine.step()
    first, second = outputs[-1].launched
    assert {len(first), len(second)} <= {1, 2}
    gone = [name for name in names if any(req_id.startswith(name) for req_id in first)]
    assert gone
    engine.llm.llm_engine.abort_request(gone, internal=True)
    answers = finish(engine)
    assert len(answers) == 3 - len(gone)
    assert all(answer.token_ids == wanted.ids for answer in answers.values())
    assert engine.is_idle()


def test_steps_in_chunks_are_not_launched_ahead(
    engine: Engine,
    model: LLaDAReference,
    launches: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    whole = engine.runner.planner.plan(StepShape(64, 32, 64))
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: whole.resized(10))
    start(engine, "long", as_request(prompt, **BLOCKS))
    engine.llm.llm_engine.step()
    assert len(launches) == 1
    assert finish(engine)["long"].token_ids == wanted.ids


def test_a_pause_collects_what_was_launched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a pause nothing is launched, and after three steps no results are pending."""
    monkeypatch.setattr(engine.loop, "runs_ahead", True)
    asks = [Request(random_prompt(20, seed), {**BLOCKS, "ignore_eos": True}) for seed in range(3)]
    wanted = [answer.token_ids for answer in engine.ask(*asks)]
    for number, ask in enumerate(asks):
        start(engine, str(number), ask)
    for _ in range(4):
        engine.llm.llm_engine.step()
    launched = record_steps(engine, monkeypatch)
    engine.core.pause_scheduler("keep", clear_cache=False)
    assert engine.scheduler.get_num_unfinished_requests() > 0
    for _ in range(3):
        if engine.scheduler.has_requests():
            engine.llm.llm_engine.step()
    assert engine.scheduler.get_num_unfinished_requests() == 0 and not launched
    engine.core.resume_scheduler()
    actual = finish(engine)
    assert [actual[str(number)].token_ids for number in range(3)] == wanted
