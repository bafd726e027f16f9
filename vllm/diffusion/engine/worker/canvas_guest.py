# SPDX-License-Identifier: Apache-2.0
"""Capabilities that take part in a request's steps, beside its decoding rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.decoding import BatchedCommit, Candidates, Commit, ForwardTarget
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.ops import Array


class CanvasGuest:
    """A capability that a request has asked for; this one changes nothing. All ranks have it.

    Attributes:
        only_watches: it never changes what is committed, and need not see the candidates for that:
            it may hear of a commit by `watch`.
    """

    only_watches = False

    def begin(self, tokens: Array) -> None:
        """Take in, and perhaps write to, the sequence [T] before the first forward."""

    def joints(
        self, tokens: Array, target: ForwardTarget, scoring: CandidateScoring, step: int
    ) -> list[Joint]:
        """Return choices that bind several candidates of the next forward, by position."""
        return []

    def fill(self, start: int, token: int, end: int | None) -> None:
        """Take in that the rule sets all positions from `start` on, before `end`, to `token`."""

    def commit(self, tokens: Array, candidates: Candidates, commit: Commit) -> Commit:
        """Return what is committed where the rule has chosen `commit` among `candidates`."""
        return commit

    def watch(self, commit: BatchedCommit, *, is_mask_forbidden: bool) -> None:
        """Take in a commit that was chosen together with those of other requests.

        Args:
            commit: the commit.
            is_mask_forbidden: whether the mask token could not be proposed.
        """

    def may_end(self, tokens: Array, end: int) -> bool:
        """Whether the answer may end with what is before canvas position `end`."""
        return True

    def use_weights(self, generation: int) -> None:
        """Take in which weights compute the next forward."""

    def look(self, tokens: Array, step: int) -> None:
        """Take in the sequence as it is after step number `step`, from 1."""

    def report(self, tokens: Array, final: range, *, is_complete: bool) -> dict[str, Any]:
        """Return fields of `StepResult`; canvas positions `final` became final with the commit."""
        return {}
