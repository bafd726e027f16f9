# SPDX-License-Identifier: Apache-2.0
"""The decoders of dInfer (arXiv:2510.08666): threshold, hierarchy and credit.

All of them decode one block after the other (fast_dllm.run_blocks). Candidates are the masks of the
block.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from reference.decode import (
    Candidates,
    Decoded,
    LogitModel,
    Loop,
    Margin,
    Options,
    Select,
    Selection,
    best_first,
    order_margin,
    threshold_margins,
)
from reference.fast_dllm import Decide, by_rule, run_blocks

SLACK = 1e-5


def select_threshold_eligible(
    tokens: Sequence[int], scores: Sequence[float], threshold: float, mask: int
) -> list[int]:
    """Return the accepted candidates, best first, whose tokens are not the mask.

    Candidates that reach the threshold are accepted, or else all within 1e-5 of the best.
    """
    order = [i for i in best_first(scores) if tokens[i] != mask]
    if not order:
        return []
    limit = min(max(scores[order[0]] - SLACK, -1000.0), threshold)
    return [i for i in order if scores[i] >= limit]


def by_threshold_eligible(threshold: float, mask: int) -> Select:
    """Return `select_threshold_eligible` as a rule of a loop.

    If every token is the mask, the best one is accepted. That changes nothing, so that the loop
    raises or its guard acts.
    """

    def select(candidates: Candidates) -> Selection:
        tokens, scores = candidates.tokens, candidates.scores
        accepted = select_threshold_eligible(tokens, scores, threshold, mask)
        if not accepted:
            return Selection(best_first(scores)[:1], [])
        order = [i for i in best_first(scores) if tokens[i] != mask]
        margins = threshold_margins(scores, threshold, order)
        rejected = [i for i in order if i not in accepted]
        if rejected and scores[accepted[-1]] < threshold:
            margins.append(order_margin(scores, accepted[-1], rejected[0]))
        return Selection(accepted, margins)

    return select


def select_hierarchy(
    positions: Sequence[int],
    scores: Sequence[float],
    threshold: float | None,
    low_threshold: float,
) -> list[int]:
    """Return the indices that any of three rules accepts, best first.

    The rules accept the best candidate, everything above the threshold (if there is one), and in
    each run of consecutive positions all that equal the run's maximum, if that is above
    low_threshold.
    """
    order = best_first(scores)
    accepted = set(order[:1])
    if threshold is not None:
        accepted |= {i for i in order if scores[i] > threshold}
    for run in runs_of(positions):
        top = max(scores[i] for i in run)
        if top > low_threshold:
            accepted |= {i for i in run if scores[i] == top}
    return [i for i in order if i in accepted]


def runs_of(positions: Sequence[int]) -> list[list[int]]:
    """Return the indices of ascending positions in maximal runs of consecutive positions."""
    runs: list[list[int]] = []
    for i, position in enumerate(positions):
        if i > 0 and positions[i - 1] == position - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def by_hierarchy(threshold: float | None, low_threshold: float) -> Select:
    """Return `select_hierarchy` as a rule of a loop."""

    def select(candidates: Candidates) -> Selection:
        positions, scores = candidates.positions, candidates.scores
        accepted = select_hierarchy(positions, scores, threshold, low_threshold)
        margins: list[Margin] = []
        if threshold is not None:
            margins += threshold_margins(scores, threshold)
        for run in runs_of(positions):
            best, *others = sorted(run, key=lambda i: (-scores[i], i))
            margins += threshold_margins(scores, low_threshold, [best])
            if others:
                margins.append(order_margin(scores, best, others[0]))
        order = best_first(scores)
        if len(order) > 1:
            margins.append(order_margin(scores, order[0], order[1]))
        return Selection(accepted, margins)

    return select


def hierarchy(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    threshold: float | None = 0.9,
    low_threshold: float = 0.4,
    cache: str = "none",
    early_stop: bool = False,
    **options: Any,
) -> Decoded:
    """Run the hierarchical decoder: accept the best of each run of masks if it is good enough.

    early_stop: after a block that holds EOS, all later positions become EOS and decoding ends. For
    other keywords see Options and fast_dllm.run_blocks.
    """
    options.setdefault("confidence_dtype", "logits")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    return run_blocks(
        loop,
        gen_length,
        block_length,
        by_rule(by_hierarchy(threshold, low_threshold)),
        cache=cache,
        block_only=True,
        early_stop=early_stop,
    )


def credit(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    threshold: float = 0.9,
    alpha: float = 0.7,
    gamma: float = 0.2,
    beta: float = 0.8,
    cache: str = "none",
    **options: Any,
) -> Decoded:
    """Run the credit decoder: tokens that stay likely within a block gain logits.

    A table C of the block is zero at its first forward pass, and is multiplied by beta at later
    ones. Then it grows by p^gamma at the likeliest token (probability p, fp32) of every masked
    position. The threshold decoder takes tokens and confidences from logits + alpha ln(C + 1). For
    other keywords see Options and fast_dllm.run_blocks.
    """
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    select = by_threshold_eligible(threshold, loop.options.ids.mask)
    return run_blocks(
        loop,
        gen_length,
        block_length,
        _by_credit(select, block_length, alpha, gamma, beta),
        cache=cache,
        block_only=True,
    )


def _by_credit(
    select: Select, block_length: int, alpha: float, gamma: float, beta: float
) -> Decide:
    tables: dict[int, Tensor] = {}

    def decide(loop: Loop, block: int, logits: Tensor, eligible: list[int], forwards: int) -> None:
        start, end = loop.block_range(block, block_length)
        if forwards == 0:
            tables[block] = torch.zeros(block_length, logits.shape[1], dtype=torch.float32)
        else:
            tables[block] *= beta
        credits = tables[block]
        for position in eligible:
            p = torch.softmax(logits[position].float(), dim=0)
            token = int(p.argmax())
            credits[position - start, token] += p[token] ** gamma
        used = logits.clone()
        used[start:end] += (alpha * (credits + 1).log()).to(logits.dtype)
        loop.decide(block, used, eligible, select)

    return decide
