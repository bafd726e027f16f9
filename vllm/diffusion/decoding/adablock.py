# SPDX-License-Identifier: Apache-2.0
"""AdaBlock (Lu et al., arXiv:2509.26432): blocks that end where the model ends a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.base import Candidates, ForwardTarget, most_certain_first
from vllm.diffusion.decoding.threshold import Threshold

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams

WINDOW = 0.25  # share of the canvas that a block ending after a delimiter may span


class AdaBlock(Threshold):
    """Threshold decoding in blocks whose length is chosen by a whole forward at their start.

    This forward commits like every other forward. If the most certain delimiter in the window has a
    confidence of at least `delimiter_threshold`, the block ends after it. Otherwise it ends after
    `block_length` positions, or with the canvas.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._delimiters = np.array(params.delimiter_ids, dtype=np.int64)
        self._window = int(WINDOW * params.gen_length)
        self._start = prompt_length
        self._end: int | None = None  # end of the block; None until its length is chosen
        self.block_bounds = ()

    def grow(self, params: DiffusionParams) -> Array:
        self._window = int(WINDOW * params.gen_length)
        return super().grow(params)

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        masked = tokens == self.params.mask_id
        if self._end is not None and not masked[self._start : self._end].any():
            self._start, self._end = self._end, None
        if self._end is None:
            # A given text may have tokens where the block would begin.
            later = masked[self._start :].nonzero()[0]
            self._start += int(later[0]) if later.size else len(masked)
        if self._start >= len(masked):
            return self.fill_remaining(masked)
        return self._target(masked)

    def _target(self, masked: Mask) -> ForwardTarget:
        start, end, length = self._start, self._end, len(masked)
        if end is None or not self.params.computes_blocks:
            reach = start + max(self._window, self.params.block_length)
            return ForwardTarget(masked[: end or reach].nonzero()[0], (0, length))
        eligible = masked[start:end].nonzero()[0] + start
        window_end = length if self.params.cache == "prefix" else end
        return ForwardTarget(eligible, (start, window_end))

    def accept(self, candidates: Candidates) -> Mask:
        if self._end is None:
            self._end = self._sized(candidates)
            self.block_bounds = (*(self.block_bounds or ()), (self._start, self._end))
        inside = candidates.positions < self._end
        accepted = np.zeros_like(inside)
        accepted[inside] = super().accept(Candidates(*(x[inside] for x in candidates[:3])))
        return accepted

    def _sized(self, candidates: Candidates) -> int:
        """Return the end of the block that starts with these candidates."""
        positions, scores = candidates.positions, candidates.scores
        canvas_end = self.prompt_length + self.params.gen_length
        in_window = (positions >= self._start) & (positions < self._start + self._window)
        delimiters = (np.isin(candidates.tokens, self._delimiters) & in_window).nonzero()[0]
        if delimiters.size:
            best = delimiters[most_certain_first(scores[delimiters])[0]]
            if float(scores[best]) >= self.params.delimiter_threshold:
                return int(positions[best]) + 1
        return min(self._start + self.params.block_length, canvas_end)
