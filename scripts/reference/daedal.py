# SPDX-License-Identifier: Apache-2.0
"""DAEDAL (arXiv:2508.00819): a canvas that chooses its length and inserts masks.

Deviation from the published code: the prompt stays conditional after an insertion, and the lowest
position wins a tie.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Sequence of token ids -> logits [T, V] of each position, with guidance.
LogitsOf = Callable[[list[int]], Tensor]


class Answer(NamedTuple):
    """The whole canvas at the end, its lengths in order, and the number of forward passes."""

    canvas: list[int]
    lengths: list[int]
    num_forwards: int


def end_confidence(logits: Tensor, eos: int, window: int) -> float:
    """Return the certainty that the answer ends on the canvas with these logits [L, V]."""
    probabilities, confidences = torch.softmax(logits, dim=-1), list[float]()
    for position in reversed(range(len(logits))):
        if int(logits[position].argmax()) == eos and len(confidences) < window:
            confidences.append(float(probabilities[position, eos]))
    return sum(confidences) / window


def chosen(
    logits: Tensor, masked: list[int], mask: int, threshold: float
) -> tuple[list[int], dict[int, float], list[int]]:
    """Return the positions to fill, the confidence of all `masked` ones, and all tokens."""
    probabilities, tokens = torch.softmax(logits, dim=-1), logits.argmax(dim=-1).tolist()
    score = {p: float(probabilities[p, tokens[p]]) for p in masked}
    others = [p for p in masked if tokens[p] != mask]
    filled = [p for p in others if score[p] > threshold]
    if not others:
        logits = logits.clone()
        logits[:, mask] = -torch.inf
        best = torch.softmax(logits, dim=-1).max(dim=-1)
        filled = [max(masked, key=lambda p: (float(best.values[p]), -p))]
        tokens = best.indices.tolist()
    return filled or [max(others, key=lambda p: (score[p], -p))], score, tokens


def daedal(
    logits_of: LogitsOf,
    prompt: Iterable[int],
    *,
    mask: int,
    eos: int,
    max_tokens: int,
    initial_length: int = 64,
    block_length: int = 32,
    threshold: float = 0.9,
    low_threshold: float = 0.1,
    expansion: int = 8,
    eos_window: int = 32,
    eos_threshold: float = 0.5,
    eos_expand_threshold: float = 0.9,
) -> Answer:
    """Run both stages to the end of the canvas, at temperature 0."""
    prompt = list(prompt)
    first, length, lengths = len(prompt), min(initial_length, max_tokens), list[int]()
    while True:
        lengths.append(length)
        certainty = end_confidence(logits_of(prompt + [mask] * length)[first:], eos, eos_window)
        if certainty >= eos_threshold or length >= max_tokens:
            break
        length = min(length + expansion, max_tokens)
    num_forwards, longer = len(lengths), min(length + eos_window // 2, max_tokens)
    row = prompt + [mask] * length + [eos] * (longer - length)
    length = longer
    start = first
    while start < first + length:
        lengths += [length] if length != lengths[-1] else []
        before, logits = list(row), logits_of(row)
        num_forwards += 1
        certainty = end_confidence(logits[first:], eos, eos_window)
        stop = min(start + block_length, first + length)
        masked = [p for p in range(start, stop) if row[p] == mask]
        filled, score, tokens = chosen(logits, masked, mask, threshold)
        for position in filled:
            row[position] = tokens[position]
        uncertain = [p for p in masked if p not in filled and score[p] < low_threshold]
        if certainty < eos_expand_threshold and length < max_tokens and uncertain:
            weakest = min(uncertain, key=lambda p: (score[p], p))
            length = min(length + expansion - 1, max_tokens)
            row[weakest : weakest + 1] = [mask] * expansion
            row = row[: first + length]
        while start < first + length and mask not in row[start : start + block_length]:
            start += block_length
        if row == before:
            break
    return Answer(row[first:], lengths, num_forwards)
