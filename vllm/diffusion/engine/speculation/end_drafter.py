# SPDX-License-Identifier: Apache-2.0
"""Drafts of the state after the end of a canvas without a mask token.

If the current step ends a canvas of `entropy_bound`, the canvas consists of the most likely tokens
of the previous step. So they are known before the step. The draft is the first step of the next
canvas, after these tokens. No other state can be drafted, because a step inside a canvas needs the
expected embeddings of the step before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.entropy_bound import EntropyBound
from vllm.diffusion.engine.speculation.drafter import DraftState

if TYPE_CHECKING:
    from vllm.diffusion.engine.speculation.drafter import AcceptanceChance, CandidateSource
    from vllm.diffusion.engine.worker.canvas import Canvas


class EndDrafter:
    """Drafts the state that follows if the canvas ends; in the form of `Drafter`."""

    has_extra_draws = False
    rows_factor = 2  # the finished canvas, and the next one

    def can_draft(self, canvas: Canvas) -> bool:
        """Whether the next step of a request may end its canvas."""
        return isinstance(canvas.rule, EntropyBound) and canvas.rule.is_near_end

    def draft(
        self,
        current: DraftState,
        source: CandidateSource,
        max_drafts: int,
        acceptance_chance: AcceptanceChance,
    ) -> list[DraftState]:
        """Return the draft, if there is one; arguments as for `Drafter`."""
        rule = current.rule
        if not max_drafts or not isinstance(rule, EntropyBound) or not rule.is_near_end:
            return []
        ended, tokens = rule.end_now(current.tokens)
        target = ended.prepare(tokens)
        if target is None or target.fill is None:
            return []
        start, noise = target.fill
        tokens[start : target.fill_end] = noise
        return [DraftState(1, tokens, ended, target)]

    def chances(self, max_drafts: int, acceptance_chance: AcceptanceChance) -> list[float]:
        """Return the chance of the draft, as `Drafter.chances`."""
        return [acceptance_chance(None, 1)][:max_drafts]
