# SPDX-License-Identifier: Apache-2.0
"""Revised texts keep pinned and likely tokens, alone, in a batch, in chunks and with few rows."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference, shift_right

from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.cases import PLANS
from tests.engine.harness import Engine, Request, Response, rows_of_launches, running
from tests.engine.revisions import assert_recorded, changed_positions, drawn_limits
from vllm.diffusion.editing.choice import NUM_STRIPES, choose
from vllm.diffusion.editing.differences import Edit, applied
from vllm.diffusion.memory.plan import Plan
from vllm.diffusion.request.algorithms import ALGORITHMS

FAMILIES = ("mha", "dream", "moe", "diffullama", "a2d_qwen3")
NUM_CASES = 40  # random revisions per family
PROMPT = random_prompt(9)
TEXT = random_prompt(20, seed=4)
BLOCKS = [name for name, a in ALGORITHMS.items() if not a.chooses_length]


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Engine, Any, bool]]:
    """Start an engine; return it, its reference and whether its logits are shifted."""
    folder = checkpoint(request.param)
    with running(folder) as engine:
        shift = engine.runner.model.family.logit_shift
        yield engine, load_reference(folder), shift > 0


def revise(text: list[int], prompt: list[int] = PROMPT, **fields: Any) -> Request:
    return Request(prompt, {"canvas_token_ids": text, **fields})


def drawn(rng: random.Random) -> Request:
    """Return a random revision; its text has no token that ends an answer."""
    text = random_prompt(rng.randint(1, 24), seed=rng.randrange(1000))
    for position in range(len(text)):
        if rng.random() < 0.1:
            text[position] = MASK_ID
    fields: dict[str, Any] = {"seed": rng.randrange(100), "temperature": rng.choice([0, 0, 0.7])}
    fields["algorithm"] = rng.choice(BLOCKS)
    fields["cache"] = rng.choice(ALGORITHMS[fields["algorithm"]].caches)
    fields |= drawn_limits(rng, len(text))
    if rng.random() < 0.3:
        fields["gen_length"] = 32
    if rng.random() < 0.2:
        fields["suffix_ids"] = random_prompt(3, seed=1)
    if rng.random() < 0.2 and fields["cache"] in ("none", "frozen"):
        fields["cfg_scale"] = 0.5
    return revise(text, random_prompt(rng.randint(1, 12), seed=rng.randrange(9)), **fields)


def assert_revised(one: Request, answer: Response) -> None:
    """Check what holds for every revision."""
    text, report = one.extra["canvas_token_ids"], answer.report
    length = one.extra.get("gen_length", len(text))
    has_ended = answer.finish_reason == "stop"
    assert has_ended or len(answer.token_ids) == length
    assert MASK_ID not in answer.token_ids
    for start, stop in one.extra.get("pinned", ()):
        given = zip(text[start:stop], answer.token_ids[start:stop], strict=True)
        assert all(new == old or old == MASK_ID for old, new in given)
    differ = changed_positions(text, answer.token_ids)
    assert report["num_edited"] == len(differ) <= one.extra.get("max_edits", len(text))
    if one.extra.get("edit_rounds", 1) == 1:
        assert len(differ) <= report["num_remasked"]
    if one.extra.get("return_trajectory"):
        assert_recorded(report["trajectory"], text, answer)
    edits = [Edit(*edit.values()) for edit in report["edits"]]
    assert applied(text, edits) == answer.token_ids[: -1 if has_ended else None]


def test_random_revisions_alone_and_together(served: tuple[Engine, Any, bool]) -> None:
    engine, *_ = served
    rng = random.Random(7)
    asks = [drawn(rng) for _ in range(NUM_CASES)]
    together = engine.ask(*asks)
    for one, answer in zip(asks, together, strict=True):
        assert_revised(one, answer)
    for one, answer in list(zip(asks, together, strict=True))[::4]:
        (alone,) = engine.ask(one)
        assert alone.token_ids == answer.token_ids, one.extra
        assert alone.report["edits"] == answer.report["edits"]
    assert engine.is_idle()


def scores_by_reference(model: Any, *, is_shifted: bool) -> list[float]:
    """Return the log probability of every token of TEXT, each in a copy that masks it."""
    scores = [0.0] * len(TEXT)
    end = [EOS_ID] * (32 - len(TEXT))
    for stripe in range(NUM_STRIPES):
        positions = range(stripe, len(TEXT), NUM_STRIPES)
        copy = [MASK_ID if at in positions else token for at, token in enumerate(TEXT)]
        logits = model.logits(torch.tensor([[*PROMPT, *copy, *end]]))
        rows = (shift_right(logits) if is_shifted else logits)[0, len(PROMPT) :].double()
        for at in positions:
            scores[at] = float(rows[at].log_softmax(-1)[TEXT[at]])
    return scores


@pytest.mark.parametrize("limits", [{"noise": 0.3}, {"noise": 0.25, "max_edits": 3}])
def test_the_least_likely_tokens_are_filled_again(
    served: tuple[Engine, Any, bool], limits: dict[str, Any]
) -> None:
    """The answer is that of a text with masks at the tokens with the lowest scores."""
    engine, model, is_shifted = served
    scores = torch.tensor(scores_by_reference(model, is_shifted=is_shifted)).numpy()
    chosen = choose(scores, noise=limits["noise"], budget=limits.get("max_edits"))
    masked = [MASK_ID if at in chosen else token for at, token in enumerate(TEXT)]
    shared: dict[str, Any] = {"algorithm": "threshold", "gen_length": 32, "max_tokens": 20}
    revised, filled = engine.ask(
        revise(TEXT, **shared, **limits), revise(masked, **shared, noise=0)
    )
    assert revised.token_ids == filled.token_ids
    assert revised.report["num_remasked"] == len(chosen)
    assert (revised.report["scoring"], filled.report["scoring"]) == ("striped", "none")
    assert revised.num_forwards == (filled.num_forwards or 0) + 1


@pytest.mark.parametrize(
    "fields",
    [{"noise": 0}, {"edit_threshold": 0}, {"max_edits": 0}, {"pinned": [[0, 20]]}],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_to_change_takes_one_forward(
    served: tuple[Engine, Any, bool], fields: dict[str, Any]
) -> None:
    engine, *_ = served
    (answer,) = engine.ask(revise(TEXT, **fields))
    assert answer.token_ids == TEXT
    assert (answer.num_forwards, answer.report["edits"]) == (1, [])
    assert answer.finish_reason == "length"


def test_likely_text_takes_one_step_of_all_copies(
    served: tuple[Engine, Any, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, *_ = served
    rows = rows_of_launches(engine, monkeypatch)
    (answer,) = engine.ask(revise(TEXT, edit_threshold=1e-99))
    assert (answer.token_ids, answer.num_forwards, answer.num_steps) == (TEXT, 1, 1)
    assert rows == [NUM_STRIPES * (len(PROMPT) + 32)]


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("limit", [0, 100, 10_000])
def test_few_rows_only_take_more_forwards(
    served: tuple[Engine, Any, bool],
    limit: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, *_ = served
    one = revise(TEXT, noise=0.5, algorithm="threshold", temperature=temperature, seed=3)
    (wanted,) = engine.ask(one)
    monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    (answer,) = engine.ask(one)
    assert answer.token_ids == wanted.token_ids
    more = {0: NUM_STRIPES - 1, 100: 1, 10_000: 0}[limit]
    assert answer.num_forwards == (wanted.num_forwards or 0) + more


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_chunks_change_nothing(
    served: tuple[Engine, Any, bool], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, *_ = served
    asks = [revise(TEXT, noise=0.5, cache=cache, seed=1) for cache in ("none", "frozen")]
    wanted = [answer.token_ids for answer in engine.ask(*asks)]
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    assert [answer.token_ids for answer in engine.ask(*asks)] == wanted
    assert engine.is_idle()


def test_the_end_of_a_given_answer_ends_it(served: tuple[Engine, Any, bool]) -> None:
    """A text may be an earlier answer with its end tokens."""
    engine, *_ = served
    (answer,) = engine.ask(revise([*TEXT, EOS_ID, EOS_ID], noise=0))
    assert answer.token_ids == [*TEXT, EOS_ID]
    assert answer.finish_reason == "stop"
    assert answer.report["edits"] == []


def test_rounds_end_when_a_text_returns(served: tuple[Engine, Any, bool]) -> None:
    """The last round scores a text that was scored before, or chooses nothing."""
    engine, *_ = served
    one, more = (
        engine.ask(revise(TEXT, noise=0.1, algorithm="threshold", edit_rounds=rounds))[0]
        for rounds in (1, 8)
    )
    assert (more.num_forwards or 0) >= (one.num_forwards or 0)
    assert more.report["num_remasked"] >= one.report["num_remasked"]
    assert more.report["num_remasked"] <= 8 * 2


def test_several_answers_have_their_own_seeds(served: tuple[Engine, Any, bool]) -> None:
    engine, *_ = served
    fields = {"canvas_token_ids": TEXT, "noise": 1, "seed": 3}
    one = Request(PROMPT, fields, {"n": 3, "temperature": 2.0})
    (output,) = engine.outputs(one)
    answers = [tuple(choice.token_ids) for choice in output.outputs]
    assert len(set(answers)) == 3
