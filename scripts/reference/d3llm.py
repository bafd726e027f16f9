# SPDX-License-Identifier: Apache-2.0
"""The decoders of d3LLM (arXiv:2601.07568): entropy thresholds, several blocks at once.

`multi_block` opens the next block while earlier blocks still have masks, with or without a delayed
reuse of keys and values. Deviations from the published code: the cache only has the rows before
`cached_len` (in the source it may hold some rows twice), num_forwards does not count a last
iteration that ends before its forward pass, and an accepted mask token is not counted as decoded.

Its variants: with "llada" the lowest entropy of all is always accepted, and others up to the
threshold (default 0.5); with "dream" only entropies strictly below the threshold are accepted
(default 0.9). In both, the first full block with masks accepts at least one. cache "delayed" reuses
keys and values of blocks that have been without masks for cache_delay_iter iterations. RuntimeError
is raised if a forward pass changes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

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
    split_steps,
    threshold_margins,
)
from reference.fast_dllm import window_logits
from reference.sglang import by_entropy_below

if TYPE_CHECKING:
    from reference.models import KeyValues

ENTROPY = Score("entropy", 1e-12)


def select_entropy(entropies: Sequence[float], threshold: float) -> list[int]:
    """Return the lowest entropy and all others up to the threshold; ties go to the lowest index."""
    order = best_first([-entropy for entropy in entropies])
    return order[:1] + [i for i in order[1:] if entropies[i] <= threshold]


def by_entropy(threshold: float, forced: tuple[int, int] | None = None) -> Select:
    """Return `select_entropy` as a rule of a loop.

    If it accepts no candidate in [forced), the lowest entropy there is accepted, without noise.
    """

    def select(candidates: Candidates) -> Selection:
        scores, order = candidates.scores, best_first(candidates.scores)
        accepted = select_entropy([-score for score in scores], threshold)
        margins = threshold_margins(scores, -threshold)
        if len(order) > 1 and -scores[order[0]] > threshold:
            margins.append(order_margin(scores, order[0], order[1]))
        if forced is not None:
            inside = [i for i in order if forced[0] <= candidates.positions[i] < forced[1]]
            if inside and not set(inside) & set(accepted):
                accepted.append(inside[0])
                if len(inside) > 1:
                    margins.append(order_margin(scores, inside[0], inside[1]))
                return Selection(accepted, margins, plain=inside[:1])
        return Selection(accepted, margins)

    return select


@dataclass
class Block:
    """A block of the row, [start, end); the prompt is the first one."""

    start: int
    end: int
    num_masked: int
    full: bool
    done_at: int | None = None  # the first iteration in which it had no masks
    cached: bool = False

    @property
    def progress(self) -> float:
        if self.num_masked == 0:
            return 1.0
        return 1 - self.num_masked / (self.end - self.start)


def multi_block(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int = 32,
    threshold: float | None = None,
    block_add_threshold: float = 0.5,
    decoded_token_threshold: float = 0.5,
    early_stop: bool = False,
    cache: str = "none",
    cache_delay_iter: int = 10000,
    refresh_interval: int = 10000,
    variant: str = "llada",
    **options: Any,
) -> Decoded:
    """Decode several blocks at once; the module's docstring describes the parameters."""
    if threshold is None:
        threshold = 0.5 if variant == "llada" else 0.9
    options.setdefault("confidence_dtype", "float64")
    num_blocks, _ = split_steps(gen_length, block_length, None)
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    blocks = _Blocks(loop, num_blocks, block_length, block_add_threshold, decoded_token_threshold)
    delayed = _Delayed(loop, blocks, cache_delay_iter, refresh_interval, variant)
    reuse, iteration = delayed if cache == "delayed" else None, 0
    while True:
        masked = loop.masked(0, len(loop.row))  # before an early stop fills some of them
        if not masked and len(blocks.created) == num_blocks + 1:
            break
        iteration += 1
        eos = blocks.fill_after_eos(reuse is not None) if early_stop else None
        if early_stop and not loop.masked(0, len(loop.row)):
            break
        blocks.promote()
        if eos is None:
            blocks.create_next()
        active_end = blocks.active_end
        if reuse is None:
            logits = guided_logits(loop.model, loop.row, loop.known, loop.options)
        else:
            reused = reuse.logits(iteration, active_end)
            if reused is None:
                break
            logits = reused
        forced = blocks.forced
        span = (forced.start, forced.end) if forced else None
        select = (by_entropy_below if variant == "dream" else by_entropy)(threshold, span)
        step = loop.decide(
            blocks.created.index(forced) - 1 if forced else 0,
            logits,
            [p for p in masked if p < active_end],
            select,
            score=ENTROPY,
        )
        blocks.count_off(
            [p for p, token in step.committed.items() if token != loop.options.ids.mask]
        )
        loop.check_change()
    return loop.result()


class _Blocks:
    """The prompt and the blocks created so far."""

    def __init__(
        self,
        loop: Loop,
        num_blocks: int,
        block_length: int,
        block_add_threshold: float,
        decoded_token_threshold: float,
    ) -> None:
        self.loop = loop
        self.num_blocks = num_blocks
        self.block_length = block_length
        self.block_add_threshold = block_add_threshold
        self.decoded_token_threshold = decoded_token_threshold
        prompt = Block(0, loop.prompt_len, 0, True, done_at=0)
        first = loop.prompt_len
        self.created = [
            prompt,
            Block(first, first + block_length, block_length, decoded_token_threshold <= 1),
        ]

    @property
    def active_end(self) -> int:
        """The end of the last block that is full or has masks."""
        return max(b.end for b in self.created if b.full or b.num_masked > 0)

    @property
    def forced(self) -> Block | None:
        """The first full block with masks, which accepts at least one token."""
        return next((b for b in self.created[1:] if b.full and b.num_masked > 0), None)

    def count_off(self, decoded: list[int]) -> None:
        """Subtract the positions that were decoded from the masks of their blocks."""
        for block in self.created[1:]:
            if block.num_masked > 0:
                block.num_masked -= sum(block.start <= p < block.end for p in decoded)

    def promote(self) -> None:
        """Make blocks full whose previous block is sufficiently decoded."""
        for before, block in pairwise(self.created):
            if not block.full and before.progress >= self.decoded_token_threshold:
                block.full = True

    def create_next(self) -> None:
        """Create one more block if any is left and the latest one is sufficiently decoded."""
        last = self.created[-1]
        enough = last.progress >= self.block_add_threshold or last.num_masked == 0
        if len(self.created) <= self.num_blocks and enough:
            end = last.end + self.block_length
            num_masked = self.loop.num_masked(last.end, end)
            is_full = last.progress >= self.decoded_token_threshold
            self.created.append(Block(last.end, end, num_masked, is_full))

    def fill_after_eos(self, is_caching: bool) -> int | None:
        """Fill positions after the canvas's first EOS with EOS, and return its position or None."""
        row, eos = self.loop.row, self.loop.options.ids.eos
        ends = [p for p in range(self.loop.prompt_len, len(row)) if row[p] == eos]
        if not ends:
            return None
        row[ends[0] :] = eos
        for block in self.created[1:]:
            if block.start > ends[0]:
                block.num_masked, block.full = 0, True
            elif block.end > ends[0]:
                block.num_masked = self.loop.num_masked(block.start, ends[0])
                block.full = block.full or block.num_masked == 0
        while len(self.created) <= self.num_blocks and self.created[-1].end > ends[0]:
            start = self.created[-1].end
            self.created.append(Block(start, start + self.block_length, 0, True, cached=is_caching))
        return ends[0]


class _Delayed:
    """The rows of keys and values that are reused, and the forward passes that reuse them."""

    def __init__(
        self, loop: Loop, blocks: _Blocks, delay: int, refresh_interval: int, variant: str
    ) -> None:
        self.loop = loop
        self.blocks = blocks
        self.delay = delay
        self.refresh_interval = refresh_interval
        self.variant = variant
        self.cached_len = 0
        self.kv: KeyValues | None = None  # all rows of the last forward pass

    def logits(self, iteration: int, active_end: int) -> Tensor | None:
        """Return logits [T, V] of an iteration, NaN outside the window; None if all is decided."""
        cached_before = self.cached_len
        listed = self._newly_cached(iteration)
        stabilising = [
            b
            for b in self.blocks.created
            if b.num_masked == 0 and b.done_at is not None and not b.cached
        ]
        waiting = stabilising + [b for b in self.blocks.created if b.num_masked > 0]
        if min([cached_before, *(b.start for b in waiting)]) >= active_end:
            return None
        start = 0
        is_refresh = bool(stabilising) or iteration % self.refresh_interval == 0
        if listed:
            start = cached_before
            self.cached_len = listed[-1].end
        elif cached_before > 0 and not is_refresh:
            start = cached_before
        logits, self.kv = window_logits(
            self.loop.model,  # type: ignore[arg-type]
            self.loop.row,
            start,
            len(self.loop.row),
            self.kv if start > 0 else None,
        )
        return logits

    def _newly_cached(self, iteration: int) -> list[Block]:
        """Mark blocks without masks, and return the blocks that have waited long enough."""
        listed = []
        for block in self.blocks.created:
            if block.end <= self.cached_len:
                continue
            if block.num_masked > 0:
                break
            if block.done_at is None:
                block.done_at = iteration
            if iteration - block.done_at < self.delay:
                if self.variant == "llada":
                    break
            elif not block.cached:
                block.cached = True
                listed.append(block)
        return listed
