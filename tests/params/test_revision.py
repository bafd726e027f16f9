# SPDX-License-Identifier: Apache-2.0
"""Parameters of requests that revise a text, by family; pins; edits and diffs."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import EOS_ID, MASK_ID
from tests.params.support import MODEL
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.editing.choice import StripedScores, choose
from vllm.diffusion.editing.differences import (
    applied,
    edits_between,
    moving_edits,
    unified_diff,
)
from vllm.diffusion.request.decision import decide
from vllm.diffusion.request.families import FAMILIES, FAST_DLLM, LLADA21, LLADA22, Family
from vllm.diffusion.request.fields import canonical
from vllm.diffusion.request.params import DiffusionParams

WORDS = {"one": 11, " two": 12, " three": 13}


def encode(text: str) -> list[int]:
    return [WORDS[word] for word in words_of(text)]


def words_of(text: str) -> list[str]:
    first, *others = text.split(" ")
    return [first, *(f" {word}" for word in others)]


def spans(text: str) -> list[tuple[int, int]]:
    ends = np.cumsum([len(word) for word in words_of(text)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


TOKENISED = replace(MODEL, encode=encode, spans=spans)


def decided(model: Any = TOKENISED, **fields: Any) -> DiffusionParams:
    return decide(canonical(fields), model, [5, 6])


def refusal(model: Any = TOKENISED, **fields: Any) -> str:
    with pytest.raises(InvalidParameterError) as error:
        decided(model, **fields)
    return str(error.value)


def test_a_text_sets_the_length_of_the_answer() -> None:
    params = decided(canvas_text="one two three")
    assert params.revision is not None
    assert params.revision.token_ids == (11, 12, 13)
    assert (params.max_tokens, params.gen_length, params.num_open) == (3, 32, 3)
    assert params.edits is not None
    assert params.edits.min_tokens == 3
    assert params.canvas == "fixed"
    longer = decided(canvas_text="one two", gen_length=16)
    assert (longer.max_tokens, longer.gen_length) == (16, 16)
    assert decided(canvas_text="one two", max_tokens=40).gen_length == 64


def test_a_text_may_end_before_its_last_token() -> None:
    params = decided(canvas_token_ids=[11, EOS_ID, EOS_ID])
    assert params.edits is not None
    assert params.edits.min_tokens == 1
    assert decided(canvas_token_ids=[EOS_ID, 11]).edits is None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([[0, 1]], ((0, 1),)),
        ([[2, 3]], ((0, 1),)),
        ([[3, 4]], ((1, 2),)),  # the space belongs to the second token
        ([[2, 8]], ((0, 3),)),
        ([[12, 13], [0, 1]], ((0, 1), (2, 3))),
        ([], ()),
    ],
)
def test_a_token_with_a_pinned_character_is_pinned(given: Any, wanted: Any) -> None:
    params = decided(canvas_text="one two three", pinned=given)
    assert params.revision is not None
    assert params.revision.pinned == wanted


def test_limits_have_defaults() -> None:
    limits = [
        (r.noise, r.threshold)
        for fields in (
            {},
            {"noise": 0.5},
            {"edit_threshold": 0.2},
            {"noise": 1, "edit_threshold": 1},
        )
        if (r := decided(canvas_text="one", **fields).revision) is not None
    ]
    assert limits == [(None, 0.1), (0.5, None), (None, 0.2), (1.0, 1.0)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_that_cannot_revise_name_the_families_that_can(family: Family) -> None:
    model = replace(TOKENISED, family=family, block_length=32)
    if not (family.has_causal_context or family is FAST_DLLM):
        assert decided(model, canvas_text="one", cache="none").revision is not None
        return
    for fields in ({"canvas_text": "one"}, {"noise": 0.5}):
        message = refusal(model, **fields)
        assert message.startswith(f"{next(iter(fields))}: given ")
        assert f"family {family.name} revises no text, but llada, dream, llada-moe" in message
        assert message.endswith("sdar-moe or stable-diffcoder do")


STREAMED = replace(
    TOKENISED,
    family=LLADA22,
    ids=replace(MODEL.ids, edit=(40, 41)),
    block_length=32,
)


def test_a_text_whose_tokens_move_has_room_for_more() -> None:
    """Only a given length is followed by masks."""
    params = decided(STREAMED, canvas_text="one two")
    assert params.ends_with_text
    assert params.max_tokens == params.gen_length == STREAMED.max_model_len - 2
    assert params.edits is None
    for fields in ({"max_tokens": 8}, {"gen_length": 8}, {"ignore_eos": True}):
        params = decided(STREAMED, canvas_text="one two", **fields)
        assert not params.ends_with_text
        assert params.max_tokens == (2 if "ignore_eos" in fields else 8)
    assert not decided(STREAMED, canvas_text="one two", algorithm="joint_threshold").ends_with_text


def test_a_text_whose_tokens_move_is_pinned_only_at_its_ends() -> None:
    for pinned in ([[0, 1]], [[8, 9]], [[0, 1], [8, 9]], [[0, 13]]):
        assert decided(STREAMED, canvas_text="one two three", pinned=pinned).revision is not None
    given: dict[str, Any] = {"canvas_text": "one two three", "pinned": [[4, 5]]}
    message = refusal(STREAMED, **given)
    assert message.startswith("pinned: given [[4, 5]]; wanted only the beginning and the end of")
    assert message.endswith("algorithm: joint_threshold, which keeps positions")
    assert decided(STREAMED, **given, algorithm="joint_threshold").revision is not None
    assert "wanted none of [40, 41], which delete and insert" in refusal(
        STREAMED, canvas_token_ids=[11, 41]
    )
    assert "wanted false with canvas_text" in refusal(
        STREAMED, canvas_text="one", return_trajectory=True
    )
    assert "levenshtein replaces tokens by" in refusal(STREAMED, canvas_text="one", noise=0.5)


def test_slack_gives_a_text_room() -> None:
    """Only a given length is followed by masks."""
    params = decided(canvas_text="one two", slack=5)
    assert params.revision is not None and params.revision.slack == 5
    assert params.ends_with_text and params.edits is None
    assert (params.max_tokens, params.gen_length) == (2 + 2 * 5, 32)
    longer = decided(canvas_text="one two", slack=5, max_tokens=8)
    assert not longer.ends_with_text and longer.max_tokens == 8
    room = TOKENISED.max_model_len - 2
    assert decided(canvas_token_ids=[11] * (room - 3), slack=256).max_tokens == room
    assert decided(canvas_text="one two", slack=0).max_tokens == 2


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (STREAMED, {}, "slack: given 4; wanted 0: levenshtein inserts and deletes tokens itself"),
        (
            replace(TOKENISED, family=LLADA21, block_length=32),
            {},
            "slack: given 4; wanted it left out: joint_threshold replaces tokens by "
            "editing_threshold",
        ),
        (TOKENISED, {"suffix_ids": [12]}, "slack: given 4; wanted 0 with suffix_ids"),
        (
            TOKENISED,
            {"return_trajectory": True},
            "return_trajectory: given True; wanted false with canvas_text",
        ),
        (TOKENISED, {"ignore_eos": True}, "ignore_eos: given True; wanted false with slack"),
        (
            replace(TOKENISED, ids=replace(TOKENISED.ids, eos=None, pad=None)),
            {},
            "slack: given 4; wanted 0: the checkpoint has no end token",
        ),
    ],
)
def test_slack_is_refused_where_it_has_no_effect(
    model: Any, fields: dict[str, Any], message: str
) -> None:
    assert refusal(model, canvas_text="one", slack=4, **fields) == message


def test_slack_needs_a_text() -> None:
    assert refusal(slack=4).startswith("slack: given 4; wanted canvas_text or")
    assert refusal(canvas_text="one", slack=257) == "slack: given 257; wanted at most 256"


def test_tokens_are_checked() -> None:
    assert refusal(canvas_token_ids=[10**6]).startswith("canvas_token_ids: given 1000000; wanted")
    assert refusal(MODEL, canvas_text="one").endswith("wanted a server with a tokenizer")
    masked = replace(TOKENISED, encode=lambda _: [11, MASK_ID])
    assert "wanted no mask token, which is token 1" in refusal(masked, canvas_text="x")


def test_stripes_cover_each_position_once() -> None:
    for count in range(1, 20):
        positions = np.sort(np.random.default_rng(count).choice(100, count, replace=False))
        scores = StripedScores(positions, 4)
        assert len(scores.pending) == min(4, count)
        while scores.pending:
            stripe = scores.pending[-1]
            scores.note(stripe, -stripe.astype(float))
        assert (scores.logprobs == -positions).all()


def test_the_least_likely_tokens_are_chosen_within_all_limits() -> None:
    logprobs = np.log([0.5, 0.01, 0.2, 0.01, 0.9])
    assert choose(logprobs).tolist() == [0, 1, 2, 3, 4]
    assert choose(logprobs, noise=0.2).tolist() == [1]  # the earlier of two equal tokens
    assert choose(logprobs, noise=0.21).tolist() == [1, 3]
    assert choose(logprobs, threshold=0.5).tolist() == [1, 2, 3]
    assert choose(logprobs, threshold=0.0).tolist() == []
    assert choose(logprobs, noise=0.8, threshold=0.1).tolist() == [1, 3]
    assert choose(logprobs, budget=1).tolist() == [1]
    free = np.array([True, False, False, False, True])
    assert choose(logprobs, budget=1, is_free=free).tolist() == [0, 1, 4]


def test_edits_lead_from_one_text_to_the_other() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        old = [rng.randrange(3) for _ in range(rng.randrange(8))]
        new = [rng.randrange(3) for _ in range(rng.randrange(8))]
        assert applied(old, moving_edits(old, new)) == new
        edits = edits_between(old, new)
        assert applied(old, edits) == new
        assert all(edit.old_ids == old[edit.start : edit.stop] for edit in edits)
        if len(old) == len(new):
            assert all(a.stop < b.start for a, b in pairwise(edits))


def test_a_diff_keeps_line_ends() -> None:
    assert unified_diff("a\nb\n", "a\nb\n") == ""
    diff = unified_diff("a\r\nb\x0cc", "a\r\nb\x0cd\n")
    assert diff.split("\n")[3:] == [
        " a\r",
        "-b\x0cc",
        "\\ No newline at end of file",
        "+b\x0cd",
        "",
    ]
