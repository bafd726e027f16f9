# SPDX-License-Identifier: Apache-2.0
"""With `slack`, masks are added behind masked tokens, and a text becomes longer or shorter."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.cases import PLANS
from tests.engine.harness import STOP_IDS, Engine, Request, Response, running
from tests.engine.revisions import drawn_limits
from vllm.diffusion.editing.differences import Edit, applied
from vllm.diffusion.memory.plan import Plan
from vllm.diffusion.request.algorithms import ALGORITHMS

FAMILIES = ("mha", "dream", "moe", "llada2", "sdar")
NUM_CASES = 40  # random revisions per family
PROMPT = random_prompt(9)
TEXT = random_prompt(20, seed=4)
BLOCK = 8


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(checkpoint(request.param)) as engine:
        yield engine


def revise(text: list[int], prompt: list[int] = PROMPT, **fields: Any) -> Request:
    bias = fields.pop("end_bias", 0)  # likely end tokens remove tokens
    sampling = {"logit_bias": {EOS_ID: bias}} if bias else {}
    fields = {"block_length": BLOCK, "cache": "none", **fields}
    return Request(prompt, {"canvas_token_ids": text, **fields}, sampling)


def is_block_causal(engine: Engine) -> bool:
    return bool(engine.runner.model.family.is_block_causal)


def drawn(rng: random.Random, algorithms: list[str]) -> Request:
    """Return a random revision; its text has no token that ends an answer."""
    text = random_prompt(rng.randint(1, 30), seed=rng.randrange(1000))
    for position in range(len(text)):
        if rng.random() < 0.05:
            text[position] = MASK_ID
    fields = drawn_limits(rng, len(text))
    for name in ("return_trajectory", "complete_blocks"):
        fields.pop(name, None)
    fields |= {"algorithm": rng.choice(algorithms), "slack": rng.choice([1, 2, 5])}
    fields |= {"seed": rng.randrange(100), "temperature": rng.choice([0, 0, 0.7])}
    fields["end_bias"] = rng.choice([0, 4, 30, 100])
    if rng.random() < 0.3:
        fields["gen_length"] = 48
    if rng.random() < 0.2:
        fields["logprobs"] = 1
    logprobs = fields.pop("logprobs", None)
    one = revise(text, random_prompt(rng.randint(1, 12), seed=rng.randrange(9)), **fields)
    if logprobs:
        one.sampling["logprobs"] = logprobs
    return one


def algorithms_of(engine: Engine) -> list[str]:
    if is_block_causal(engine):
        return ["low_confidence_dynamic", "semi_ar", "sequential", "entropy_bounded"]
    return [name for name, algorithm in ALGORITHMS.items() if not algorithm.chooses_length]


def assert_revised(one: Request, answer: Response) -> None:
    """Check that pinned tokens stay in order, and that the report describes the answer."""
    text = one.extra["canvas_token_ids"]
    given = list(answer.token_ids)
    if answer.finish_reason == "stop":
        given.pop()
    assert MASK_ID not in given and not STOP_IDS.intersection(given)
    edits = [Edit(*edit.values()) for edit in answer.report["edits"]]
    assert applied(text, edits) == given
    pinned = {at for span in one.extra.get("pinned", ()) for at in range(*span)}
    rest = iter(given)
    assert all(text[at] in rest for at in sorted(pinned) if text[at] != MASK_ID)
    # A pinned range stays in one piece.
    for start, stop in one.extra.get("pinned", ()):
        piece = text[start:stop]
        if MASK_ID not in piece:
            assert any(given[at : at + len(piece)] == piece for at in range(len(given)))


def test_random_texts_alone_and_together(engine: Engine) -> None:
    rng = random.Random(3)
    asks = [drawn(rng, algorithms_of(engine)) for _ in range(NUM_CASES)]
    together = engine.ask(*asks)
    sizes = set()
    for one, answer in zip(asks, together, strict=True):
        assert_revised(one, answer)
        has_ended = answer.finish_reason == "stop"
        growth = len(answer.token_ids) - has_ended - len(one.extra["canvas_token_ids"])
        if "gen_length" not in one.extra:
            sizes.add((growth > 0) - (growth < 0))
    assert sizes == {-1, 0, 1}
    for one, answer in list(zip(asks, together, strict=True))[::4]:
        (alone,) = engine.ask(one)
        assert alone.token_ids == answer.token_ids, one.extra
        assert alone.report["edits"] == answer.report["edits"]
    assert engine.is_idle()


@pytest.mark.parametrize("end_bias", [0, 4])
def test_masks_are_added_behind_every_run(engine: Engine, end_bias: int) -> None:
    """The answer is that of a text with these masks, without the end tokens that fill them."""
    if is_block_causal(engine):
        pytest.skip("later blocks are scored again")
    shared: dict[str, Any] = {"algorithm": "threshold", "gen_length": 32, "ignore_eos": True}
    limits: dict[str, Any] = {"noise": 0.2, "pinned": [[16, 20]]}
    # End tokens cannot be the old tokens, so every masked token is reported as an edit.
    ends = revise(TEXT, **shared, **limits, max_tokens=20, end_bias=100)
    (marks,) = engine.ask(ends)
    masked = {at for e in marks.report["edits"] for at in range(e["start"], e["stop"])}
    given, room = list[int](), 2 * 3  # the default room has masks for two runs
    for at, token in enumerate(TEXT):
        given.append(MASK_ID if at in masked else token)
        if at in masked and at + 1 not in masked and room:
            given += [MASK_ID] * 3
            room -= 3
    filled, revised = engine.ask(
        revise(given, **shared, noise=0, max_tokens=len(given), end_bias=end_bias),
        revise(TEXT, **limits, algorithm="threshold", slack=3, end_bias=end_bias),
    )
    wanted = [token for token in filled.token_ids if token not in STOP_IDS]
    assert [token for token in revised.token_ids if token not in STOP_IDS] == wanted


def test_without_masked_tokens_nothing_moves(engine: Engine) -> None:
    (answer,) = engine.ask(revise(TEXT, slack=4, edit_threshold=1e-99))
    assert [*TEXT] == answer.token_ids[: len(TEXT)]
    assert answer.finish_reason == "stop" and len(answer.token_ids) == len(TEXT) + 1
    assert (answer.num_forwards, answer.report["edits"]) == (1, [])


def test_a_given_length_bounds_the_text(engine: Engine) -> None:
    """Without room behind the text no mask is added."""
    fields = {"noise": 1.0, "gen_length": 24, "max_tokens": 20, "end_bias": -100}
    plain, slack = engine.ask(revise(TEXT, **fields), revise(TEXT, **fields, slack=9))
    assert plain.token_ids == slack.token_ids
    (longer,) = engine.ask(revise(TEXT, **{**fields, "max_tokens": 24}, slack=9))
    assert len(longer.token_ids) == 24


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_chunks_change_nothing(engine: Engine, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [revise(TEXT, noise=0.5, slack=2, end_bias=bias) for bias in (0, 4)]
    wanted = [answer.token_ids for answer in engine.ask(*asks)]
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    assert [answer.token_ids for answer in engine.ask(*asks)] == wanted
    assert engine.is_idle()


@pytest.mark.parametrize("limit", [0, 100])
def test_few_rows_change_nothing(
    engine: Engine, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = revise(TEXT, noise=0.5, slack=2)
    (wanted,) = engine.ask(one)
    monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    (answer,) = engine.ask(one)
    assert answer.token_ids == wanted.token_ids
