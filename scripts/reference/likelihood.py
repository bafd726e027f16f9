# SPDX-License-Identifier: Apache-2.0
"""Likelihood of a continuation, one sequence at a time, written plainly.

The module has the estimator of LLaDA's evaluation (arXiv:2502.09992, Algorithm 3), its exact
expectation over all maskings, its check for greediness, and the left-to-right chain.
"""

from collections.abc import Sequence
from itertools import combinations

import torch

from reference.decode import LogitModel, aligned


def log_probabilities(
    model: LogitModel, row: Sequence[int], context_length: int, cfg: float, mask: int
) -> torch.Tensor:
    """Return fp64 log probabilities [T, V] of a row; guidance masks the context of a second row."""
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
    """Return the summed loss of the masked target tokens, times L / number of masked tokens."""
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
    """Return the mean of the estimator: the average over every count, and every choice of it."""
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
    """Run the published loop on a CPU, after seeding the global generator."""
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
    """Return whether writing the surest masked token in each forward pass gives the target."""
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
    """Return [T - 1, V]: token i from 1, given earlier tokens and masks from i to the end."""
    end = len(tokens) if end is None else end
    rows = []
    for i in range(1, len(tokens)):
        row = [*tokens[:i], *[mask] * (end - i)]
        rows.append(log_probabilities(model, row, 0, 0.0, mask)[i])
    return torch.stack(rows)
