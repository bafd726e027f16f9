# SPDX-License-Identifier: Apache-2.0
"""Keeps the latest proposal for every position of a canvas, for requests that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion.core.canvas_view import CanvasView
from vllm.diffusion.core.logprobs import Logprobs
from vllm.diffusion.engine.worker.canvas_guest import CanvasGuest
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm.diffusion.decoding import Candidates, Commit
    from vllm.diffusion.request.params import DiffusionParams


class Proposals(CanvasGuest):
    """Latest proposed tokens and their log probabilities, by canvas position.

    For a committed position these values come from the forward that committed its token. They stay
    the same even if the rule later considers a replacement.

    Args:
        params: the request's parameters; `num_logprobs` is not None.
        prompt_length: tokens before the canvas.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        self._prompt_length, self._params = prompt_length, params
        self._view: CanvasView | None = None
        self._num_top = params.num_logprobs or 0
        self._mask_id = params.mask_id
        length, width = params.gen_length, 1 + self._num_top
        self._canvas = slice(prompt_length, prompt_length + length)
        # The proposed token, then the most likely tokens.
        self._tokens = np.full((length, width), self._mask_id, dtype=np.int32)
        self._logprobs = np.full((length, width), np.nan, dtype=np.float32)
        self._ranks = np.ones(length, dtype=np.int32)
        self._drafted = np.zeros(length, dtype=np.bool_)
        # Whether the next commit is a draft's. The first commit after `look` belongs to the forward
        # itself.
        self._is_draft = False

    def grow(
        self, params: DiffusionParams, tokens: NDArray[np.int64], sources: NDArray[np.int64]
    ) -> None:
        self._params = params
        self._canvas = slice(self._prompt_length, len(tokens))
        on_canvas = sources[self._canvas]
        on_canvas = np.where(on_canvas < 0, -1, on_canvas - self._prompt_length)
        self._tokens = _moved(self._tokens, on_canvas, self._mask_id)
        self._logprobs = _moved(self._logprobs, on_canvas, np.nan)
        self._ranks = _moved(self._ranks, on_canvas, 1)
        self._drafted = _moved(self._drafted, on_canvas, 0)

    def begin(self, tokens: NDArray[np.int64]) -> None:
        """Record the tokens on the canvas before the first forward as certain."""
        canvas = tokens[self._canvas]
        known = canvas != self._mask_id
        self._tokens[known] = canvas[known, None]
        self._logprobs[known] = 0.0

    def commit(self, tokens: NDArray[np.int64], candidates: Candidates, commit: Commit) -> Commit:
        """Record the proposals of a forward and the committed tokens.

        A committed token has no log probability until a forward proposes it, unless it is the
        proposed or the greedy token.
        """
        if candidates.logprobs is not None and candidates.positions.size:
            logprobs = Logprobs.unpack(torch.from_numpy(candidates.logprobs), self._num_top)
            current = tokens[candidates.positions]
            is_new = (current == self._mask_id) | self._confirms(candidates, current)
            is_proposed = commit.positions <= candidates.positions[-1]
            if not is_proposed.all():
                self._move(commit.positions[~is_proposed], commit.tokens[~is_proposed])
            kept = commit.positions[is_proposed], commit.tokens[is_proposed]
            self._note(candidates, logprobs, type(commit)(*kept), is_new)
        positions = commit.positions - self._prompt_length
        # The last block may be longer than the canvas.
        on_canvas = (positions >= 0) & (positions < self._drafted.size)
        self._drafted[positions[on_canvas]] = self._is_draft
        self._is_draft = True
        return commit

    def _confirms(self, candidates: Candidates, standing: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a forward proposes the token of a position that has no probability yet."""
        places = candidates.positions - self._prompt_length
        is_unknown = np.isnan(self._logprobs[places.clip(0, len(self._ranks) - 1), 0])
        confirms: NDArray[np.bool_] = is_unknown & (candidates.tokens == standing)
        return confirms

    def _move(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Record tokens that an insertion or a deletion has moved behind the forward's rows."""
        at = positions - self._prompt_length
        at, tokens = at[at < len(self._ranks)], tokens[at < len(self._ranks)]
        self._tokens[at, 0], self._logprobs[at, 0] = tokens, np.nan

    def _note(
        self,
        candidates: Candidates,
        logprobs: Logprobs,
        commit: Commit,
        is_new: NDArray[np.bool_],
    ) -> None:
        tokens = candidates.tokens.copy()
        committed = np.searchsorted(candidates.positions, commit.positions)
        tokens[committed], is_new[committed] = commit.tokens, True
        value, rank = np.full(tokens.size, np.nan), np.ones(tokens.size)
        for known, own_value, own_rank in (
            (candidates.greedy, logprobs.greedy, logprobs.greedy_rank),
            (candidates.tokens, logprobs.token, logprobs.token_rank),
        ):
            if known is not None:
                value = np.where(tokens == known, own_value, value)
                rank = np.where(tokens == known, own_rank, rank)
        # The token that ends thinking is certain when the budget is used up.
        if self._params.thinking_token_budget is not None:
            is_given = np.isnan(value) & (tokens == self._params.think_ids[1])
            value = np.where(is_given, 0.0, value)
        positions = candidates.positions - self._prompt_length
        is_recorded = is_new & (positions >= 0) & (positions < len(self._ranks))
        at = positions[is_recorded]
        self._tokens[at, 0] = tokens[is_recorded]
        self._logprobs[at, 0] = value[is_recorded]
        self._ranks[at] = rank[is_recorded]
        self._tokens[at, 1:] = logprobs.top_tokens.numpy()[:, is_recorded].T
        self._logprobs[at, 1:] = logprobs.top.numpy()[:, is_recorded].T

    def fill(self, start: int, token: int | NDArray[np.int64], end: int | None) -> None:
        """Record that the rule has set positions from `start` on to `token`, which is certain."""
        before = self._prompt_length
        filled = slice(start - before, None if end is None else end - before)
        self._tokens[filled] = np.reshape(token, (-1, 1))
        self._logprobs[filled] = 0.0
        self._ranks[filled] = 1

    def look(self, tokens: NDArray[np.int64], step: int) -> None:
        """Record the whole canvas after forward number `step` if the request asks for it."""
        self._is_draft = False
        if self._params.stream_canvas:
            self._view = self._view_of(tokens[self._canvas], step)

    def report(
        self, tokens: NDArray[np.int64], final: range, *, is_complete: bool
    ) -> dict[str, Any]:
        """Return the log probabilities of the new final tokens, and the canvas."""
        wants_logprobs = self._params.logprobs is not None
        return {
            "logprobs": self._logprobs_of(final.start, final.stop) if wants_logprobs else None,
            "canvas": self._view,
        }

    def _logprobs_of(self, start: int, end: int) -> LogprobsLists:
        """Return the log probabilities of committed positions, in upstream's type.

        A missing log probability is reported as minus infinity, because JSON has no NaN.
        """
        logprobs = self._logprobs[start:end]
        return LogprobsLists(
            self._tokens[start:end].copy(),
            np.where(np.isnan(logprobs), -np.inf, logprobs),
            self._ranks[start:end].copy(),
        )

    def _view_of(self, canvas: NDArray[np.int64], step: int) -> CanvasView:
        committed = canvas != self._mask_id
        return CanvasView(
            step=step,
            token_ids=np.where(committed, canvas, self._tokens[:, 0]).astype("<i4").tobytes(),
            committed=committed.tobytes(),
            confidence=np.exp(self._logprobs[:, 0]).astype("<f4").tobytes(),
            guessed=self._drafted.tobytes() if self._params.num_speculative_states else None,
        )


def _moved(values: NDArray[Any], sources: NDArray[np.int64], nothing: float) -> NDArray[Any]:
    """Return the values of the positions `sources`, and `nothing` where it is -1."""
    moved: NDArray[Any] = values[sources]
    moved[sources < 0] = nothing
    return moved
