# SPDX-License-Identifier: Apache-2.0
"""A canvas that grows: `max_tokens` is a limit, and only the answer's length is paid for."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import EOS_ID, random_prompt
from tests.engine.harness import (
    DETERMINISTIC,
    MAX_MODEL_LEN,
    Engine,
    Request,
    Response,
    finish,
    rows_of_launches,
    running,
    start,
    step,
)
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.memory import Admission, Demand

FIRST, BLOCK, GROWTH = 16, 8, 16
TEXT = 7  # the token of every position before the end
LENGTHS: dict[str, Any] = {"block_length": BLOCK, "growth": GROWTH}
QUOTA: dict[str, Any] = {"algorithm": "semi_ar", "steps": 8}
KINDS: list[dict[str, Any]] = [
    QUOTA,
    {**QUOTA, "cache": "prefix"},
    {**QUOTA, "cache": "dual"},
    {**QUOTA, "cache": "frozen"},
    {**QUOTA, "cache": "frozen", "cfg_scale": 0.5},
    {"algorithm": "threshold", "threshold": 0.9, "cache": "dual"},
    {"algorithm": "threshold", "steps": 8},
    {"algorithm": "factor"},
    {"algorithm": "local_leap", "early_stop": True},
    {"algorithm": "hierarchy"},
    {"algorithm": "credit", "cache": "prefix"},
    {"algorithm": "entropy_threshold", "threshold": 0.5},
    {"algorithm": "adablock", "cache": "dual"},
    {**QUOTA, "num_speculative_states": 4},
    {**QUOTA, "num_speculative_states": 4, "cache": "dual"},
]


@pytest.fixture(scope="module", params=["gqa", "dream"])
def growing(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    dllm = {**DETERMINISTIC["dllm"], "default_gen_length": FIRST}
    with running(checkpoint(request.param), additional_config={"dllm": dllm}) as engine:
        yield engine


def ends_at(
    length: int, prompt: list[int] | None = None, limit: int = 100, **fields: Any
) -> Request:
    """Return a request whose answer has `length` tokens, whatever the model predicts."""
    sampling = {"logit_bias": {TEXT: 50.0, EOS_ID: 100.0}, "min_tokens": length - 1}
    fields = {**LENGTHS, **fields}
    return Request(prompt or random_prompt(9), fields, {**sampling, "max_tokens": limit})


def with_fixed(asked: Request, gen_length: int) -> Request:
    """Return the same request on a canvas of fixed length, with the same steps for each block."""
    extra = {name: value for name, value in asked.extra.items() if name != "growth"}
    extra |= {"gen_length": gen_length}
    if "steps" in extra:
        extra["steps"] = extra["steps"] * gen_length // FIRST
    return Request(asked.prompt, extra, {**asked.sampling, "max_tokens": gen_length})


def summary(answer: Response) -> tuple[Any, ...]:
    return answer.token_ids, answer.finish_reason, answer.num_steps


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_answer_is_that_of_the_shortest_canvas_that_holds_it(
    growing: Engine, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of_launches(growing, monkeypatch)
    for length, canvas in ((5, 16), (16, 16), (17, 32), (45, 48)):
        rows.clear()
        (fixed,) = growing.ask(with_fixed(ends_at(length, **kind), canvas))
        num_fixed = sum(rows)
        rows.clear()
        (answer,) = growing.ask(ends_at(length, **kind))
        assert answer.token_ids == [TEXT] * (length - 1) + [EOS_ID]
        assert summary(answer) == summary(fixed)
        assert answer.report["canvas_lengths"] == list(range(FIRST, canvas + 1, GROWTH))
        assert sum(rows) <= 1.5 * num_fixed
    assert growing.is_idle()


def test_the_limit_costs_nothing(growing: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short answer computes as many rows with a limit of 200 as with one of 16."""
    rows = rows_of_launches(growing, monkeypatch)
    growing.ask(ends_at(10, limit=16, **QUOTA))
    num_small = sum(rows)
    rows.clear()
    growing.ask(ends_at(10, limit=200, **QUOTA))
    assert sum(rows) == num_small


def test_a_batch_of_all_kinds(growing: Engine) -> None:
    asked = [ends_at(3 + 5 * n, random_prompt(4 + n, n), **kind) for n, kind in enumerate(KINDS)]
    asked += [with_fixed(ask, 48) for ask in asked[:4]]
    alone = [summary(growing.ask(ask)[0]) for ask in asked]
    assert [summary(answer) for answer in growing.ask(*asked)] == alone
    assert growing.is_idle()


@pytest.mark.parametrize("limit", [20, 32, 47])
def test_an_answer_ends_at_its_limit(growing: Engine, limit: int) -> None:
    ask = ends_at(limit + 1, limit=limit, **QUOTA)
    (answer,) = growing.ask(ask)
    assert (answer.token_ids, answer.finish_reason) == ([TEXT] * limit, "length")
    assert answer.report["canvas_lengths"][-1] == -(-limit // BLOCK) * BLOCK


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_the_last_block_fills_the_model_s_length(growing: Engine, cache: str) -> None:
    """The longest canvas ends with the model's maximum length, inside a block."""
    room = MAX_MODEL_LEN - 9
    (answer,) = growing.ask(ends_at(room - 1, limit=room - 1, **QUOTA, cache=cache))
    assert answer.token_ids == [TEXT] * (room - 2) + [EOS_ID]
    assert answer.report["canvas_lengths"][-1] == room


@pytest.mark.parametrize("algorithm", ["dream", "full_attn_multi_block", "multi_block"])
def test_other_algorithms_stay_on_their_first_canvas(growing: Engine, algorithm: str) -> None:
    (answer,) = growing.ask(ends_at(FIRST + 1, algorithm=algorithm, block_length=None))
    assert (len(answer.token_ids), answer.finish_reason) == (FIRST, "length")
    assert answer.report["canvas_lengths"] == [FIRST]


def test_a_given_first_length(growing: Engine) -> None:
    asked = ends_at(30, **QUOTA, canvas="grow", gen_length=24, limit=64)
    (answer,) = growing.ask(Request(asked.prompt, {**asked.extra, "steps": 12}, asked.sampling))
    assert answer.report["canvas_lengths"] == [24, 40]
    assert len(answer.token_ids) == 30


def test_log_probabilities_and_views_cover_the_grown_canvas(growing: Engine) -> None:
    asked = ends_at(40, **QUOTA, stream_canvas=True)
    asked = Request(asked.prompt, asked.extra, {**asked.sampling, "logprobs": 2})
    (output,) = growing.outputs(asked)
    assert len(output.outputs[0].logprobs) == 40
    assert output.outputs[0].logprobs[-1][EOS_ID].logprob == pytest.approx(0.0, abs=1e-6)
    view = output.kv_transfer_params["dllm"]["canvas"]
    assert len(view["committed"]) == 48


def test_answers_to_one_prompt_grow_by_themselves(growing: Engine) -> None:
    for cache in ("none", "frozen"):
        asked = ends_at(40, **QUOTA, cache=cache)
        drawn = {"n": 3, "temperature": 0.5, "seed": 3}
        together = Request(asked.prompt, asked.extra, {**asked.sampling, **drawn})
        (output,) = growing.outputs(together)
        assert [list(c.token_ids) for c in output.outputs] == [[TEXT] * 39 + [EOS_ID]] * 3
    assert growing.is_idle()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return two requests whose first canvases fit together; a longer one only fits alone."""
    longest = 9 + FIRST

    def obstacle(_: Admission, running: Sequence[Demand], new: Demand, **__: Any) -> str | None:
        return "memory" if running and new.length > longest else None

    monkeypatch.setattr(Admission, "obstacle", obstacle)
    steps = {"algorithm": "semi_ar", "cache": "dual"}
    return [
        ends_at(20, random_prompt(9, 1), steps=8, **steps),
        ends_at(80, random_prompt(9, 2), steps=2, **steps),
    ]


def test_who_cannot_grow_waits(growing: Engine, full: list[Request]) -> None:
    alone = {str(n): summary(growing.ask(ask)[0]) for n, ask in enumerate(full)}
    for name, ask in zip(alone, full, strict=True):
        start(growing, name, ask)
    answers, counts = dict[str, Response](), list[tuple[int, int]]()
    while growing.llm.llm_engine.has_unfinished_requests():
        answers |= step(growing)
        counts.append(growing.scheduler.get_request_counts())
    assert counts[0] == (2, 0) and (1, 1) in counts
    assert {name: summary(answer) for name, answer in answers.items()} == alone
    assert growing.is_idle()


def test_an_abort_while_the_canvas_waits(growing: Engine, full: list[Request]) -> None:
    first, second = (start(growing, str(n), ask) for n, ask in enumerate(full))
    while growing.scheduler.get_request_counts() != (1, 1):
        assert step(growing) == {}
    assert set(growing.runner.canvases) == {first, second}
    growing.llm.llm_engine.abort_request([second], internal=True)
    assert [len(answer.token_ids) for answer in finish(growing).values()] == [20]
    assert growing.is_idle()


def test_a_canvas_that_never_fits_ends_the_answer(
    growing: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Admission, new: Demand) -> Demand:
        if new.length > 9 + FIRST + GROWTH:
            raise ActivationBudgetError(new.length, 2, 1, 1)
        return new

    monkeypatch.setattr(Admission, "check", check)
    (answer,) = growing.ask(ends_at(50, **QUOTA))
    assert (answer.token_ids, answer.finish_reason) == ([TEXT] * 32, "length")
    assert answer.report["num_steps"] == 16
    assert growing.is_idle()


def test_new_weights_while_a_canvas_waits(growing: Engine, full: list[Request]) -> None:
    wanted = [summary(growing.ask(ask)[0]) for ask in full]
    for number, ask in enumerate(full):
        start(growing, str(number), ask)
    while growing.scheduler.get_request_counts() != (1, 1):
        assert step(growing) == {}
    growing.runner.model.weight_generation += 1
    assert [summary(answer) for _, answer in sorted(finish(growing).items())] == wanted
    assert growing.is_idle()


def test_a_record_that_is_longer_than_the_first_canvas(growing: Engine) -> None:
    """The language may use all of `max_tokens`, and the answer ends with the record."""
    schema = {"type": "array", "items": {"const": "abcdefgh"}, "minItems": 3, "maxItems": 3}
    fields = {**LENGTHS, **QUOTA, "growth": 8, "structured_outputs": {"json": schema}}
    (answer,) = growing.ask(Request(random_prompt(9), fields, {"max_tokens": 120}))
    assert json.loads(answer.text) == ["abcdefgh"] * 3
    assert answer.report["canvas_lengths"][:2] == [FIRST, FIRST + 8]
