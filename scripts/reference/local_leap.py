# SPDX-License-Identifier: Apache-2.0
"""LocalLeap (arXiv:2510.07081): a lower threshold near very confident positions."""

from collections.abc import Iterable, Sequence
from typing import Any

from reference.decode import (
    Candidates,
    Decoded,
    LogitModel,
    Loop,
    Options,
    Select,
    Selection,
    best_first,
    by_threshold,
    order_margin,
    threshold_margins,
)
from reference.fast_dllm import by_rule, run_blocks


def select_local_leap(
    positions: Sequence[int],
    scores: Sequence[float],
    threshold: float,
    relaxed_threshold: float,
    radius: int,
) -> list[int]:
    """Return the best index and all whose score reaches the local threshold, best first.

    The relaxed threshold applies within `radius` positions of an anchor, a candidate that reaches
    the threshold itself.
    """
    order = best_first(scores)
    anchors = [p for p, score in zip(positions, scores, strict=True) if score >= threshold]
    accepted = []
    for i in order:
        near = any(abs(positions[i] - anchor) <= radius for anchor in anchors)
        limit = relaxed_threshold if near else threshold
        if i == order[0] or scores[i] >= limit:
            accepted.append(i)
    return accepted


def by_local_leap(threshold: float, relaxed_threshold: float | None, radius: int) -> Select:
    """Return `select_local_leap` as a rule, or a plain threshold without a relaxed one."""
    if relaxed_threshold is None:
        return by_threshold(threshold)

    def select(candidates: Candidates) -> Selection:
        scores, order = candidates.scores, best_first(candidates.scores)
        margins = threshold_margins(scores, threshold)
        margins += threshold_margins(scores, relaxed_threshold)
        if len(order) > 1 and scores[order[0]] < threshold:
            margins.append(order_margin(scores, order[0], order[1]))
        accepted = select_local_leap(
            candidates.positions, scores, threshold, relaxed_threshold, radius
        )
        return Selection(accepted, margins)

    return select


def local_leap(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    threshold: float = 0.9,
    relaxed_threshold: float | None = 0.75,
    radius: int = 4,
    early_stop: bool = False,
    cache: str = "none",
    **options: Any,
) -> Decoded:
    """Run blocks with LocalLeap's selection.

    early_stop: after a block that holds EOS, all later positions become EOS and decoding ends. For
    other keywords see Options and fast_dllm.run_blocks.
    """
    options.setdefault("confidence_dtype", "float64")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    return run_blocks(
        loop,
        gen_length,
        block_length,
        by_rule(by_local_leap(threshold, relaxed_threshold, radius)),
        cache=cache,
        early_stop=early_stop,
    )
