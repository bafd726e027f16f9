# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM (arXiv:2505.22618): blocks with reused keys and values, and factor selection.

`run_blocks` is the loop over blocks that other sources share: it decides one block after the
other with any rule, and its forwards are whole ones or, with a cache, windows:

- none: every forward reads the whole row; candidates are all masks before the block's end.
- prefix: the first forward of a block is whole. Later ones read [block start, row end) and attend
  to keys and values that the first one left for the positions before; candidates are the block's.
- dual: as prefix, but later forwards read the block alone and also attend to what the first one
  left for the positions behind it.

Where logits are shifted, a window starts one token early, because the first logits of the block
come from the position before it.

Deviation from the published code, which always makes one more forward: a block without masks is
left before the next forward.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.reference.decode import (
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
from tests.reference.models import KeyValues


class WindowModel(LogitModel, Protocol):
    """A model whose forward can read a part of a row; see the models' forward_with_kv."""

    def forward_with_kv(
        self, ids: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]: ...


def window_logits(
    model: WindowModel, row: Tensor, start: int, end: int, past: KeyValues | None
) -> tuple[Tensor, KeyValues]:
    """Logits [T, V] of row positions [start, end), NaN elsewhere, and the keys and values after.

    Rows of `past` at positions of the window are computed anew, one token earlier if logits shift.
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
    """Decides one block after the other until none has masks.

    block_only: without cache, candidates are the block's masks only. early_stop: after a block
    without masks that holds EOS, the positions behind it become EOS. Raises RuntimeError when a
    forward changes nothing because the model predicts the mask (no later forward would differ).
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
    """One forward of a block; kv is what its first forward left, None at first."""
    model, row = loop.model, loop.row
    if cache == "none":
        return guided_logits(model, row, loop.known, loop.options), None
    if kv is None:
        return window_logits(model, row, 0, len(row), None)  # type: ignore[arg-type]
    window_end = len(row) if cache == "prefix" else end
    return window_logits(model, row, start, window_end, kv)  # type: ignore[arg-type]


def by_rule(select: Select, score: Score = CONFIDENCE) -> Decide:
    """The same selection at every forward."""

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
    """Threshold or, without one, LLaDA's quotas (`steps` needed), with cache prefix or dual.

    Quotas of 0 make no forward. Other keywords: see Options. Raises what `run_blocks` raises,
    and RuntimeError when quotas run out before the masks.
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
        # A block's masks are all there when its quotas are made.
        quotas = num_transfer_tokens(block_length, block_steps)
        if forwards >= block_steps or quotas[forwards] == 0:
            raise RuntimeError(f"block {block}: masks remain, the model predicts the mask")
        loop.decide(block, logits, eligible, by_quota(quotas[forwards]))

    return decide


def select_factor(scores: Sequence[float], factor: float) -> list[int]:
    """The most confident indices while 1 - factor / (rank + 2) is reached, ranks from 0.

    Let r be the first rank (rank 0 never fails) whose score is below its limit, or the last rank
    if none is. As published, r is raised by one if it is the last rank (or 0), then r candidates
    are accepted: a failure exactly at the last rank is accepted too.
    """
    order = best_first(scores)
    last = len(order) - 1
    failed = [r for r in range(1, len(order)) if scores[order[r]] < 1 - factor / (r + 2)]
    rank = failed[0] if failed else last
    if rank in (0, last):
        rank += 1
    return order[:rank]


def by_factor(factor: float) -> Select:
    """`select_factor` as a rule of a loop."""

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
    """Blocks with factor selection. Other keywords: see Options and run_blocks."""
    options.setdefault("confidence_dtype", "float64")
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    decide = by_rule(by_factor(factor))
    return run_blocks(loop, gen_length, block_length, decide, cache=cache)
