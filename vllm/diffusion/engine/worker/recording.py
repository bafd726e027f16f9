# SPDX-License-Identifier: Apache-2.0
"""Guests of a canvas that record trajectories, or that end answers with whole blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm.diffusion.core.trajectory import CandidateLogprobs, Commits, Trajectory
from vllm.diffusion.engine.worker.canvas_guest import CanvasGuest
from vllm.diffusion.request.algorithms import algorithms_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm.diffusion.decoding import BatchedCommit, Candidates, Commit, DecodingRule
    from vllm.diffusion.request.params import DiffusionParams

    Array = NDArray[Any]

# A larger number would make the device wait if many answers end at once.

MAX_PENDING_COMMITS = 32


class BlockTracker:
    """The blocks of a canvas, as its rule fills them.

    Args:
        params: parameters of the request.
        prompt_length: number of tokens before the canvas.
        length: number of positions of prompt and canvas.
        rule: the decoding rule, which may choose where blocks end.
    """

    def __init__(
        self, params: DiffusionParams, prompt_length: int, length: int, rule: DecodingRule
    ) -> None:
        self.rule, self._prompt_length = rule, prompt_length
        end, width = length - prompt_length, params.block_length
        # The row has room for a whole block after the answer.
        if params.has_causal_context:
            end = params.num_blocks * width
        is_grid = params.is_block_causal and not params.has_causal_context
        record = algorithms_of(is_block_causal=params.is_block_causal)[params.algorithm]
        if record.blocks == "none":
            width, end = (1, params.gen_length) if params.has_causal_context else (end, end)
        first = width
        if is_grid:
            first -= (prompt_length + params.block_offset(prompt_length)) % width
        self._bounds = np.array([0, *range(first, end, width), end])

    @property
    def bounds(self) -> Array:
        """Canvas positions [B + 1]: the start of each block in order, and the end of the last.

        Only blocks that exist so far count; before the first block, a block of one position.
        """
        sized = self.rule.block_bounds
        if sized is None:
            return self._bounds
        start = self._prompt_length
        sized = sized or ((start, start + 1),)
        # Tokens of a text before the first block belong to this block.
        return np.array([start, *(begin for begin, _ in sized[1:]), sized[-1][1]]) - start


class _Noted(NamedTuple):
    """A recorded commit.

    Attributes:
        step: number of the step.
        eligible: [R] int64, ascending: positions of the candidates.
        rows: [5, R], the `CandidateLogprobs` of the candidates.
        positions, tokens: [K] int64, the committed positions and their tokens.
    """

    step: int
    eligible: Array
    rows: Array
    positions: Array
    tokens: Array


class Recorder(CanvasGuest):
    """Records which step committed which token, and the token's probability.

    The device may wait while a step commits. So commits are only noted, and processed later, many
    at a time.

    Args:
        params: parameters of the request, with `return_trajectory`.
        tokens: sequence [T] of the request before decoding.
        prompt_length: number of tokens before the canvas.
        rule: decoding rule of the request.
    """

    only_watches = True

    def __init__(
        self, params: DiffusionParams, tokens: Array, prompt_length: int, rule: DecodingRule
    ) -> None:
        self._params, self._prompt_length, self._rule = params, prompt_length, rule
        self._blocks = BlockTracker(params, prompt_length, len(tokens), rule)
        # First row of the extras after the log probabilities that the client receives, if there are
        # any.
        first_row = 0 if params.num_logprobs is None else 4 + 2 * params.num_logprobs
        self._rows = slice(first_row, first_row + len(CandidateLogprobs._fields))
        self._holes = np.empty(0, dtype=np.int64)  # mask positions of the prompt
        self._tokens = tokens.copy()  # tokens before the commits in `_noted`
        # Commits and fills that are not processed yet. A fill is (step, start, token, end).
        self._noted: list[_Noted | tuple[int, int, int, int | None]] = []
        self._steps = np.zeros(len(tokens), dtype=np.int32)
        self._logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
        self._entropies = np.full(len(tokens), np.nan, dtype=np.float32)
        self._is_filled = np.zeros(len(tokens), dtype=np.bool_)
        # First step with a candidate at each position; 0 for none.
        self._first_eligible = np.zeros(len(tokens), dtype=np.int32)
        self._commits: list[tuple[Array, Array, Array, Array]] = []  # arguments of `_put`
        self._replaces = False  # whether some position was, or may have been, written twice
        self._mask_forbidden: list[int] = []
        self._weight_steps: list[tuple[int, int]] = []
        self._step = 0  # number of the last noted step

    def begin(self, tokens: Array) -> None:
        self._tokens[:] = tokens
        masked = tokens == self._params.mask_id
        self._steps[:] = np.where(masked, -1, 0)
        self._holes = masked[: self._prompt_length].nonzero()[0]

    def use_weights(self, generation: int) -> None:
        following = self._step + 1
        if self._weight_steps and self._weight_steps[-1][0] == generation:
            return
        if self._weight_steps and self._weight_steps[-1][1] == following:
            self._weight_steps.pop()  # no step was computed with these weights
        self._weight_steps.append((generation, following))

    def fill(self, start: int, token: int | Array, end: int | None) -> None:
        assert isinstance(token, int)
        self._noted.append((self._step, start, token, end))

    def rescored(self, rule: DecodingRule, positions: Array, step: int) -> None:
        self._rule = self._blocks.rule = rule
        self._step = step
        self._noted += [(step, int(at), self._params.mask_id, int(at) + 1) for at in positions]

    def watch(self, commit: BatchedCommit, *, is_mask_forbidden: bool) -> None:
        self._note(commit, commit.eligible, commit.logprobs, is_mask_forbidden=is_mask_forbidden)

    def commit(self, tokens: Array, candidates: Candidates, commit: Commit) -> Commit:
        self._note(
            commit,
            candidates.positions,
            candidates.logprobs,
            is_mask_forbidden=self._rule.forbade_mask,
        )
        return commit

    def _note(
        self,
        commit: Commit | BatchedCommit,
        eligible: Array | None,
        logprobs: Array | None,
        *,
        is_mask_forbidden: bool,
    ) -> None:
        """Note the next step's commit, with the candidates that it was chosen from."""
        self._step += 1
        if is_mask_forbidden:
            self._mask_forbidden.append(self._step)
        if eligible is None or logprobs is None or not eligible.size:
            return
        rows = logprobs[self._rows].copy()  # the step's buffer is reused
        self._noted.append(_Noted(self._step, eligible, rows, commit.positions, commit.tokens))
        if len(self._noted) >= MAX_PENDING_COMMITS:
            self._catch_up()

    def _catch_up(self) -> None:
        """Process all notes: the commits between two fills are processed together."""
        notes, self._noted = self._noted, []
        commits: list[_Noted] = []
        for item in notes:
            if isinstance(item, _Noted):
                commits.append(item)
                continue
            self._take(commits)
            commits = []
            self._fill(*item)
        self._take(commits)

    def _fill(self, step: int, start: int, token: int, end: int | None) -> None:
        changed = start + (self._tokens[start:end] != token).nonzero()[0]
        self._replaces |= bool((self._steps[changed] >= 0).any())
        count = changed.size
        self._put(np.full(count, step), changed, np.full(count, token), np.full(count, np.nan))
        self._is_filled[changed] = token != self._params.mask_id

    def _take(self, commits: Sequence[_Noted]) -> None:
        if not commits:
            return
        steps, *parts = zip(*commits, strict=True)
        eligible, positions, tokens = (np.concatenate(parts[index]) for index in (0, 2, 3))
        seen, placed = (np.repeat(steps, [part.size for part in parts[index]]) for index in (0, 2))
        width, total = len(self._tokens), np.iinfo(np.int32).max
        # Both arrays are in ascending order of step, then of position.
        at = np.searchsorted(seen * width + eligible, placed * width + positions)
        logprobs = CandidateLogprobs.unpack(np.concatenate(parts[1], axis=1)[:, at])
        first = np.zeros(width, dtype=np.int32)
        # If a position occurs several times, the last assignment wins.
        first[eligible[::-1]] = seen[::-1]
        self._first_eligible = np.where(self._first_eligible > 0, self._first_eligible, first)
        # Rules that replace tokens have candidates at positions that already hold a token.

        stands = np.where(self._steps >= 0, 0, total)
        is_token = tokens != self._params.mask_id
        filled = np.full(width, total)
        filled[positions[is_token][::-1]] = placed[is_token][::-1]
        stands = np.minimum(stands, filled)
        self._replaces |= bool((seen > stands[eligible]).any())
        self._put(placed, positions, tokens, logprobs.of(tokens))
        self._entropies[positions] = np.where(is_token, logprobs.entropies, np.nan)

    def _put(self, steps: Array, positions: Array, tokens: Array, logprobs: Array) -> None:
        is_open = tokens == self._params.mask_id
        self._tokens[positions] = tokens
        self._steps[positions] = np.where(is_open, -1, steps)
        self._logprobs[positions] = np.where(is_open, np.nan, logprobs)
        self._entropies[positions] = np.nan
        self._is_filled[positions] = False
        self._commits.append((steps, positions, tokens, logprobs))

    def report(self, tokens: Array, final: range, *, is_complete: bool) -> dict[str, Any]:
        if not (is_complete or self._params.has_stop_strings):
            return {}
        self._catch_up()
        return {"trajectory": self._record()}

    def _record(self) -> Trajectory:
        start, params = self._prompt_length, self._params
        never = np.iinfo(np.int32).max
        bounds = self._blocks.bounds
        starts, stops = bounds[:-1], bounds[1:]
        recorded = slice(start, start + stops[-1])
        steps, seen = self._steps[recorded], self._first_eligible[recorded]
        # For each block, the first step that had candidates there, or that committed.
        first, committed = (
            np.minimum.reduceat(np.where(numbers > 0, numbers, never), starts)
            for numbers in (seen, steps)
        )
        first = np.where(first < never, first, committed)
        is_begun = first < never
        if params.revision is not None:
            is_begun |= np.minimum.reduceat(steps, starts) >= 0  # the text has the whole block
        (begun,) = is_begun.nonzero()
        end = int(stops[begun[-1]]) if begun.size else 0
        in_block = steps - np.repeat(first, stops - starts) + 1
        block_steps = np.where(steps > 0, np.maximum(in_block, 1), steps)[:end]
        canvas = slice(start, start + end)
        return Trajectory(
            prompt_length=start,
            block_length=params.block_length,
            block_starts=starts[starts < end].tolist(),
            token_ids=self._tokens[canvas].astype(np.int32),
            commit_steps=self._steps[canvas].copy(),
            block_steps=block_steps,
            logprobs=self._logprobs[canvas].copy(),
            entropies=self._entropies[canvas].copy() if params.return_entropy else None,
            filled=self._is_filled[canvas].nonzero()[0].tolist(),
            edits=self._edits() if self._replaces else None,
            prompt=self._of_prompt(),
            mask_forbidden=list(self._mask_forbidden),
            num_steps=self._step,
            weight_steps=list(self._weight_steps),
        )

    def _of_prompt(self) -> Commits:
        holes = self._holes[self._steps[self._holes] > 0]
        steps, tokens = self._steps[holes], self._tokens[holes]
        return Commits(steps, holes, tokens, self._logprobs[holes])

    def _edits(self) -> Commits:
        steps, positions, tokens, logprobs = (
            np.concatenate(parts) for parts in zip(*self._commits, strict=True)
        )
        return Commits(steps, positions - self._prompt_length, tokens, logprobs)


class CompleteBlocks(CanvasGuest):
    """Makes answers end only when the block of their last token is filled.

    Arguments as in `Recorder`.
    """

    only_watches = True

    def __init__(
        self, params: DiffusionParams, tokens: Array, prompt_length: int, rule: DecodingRule
    ) -> None:
        self._blocks = BlockTracker(params, prompt_length, len(tokens), rule)
        self._prompt_length, self._mask_id = prompt_length, params.mask_id

    def rescored(self, rule: DecodingRule, positions: Array, step: int) -> None:
        self._blocks.rule = rule

    def may_end(self, tokens: Array, end: int) -> bool:
        bounds, canvas = self._blocks.bounds, tokens[self._prompt_length :]
        # Index of the first bound that is not before the end.
        behind = np.searchsorted(bounds, end)
        if behind == len(bounds):
            return True
        return not (canvas[bounds[behind - 1] : bounds[behind]] == self._mask_id).any()
