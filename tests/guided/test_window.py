# SPDX-License-Identifier: Apache-2.0
"""The joint choice is the best string of the language, or a fair draw from all its strings."""

import itertools
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.guided.support import TOKENS, bytes_of, language_of
from vllm.diffusion.guided.joint import Joint
from vllm.diffusion.guided.open_window import FREE, OPEN, OpenWindow, can_be_completed
from vllm.diffusion.guided.regex import regex

PATTERNS = ["(a|bc)*1?", "[abc]{2,4}", "ab+c?|1+", "(abc|cab)1*", "a(b|c){0,3}"]


def joint(language: Any, window: OpenWindow, temperature: float = 0.0, step: int = 0) -> Joint:
    return Joint(
        language, window, temperature, seed=5, step=step, is_tempered=False, sets_scores=True
    )


def strings(pattern: str, length: int) -> list[tuple[int, ...]]:
    """Return all sequences of `length` tokens whose text matches."""
    results = []
    for ids in itertools.product(range(len(TOKENS)), repeat=length):
        text = bytes_of(ids)
        if text is not None and re.fullmatch(pattern, text.decode()):
            results.append(ids)
    return results


def chosen(made: Joint, logits: torch.Tensor) -> list[int]:
    made.read(logits, torch.arange(len(logits)))
    tokens, logprobs = made.choose()
    wanted = torch.log_softmax(logits.double(), dim=-1)[torch.arange(len(logits)), tokens]
    assert logprobs == pytest.approx(wanted.numpy())
    return list(tokens.tolist())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_best_string_is_found(pattern: str) -> None:
    language, length = language_of(regex(pattern)), 4
    allowed = strings(pattern, length)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = 3 * torch.randn(length, len(TOKENS), generator=generator)
        window = OpenWindow(0, 0, np.full(length, OPEN, dtype=np.int32), 0)
        actual = chosen(joint(language, window), logits)
        worth = torch.log_softmax(logits, dim=-1)
        best = max(sum(worth[i, t].item() for i, t in enumerate(ids)) for ids in allowed)
        assert tuple(actual) in allowed
        assert sum(worth[i, t].item() for i, t in enumerate(actual)) == pytest.approx(best)


def test_what_stands_there_and_what_is_still_free_is_respected() -> None:
    pattern, length = "(a|bc)*1?", 5
    language = language_of(regex(pattern))
    logits = torch.randn(2, len(TOKENS), generator=torch.Generator().manual_seed(1))
    fixed = int(language.class_of_token[1])  # the class of b, at position 1
    kinds = np.array([OPEN, fixed, FREE, OPEN], dtype=np.int32)
    made = joint(language, OpenWindow(0, 0, kinds, 1))
    made.read(logits, torch.tensor([0, 3]))
    first, last = made.choose()[0].tolist()
    worth = torch.log_softmax(logits.double(), dim=-1)
    allowed = [ids for ids in strings(pattern, length) if ids[1] == 1]
    best = max(worth[0, ids[0]] + worth[1, ids[3]] for ids in allowed)
    assert any((ids[0], ids[3]) == (first, last) for ids in allowed)
    assert float(worth[0, first] + worth[1, last]) == pytest.approx(float(best))


def test_an_answer_ends_within_its_limit() -> None:
    """The window is longer than the maximum answer."""
    language = language_of(regex("[abc]*1"))
    logits = torch.zeros(5, len(TOKENS))
    logits[:, 0] = 9.0
    window = OpenWindow(0, 0, np.full(5, OPEN, dtype=np.int32), -2)
    actual = chosen(joint(language, window), logits)
    text = bytes_of(actual[:3])
    assert text is not None
    assert re.fullmatch("[abc]*1", text.decode()), actual


def test_room_is_kept_for_what_must_follow() -> None:
    language = language_of(regex("[abc]*1111"))
    assert language.least_tokens == 4
    logits = torch.zeros(2, len(TOKENS))
    logits[:, 0] = 9.0
    window = OpenWindow(0, 0, np.full(2, OPEN, dtype=np.int32), 3)
    assert chosen(joint(language, window), logits) == [0, 6]


def test_a_language_can_run_out_of_room() -> None:
    language = language_of(regex("[abc]*1111"))
    kinds = np.array([int(language.class_of_token[0]), FREE, FREE], dtype=np.int32)
    assert can_be_completed(language, OpenWindow(0, 0, kinds, 2))
    assert not can_be_completed(language, OpenWindow(0, 0, kinds, 1))


def test_what_the_model_excludes_may_be_all_that_fits() -> None:
    language = language_of(regex("abc"))
    logits = torch.full((2, len(TOKENS)), -torch.inf)
    logits[:, 6] = 0.0
    window = OpenWindow(0, 0, np.full(2, OPEN, dtype=np.int32), 0)
    made = joint(language, window)
    made.read(logits, torch.arange(2))
    assert bytes_of(made.choose()[0].tolist()) == b"abc"


def test_draws_have_the_conditional_distribution() -> None:
    """Frequencies match the probabilities of all strings; a rare string may appear once."""
    pattern, length, temperature, num = "(a|bc)*1?", 3, 0.8, 400
    language = language_of(regex(pattern))
    logits = 1.5 * torch.randn(length, len(TOKENS), generator=torch.Generator().manual_seed(2))
    worth = torch.log_softmax(logits / temperature, dim=-1)
    weights = {
        ids: np.exp(sum(worth[i, t].item() for i, t in enumerate(ids)))
        for ids in strings(pattern, length)
    }
    total = sum(weights.values())
    window = OpenWindow(0, 0, np.full(length, OPEN, dtype=np.int32), 0)
    counts: Counter[tuple[int, ...]] = Counter()
    for step in range(num):
        made = joint(language, window, temperature, step)
        made.read(logits, torch.arange(length))
        counts[tuple(made.choose()[0].tolist())] += 1
    assert counts.keys() <= weights.keys()
    for ids, weight in weights.items():
        share = weight / total
        spread = (share * (1 - share) / num) ** 0.5
        assert counts[ids] / num == pytest.approx(share, abs=4.5 * spread + 1 / num)


def test_draws_are_repeated_by_seed_and_step() -> None:
    language = language_of(regex("[abc]{6}"))
    logits = torch.randn(6, len(TOKENS), generator=torch.Generator().manual_seed(3))
    window = OpenWindow(0, 0, np.full(6, OPEN, dtype=np.int32), 0)
    actual = [chosen(joint(language, window, 1.0, step), logits) for step in (0, 0, 1, 2)]
    assert actual[0] == actual[1]
    assert len({tuple(ids) for ids in actual}) == 3
