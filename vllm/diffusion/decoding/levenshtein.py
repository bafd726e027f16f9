# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.2: masks are filled, tokens replaced, deleted and inserted in one go.

The source is the release's loop (https://huggingface.co/inclusionAI/LLaDA2.2-mini), as FluxServe
serves it: which token breaks a loop is not drawn, and the mask token is not proposed.
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

MAX_FORWARDS = 1000  # of a block
MAX_SWAPS = 5  # of a token, to leave a loop
NUM_BEST = 3  # one of them neither deletes nor inserts


class _Best(NamedTuple):
    """The likeliest tokens [R, 3] of rows, best first, and the probability [R] of the first."""

    tokens: Array
    confidence: Array


class Levenshtein(GridRule):
    """Fill masks, and let the model replace, delete and insert tokens of the block.

    All is decided from the block as the forward read it. Masks are filled that exceed the
    threshold, at least as many as the quota of the step and the number of masks that edits have
    made; committed tokens behind the prompt are replaced by others that exceed the editing
    threshold. Then a token that deletes vanishes, and one that inserts becomes a mask before the
    token that stood there. The block keeps its length: what overflows is lost, and masks fill it
    up.

    A block ends with a forward that finds no masks and changes nothing, or after `max_post_steps`
    forwards without any of its first masks; the last of these fills all masks and edits no length.
    A block as it was written before is written with another token at the least certain change.
    """

    adjusts_logits = True

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        # A drawn token has its probability among all, too; beside it the likeliest one is wanted.
        self.scoring = CandidateScoring(greedy=True)
        self.forbid_mask = True
        self._forbidden = [params.mask_id, *params.never_ids]
        self._delete, self._split = params.edit_ids
        self._num_steps = params.steps_per_block or params.block_length
        self._before = self._is_first = np.empty(0, dtype=np.int64)
        self._is_active = False  # the block at `start` has begun and not ended
        self._num_first = self._num_post = 0
        self._seen: set[bytes] = set()  # the block as written by its forwards
        self._parts: list[tuple[torch.Tensor, ...]] = []  # of parts of the forward's rows

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        start = self.num_settled(tokens)
        if start >= min(self._end, len(tokens)):
            return None
        first, end = max(start, self.prompt_length), start + self.params.block_length
        self._before = tokens[first:end].copy()
        if not self._is_active:
            self._is_active, self.start, self.step, self._num_post = True, start, 0, 0
            self._is_first = self._before == self._mask  # marks travel with their positions
            self._num_first, self._seen = int(np.count_nonzero(self._is_first)), set()
        return ForwardTarget(np.arange(first, end), (start, end))

    def num_settled(self, tokens: Array) -> int:
        return self.start if self._is_active else self.front(tokens).start

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look up the likeliest tokens of each row, without forbidden ones; change nothing else."""
        logits[:, self._forbidden] = -torch.inf
        wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        confidence = torch.softmax(wide, dim=-1).amax(dim=-1)
        left, best = logits.clone(), []
        for _ in range(NUM_BEST):
            best.append(left.argmax(dim=-1))
            left.scatter_(1, best[-1][:, None], -torch.inf)
        self._parts.append((positions, torch.stack(best, dim=1), confidence))
        return logits

    def _take_best(self, positions: Array) -> _Best:
        """Return what was looked up for these positions [R]; a repeated forward counts."""
        tokens = np.empty((positions.size, NUM_BEST), dtype=np.int64)
        confidence = np.empty(positions.size)
        for part in self._parts:
            on_canvas, best, likeliest = (x.cpu().numpy() for x in part)
            rows = np.searchsorted(positions, on_canvas + self.prompt_length)
            tokens[rows], confidence[rows] = best, likeliest
        self._parts = []
        return _Best(tokens, confidence)

    def decide(self, candidates: Candidates) -> Commit:
        self.forbade_mask, self._front = True, None
        before, best = self._before, self._take_best(candidates.positions)
        is_masked = before == self._mask
        filled = self._filled(candidates.scores, is_masked)
        is_last = self._is_last(filled, is_masked)
        edited = ~is_masked & (best.tokens[:, 0] != before)
        edited &= self._edit_confidence(candidates, best) > self.params.editing_threshold
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

    def _edit_confidence(self, candidates: Candidates, best: _Best) -> Array:
        """Return the probability [R] of the likeliest token; fills alone are drawn."""
        return candidates.scores if self.params.temperature == 0 else best.confidence

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
        """Whether the round fills all masks and edits no length."""
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
        """Return the likeliest token [R] of each row that edits no length."""
        is_plain = ~self._edits(best.tokens)
        plain: Array = best.tokens[np.arange(len(best.tokens)), is_plain.argmax(axis=1)]
        return plain

    def _leave_loop(self, written: Array, confidence: Array, best: _Best) -> None:
        """Change the least certain of the changed tokens until the block is a new one.

        A token that is as it was before is none of them any more.
        """
        for _ in range(MAX_SWAPS):
            changed = (written != self._before).nonzero()[0]
            if not changed.size or written.tobytes() not in self._seen:
                return
            weakest = changed[confidence[changed].argmin()]
            first, second, _ = best.tokens[weakest].tolist()
            written[weakest] = second if written[weakest] == first else first

    def _scan(self, written: Array) -> Array:
        """Return the block [R] after deletions and insertions, whose marks become its own."""
        block: list[int] = []
        marks: list[bool] = []
        columns = written.tolist(), self._before.tolist(), self._is_first.tolist()
        for token, before, is_first in zip(*columns, strict=True):
            if token == self._delete:
                continue
            if token == self._split:
                block.append(self.params.mask_id)
                marks.append(False)
                token = before
            block.append(token)
            marks.append(bool(is_first))
        missing = max(written.size - len(block), 0)
        block += [self.params.mask_id] * missing
        marks += [False] * missing
        self._is_first = np.array(marks[: written.size], dtype=np.bool_)
        scanned = np.array(block[: written.size], dtype=np.int64)
        if self.params.edits is not None:  # an end may have moved to where there must be none
            first = max(self.start, self.prompt_length) - self.prompt_length
            num_early = max(self.params.edits.min_tokens - first, 0)
            ends = np.isin(scanned[:num_early], self.params.edits.end_ids).nonzero()[0]
            scanned[ends], self._is_first[ends] = self.params.mask_id, False
        return scanned

    def _ends_with(self, block: Array) -> bool:
        """Whether no forward follows the one that turned the block into `block` [R]."""
        self.step += 1
        is_masked = block == self._mask
        self._num_post = 0 if (is_masked & self._is_first).any() else self._num_post + 1
        if is_masked.any():
            return False
        is_stable = np.array_equal(block, self._before)
        is_over = self._num_post > self.params.max_post_steps
        return is_stable or is_over or self.step >= MAX_FORWARDS
