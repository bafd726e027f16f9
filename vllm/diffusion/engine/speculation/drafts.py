# SPDX-License-Identifier: Apache-2.0
"""Drafts: predicted states that a step packs like requests of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.engine.batch_item import ExtraItem

if TYPE_CHECKING:
    from vllm.diffusion.decoding import ForwardTarget
    from vllm.diffusion.engine.speculation.drafter import DraftState
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import RowEdits


class Draft(ExtraItem):
    """A predicted state of a request; likelihood requests have no drafts.

    With a cache, its pages are the request's, with draft pages for the positions of the window.

    Args:
        canvas: the request.
        state: the predicted state.
        positions: the positions that are computed.
    """

    def __init__(self, canvas: Canvas, state: DraftState, positions: Window) -> None:
        super().__init__(canvas, state.rule, state.target, positions)
        self.state = state
        self.num_steps = canvas.num_steps + state.depth
        self.wants_logprobs, self.num_extra_draws = canvas.wants_logprobs, canvas.num_extra_draws
        self.adjust_logits = state.rule.adjust_logits if state.rule.adjusts_logits else None

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.sequences_of(self.state.tokens)

    def edits(self, positions: Array) -> RowEdits | None:
        return self.canvas.edits(positions, self.state.tokens)

    def draws(self, positions: Array) -> Array | None:
        return self.canvas.draws(positions, self.num_steps)

    def is_reached(self, target: ForwardTarget) -> bool:
        """Whether the request, whose next forward is for `target`, has reached this state."""
        canvas = self.canvas
        is_due = self.num_steps == canvas.num_steps
        return is_due and self.state.is_of(canvas.tokens, canvas.rule, target)
