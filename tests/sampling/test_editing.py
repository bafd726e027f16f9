# SPDX-License-Identifier: Apache-2.0
"""Edits of logits match upstream's own formulas, applied position by position."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.utils import apply_penalties

from tests.sampling.support import EOS, EOT, MASK, MODEL, NUM_COLUMNS, GivenLogits
from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.request import decision, fields
from vllm.diffusion.sampling import LogitEditor, RowGroup, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.request.params import DiffusionParams

PROMPT = [3, 4, 4, 30]
WORDS = {"a": [3], " a": [1, 3], "bc": [6, 9], " bc": [1, 6, 9], "bcd": [6, 9, 12], " bcd": [1]}
HANG = 120  # seconds; the operation takes a few milliseconds


def begun(
    prompt: list[int], encode: Callable[[str], list[int]], **parameters: Any
) -> tuple[DiffusionParams, np.ndarray[Any, Any]]:
    """Return the parameters of a request, and its sequence before decoding."""
    served = dataclasses.replace(MODEL, encode=encode)
    infill = {"allow_infill": True} if MASK in prompt else {}
    given = fields.canonical({"gen_length": 16, **infill, **parameters})
    params = decision.decide({**given, "logprobs": NUM_COLUMNS}, served, prompt)
    tokens = np.full(len(prompt) + params.gen_length, MASK, dtype=np.int64)
    tokens[: len(prompt)] = prompt
    if params.suffix_ids:
        start = len(prompt) + params.max_tokens
        tokens[start:] = EOS
        tokens[start : start + len(params.suffix_ids)] = params.suffix_ids
    return params, tokens


def edited(
    canvas: dict[int, int],
    rows: list[int],
    logits: torch.Tensor | None = None,
    prompt: list[int] = PROMPT,
    **parameters: Any,
) -> torch.Tensor:
    """Return the logged logits [R, V] of positions `rows`: log probabilities, not normalised.

    `canvas` has the committed tokens. `rows` are positions relative to the canvas.
    """
    params, tokens = begun(prompt, WORDS.__getitem__, **parameters)
    editor = LogitEditor(params, tokens, len(prompt))
    for place, token in canvas.items():
        tokens[len(prompt) + place] = token
    at = np.array(rows) + len(prompt)
    group = RowGroup(
        params=params,
        scoring=CandidateScoring(),
        step=0,
        forbid_mask=False,
        rows=slice(0, len(rows)),
        unconditional_rows=None,
        positions=torch.tensor(rows),
        edits=editor.of(tokens, at),
    )
    given_logits = torch.zeros(len(rows), NUM_COLUMNS) if logits is None else logits
    table = sample(GivenLogits(), given_logits, [group]).table[7:]
    ids, values = table[:NUM_COLUMNS].long(), table[NUM_COLUMNS:]
    return torch.zeros(len(rows), NUM_COLUMNS).scatter_(1, ids.T, values.T.float())


def letters(word: str) -> list[int]:
    """Return the token ids of a text in which each letter is a token, from 3 on."""
    return [3 + ord(letter) - ord("a") for letter in word.replace(" ", "")]


def forbidden(actual: torch.Tensor) -> list[set[int]]:
    return [set((row == -torch.inf).nonzero()[:, 0].tolist()) for row in actual]


def test_penalties_are_upstreams() -> None:
    logits = 3 * torch.randn(3, NUM_COLUMNS, generator=torch.Generator().manual_seed(2))
    canvas = {0: 5, 1: 6, 2: 6, 5: 4, 9: 6}
    penalties = {"repetition_penalty": 1.7, "presence_penalty": -0.6, "frequency_penalty": 0.9}
    actual = edited(canvas, [3, 4, 7], logits, **penalties)
    wanted = apply_penalties(
        logits.clone(),
        torch.tensor([PROMPT] * 3),
        torch.tensor([list(canvas.values())] * 3),
        *(torch.full((3,), penalties[f"{name}_penalty"]) for name in ("presence", "frequency")),
        torch.full((3,), penalties["repetition_penalty"]),
    )
    torch.testing.assert_close(actual, torch.log_softmax(wanted, dim=1))


def counted(actual: torch.Tensor, penalty: float = 2.0) -> list[dict[int, int]]:
    """Return how often each token counts, given equal logits with a frequency penalty."""
    best = actual.max(dim=1, keepdim=True).values
    times = ((best - actual) / penalty).round().long()
    return [{i: int(n) for i, n in enumerate(row) if n} for row in times]


def test_what_counts() -> None:
    canvas = {0: 5, 1: 6, 2: 6, 7: EOS, 8: EOT}
    parameters = {"frequency_penalty": 2.0}
    assert counted(edited(canvas, [3], **parameters)) == [{5: 1, 6: 2}]
    whole = counted(edited(canvas, [3], **parameters, ignore_eos=True))
    assert whole == [{5: 1, 6: 2, EOS: 1, EOT: 1}]
    # A committed token that may be replaced does not count at its own position.
    assert counted(edited(canvas, [0, 2, 3, 7], **parameters)) == [
        {6: 2},
        {5: 1, 6: 1},
        {5: 1, 6: 2},
        {5: 1, 6: 2},
    ]


def test_a_prompts_gaps_count_once_they_are_filled() -> None:
    prompt = [3, MASK, 4, 30]
    assert counted(edited({}, [3], prompt=prompt, frequency_penalty=2.0)) == [{}]
    assert counted(edited({-3: 9}, [3], prompt=prompt, frequency_penalty=2.0)) == [{9: 1}]
    repeated = edited({-3: 9}, [3], 1 + torch.zeros(1, NUM_COLUMNS), prompt, repetition_penalty=2.0)
    assert [i for i, x in enumerate(repeated[0]) if x < repeated[0].max()] == [3, 4, 9, 30]


def test_a_prompt_of_gaps_alone_counts_nothing() -> None:
    assert edited({}, [0, 1], prompt=[MASK, MASK], frequency_penalty=1.0).unique().numel() == 1


def test_a_suffix_counts_as_given() -> None:
    parameters = {"suffix_ids": [11, 12], "max_tokens": 8, "gen_length": 16}
    assert counted(edited({0: 5}, [3], **parameters, frequency_penalty=2.0)) == [{5: 1}]
    logits = torch.ones(1, NUM_COLUMNS)
    actual = edited({0: 5}, [3], logits, **parameters, repetition_penalty=2.0)[0]
    assert [i for i, x in enumerate(actual) if x < actual.max()] == [3, 4, 5, 11, 12, 30]


def test_the_end_is_forbidden_where_the_answer_is_too_short() -> None:
    actual = forbidden(edited({}, [0, 4, 5, 9], min_tokens=5))
    assert actual == [{EOS, EOT}, {EOS, EOT}, set(), set()]
    kept = forbidden(edited({}, [0], min_tokens=5, ignore_eos=True))
    assert kept == [{EOS, EOT}]
    gap = forbidden(edited({}, [-3, 0], prompt=[3, MASK, 4, 30], min_tokens=5))
    assert gap == [set(), {EOS, EOT}]


@pytest.mark.parametrize(
    ("canvas", "words", "wanted"),
    [
        ({}, ["a"], {0: {3}, 1: {3}, 2: {3}}),
        ({0: 6}, ["bc"], {1: {9}, 2: set()}),  # after the beginning of the word
        ({2: 9}, ["bc"], {0: set(), 1: {6}}),  # before the end of the word
        ({0: 6, 2: 12}, ["bcd"], {1: {9}}),  # between beginning and end
        ({0: 6}, ["bcd"], {1: set(), 2: set()}),  # a masked neighbour completes no word
        ({1: 9}, ["bcd"], {0: set(), 2: set()}),
        ({15: 9}, ["bc"], {14: {6}}),  # at the end of the canvas
        ({0: 9}, ["bc"], {1: set()}),  # tokens before the canvas do not count
        ({0: 6, 1: 6}, ["bc", "a"], {2: {3, 9}}),
    ],
)
def test_bad_words(canvas: dict[int, int], words: list[str], wanted: dict[int, set[int]]) -> None:
    actual = edited(canvas, list(wanted), prompt=[3, 4, 30, 6], bad_words=words)
    assert forbidden(actual) == list(wanted.values())


def test_a_gap_sees_the_words_around_it() -> None:
    actual = forbidden(edited({}, [-2], prompt=[3, 6, MASK, 30], bad_words=["bc"]))
    assert actual == [{9}]


def completes(tokens: list[int], word: list[int], at: int, lowest: int) -> set[int]:
    """Return the tokens that complete a word at a position, by definition."""
    actual = set()
    for place, token in enumerate(word):
        own = [*tokens[:at], token, *tokens[at + 1 :]]
        first = at - place
        if first >= lowest and own[first : first + len(word)] == word:
            actual.add(token)
    return actual


@pytest.mark.parametrize("seed", range(60))
def test_bad_words_among_few_letters(seed: int) -> None:
    """Words overlap themselves, complete or almost, in gaps and at tokens that change."""
    rng = np.random.default_rng(seed)
    prompt = [int(t) for t in rng.choice([3, 4, MASK], 6, p=[0.5, 0.2, 0.3])]
    words = ["".join(rng.choice(["a", "b"], size, p=[0.8, 0.2])) for size in (2, 3, 5, 9)]
    params, tokens = begun(prompt, letters, bad_words=words, gen_length=32)
    editor = LogitEditor(params, tokens, len(prompt))
    tokens[len(prompt) :] = rng.choice([3, 4, MASK], 32, p=[0.7, 0.2, 0.1])
    tokens[: len(prompt)][tokens[: len(prompt)] == MASK] = rng.choice([3, 4, MASK])
    at = np.sort(rng.choice(len(tokens), 20, replace=False))
    actual = editor.of(tokens, at)
    wanted = {
        (row, token)
        for row, position in enumerate(at.tolist())
        for word in words
        for token in completes(tokens.tolist(), letters(word), position, 6 if position >= 6 else 0)
    }
    assert set(zip(actual.rows.tolist(), actual.columns.tolist(), strict=True)) == wanted


def test_a_word_of_thousands_of_tokens_holds_nothing_up() -> None:
    """The time of a step grows linearly with the letters of its words."""
    words = ["a" * (1500 + extra) for extra in range(12)]
    params, tokens = begun(PROMPT, letters, bad_words=words, gen_length=3072, max_tokens=3072)
    editor = LogitEditor(params, tokens, len(PROMPT))
    started = time.monotonic()
    for filled in range(0, 1500, 100):
        tokens[len(PROMPT) : len(PROMPT) + filled] = 3
        assert editor.of(tokens, np.arange(len(PROMPT), len(tokens))).rows.size == 0
    tokens[len(PROMPT) : len(PROMPT) + 1499] = 3
    actual = editor.of(tokens, np.arange(len(PROMPT), len(tokens)))
    assert (actual.rows.tolist(), actual.columns.tolist()) == ([1499], [3])
    assert time.monotonic() - started < HANG


def test_every_token_may_end_an_answer_that_allows_every_token() -> None:
    """Fields have all ids of a large vocabulary, and another field forbids the end."""
    size = 100_000
    served = dataclasses.replace(MODEL, vocab_size=size, encode=letters)
    every = [token for token in range(size) if token != MASK]
    parameters = {
        "allowed_token_ids": every,
        "min_tokens": 2,
        "bad_words": ["ab"],
        "gen_length": 64,
    }
    given = fields.canonical(parameters) | {"stop_token_ids": tuple(every[10:])}
    params = decision.decide(given, served, PROMPT)
    tokens = np.array([*PROMPT, 3, *[MASK] * 63])
    started = time.monotonic()
    actual = LogitEditor(params, tokens, len(PROMPT)).of(tokens, np.arange(5, len(tokens)))
    assert time.monotonic() - started < HANG
    assert (actual.rows.tolist(), actual.columns.tolist()) == ([0], [4])
    assert actual.ends.size == size - 11 and actual.early == slice(0, 1)


def test_a_bad_word_of_several_tokens_gives_way_to_the_allowed_ones() -> None:
    every = set(range(NUM_COLUMNS))
    parameters = {"bad_words": ["bc", "a"], "allowed_token_ids": [3, 6, 9]}
    assert forbidden(edited({0: 6}, [1, 2], **parameters)) == [every - {6}, every - {6, 9}]
    few = {"bad_words": ["bc", "a"], "allowed_token_ids": [3, 9]}
    assert forbidden(edited({0: 6}, [1, 2], **few)) == [every - {9}, every - {9}]


def test_biases_come_before_penalties_and_what_is_forbidden_stays_so() -> None:
    parameters = {"logit_bias": {"3": 5.0, "7": 4.0, str(EOS): 100}, "repetition_penalty": 2.0}
    actual = edited({}, [0], min_tokens=1, **parameters)[0]
    assert actual[EOS] == -torch.inf
    assert float(actual[3] - actual[0]) == pytest.approx(2.5)  # a token of the prompt: 5 / 2
    assert float(actual[7] - actual[0]) == pytest.approx(4.0)


def test_narrow_logits_are_edited_in_fp32() -> None:
    logits = torch.full((1, NUM_COLUMNS), 256.0, dtype=torch.bfloat16)
    actual = edited({}, [0], logits, logit_bias={"7": 0.25})[0]
    assert float(actual[7] - actual[0]) == pytest.approx(0.25, abs=1e-5)
