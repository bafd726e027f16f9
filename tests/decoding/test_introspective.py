# SPDX-License-Identifier: Apache-2.0
"""Introspective decoding, its rule alone: drafts of a made-up model."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from tests.params.support import model
from vllm.diffusion import ops
from vllm.diffusion.decoding import Candidates, make_rule
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import IDLM
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import SpecialIds

VOCAB, MASK, LENGTH, PROMPT = 17, 16, 3, [1]
SERVED = model(
    family=IDLM, vocab_size=VOCAB, ids=SpecialIds(MASK, None, None, frozenset()), block_length=3
)
NUM_ANSWERS = 20_000
MIN_P_VALUE = 1e-4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute the random numbers of all seeds at once, and small tensors without other threads."""
    seeds, compute = torch.arange(NUM_ANSWERS), ops.philox_uniform

    @cache
    def of_all_seeds(purpose: int, step: int, position: int, columns: range) -> torch.Tensor:
        return compute(seeds, purpose, step, torch.full_like(seeds, position), columns)

    def look_up(
        seed: int, purpose: int, step: int, positions: torch.Tensor, columns: range
    ) -> torch.Tensor:
        rows = [of_all_seeds(purpose, step, p, columns)[seed] for p in positions.tolist()]
        return torch.stack(rows)

    monkeypatch.setattr(ops, "philox_uniform", look_up)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def logits_after(context: tuple[int, ...], num_masks: int) -> torch.Tensor:
    """Return the logits [V] of a row that `num_masks` masks separate from a context of tokens."""
    seed = 17 * num_masks + sum(31**i * (token + 1) for i, token in enumerate(context))
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(VOCAB, generator=generator)


@cache
def decided(**parameters: object) -> DiffusionParams:
    request = {"gen_length": LENGTH, "stride": 3, "temperature": 1.0, **parameters}
    return decision.decide(fields.canonical(request), SERVED, PROMPT)


def answer(seed: int, takes_best: bool = False, **parameters: object) -> tuple[int, ...]:
    """Return an answer of the rule; `takes_best` makes drafts the most likely tokens."""
    params = decided(**parameters).with_seed(seed)
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


def expected(filters: dict[str, int]) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of one token at a time."""
    probabilities = {}
    for tokens in itertools.product(range(VOCAB - 1), repeat=LENGTH):
        total = 1.0
        for i, token in enumerate(tokens):
            logits = logits_after((*PROMPT, *tokens[:i]), 0).clone()
            logits[MASK] = -torch.inf
            if "top_k" in filters:
                least = logits.sort(descending=True).values[filters["top_k"] - 1]
                logits[logits < least] = -torch.inf
            total *= float(torch.softmax(logits, dim=-1)[token])
        probabilities[tokens] = total
    return probabilities


def p_value(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    assert all(wanted[tokens] > 0 for tokens in counts)
    number = counts.total()
    likely = [tokens for tokens, p in wanted.items() if p * number >= 5]
    actual = [counts[tokens] for tokens in likely]
    share = [wanted[tokens] * number for tokens in likely]
    actual.append(number - sum(actual))
    share.append(number - sum(share))
    if share[-1] < 5:
        actual[-2:], share[-2:] = [sum(actual[-2:])], [sum(share[-2:])]
    chi_square = sum((a - s) ** 2 / s for a, s in zip(actual, share, strict=True))
    half = torch.tensor([len(share) - 1, chi_square], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}], ids=["all tokens", "top_k"])
def test_ratio_keeps_the_distribution(filters: dict[str, int]) -> None:
    seeds = range(5000 if filters else NUM_ANSWERS)
    counts = Counter(answer(seed, acceptance="ratio", **filters) for seed in seeds)
    assert p_value(counts, expected(filters)) > MIN_P_VALUE


def test_the_most_likely_tokens_as_drafts_would_not_keep_it() -> None:
    """The test above would notice the rule of the release at temperatures above 0."""
    counts = Counter(answer(s, takes_best=True, acceptance="ratio") for s in range(4000))
    assert p_value(counts, expected({})) < MIN_P_VALUE
