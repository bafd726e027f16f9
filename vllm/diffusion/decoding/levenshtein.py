# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.2: fills masks, and replaces, deletes and inserts tokens, in one step.

The source is the release's loop (https://huggingface.co/inclusionAI/LLaDA2.2-mini), as FluxServe
serves it: the token that breaks a loop is not drawn at random, and the mask token is not proposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Candidates, Commit, ForwardTarget, most_certain_first
from vllm.diffusion.decoding.block_grid import GridRule

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams

MAX_FORWARDS = 1000  # maximum number of forwards of a block
MAX_SWAPS = 5  # maximum number of swapped tokens to leave a loop
NUM_BEST = 3  # number of candidates per row; at least one neither deletes nor inserts


class _Best(NamedTuple):
    """The likeliest tokens [R, 3] of each row, best first, and the probability [R] of the best."""

    tokens: Array
    confidence: Array


class Levenshtein(GridRule):
    """Fills masks, and replaces, deletes and inserts tokens of the block.

    All decisions use the block as the forward read it. Masks above the threshold are filled, but at
    least the quota of the step plus the number of masks that edits have made. Committed tokens
    after the prompt are replaced if another token exceeds the editing threshold. Then a deleting
    token vanishes, and an inserting token becomes a mask, followed by the previous token at this
    position. The block keeps its length: tokens beyond its end are lost, and masks fill it up.

    A block ends with a forward that finds no masks and changes nothing. It also ends after
    `max_post_steps` forwards without any of its first masks; the last of these forwards fills all
    masks and changes no length. If a forward would write the block as it was written before, the
    least certain change gets another token.
    """

    adjusts_logits = True

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        # A drawn token's score is its probability among all tokens. The likeliest token is also
        # needed.

        self.scoring = CandidateScoring(greedy=True)
        self.forbid_mask = True
        self._forbidden = [params.mask_id, *params.never_ids]
        self._delete, self._split = params.edit_ids
        self._num_steps = params.steps_per_block or params.block_length
        self._before = np.empty(0, dtype=np.int64)
        self._is_first = np.empty(0, dtype=np.bool_)
        self._is_active = False  # whether the block at `start` has begun and not ended
        self._num_first = self._num_post = 0
        self._seen: set[bytes] = set()  # the block as each forward wrote it
        self._parts: list[tuple[torch.Tensor, ...]] = []  # results for parts of the forward's rows

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        start = self.num_settled(tokens)
        if start >= min(self._end, len(tokens)):
            return None
        first, end = max(start, self.prompt_length), start + self.params.block_length
        self._before = tokens[first:end].copy()
        if not self._is_active:
            self._is_active, self.start, self.step, self._num_post = True, start, 0, 0
            # The marks of first masks move with their positions.
            self._is_first = self._first_masks(first)
            self._num_first, self._seen = int(np.count_nonzero(self._is_first)), set()
        return ForwardTarget(np.arange(first, end), (start, end))

    def _first_masks(self, first: int) -> Mask:
        """Return which positions, from `first` on, are masks with which the block begins."""
        is_masked: Mask = self._before == self._mask
        return is_masked

    def num_settled(self, tokens: Array) -> int:
        return self.start if self._is_active else self.front(tokens).start

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Record the likeliest allowed tokens of each row; otherwise only forbid some tokens."""
        logits[:, self._forbidden] = -torch.inf
        wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        confidence = torch.softmax(wide, dim=-1).amax(dim=-1)
        remaining, best = logits.clone(), []
        for _ in range(NUM_BEST):
            best.append(remaining.argmax(dim=-1))
            remaining.scatter_(1, best[-1][:, None], -torch.inf)
        self._parts.append((positions, torch.stack(best, dim=1), confidence))
        return logits

    def _take_best(self, positions: Array) -> _Best:
        """Return the recorded tokens of these positions [R]; a repeated forward overwrites them."""
        tokens = np.empty((positions.size, NUM_BEST), dtype=np.int64)
        confidence = np.empty(positions.size)
        for part in self._parts:
            on_canvas, best, likeliest = (x.cpu().numpy() for x in part)
            is_needed = np.isin(on_canvas + self.prompt_length, positions)
            rows = np.searchsorted(positions, on_canvas[is_needed] + self.prompt_length)
            tokens[rows], confidence[rows] = best[is_needed], likeliest[is_needed]
        return _Best(tokens, confidence)

    def decide(self, candidates: Candidates) -> Commit:
        self.forbade_mask, self._front = True, None
        before, best = self._before, self._take_best(candidates.positions)
        self._parts = []
        is_masked = before == self._mask
        filled = self._filled(candidates.scores, is_masked)
        is_last = self._is_last(filled, is_masked)
        edited = self._may_edit() & self._is_doubted(candidates, best, before)
        proposed = np.where(is_masked, candidates.tokens, best.tokens[:, 0])
        if is_last:
            filled = is_masked
            proposed = np.where(self._edits(proposed), self._plain(best), proposed)
        written = np.where(filled | edited, proposed, before)
        if not is_last:
            confidence = np.where(is_masked, candidates.scores, best.confidence)
            self._leave_loop(written, confidence, best)
        self._seen.add(written.tobytes())
        block = self._scan(written)
        self._is_active = not self._ends_with(block)
        changed = (block != before).nonzero()[0]
        return Commit(candidates.positions[changed], block[changed])

    def choose(self, candidates: Candidates) -> Array:
        raise NotImplementedError("tokens move: the whole block is decided")

    def _may_edit(self) -> Mask:
        """Return which tokens of the block may be replaced, [R] bool."""
        is_token: Mask = self._before != self._mask
        return is_token

    def _is_doubted(self, candidates: Candidates, best: _Best, current: Array) -> Mask:
        """Return in which rows [R] another token exceeds the threshold; drawn tokens only fill."""
        confidence = candidates.scores if self.params.temperature == 0 else best.confidence
        is_above = confidence > self.params.editing_threshold
        doubted: Mask = is_above & (best.tokens[:, 0] != current)
        return doubted

    def _filled(self, scores: Array, is_masked: Mask) -> Mask:
        """Return the masked positions that are filled, [R] bool."""
        if self.step >= self._num_steps:
            return is_masked
        quota, remainder = divmod(self._num_first, self._num_steps)
        needed = (
            quota + (self.step < remainder) + int(np.count_nonzero(is_masked & ~self._is_first))
        )
        filled = is_masked & (scores > self.params.threshold)
        if np.count_nonzero(filled) >= needed:
            return filled
        masked = is_masked.nonzero()[0]
        filled = np.zeros_like(is_masked)
        filled[masked[most_certain_first(scores[masked])[:needed]]] = True
        return filled

    def _is_last(self, filled: Mask, is_masked: Mask) -> bool:
        """Whether the forward fills all masks and changes no length."""
        if self.step + 1 >= MAX_FORWARDS:
            return True
        if self.params.max_post_steps:
            return self._num_post >= self.params.max_post_steps
        first = is_masked & self._is_first
        return bool(first.any() and filled[first].all())

    def _edits(self, tokens: Array) -> Mask:
        is_edit: Mask = (tokens == self._delete) | (tokens == self._split)
        return is_edit

    def _plain(self, best: _Best) -> Array:
        """Return the likeliest token [R] of each row that neither deletes nor inserts."""
        is_plain = ~self._edits(best.tokens)
        plain: Array = best.tokens[np.arange(len(best.tokens)), is_plain.argmax(axis=1)]
        return plain

    def _leave_loop(self, written: Array, confidence: Array, best: _Best) -> None:
        """Change the least certain changed token until the block differs from all earlier ones.

        A token that has its previous value again no longer counts as changed.
        """
        for _ in range(MAX_SWAPS):
            changed = (written != self._before).nonzero()[0]
            if not changed.size or written.tobytes() not in self._seen:
                return
            weakest = changed[confidence[changed].argmin()]
            first, second, _ = best.tokens[weakest].tolist()
            written[weakest] = second if written[weakest] == first else first

    def _scan(self, written: Array) -> Array:
        """Return the block [R] after deletions and insertions, and update its marks."""
        sources = self._sources(written)[: written.size]
        sources = np.pad(sources, (0, written.size - sources.size), constant_values=-1)
        is_new = sources < 0
        self._is_first = ~is_new & self._is_first[sources]
        block = np.where(is_new, self._mask, self._plain_tokens(written)[sources])
        return self._without_early_ends(block)

    def _sources(self, written: Array) -> Array:
        """Return the previous row of each row after deletions and insertions; -1 for a new mask."""
        counts = np.where(written == self._split, 2, written != self._delete)
        sources = np.arange(written.size).repeat(counts)
        sources[:-1][sources[:-1] == sources[1:]] = -1
        return sources

    def _plain_tokens(self, written: Array) -> Array:
        """Return the tokens [R] that stay where `written` inserts a mask before them."""
        return np.where(written == self._split, self._before[: written.size], written)

    def _without_early_ends(self, block: Array) -> Array:
        """Mask end tokens of the block [R] that have moved to a position before `min_tokens`."""
        if self.params.edits is not None:
            first = max(self.start, self.prompt_length) - self.prompt_length
            num_early = max(self.params.edits.min_tokens - first, 0)
            ends = np.isin(block[:num_early], self.params.edits.end_ids).nonzero()[0]
            block[ends], self._is_first[ends] = self.params.mask_id, False
        return block

    def _ends_with(self, block: Array) -> bool:
        """Whether the forward that produced `block` [R] was the last one of the block."""
        self.step += 1
        is_masked = block == self._mask
        self._num_post = 0 if (is_masked & self._is_first).any() else self._num_post + 1
        if is_masked.any():
            return False
        is_stable = np.array_equal(block, self._before)
        is_over = self._num_post > self.params.max_post_steps
        return is_stable or is_over or self.step >= MAX_FORWARDS
