# SPDX-License-Identifier: Apache-2.0
"""Introspective decoding, its rule alone: drafts of a made-up model."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from tests.params.support import model
from vllm.diffusion.decoding import Candidates, make_rule
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import IDLM
from vllm.diffusion.request.served_model import SpecialIds

VOCAB, MASK, LENGTH, PROMPT = 4, 3, 3, [1]
SERVED = model(
    family=IDLM, vocab_size=VOCAB, ids=SpecialIds(MASK, None, None, frozenset()), block_length=3
)
NUM_ANSWERS = 3000
MIN_P_VALUE = 1e-4


def logits_after(context: tuple[int, ...], num_masks: int) -> torch.Tensor:
    """Return the logits [V] of a row that `num_masks` masks separate from a context of tokens."""
    seed = 17 * num_masks + sum(31**i * (token + 1) for i, token in enumerate(context))
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(VOCAB, generator=generator)


def answer(seed: int, takes_best: bool = False, **parameters: object) -> tuple[int, ...]:
    """Return an answer of the rule; `takes_best` makes drafts the most likely tokens."""
    request = {"gen_length": LENGTH, "stride": 3, "temperature": 1.0, "seed": seed, **parameters}
    params = decision.decide(fields.canonical(request), SERVED, PROMPT)
    rule = make_rule(params, len(PROMPT))
    tokens = np.array([*PROMPT, *[MASK] * (LENGTH + params.block_length)])
    while (target := rule.prepare(tokens)) is not None:
        sequence = tokens.tolist()
        rows = []
        for position in target.eligible.tolist():
            known = next((i for i, t in enumerate(sequence) if t == MASK), len(sequence))
            context = tuple(sequence[: min(position, known)])
            rows.append(logits_after(context, position - len(context)))
        positions = torch.from_numpy(target.eligible - len(PROMPT))
        logits = rule.adjust_logits(torch.stack(rows), positions)
        proposed = logits.argmax(dim=-1).numpy()
        if takes_best:
            for i, position in enumerate(target.eligible.tolist()):
                if position > (tokens != MASK).sum():
                    proposed[i] = rows[i][:MASK].argmax()
        scores = np.zeros(len(proposed))
        commit = rule.decide(Candidates(target.eligible, proposed, scores))
        tokens[commit.positions] = commit.tokens
    return tuple(int(t) for t in tokens[len(PROMPT) : len(PROMPT) + LENGTH])


def expected(filters: dict[str, object]) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of one token at a time."""
    probabilities = {}
    for tokens in itertools.product(range(VOCAB - 1), repeat=LENGTH):
        total = 1.0
        for i, token in enumerate(tokens):
            logits = logits_after((*PROMPT, *tokens[:i]), 0)
            logits[MASK] = -torch.inf
            if "top_k" in filters:
                logits[logits < logits.sort(descending=True).values[1]] = -torch.inf
            total *= float(torch.softmax(logits, dim=-1)[token])
        probabilities[tokens] = total
    return probabilities


def p_value(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    assert all(wanted[tokens] > 0 for tokens in counts)
    likely = [tokens for tokens, p in wanted.items() if p * NUM_ANSWERS >= 5]
    actual = [counts[tokens] for tokens in likely]
    share = [wanted[tokens] * NUM_ANSWERS for tokens in likely]
    actual.append(NUM_ANSWERS - sum(actual))
    share.append(NUM_ANSWERS - sum(share))
    if share[-1] < 5:
        actual[-2:], share[-2:] = [sum(actual[-2:])], [sum(share[-2:])]
    chi_square = sum((a - s) ** 2 / s for a, s in zip(actual, share, strict=True))
    half = torch.tensor([len(share) - 1, chi_square], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}], ids=["all tokens", "top_k"])
def test_ratio_keeps_the_distribution(filters: dict[str, object]) -> None:
    counts = Counter(answer(s, acceptance="ratio", **filters) for s in range(NUM_ANSWERS))
    assert p_value(counts, expected(filters)) > MIN_P_VALUE


def test_the_most_likely_tokens_as_drafts_would_not_keep_it() -> None:
    """The test above would notice the rule of the release at temperatures above 0."""
    counts = Counter(answer(s, takes_best=True, acceptance="ratio") for s in range(NUM_ANSWERS))
    assert p_value(counts, expected({})) < MIN_P_VALUE
