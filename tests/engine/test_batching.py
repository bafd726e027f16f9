# SPDX-License-Identifier: Apache-2.0
"""The tokens of a request depend neither on its neighbours nor on the chunks of a step."""

from collections.abc import Sequence
from typing import Any

import pytest
from reference.models import LLaDAReference

from tests.engine.harness import (
    BLOCKS,
    Engine,
    Request,
    Response,
    as_request,
    assert_decoded,
    clear_case,
    clear_cases,
    finish,
    record_steps,
    start,
    step,
)
from tests.golden import Run

SHORT = {"gen_length": 16, "block_length": 8, "steps": 8}
# Prompt lengths and parameters of requests that share steps.
MIXED: list[tuple[int, dict[str, Any]]] = [
    (20, BLOCKS),
    (5, {**BLOCKS, "steps": 32}),
    (1, {"gen_length": 32, "block_length": 16, "threshold": 0.6}),
    (33, {**BLOCKS, "cfg_scale": 1.0}),
    (7, {**SHORT, "temperature": 1.0, "seed": 1}),
    (77, {"gen_length": 64, "block_length": 32, "steps": 8}),
    (12, {**SHORT, "remasking": "random", "seed": 2}),
    (20, {**BLOCKS, "confidence_eos_eot_inf": True}),
    (9, {**BLOCKS, "confidence_dtype": "float64"}),
    (3, {"gen_length": 16, "block_length": 16, "threshold": 0.9, "cfg_scale": 0.5}),
    (50, {**BLOCKS, "logits_eos_inf": True, "steps": 4}),
]


@pytest.fixture(scope="module")
def mixed(model: LLaDAReference) -> tuple[list[Request], list[Run]]:
    return clear_cases(model, MIXED)


def run_staggered(engine: Engine, asks: Sequence[Request], steps_between: int) -> list[Response]:
    """Send the requests `steps_between` steps apart and return their responses."""
    upstream = engine.llm.llm_engine
    waiting = list(enumerate(asks))
    answers: dict[str, Response] = {}
    count = 0
    while waiting or upstream.has_unfinished_requests():
        if waiting and count % steps_between == 0:
            index, ask = waiting.pop(0)
            start(engine, str(index), ask)
        answers |= step(engine)
        count += 1
    return [answers[str(index)] for index in range(len(asks))]


def test_a_mixed_batch_equals_each_alone(
    engine: Engine,
    mixed: tuple[list[Request], list[Run]],
    runs_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks, wanted = mixed
    assert_decoded([engine.ask(ask)[0] for ask in asks], wanted)
    steps = record_steps(engine, monkeypatch)
    assert_decoded(engine.ask(*asks), wanted)
    assert len(steps[0]) == len(asks)  # the requests share the first step
    assert len(steps) == max(w.num_forwards for w in wanted)
    assert_decoded(engine.ask(*reversed(asks)), wanted[::-1])
    assert engine.is_idle()


def test_requests_join_and_leave_at_any_step(
    engine: Engine,
    mixed: tuple[list[Request], list[Run]],
    runs_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks, wanted = mixed
    steps = record_steps(engine, monkeypatch)
    assert_decoded(run_staggered(engine, asks, steps_between=3), wanted)
    assert len({len(step) for step in steps}) > 2
    assert engine.is_idle()


def test_what_has_not_changed_is_not_found_out_again(
    engine: Engine, mixed: tuple[list[Request], list[Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner searches again only when a request arrives, ends or reads other rows."""
    asks, wanted = mixed
    planner = engine.runner.planner
    before = planner.num_found
    monkeypatch.setattr(engine.loop, "runs_ahead", True)
    start(engine, "0", asks[1])
    for _ in range(6):
        step(engine)
    assert planner.num_found - before <= 4
    start(engine, "1", asks[0])
    answers = finish(engine)
    assert_decoded([answers["1"], answers["0"]], wanted[:2])
    assert planner.num_found - before < wanted[1].num_forwards / 2
    assert engine.is_idle()


def test_force_single_batch_shares_no_step(
    engine: Engine,
    mixed: tuple[list[Request], list[Run]],
    runs_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks, wanted = mixed
    alone = Request(asks[2].prompt, {**asks[2].extra, "force_single_batch": True})
    steps = record_steps(engine, monkeypatch)
    order = [0, 1, 2, 3, 4]
    answers = engine.ask(*(alone if i == 2 else asks[i] for i in order))
    assert_decoded(answers, [wanted[i] for i in order])
    actual = {req_id for step in steps for req_id in step}
    lone = sorted(actual, key=lambda req_id: int(req_id.split("-")[0]))[2]  # ids ascend
    assert [step for step in steps if lone in step] == [[lone]] * wanted[2].num_forwards
    assert max(len(step) for step in steps) == 4  # the other requests do not wait


def test_an_abort_in_the_middle_leaves_the_others_alone(
    engine: Engine, mixed: tuple[list[Request], list[Run]]
) -> None:
    asks, wanted = mixed
    upstream = engine.llm.llm_engine
    ids = [start(engine, str(i), ask) for i, ask in enumerate(asks[:3])]
    for _ in range(4):
        upstream.step()
    assert len(engine.runner.canvases) == 3
    upstream.abort_request([ids[1]], internal=True)
    answers = finish(engine)
    assert_decoded([answers["0"], answers["2"]], [wanted[0], wanted[2]])
    assert "1" not in answers
    assert engine.is_idle()


def test_aborting_the_last_request_empties_the_engine(
    engine: Engine, mixed: tuple[list[Request], list[Run]]
) -> None:
    ask = mixed[0][0]
    upstream = engine.llm.llm_engine
    req_id = start(engine, "lone", ask)
    upstream.step()
    upstream.abort_request([req_id], internal=True)
    assert not upstream.has_unfinished_requests()
    assert engine.is_idle()


@pytest.mark.parametrize("keep_queries", [False, True])
def test_chunked_steps_give_the_same_tokens(
    engine: Engine,
    mixed: tuple[list[Request], list[Run]],
    monkeypatch: pytest.MonkeyPatch,
    keep_queries: bool,
) -> None:
    """Chunks whose sizes divide no length cross sequences and requests without changing a token."""
    from vllm.diffusion.memory.plan import ChunkRows, Plan, Residency

    plan = Plan(Residency(keep_queries), ChunkRows(17, 11, 7, 3))
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    asks, wanted = mixed
    assert_decoded(engine.ask(*asks[2:5]), wanted[2:5])


def test_answers_grow_by_finished_prefixes(engine: Engine, model: LLaDAReference) -> None:
    """A streamed prefix never changes, and reaches up to the first masked position."""
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    upstream = engine.llm.llm_engine
    start(engine, "growing", as_request(prompt, **BLOCKS))
    lengths = []
    while upstream.has_unfinished_requests():
        for output in upstream.step():
            tokens = list(output.outputs[0].token_ids)
            assert tokens == wanted.ids[: len(tokens)]
            lengths.append(len(tokens))
    assert lengths == sorted(set(lengths))
    assert len(lengths) >= 4  # at least one output per block
    assert lengths[-1] == 32
