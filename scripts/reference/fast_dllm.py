# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM (arXiv:2505.22618): blocks with reused keys and values, and factor selection.

`run_blocks` is the loop over blocks that other sources share. It decides one block after the other
with any rule. Its forward passes are whole, or windows with a cache:

- none: every forward pass reads the whole row; candidates are all masks before the block's end.
- prefix: the first forward pass of a block is whole. Later ones read [block start, row end) and
  attend to keys and values of the first one at earlier positions; candidates are the block's masks.
- dual: as prefix, but later forward passes only read the block, and also attend to keys and values
  of the first one at later positions.

If logits are shifted, a window starts one token early, because the first logits of the block come
from the previous position.

Deviation from the published code, which always makes one more forward pass: a block without masks
is left before the next forward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from reference.decode import (
    CONFIDENCE,
    Candidates,
    Decoded,
    LogitModel,
    Loop,
    Options,
    Score,
    Select,
    Selection,
    aligned,
    best_first,
    by_quota,
    by_threshold,
    guided_logits,
    num_transfer_tokens,
    order_margin,
    split_steps,
    threshold_margins,
)
from reference.models import KeyValues


class WindowModel(LogitModel, Protocol):
    """A model whose forward pass can read a part of a row; see the models' forward_with_kv."""

    def forward_with_kv(
        self, ids: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]: ...


def window_logits(
    model: WindowModel, row: Tensor, start: int, end: int, past: KeyValues | None
) -> tuple[Tensor, KeyValues]:
    """Return logits [T, V] of [start, end), NaN elsewhere, and the new keys and values.

    Rows of `past` in the window are computed again; if logits shift, the window starts one token
    early.
    """
    first = max(0, start - getattr(model, "logit_shift", 0))
    raw, kv = model.forward_with_kv(row[None, first:end], range(first, end), past)
    logits = torch.full((len(row), raw.shape[2]), float("nan"), dtype=raw.dtype)
    logits[start:end] = aligned(model, raw)[0][start - first :]
    return logits, kv


# (loop, block, logits [T, V], eligible row positions, forwards of this block so far)
Decide = Callable[[Loop, int, Tensor, list[int], int], None]


def run_blocks(
    loop: Loop,
    gen_length: int,
    block_length: int,
    decide: Decide,
    *,
    cache: str = "none",
    block_only: bool = False,
    early_stop: bool = False,
) -> Decoded:
    """Decide one block after the other until no block has masks.

    block_only: without cache, candidates are the block's masks only. early_stop: after a block
    without masks that holds EOS, all later positions become EOS. Raises RuntimeError if a forward
    pass changes nothing because the model predicts the mask (no later forward pass would differ).
    """
    num_blocks, _ = split_steps(gen_length, block_length, None)
    for block in range(num_blocks):
        start, end = loop.block_range(block, block_length)
        kv: KeyValues | None = None
        forwards = 0
        while loop.num_masked(start, end):
            logits, kv = block_logits(loop, cache, start, end, kv)
            inside_only = block_only or (cache != "none" and forwards > 0)
            decide(loop, block, logits, loop.masked(start if inside_only else 0, end), forwards)
            forwards += 1
            loop.check_change()
        if early_stop and loop.may_stop(end, [loop.options.ids.eos]):
            loop.row[end:] = loop.options.ids.eos
            break
    return loop.result()


def block_logits(
    loop: Loop, cache: str, start: int, end: int, kv: KeyValues | None
) -> tuple[Tensor, KeyValues | None]:
    """Run one forward pass of a block; `kv` comes from the block's first one and is None there."""
    model, row = loop.model, loop.row
    if cache == "none":
        return guided_logits(model, row, loop.known, loop.options), None
    if kv is None:
        return window_logits(model, row, 0, len(row), None)  # type: ignore[arg-type]
    window_end = len(row) if cache == "prefix" else end
    return window_logits(model, row, start, window_end, kv)  # type: ignore[arg-type]


def by_rule(select: Select, score: Score = CONFIDENCE) -> Decide:
    """Return a rule with the same selection at every forward pass."""

    def decide(loop: Loop, block: int, logits: Tensor, eligible: list[int], forwards: int) -> None:
        loop.decide(block, logits, eligible, select, score=score)

    return decide


def cached(
    model: WindowModel,
    prompt_ids: Iterable[int],
    *,
    cache: str,
    gen_length: int,
    block_length: int,
    threshold: float | None = None,
    steps: int | None = None,
    **options: Any,
) -> Decoded:
    """Run the threshold or, without one, LLaDA's quotas (`steps` needed), with a cache.

    Quotas of 0 make no forward pass. For other keywords see Options. Raises the errors of
    `run_blocks`, and RuntimeError if masks remain after all quotas.
    """
    options.setdefault("confidence_dtype", "float64")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    if threshold is not None:
        decide = by_rule(by_threshold(threshold))
    else:
        _, block_steps = split_steps(gen_length, block_length, steps)
        decide = _by_quotas(block_length, block_steps)
    return run_blocks(loop, gen_length, block_length, decide, cache=cache)


def _by_quotas(block_length: int, block_steps: int) -> Decide:
    def decide(loop: Loop, block: int, logits: Tensor, eligible: list[int], forwards: int) -> None:
        # No mask of a block is committed when its quotas are computed.
        quotas = num_transfer_tokens(block_length, block_steps)
        if forwards >= block_steps or quotas[forwards] == 0:
            raise RuntimeError(f"block {block}: masks remain, the model predicts the mask")
        loop.decide(block, logits, eligible, by_quota(quotas[forwards]))

    return decide


def select_factor(scores: Sequence[float], factor: float) -> list[int]:
    """Return the most confident indices while 1 - factor / (rank + 2) is reached, ranks from 0.

    Let r be the first rank whose score is below its limit (rank 0 never fails), or the last rank if
    none is. As published, r is raised by one if it is the last rank (or 0), and then r candidates
    are accepted. Therefore a failure exactly at the last rank is accepted, too.
    """
    order = best_first(scores)
    last = len(order) - 1
    failed = [r for r in range(1, len(order)) if scores[order[r]] < 1 - factor / (r + 2)]
    rank = failed[0] if failed else last
    if rank in (0, last):
        rank += 1
    return order[:rank]


def by_factor(factor: float) -> Select:
    """Return `select_factor` as a rule of a loop."""

    def select(candidates: Candidates) -> Selection:
        scores, order = candidates.scores, best_first(candidates.scores)
        accepted = select_factor(scores, factor)
        margins = []
        for rank in range(1, min(len(accepted) + 1, len(order))):
            margins += threshold_margins(scores, 1 - factor / (rank + 2), [order[rank]])
        if len(accepted) < len(order):
            margins.append(order_margin(scores, accepted[-1], order[len(accepted)]))
        return Selection(accepted, margins)

    return select


def factor(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    factor: float = 1.0,
    cache: str = "none",
    **options: Any,
) -> Decoded:
    """Run blocks with factor selection. For other keywords see Options and run_blocks."""
    options.setdefault("confidence_dtype", "float64")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    decide = by_rule(by_factor(factor))
    return run_blocks(loop, gen_length, block_length, decide, cache=cache)
