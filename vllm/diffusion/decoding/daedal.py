# SPDX-License-Identifier: Apache-2.0
"""DAEDAL: the canvas chooses its length (Li et al., arXiv:2508.00819, Algorithm 1).

The loop is that of the authors' repository, with one request at a time and with guidance that keeps
the prompt conditional after an insertion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.decoding.base import (
    Candidates,
    Commit,
    DecodingRule,
    ForwardTarget,
    most_certain_first,
)

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array
    from vllm.diffusion.request.params import DiffusionParams

_NOTHING = np.empty(0, dtype=np.int64)


class Daedal(DecodingRule):
    """Chooses a length first, and inserts masks where the model is uncertain later.

    The end confidence of a forward is the share of `eos_window` that its end tokens fill: the sum
    of the probabilities of the last positions that predict the end token, at most `eos_window` of
    them, divided by `eos_window`.

    While the canvas has no length, all its positions are masked. It is lengthened by `expansion`
    until the end confidence reaches `eos_threshold`, and then by half a window of end tokens.

    Then blocks are filled from left to right: every candidate of the block above `threshold`, or
    the best one. While the end confidence is below `eos_expand_threshold`, a forward also replaces
    the least certain position of the block that it does not fill, if it is below `low_threshold`,
    by `expansion` masks. `max_tokens` limits the canvas, and positions beyond it are dropped.

    Attributes:
        has_length: whether the first length has been chosen.
    """

    adjusts_logits = True

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.eos_id is None:
            raise ValueError("eos_id: daedal needs one, got None")
        self._eos_id = params.eos_id
        self.has_length = False
        self._start = prompt_length  # first position of the current block
        self._tail: int | None = None  # position from which the next forward reads end tokens
        self._inserted_at: int | None = None  # position that the next canvas replaces by masks
        self._masked = _NOTHING  # masked positions of the current block
        # Per part of the forward's rows: positions, then for each row its probability of the end
        # token if that is the likeliest, its likeliest other token than the mask, and its score.
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        length = len(tokens)
        canvas = np.arange(self.prompt_length, length)
        if not self.has_length:
            return ForwardTarget(canvas, (0, length))
        while self._start < length:
            end = min(self._start + self.params.block_length, self._tail or length)
            self._masked = (tokens[self._start : end] == self._mask).nonzero()[0] + self._start
            if self._masked.size:
                fill = None if self._tail is None else (self._tail, self._eos_id)
                return ForwardTarget(canvas, (0, length), fill)
            self._start += self.params.block_length
        return None

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Record what the rule needs in addition to candidates; the logits stay as they are."""
        wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        ends = torch.softmax(wide, dim=-1)[:, self._eos_id]
        ends = torch.where(wide.argmax(dim=-1) == self._eos_id, ends, 0)
        others = wide.clone()
        others[:, self.params.mask_id] = -torch.inf
        score, token = torch.softmax(others, dim=-1).max(dim=-1)
        self._parts.append(
            (positions, torch.stack([ends.double(), token.double(), score.double()]))
        )
        return logits

    def _recorded(self, positions: Array) -> Array:
        """Return the recorded values [3, R] of `positions`; a repeated forward replaces them."""
        recorded = np.empty((3, positions.size))
        for on_canvas, values in self._parts:
            recorded[:, on_canvas.cpu().numpy()] = values.cpu().numpy()
        self._parts = []
        return recorded

    def decide(self, candidates: Candidates) -> Commit:
        ends, other_tokens, other_scores = self._recorded(candidates.positions)
        # Positions that do not predict the end token have a probability of 0 here.
        last_ends = ends[ends > 0][-self.params.eos_window :]
        end_confidence = float(last_ends.sum()) / self.params.eos_window
        if not self.has_length:
            self._choose_length(candidates.positions.size, end_confidence)
            return Commit(_NOTHING, _NOTHING)
        self._tail = None
        masked, rows = self._masked, self._masked - self.prompt_length
        tokens, scores = candidates.tokens[rows], candidates.scores[rows]
        is_mask = tokens == self._mask
        filled = (scores > self.params.threshold) & ~is_mask
        if is_mask.all():
            tokens = other_tokens[rows].astype(np.int64)
            filled[most_certain_first(other_scores[rows])[0]] = True
        elif not filled.any():
            filled[most_certain_first(np.where(is_mask, -np.inf, scores))[0]] = True
        uncertain = ~filled & (scores < self.params.low_threshold)
        if end_confidence < self.params.eos_expand_threshold and uncertain.any():
            self._insert(int(masked[np.where(uncertain, scores, np.inf).argmin()]))
        return Commit(masked[filled], tokens[filled])

    def choose(self, candidates: Candidates) -> Array:
        raise NotImplementedError("the canvas changes its length: the whole forward is decided")

    def _choose_length(self, length: int, end_confidence: float) -> None:
        """Lengthen a canvas of masks, or choose its length and add end tokens."""
        params = self.params
        self.has_length = end_confidence >= params.eos_threshold or length >= params.max_tokens
        more = params.eos_window // 2 if self.has_length else params.expansion
        longer = min(length + more, params.max_tokens)
        if longer > length:
            self.new_lengths = (longer,)
            self._tail = self.prompt_length + length if self.has_length else None

    def _insert(self, position: int) -> None:
        """Replace a position by `expansion` masks on the next canvas, if it may be longer."""
        length, limit = self.params.gen_length, self.params.max_tokens
        longer = min(length + self.params.expansion - 1, limit)
        if longer > length:
            self._inserted_at, self.new_lengths = position, (longer,)

    def grow(self, params: DiffusionParams) -> Array:
        sources, position = super().grow(params), self._inserted_at
        if position is None:
            return sources
        self._inserted_at = None
        behind = position + params.expansion
        sources[behind:] = np.arange(position + 1, position + 1 + max(len(sources) - behind, 0))
        sources[position:behind] = -1
        return sources
