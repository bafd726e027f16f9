# SPDX-License-Identifier: Apache-2.0
"""Drafts in a step: accepted ones save forward passes, rejected ones change no token."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
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
    refusal_error,
    running,
    shrink,
    speculating,
    start,
    step,
    to_answer,
)
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.decoding.block_grid import GridRule
from vllm.diffusion.engine.speculation.drafter import Drafter, DraftState
from vllm.diffusion.engine.step_times import StepTimes

ONE_BY_ONE: dict[str, Any] = {"gen_length": 32, "block_length": 32, "steps": 32}
SHORT: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8}
THRESHOLD: dict[str, Any] = {"gen_length": 32, "block_length": 16, "threshold": 0.3}
WEIGHED: dict[str, Any] = {"dllm": {"longest_pause_ms": 0, "weighs_guesses": True}}
Draft = Callable[[DraftState, Any, int, Any], list[DraftState]]


class Recorded:
    """The states of a request without drafts, which serve as an oracle for later states."""

    def __init__(self, engine: Engine, ask: Request, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = list[DraftState]()
        with monkeypatch.context() as recording:
            record(recording, engine.runner, "launch", self._note)
            (self.answer,) = engine.ask(ask)

    def _note(self, step: Any, _: list[str]) -> None:
        (canvas,) = step.batch.items
        target, _ = canvas.next_forward()
        self.states.append(DraftState(0, canvas.tokens.copy(), canvas.rule.fork(), target))

    @staticmethod
    def reaches(current: DraftState, state: DraftState) -> bool:
        """Return whether both states have forward passes of the same kind."""
        is_grid = isinstance(current.rule, GridRule)
        return state.target.rows == current.target.rows or is_grid

    def draft(self, current: DraftState, source: Any, most: int, chance: Any) -> list[DraftState]:
        """Return the next states, up to the first one with another kind of forward pass."""
        here = next(
            i
            for i, state in enumerate(self.states)
            if (state.tokens == current.tokens).all()
            and state.target.eligible.tolist() == current.target.eligible.tolist()
        )
        results = []
        for depth, state in enumerate(self.states[here + 1 : here + 1 + most], 1):
            if state.target.rows[0] < current.target.rows[0] or not self.reaches(current, state):
                break
            results.append(state._replace(depth=depth))
        return results


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Draft], None]]:
    """Yield a function that replaces the way in which states are drafted."""
    yield lambda draft: monkeypatch.setattr(Drafter, "draft", lambda _, *given: draft(*given))


def wrong_token(state: DraftState, chance: random.Random) -> DraftState:
    tokens = state.tokens.copy()
    position = chance.randrange(20, 52)
    tokens[position] = (tokens[position] + 1) % 200
    return state._replace(tokens=tokens)


def wrong_position(state: DraftState, chance: random.Random) -> DraftState:
    """Return the state with one committed position open and one open position not sampled."""
    eligible = state.target.eligible
    return state._replace(
        target=state.target._replace(eligible=eligible[1:] if len(eligible) > 1 else eligible - 1)
    )


def wrong_depth(state: DraftState, chance: random.Random) -> DraftState:
    return state._replace(depth=state.depth + 1)


def other_rule(state: DraftState, chance: random.Random) -> DraftState:
    rule = state.rule.fork()
    rule.forbid_mask = not rule.forbid_mask
    return state._replace(rule=rule)


WRONG = [wrong_token, wrong_position, wrong_depth, other_rule]


@pytest.mark.parametrize("parameters", [ONE_BY_ONE, BLOCKS, THRESHOLD], ids=["1", "2", "threshold"])
def test_an_oracle_saves_forwards(
    engine: Engine,
    model: LLaDAReference,
    parameters: dict[str, Any],
    drafts: Callable[[Draft], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = as_request(clear_case(model, 20, **parameters)[0], **parameters)
    recorded = Recorded(engine, ask, monkeypatch)
    drafts(recorded.draft)
    steps = recorded.answer.num_steps or 0
    for most in (1, 3, 7):
        (answer,) = engine.ask(*speculating([ask], most))
        assert (answer.token_ids, answer.num_steps) == (recorded.answer.token_ids, steps)
        # The first forward pass has no drafts, because no candidates exist.
        assert answer.num_forwards == 1 + -(-(steps - 1) // (most + 1))


@pytest.mark.parametrize("cache", ["dual", "prefix", "frozen"])
def test_an_oracle_saves_forwards_of_kept_keys(
    engine: Engine,
    cache: str,
    drafts: Callable[[Draft], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three blocks with 16 steps, the whole forward pass of each block has no drafts."""
    parameters = {"gen_length": 48, "block_length": 16, "steps": 48, "cache": cache}
    ask = as_request(random_prompt(50, 5), **parameters)
    recorded = Recorded(engine, ask, monkeypatch)
    assert recorded.answer.num_steps == 48
    drafts(recorded.draft)
    for most in (1, 3, 7):
        (answer,) = engine.ask(*speculating([ask], most))
        assert (answer.token_ids, answer.num_steps) == (recorded.answer.token_ids, 48)
        of_block = 1 + -(-15 // (most + 1))
        wanted = 3 * of_block if cache != "frozen" else 1 + -(-47 // (most + 1))
        assert answer.num_forwards == wanted
        assert engine.is_idle()
        assert engine.runner.caches.num_bytes == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_saves_forwards_of_exact_keys(
    checkpoint: Callable[[str], Path],
    temperature: float,
    drafts: Callable[[Draft], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts reach into later blocks. Finished blocks are stored with a later forward pass."""
    parameters = {"algorithm": "semi_ar", "gen_length": 40, "block_length": 4, "steps_per_block": 4}
    parameters |= {"temperature": temperature, "seed": 4, "ignore_eos": True}
    with running(checkpoint("sdar")) as engine:
        asks = [Request(random_prompt(length, 1), parameters) for length in (60, 97)]
        for ask in asks:
            recorded = Recorded(engine, ask, monkeypatch)
            steps = recorded.answer.num_steps or 0
            drafts(recorded.draft)
            for most in (1, 3, 7):
                (answer,) = engine.ask(*speculating([ask], most))
                assert answer.token_ids == recorded.answer.token_ids
                assert answer.num_steps == steps
                assert answer.num_forwards <= 2 + -(-(steps - 1) // (most + 1))
                assert engine.is_idle()


@pytest.mark.parametrize("spoil", WRONG)
@pytest.mark.parametrize("parameters", [ONE_BY_ONE, THRESHOLD], ids=["semi_ar", "threshold"])
def test_wrong_guesses_change_nothing(
    engine: Engine,
    model: LLaDAReference,
    parameters: dict[str, Any],
    spoil: Callable[[DraftState, random.Random], DraftState],
    drafts: Callable[[Draft], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = as_request(clear_case(model, 20, **parameters)[0], **parameters)
    recorded, chance = Recorded(engine, ask, monkeypatch), random.Random(5)

    def draft(*given: Any) -> list[DraftState]:
        return [spoil(state, chance) for state in recorded.draft(*given)]

    drafts(draft)
    (answer,) = engine.ask(*speculating([ask], 3))
    assert answer.token_ids == recorded.answer.token_ids
    assert answer.num_steps == answer.num_forwards == recorded.answer.num_steps
    assert answer.report["states_drafted"] > 0


TOGETHER: dict[str, dict[str, Any]] = {
    "stop token": {"ignore_eos": False},
    "max_tokens": {"max_tokens": 13},
    "log probabilities": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "biases": {"logit_bias": {"7": 3.0, "9": -100.0}},
    "guidance": {"cfg_scale": 0.2},
    "random scores": {"remasking": "random", "seed": 3},
    "noise": {"temperature": 0.5, "seed": 4},
    "noise and filters": {"temperature": 0.8, "top_p": 0.5, "top_k": 9, "seed": 2},
    "noise and random scores": {"temperature": 0.3, "remasking": "random", "seed": 2},
    "suffix": {"suffix_ids": [5, 6, 7]},
    "late end-of-sequence": {"confidence_eos_eot_inf": True},
}


@pytest.mark.parametrize("more", TOGETHER.values(), ids=TOGETHER.keys())
def test_what_a_request_asks_for_stays(
    engine: Engine, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = 0
    for parameters, ahead in ((SHORT, True), (THRESHOLD, False)):
        monkeypatch.setattr(engine.loop, "runs_ahead", ahead)
        extra = {**parameters, "ignore_eos": True, **more}
        sampling = {} if more else {"logprobs": 2}
        asks = [Request(random_prompt(20, n), extra, sampling) for n in range(3)]
        plain, drafted = engine.outputs(*asks), engine.outputs(*speculating(asks, 5))
        for one, other in zip(plain, drafted, strict=True):
            wanted, actual = to_answer(one), to_answer(other)
            assert (actual.token_ids, actual.num_steps) == (wanted.token_ids, wanted.num_steps)
            assert actual.finish_reason == wanted.finish_reason
            assert found_logprobs(other) == pytest.approx(found_logprobs(one), abs=1e-5)
            saved += actual.report["states_accepted"]
    assert saved > 0
    assert engine.is_idle()


def found_logprobs(output: Any) -> list[float]:
    positions = output.outputs[0].logprobs or []
    return [p.logprob for position in positions for p in position.values()]


def test_a_model_that_predicts_the_mask(checkpoint: Callable[[str], Path]) -> None:
    cases = [
        BLOCKS,
        THRESHOLD,
        {**BLOCKS, "steps": 32},
        {"algorithm": "dream", "gen_length": 32},
    ]
    with running(checkpoint("predicts_mask")) as engine:
        asks = [as_request(random_prompt(20, n), **a, seed=1) for a in cases for n in range(2)]
        plain, drafted = engine.ask(*asks), engine.ask(*speculating(asks, 5))
    assert [(a.token_ids, a.num_steps) for a in drafted] == [
        (a.token_ids, a.num_forwards) for a in plain
    ]


def test_who_takes_no_part(engine: Engine) -> None:
    """Guided requests have no drafts. Algorithms without drafts and too many drafts are refused."""
    (guided,) = engine.ask(
        Request(
            [1, 2, 3], {"structured_outputs": {"regex": "[ab]{3}"}, "num_speculative_states": 3}
        )
    )
    assert guided.report["states_drafted"] == 0
    with pytest.raises(refusal_error(), match="num_speculative_states: given 3; algorithm credit"):
        engine.ask(Request([1, 2, 3], {"algorithm": "credit", "num_speculative_states": 3}))
    with pytest.raises(refusal_error(), match="num_speculative_states: given 16"):
        engine.ask(Request([1, 2, 3], {"num_speculative_states": 16}))


def test_memory_that_runs_out_costs_guesses_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = as_request(random_prompt(20, 3), **BLOCKS)
    (plain,) = engine.ask(ask)
    plan = engine.runner.planner.plan_alike

    def least(shape: Any, *more: Any) -> Any:
        if shape.rows > 52:
            raise ActivationBudgetError(shape.rows, 1, 1, 1)
        return plan(shape, *more)

    monkeypatch.setattr(engine.runner.planner, "plan_alike", least)
    (answer,) = engine.ask(*speculating([ask], 3))
    assert answer.token_ids == plain.token_ids
    assert answer.report["states_drafted"] == 0


@pytest.mark.parametrize("cache", ["none", "dual", "prefix", "frozen"])
def test_several_answers_and_aborts(
    engine: Engine, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts change no token of answers with a common prompt, or after an abort within a block."""
    monkeypatch.setattr(engine.loop, "runs_ahead", cache in ("dual", "none"))
    parameters = {**SHORT, "cache": cache, "ignore_eos": True}
    several = Request(random_prompt(40, 2), parameters, {"n": 4, "temperature": 0.3, "seed": 3})
    (plain,), (drafted,) = (engine.outputs(*a) for a in ([several], speculating([several], 3)))
    assert [o.token_ids for o in drafted.outputs] == [o.token_ids for o in plain.outputs]
    asks = [Request(random_prompt(30 + n, n), {**BLOCKS, "cache": cache}) for n in range(6)]
    wanted = engine.ask(*asks)
    names = [start(engine, str(n), one) for n, one in enumerate(speculating(asks, 3))]
    for number in range(8):
        step(engine)
        if number in (3, 5):
            engine.llm.llm_engine.abort_request([names[number]], internal=True)
    answers = finish(engine)
    for name in ("0", "1", "2", "4"):
        assert name not in answers or answers[name].token_ids == wanted[int(name)].token_ids
    assert answers
    assert engine.is_idle()
    assert engine.runner.caches.num_bytes == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
def test_guesses_end_where_they_do_not_hold_and_begin_where_they_would(
    checkpoint: Callable[[str], Path], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting stops where drafts are rejected. The times of steps are made up, as of a GPU."""
    times = StepTimes.of({52 * n: 1 + 0.1 * n for n in range(1, 9)})
    monkeypatch.setattr(StepTimes, "of", lambda _: times)
    with running(checkpoint("mha"), additional_config=WEIGHED) as engine:
        engine.loop.runs_ahead = ahead
        ask = as_request(random_prompt(20, 1), **ONE_BY_ONE)
        recorded, chance = Recorded(engine, ask, monkeypatch), random.Random(5)

        def wrong(*given: Any) -> list[DraftState]:
            return [wrong_token(state, chance) for state in recorded.draft(*given)]

        drafted = []
        for draft in (wrong, wrong, recorded.draft, recorded.draft):
            monkeypatch.setattr(Drafter, "draft", lambda _, *given, draft=draft: draft(*given))
            (answer,) = engine.ask(*speculating([ask], 7))
            assert answer.token_ids == recorded.answer.token_ids
            drafted.append((answer.report["states_drafted"], answer.report["states_accepted"]))
    (first, none), (second, nothing), _, (fourth, held) = drafted
    assert (none, nothing) == (0, 0)
    assert 0 < first < 7 * 32  # drafting stopped within 32 steps
    assert second < 32 / 4  # later there were a few trials of one draft
    assert fourth == held > 16


def test_guesses_for_which_there_is_no_memory_are_not_weighed(
    checkpoint: Callable[[str], Path],
) -> None:
    ask = as_request(random_prompt(20, 1), **ONE_BY_ONE)
    with running(checkpoint("mha"), additional_config=WEIGHED) as engine:
        shrink(engine.runner, 400_000)
        plain, guessing = engine.ask(ask)[0], engine.ask(*speculating([ask], 7))[0]
    assert guessing.finish_reason == "length" and guessing.token_ids == plain.token_ids


@pytest.mark.gpu
def test_a_gpu_guesses_without_being_asked(checkpoint: Callable[[str], Path]) -> None:
    eager = {"dllm": {"longest_pause_ms": 0, "weighs_guesses": False}}
    with running(checkpoint("mha"), dtype="bfloat16", additional_config=eager) as engine:
        (quiet,) = engine.ask(Request([1, 2, 3], {**ONE_BY_ONE, "num_speculative_states": 0}))
        (answer,) = engine.ask(Request([1, 2, 3], ONE_BY_ONE))
    assert quiet.report["states_drafted"] == 0 < answer.report["states_drafted"]
    assert quiet.token_ids == answer.token_ids and quiet.num_steps == answer.num_steps
