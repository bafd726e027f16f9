# SPDX-License-Identifier: Apache-2.0
"""Two block algorithms of SGLang for models with attention over the whole sequence.

`entropy_threshold` decides one block after the other, `full_attn_multi_block` several at once
(SGLang pull request 20615). Blocks are counted from the end of the prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reference.decode import (
    Candidates,
    Decoded,
    LogitModel,
    Loop,
    Options,
    Score,
    Select,
    Selection,
    best_first,
    guided_logits,
    order_margin,
    threshold_margins,
)
from reference.fast_dllm import by_rule, run_blocks


def select_entropy_strict(entropies: Sequence[float], threshold: float) -> list[int]:
    """Return the lowest entropy and all below the threshold; ties go to the lowest index."""
    order = best_first([-entropy for entropy in entropies])
    return order[:1] + [i for i in order[1:] if entropies[i] < threshold]


def by_entropy_strict(threshold: float) -> Select:
    """Return `select_entropy_strict` as a rule of a loop (scores are negative entropies)."""

    def select(candidates: Candidates) -> Selection:
        scores, order = candidates.scores, best_first(candidates.scores)
        margins = threshold_margins(scores, -threshold)
        if len(order) > 1 and -scores[order[0]] >= threshold:
            margins.append(order_margin(scores, order[0], order[1]))
        return Selection(select_entropy_strict([-x for x in scores], threshold), margins)

    return select


def entropy_threshold(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    threshold: float = 0.95,
    cache: str = "none",
    **options: Any,
) -> Decoded:
    """Run one block after the other: accept the lowest entropy, and others below the threshold.

    Epsilon is 1e-8. Keys and values of finished blocks are not cached, because attention is
    bidirectional over the whole row. For other keywords see Options and fast_dllm.run_blocks.
    """
    options.setdefault("confidence_dtype", "logits")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    return run_blocks(
        loop,
        gen_length,
        block_length,
        by_rule(by_entropy_strict(threshold), Score("entropy", 1e-8)),
        cache=cache,
    )


@dataclass
class _Block:
    start: int
    end: int
    active: bool
    full: bool


def full_attn_multi_block(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int = 32,
    threshold: float = 0.4,
    block_add_threshold: float = 0.1,
    decoded_token_threshold: float = 0.95,
    **options: Any,
) -> Decoded:
    """Decode several blocks at once; the last one may be shorter. Epsilon is 1e-12.

    A block becomes active when the previous one is active and decoded to block_add_threshold, and
    full when the previous one is decoded to decoded_token_threshold. Of all masks before the last
    active block's end, masks with an entropy below the threshold are accepted. The first full block
    with masks at least accepts its lowest entropy. Raises RuntimeError if a forward pass changes
    nothing because the model predicts the mask.
    """
    options.setdefault("confidence_dtype", "float32")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    starts = range(loop.prompt_len, len(loop.row), block_length)
    blocks = [
        _Block(start, min(start + block_length, len(loop.row)), i == 0, i == 0)
        for i, start in enumerate(starts)
    ]

    def progress(block: _Block) -> float:
        return 1 - loop.num_masked(block.start, block.end) / (block.end - block.start)

    while loop.num_masked(0, len(loop.row)):
        for before, block in pairwise(blocks):
            if before.active and progress(before) >= block_add_threshold:
                block.active = True
            if before.active and not loop.num_masked(before.start, before.end):
                block.active = True
            if block.active and progress(before) >= decoded_token_threshold:
                block.full = True
        masked = [b for b in blocks if loop.num_masked(b.start, b.end)]
        active_end = max(b.end for b in blocks if b.active and (b.full or b in masked))
        forced = next((b for b in masked if b.full), None)
        logits = guided_logits(loop.model, loop.row, loop.known, loop.options)
        loop.decide(
            blocks.index(forced) if forced else 0,
            logits,
            loop.masked(0, active_end),
            by_entropy_below(threshold, (forced.start, forced.end) if forced else None),
            score=Score("entropy", 1e-12),
        )
        loop.check_change()
    return loop.result()


def by_entropy_below(threshold: float, forced: tuple[int, int] | None) -> Select:
    """Return a rule: entropies below the threshold, and at least the lowest one in [forced)."""

    def select(candidates: Candidates) -> Selection:
        scores = candidates.scores
        order = best_first(scores)
        accepted = [i for i in order if -scores[i] < threshold]
        margins = threshold_margins(scores, -threshold)
        if forced is not None:
            inside = [i for i in order if forced[0] <= candidates.positions[i] < forced[1]]
            if inside and not set(inside) & set(accepted):
                accepted.append(inside[0])
                if len(inside) > 1:
                    margins.append(order_margin(scores, inside[0], inside[1]))
        return Selection(accepted, margins)

    return select
