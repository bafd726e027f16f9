# SPDX-License-Identifier: Apache-2.0
"""Rules on a canvas that begins with a text: find the blocks to change, and decode only these."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.base import Candidates, Commit, ForwardTarget
from vllm.diffusion.decoding.block_grid import GridRule

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams


def end_of(marks: Mask, none: int) -> int:
    """Return the position after the last mark, or `none` without marks."""
    marked = marks.nonzero()[0]
    return int(marked[-1]) + 1 if marked.size else none


class TextScan(GridRule):
    """Scans the blocks of a text in one forward, and works only on blocks that change.

    A scan computes all blocks that are not settled and have a position that may change. The blocks
    before the first change are settled. Each block attends to itself and to the blocks before it,
    so the scan is also the first forward of the block with the first change. The rule of blocks,
    which a subclass names as its second base class, decodes this block until it ends, and the next
    scan begins after it.

    Pinned tokens, and the end tokens after the longest answer, never change. Masks of the text are
    always filled.
    """

    # Whether the block at `start` has begun and not ended; the rule of blocks sets it.
    _is_active: bool
    _before: Array

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.revision is None:
            raise ValueError("revision: wanted a text, got None")
        self._end = prompt_length + params.max_tokens
        text = np.array(params.revision.token_ids)
        stop = prompt_length + (text.size if params.ends_with_text else params.max_tokens)
        fixed = np.ones(self.block_end(self._end - 1), dtype=np.bool_)
        fixed[prompt_length:stop] = params.revision.is_pinned(stop - prompt_length)
        fixed[prompt_length : prompt_length + text.size] &= text != params.mask_id
        self._is_fixed = fixed  # for each position, whether it never changes
        start = prompt_length if fixed.all() else int(fixed.argmin())
        self._open_stop = end_of(~fixed, start + 1)  # no later position may change
        # No block before `_scan_start` changes again. A scan ends at `_scan_stop`.
        self._scan_start = self._scan_stop = self._block_start(start)
        self._is_scanning = self._is_in_block = False
        self._tokens = self._eligible = np.empty(0, dtype=np.int64)

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        self._tokens = tokens
        if self.num_settled(tokens) >= len(tokens):
            return None
        if self._is_active:
            target = super().prepare(tokens)
            return target and target._replace(eligible=self._rows_of(target.eligible))
        self._is_scanning = True
        self.start, self._before = self._scan_start, tokens[self._scan_start :].copy()
        stop = min(self.block_end(self._open_stop - 1), len(tokens))
        self._eligible = self._rows_of(np.arange(max(self.start, self.prompt_length), stop))
        return self.cut_scan(stop)

    def cut_scan(self, stop: int) -> ForwardTarget | None:
        """Return the target of a scan that only reaches position `stop`, the end of a block.

        Returns None if no scan has begun or it would reach no block.
        """
        if not self._is_scanning or stop <= self.start:
            return None
        self._scan_stop = stop
        return ForwardTarget(self._eligible[self._eligible < stop], (self.start, stop))

    def num_settled(self, tokens: Array) -> int:
        super().num_settled(tokens)  # examines the result of the latest forward
        if self._is_active:
            return self.start
        if self._is_in_block:
            self._is_in_block, self._scan_start = False, self.block_end(self.start)
        return len(tokens) if self._scan_start >= self._open_stop else self._scan_start

    def decide(self, candidates: Candidates) -> Commit:
        if not self._is_scanning:
            return super().decide(candidates)
        self._is_scanning = False
        changes = self._would_change(candidates)
        if not changes.any():
            self._scan_start, self.forbade_mask = self._scan_stop, self.forbid_mask
            return Commit(candidates.positions[:0], candidates.tokens[:0])
        # The block goes on as if this forward had been its own.
        self._scan_start = self._block_start(int(candidates.positions[changes.argmax()]))
        start, stop = self._scan_start, self.block_end(self._scan_start)
        super().prepare(self._tokens)
        self._is_in_block = True
        inside = (candidates.positions >= start) & (candidates.positions < stop)
        return super().decide(Candidates(*(x[inside] for x in candidates[:3])))

    @abstractmethod
    def _would_change(self, candidates: Candidates) -> Mask:
        """Return which positions [R] of a scan the rule of blocks would change."""

    def _rows_of(self, positions: Array) -> Array:
        """Return the positions whose candidates the rule of blocks reads."""
        return positions
