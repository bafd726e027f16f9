# SPDX-License-Identifier: Apache-2.0
"""Base class of guests: capabilities that take part in a request's steps besides its rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.decoding import (
        BatchedCommit,
        Candidates,
        Commit,
        DecodingRule,
        ForwardTarget,
    )
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams


class CanvasGuest:
    """Base class of guests, which changes nothing. All ranks create the same guests.

    Attributes:
        only_watches: whether the guest never changes a commit and does not need candidates, so that
            `watch` is enough for it.
    """

    only_watches = False

    def begin(self, tokens: Array) -> None:
        """Read, and perhaps change, the sequence [T] before the first forward."""

    def grow(self, params: DiffusionParams, tokens: Array, sources: Array) -> None:
        """Continue on a longer canvas.

        Args:
            params: the parameters with its length.
            tokens: [T] int64, the longer sequence.
            sources: [T] int64, for each position its previous position, or -1 for a new mask.
        """

    def joints(
        self, tokens: Array, target: ForwardTarget, scoring: CandidateScoring, step: int
    ) -> list[Joint]:
        """Return the joint choices of candidates of the next forward, by position."""
        return []

    def fill(self, start: int, token: int | Array, end: int | None) -> None:
        """Handle a fill: the rule sets all positions from `start`, before `end`, to `token`.

        `token` may be an array of one token per position.
        """

    def commit(self, tokens: Array, candidates: Candidates, commit: Commit) -> Commit:
        """Return what to commit if the rule has chosen `commit` from `candidates`."""
        return commit

    def rescored(self, rule: DecodingRule, positions: Array, step: int) -> None:
        """Handle a text whose tokens at `positions` [K] become masks in step number `step`.

        A new rule fills them. The steps since the latest commit have only scored tokens.
        """

    def watch(self, commit: BatchedCommit, *, is_mask_forbidden: bool) -> None:
        """Handle a commit that was chosen together with the commits of other requests.

        Args:
            commit: the commit.
            is_mask_forbidden: whether the mask token was excluded from the proposals.
        """

    def may_end(self, tokens: Array, end: int) -> bool:
        """Whether the answer may end before canvas position `end`."""
        return True

    def use_weights(self, generation: int) -> None:
        """Set the weight generation that computes the next forward."""

    def look(self, tokens: Array, step: int) -> None:
        """Handle the sequence as it is after step number `step`, from 1."""

    def report(self, tokens: Array, final: range, *, is_complete: bool) -> dict[str, Any]:
        """Return fields of `StepResult`; the latest commits made canvas positions `final` final."""
        return {}
