# SPDX-License-Identifier: Apache-2.0
"""Likelihood of a continuation, one sequence at a time, as plainly as it can be written.

The estimator of LLaDA's evaluation (arXiv:2502.09992, Algorithm 3), its exact expectation by all
maskings there are, its check for greediness, and the left-to-right chain.
"""

from collections.abc import Sequence
from itertools import combinations

import torch

from tests.reference.decode import LogitModel, aligned


def log_probabilities(
    model: LogitModel, row: Sequence[int], context_length: int, cfg: float, mask: int
) -> torch.Tensor:
    """[T, V] fp64 of a row with masks; guidance compares with the row whose context is masked."""
    ids = torch.tensor([list(row)])
    logits = aligned(model, model.logits(ids))[0]
    if cfg > 0:
        ids[0, :context_length] = mask
        free = aligned(model, model.logits(ids))[0]
        logits = free + (cfg + 1) * (logits - free)
    return torch.log_softmax(logits.double(), dim=-1)


def cross_entropy(
    model: LogitModel,
    context: Sequence[int],
    target: Sequence[int],
    masked: Sequence[int],
    mask: int,
    cfg: float = 0.0,
) -> float:
    """Of the masked tokens of the target, summed, times L over how many they are."""
    row = [*context, *(mask if i in masked else t for i, t in enumerate(target))]
    values = log_probabilities(model, row, len(context), cfg, mask)
    total = sum(-values[len(context) + i, target[i]].item() for i in masked)
    return total * len(target) / len(masked)


def expectation(
    model: LogitModel,
    context: Sequence[int],
    target: Sequence[int],
    mask: int,
    cfg: float = 0.0,
) -> float:
    """The log likelihood that the estimator has in the mean: every count, every choice of it."""
    length, total = len(target), 0.0
    for count in range(1, length + 1):
        losses = [
            cross_entropy(model, context, target, chosen, mask, cfg)
            for chosen in combinations(range(length), count)
        ]
        total += sum(losses) / len(losses)
    return -total / length


def estimate(
    model: LogitModel,
    context: Sequence[int],
    target: Sequence[int],
    mask: int,
    *,
    mc_num: int,
    batch_size: int,
    seed: int,
    cfg: float = 0.0,
) -> float:
    """The published loop, on a CPU whose generator is seeded before it."""
    torch.manual_seed(seed)
    length, means = len(target), []
    for _ in range(mc_num // batch_size):
        k = torch.randint(1, length + 1, ())
        ends = float(k), float(k) + (batch_size - 1) * (length / batch_size)
        counts = torch.round(torch.linspace(*ends, steps=batch_size)).long()
        counts = (counts - 1) % length + 1
        losses = []
        for count in counts:
            is_masked = (torch.arange(length) < count)[torch.randperm(length)]
            chosen = is_masked.nonzero()[:, 0].tolist()
            losses.append(cross_entropy(model, context, target, chosen, mask, cfg))
        means.append(sum(losses) / batch_size)
    return -sum(means) / len(means)


def is_greedy(
    model: LogitModel,
    context: Sequence[int],
    target: Sequence[int],
    mask: int,
    cfg: float = 0.0,
) -> bool:
    """Whether the surest token of all masked positions, written one a forward, gives the target."""
    row = [*context, *[mask] * len(target)]
    for _ in target:
        values = log_probabilities(model, row, len(context), cfg, mask)
        best, tokens = values.max(dim=-1)
        open_ = [i for i in range(len(context), len(row)) if row[i] == mask]
        surest = max(open_, key=lambda i: best[i].item())
        row[surest] = int(tokens[surest])
    return row[len(context) :] == list(target)


def chain(
    model: LogitModel, tokens: Sequence[int], mask: int, end: int | None = None
) -> torch.Tensor:
    """[T - 1, V]: token i from 1, given those before it; everything from i to the end masked."""
    end = len(tokens) if end is None else end
    rows = []
    for i in range(1, len(tokens)):
        row = [*tokens[:i], *[mask] * (end - i)]
        rows.append(log_probabilities(model, row, 0, 0.0, mask)[i])
    return torch.stack(rows)
