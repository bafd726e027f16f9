# SPDX-License-Identifier: Apache-2.0
"""Guests of canvases without a mask token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.core.canvas_view import CanvasView
from vllm.diffusion.core.logprobs import Logprobs
from vllm.diffusion.decoding import Commit
from vllm.diffusion.engine.worker.constrained import Constraint
from vllm.diffusion.engine.worker.proposals import Proposals
from vllm.diffusion.engine.worker.recording import Recorder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.decoding import Candidates, DecodingRule
    from vllm.diffusion.decoding.entropy_bound import EntropyBound
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.guided.open_window import OpenWindow
    from vllm.diffusion.request.params import DiffusionParams


class OpenProposals(Proposals):
    """Most likely token of every position in the latest step of its canvas.

    Log probabilities belong to the distributions at the temperature of that step.

    Args:
        params, prompt_length: as for `Proposals`.
        rule: the decoding rule.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int, rule: EntropyBound) -> None:
        super().__init__(params, prompt_length)
        self._rule = rule
        self._entropies = np.zeros(params.gen_length, dtype=np.float32)
        self._is_kept = np.zeros(params.gen_length, dtype=np.bool_)
        self._num_begun = 0  # canvas positions

    def begin(self, tokens: NDArray[np.int64]) -> None:
        """Do nothing: a canvas without a mask token has no tokens before its first forward."""

    def fill(self, start: int, token: int | NDArray[np.int64], end: int | None) -> None:
        """Do nothing: the noise with which a canvas begins is no proposal."""

    def commit(self, tokens: NDArray[np.int64], candidates: Candidates, commit: Commit) -> Commit:
        """Record the most likely tokens; the last canvas may be longer than the answer."""
        if candidates.logprobs is None or candidates.greedy is None:
            return commit
        start = int(candidates.positions[0]) - self._prompt_length
        count = min(candidates.positions.size, len(self._ranks) - start)
        at, own = slice(start, start + count), slice(count)
        logprobs = Logprobs.unpack(torch.from_numpy(candidates.logprobs), self._num_top)
        self._tokens[at, 0] = candidates.greedy[own]
        self._logprobs[at, 0] = logprobs.greedy[own]
        self._ranks[at] = logprobs.greedy_rank[own]
        self._tokens[at, 1:] = logprobs.top_tokens.numpy()[:, own].T
        self._logprobs[at, 1:] = logprobs.top.numpy()[:, own].T
        self._entropies[at] = -candidates.scores[own]
        self._is_kept[at] = self._rule.accepted[own]
        self._num_begun = at.stop
        return commit

    def _view_of(self, canvas: NDArray[np.int64], step: int) -> CanvasView:
        begun = slice(self._num_begun)
        return CanvasView(
            step=step,
            token_ids=self._tokens[begun, 0].astype("<i4").tobytes(),
            committed=self._is_kept[begun].tobytes(),
            confidence=np.exp(self._logprobs[begun, 0]).astype("<f4").tobytes(),
            entropies=self._entropies[begun].astype("<f4").tobytes(),
        )


class OpenRecorder(Recorder):
    """Records the steps that changed the most likely token of a position.

    From the last of these steps on, the token stays the same. See `Recorder` for the arguments.
    """

    def __init__(
        self,
        params: DiffusionParams,
        tokens: NDArray[np.int64],
        prompt_length: int,
        rule: DecodingRule,
    ) -> None:
        super().__init__(params, tokens, prompt_length, rule)
        self._latest = np.full(len(tokens), params.mask_id, dtype=np.int64)

    def fill(self, start: int, token: int | NDArray[np.int64], end: int | None) -> None:
        """Do nothing: the noise with which a canvas begins is no commit."""

    def commit(self, tokens: NDArray[np.int64], candidates: Candidates, commit: Commit) -> Commit:
        most_likely = candidates.greedy
        assert most_likely is not None  # the scoring requires it
        is_new = most_likely != self._latest[candidates.positions]
        self._latest[candidates.positions] = most_likely
        changes = Commit(candidates.positions[is_new], most_likely[is_new])
        super().commit(tokens, candidates, changes)
        return commit


class OpenConstraint(Constraint):
    """Constraint that takes all tokens of a canvas from the most likely string of the language.

    The string replaces the most likely and the drawn tokens of every step. The canvas leaves enough
    room for the end of the answer, which may follow on later canvases.
    """

    def begin(self, tokens: NDArray[np.int64]) -> None:
        """Do nothing: a canvas begins as noise, also where every answer has the same tokens."""

    def commit(self, tokens: NDArray[np.int64], candidates: Candidates, commit: Commit) -> Commit:
        """Return the commit: only the last one of a canvas counts, and it is a whole string."""
        return commit

    def _joint(self, window: OpenWindow, scoring: CandidateScoring, step: int) -> Joint:
        return replace(super()._joint(window, scoring, step), temperature=0.0)
