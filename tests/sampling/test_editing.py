# SPDX-License-Identifier: Apache-2.0
"""What a request changes of logits, by upstream's own formulas and position by position."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.utils import apply_penalties

from tests.sampling.support import EOS, EOT, MASK, MODEL, NUM_COLUMNS, GivenLogits
from vllm.diffusion.core.scoring import Scoring
from vllm.diffusion.request import decision, fields
from vllm.diffusion.sampling import LogitEditor, RowGroup, sample

PROMPT = [3, 4, 4, 30]
WORDS = {"a": [3], " a": [1, 3], "bc": [6, 9], " bc": [1, 6, 9], "bcd": [6, 9, 12], " bcd": [1]}


def edited(
    canvas: dict[int, int],
    rows: list[int],
    logits: torch.Tensor | None = None,
    prompt: list[int] = PROMPT,
    **asked: Any,
) -> torch.Tensor:
    """Logits [R, V] of positions `rows` as told: log probabilities of every token, unnormalised.

    `canvas` are the tokens on it; `rows` count from its start.
    """
    served = dataclasses.replace(MODEL, encode=WORDS.__getitem__)
    infill = {"allow_infill": True} if MASK in prompt else {}
    given = fields.canonical({"gen_length": 16, **infill, **asked})
    params = decision.decide({**given, "logprobs": NUM_COLUMNS}, served, prompt)
    tokens = np.full(len(prompt) + params.gen_length, MASK, dtype=np.int64)
    tokens[: len(prompt)] = prompt
    if params.suffix_ids:
        start = len(prompt) + params.max_tokens
        tokens[start:] = EOS
        tokens[start : start + len(params.suffix_ids)] = params.suffix_ids
    editor = LogitEditor(params, tokens, len(prompt))
    for place, token in canvas.items():
        tokens[len(prompt) + place] = token
    at = np.array(rows) + len(prompt)
    group = RowGroup(
        params=params,
        scoring=Scoring(),
        step=0,
        forbid_mask=False,
        rows=slice(0, len(rows)),
        unconditional_rows=None,
        positions=torch.tensor(rows),
        edits=editor.of(tokens, at),
    )
    given_logits = torch.zeros(len(rows), NUM_COLUMNS) if logits is None else logits
    table = sample(GivenLogits(), [(given_logits, [group])]).table[7:]
    ids, values = table[:NUM_COLUMNS].long(), table[NUM_COLUMNS:]
    return torch.zeros(len(rows), NUM_COLUMNS).scatter_(1, ids.T, values.T.float())


def forbidden(found: torch.Tensor) -> list[set[int]]:
    return [set((row == -torch.inf).nonzero()[:, 0].tolist()) for row in found]


def test_penalties_are_upstreams() -> None:
    logits = 3 * torch.randn(3, NUM_COLUMNS, generator=torch.Generator().manual_seed(2))
    canvas = {0: 5, 1: 6, 2: 6, 5: 4, 9: 6}
    penalties = {"repetition_penalty": 1.7, "presence_penalty": -0.6, "frequency_penalty": 0.9}
    found = edited(canvas, [3, 4, 7], logits, **penalties)
    wanted = apply_penalties(
        logits.clone(),
        torch.tensor([PROMPT] * 3),
        torch.tensor([list(canvas.values())] * 3),
        *(torch.full((3,), penalties[f"{name}_penalty"]) for name in ("presence", "frequency")),
        torch.full((3,), penalties["repetition_penalty"]),
    )
    torch.testing.assert_close(found, torch.log_softmax(wanted, dim=1))


def counted(found: torch.Tensor, penalty: float = 2.0) -> list[dict[int, int]]:
    """How often each token counts, where all logits are equal but for a frequency penalty."""
    best = found.max(dim=1, keepdim=True).values
    times = ((best - found) / penalty).round().long()
    return [{i: int(n) for i, n in enumerate(row) if n} for row in times]


def test_what_counts() -> None:
    canvas = {0: 5, 1: 6, 2: 6, 7: EOS, 8: EOT}
    asked = {"frequency_penalty": 2.0}
    assert counted(edited(canvas, [3], **asked)) == [{5: 1, 6: 2}]
    whole = counted(edited(canvas, [3], **asked, ignore_eos=True))
    assert whole == [{5: 1, 6: 2, EOS: 1, EOT: 1}]
    # A committed token that may be replaced does not count for its own place.
    assert counted(edited(canvas, [0, 2, 3, 7], **asked)) == [
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
    asked = {"suffix_ids": [11, 12], "max_tokens": 8, "gen_length": 16}
    assert counted(edited({0: 5}, [3], **asked, frequency_penalty=2.0)) == [{5: 1}]
    logits = torch.ones(1, NUM_COLUMNS)
    found = edited({0: 5}, [3], logits, **asked, repetition_penalty=2.0)[0]
    assert [i for i, x in enumerate(found) if x < found.max()] == [3, 4, 5, 11, 12, 30]


def test_the_end_is_forbidden_where_the_answer_is_too_short() -> None:
    found = forbidden(edited({}, [0, 4, 5, 9], min_tokens=5))
    assert found == [{EOS, EOT}, {EOS, EOT}, set(), set()]
    kept = forbidden(edited({}, [0], min_tokens=5, ignore_eos=True))
    assert kept == [{EOS, EOT}]
    gap = forbidden(edited({}, [-3, 0], prompt=[3, MASK, 4, 30], min_tokens=5))
    assert gap == [set(), {EOS, EOT}]


@pytest.mark.parametrize(
    ("canvas", "words", "wanted"),
    [
        ({}, ["a"], {0: {3}, 1: {3}, 2: {3}}),
        ({0: 6}, ["bc"], {1: {9}, 2: set()}),  # behind its beginning
        ({2: 9}, ["bc"], {0: set(), 1: {6}}),  # before its end
        ({0: 6, 2: 12}, ["bcd"], {1: {9}}),  # between both
        ({0: 6}, ["bcd"], {1: set(), 2: set()}),  # a masked neighbour completes nothing
        ({1: 9}, ["bcd"], {0: set(), 2: set()}),
        ({15: 9}, ["bc"], {14: {6}}),  # at the end of the canvas
        ({0: 9}, ["bc"], {1: set()}),  # nothing before the canvas counts
        ({0: 6, 1: 6}, ["bc", "a"], {2: {3, 9}}),
    ],
)
def test_bad_words(canvas: dict[int, int], words: list[str], wanted: dict[int, set[int]]) -> None:
    found = edited(canvas, list(wanted), prompt=[3, 4, 30, 6], bad_words=words)
    assert forbidden(found) == list(wanted.values())


def test_a_gap_sees_the_words_around_it() -> None:
    found = forbidden(edited({}, [-2], prompt=[3, 6, MASK, 30], bad_words=["bc"]))
    assert found == [{9}]


def test_a_bad_word_of_several_tokens_gives_way_to_the_allowed_ones() -> None:
    every = set(range(NUM_COLUMNS))
    asked = {"bad_words": ["bc", "a"], "allowed_token_ids": [3, 6, 9]}
    assert forbidden(edited({0: 6}, [1, 2], **asked)) == [every - {6}, every - {6, 9}]
    few = {"bad_words": ["bc", "a"], "allowed_token_ids": [3, 9]}
    assert forbidden(edited({0: 6}, [1, 2], **few)) == [every - {9}, every - {9}]


def test_biases_come_before_penalties_and_what_is_forbidden_stays_so() -> None:
    asked = {"logit_bias": {"3": 5.0, "7": 4.0, str(EOS): 100}, "repetition_penalty": 2.0}
    found = edited({}, [0], min_tokens=1, **asked)[0]
    assert found[EOS] == -torch.inf
    assert float(found[3] - found[0]) == pytest.approx(2.5)  # in the prompt: 5 / 2
    assert float(found[7] - found[0]) == pytest.approx(4.0)


def test_narrow_logits_are_edited_in_fp32() -> None:
    logits = torch.full((1, NUM_COLUMNS), 256.0, dtype=torch.bfloat16)
    found = edited({}, [0], logits, logit_bias={"7": 0.25})[0]
    assert float(found[7] - found[0]) == pytest.approx(0.25, abs=1e-5)
