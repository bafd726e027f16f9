# SPDX-License-Identifier: Apache-2.0
"""Drafts: predicted states that a step packs like requests of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.diffusion.decoding import ForwardTarget
    from vllm.diffusion.engine.speculation.drafter import DraftState
    from vllm.diffusion.engine.step_guest import BatchItem
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import RowEdits


class DraftWindow(NamedTuple):
    """The pages and sequences of a draft or another extra item, in the form of `ForwardWindow`.

    Attributes:
        cache: the request's pages, with draft pages for the positions of the window; None if the
            request has no cache.
        kept_starts, num_sequences: as for the request.
        has_fp8_attention: as in `ForwardWindow`.
        context: as in `ItemWindow`.
    """

    cache: KeptSequence | None
    kept_starts: tuple[int, ...]
    num_sequences: int
    has_fp8_attention: bool = False
    context: BatchItem | None = None


class Draft:
    """A predicted state that a step packs like a request of its own.

    Args:
        canvas: the request.
        state: the predicted state.
        positions: the positions that are computed.
    """

    pick = None

    def __init__(self, canvas: Canvas, state: DraftState, positions: Window) -> None:
        self.canvas, self.state, self.positions = canvas, state, positions
        self.window = DraftWindow(None, canvas.window.kept_starts, canvas.window.num_sequences)
        self.req_id, self.params = canvas.req_id, canvas.params
        self.prompt_length, self.wants_logprobs = canvas.prompt_length, canvas.wants_logprobs
        self.num_steps = canvas.num_steps + state.depth
        self.rule, self.num_extra_draws = state.rule, canvas.num_extra_draws
        self.adjust_logits = state.rule.adjust_logits if state.rule.adjusts_logits else None

    @property
    def num_rows(self) -> int:
        """Number of rows of the draft's forward."""
        return self.positions.num_rows * self.window.num_sequences

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.sequences_of(self.state.tokens)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        return self.state.target, self.positions

    def token_ids(self, positions: Array) -> None:
        """Return no tokens to be scored: likelihood requests have no drafts."""

    def joints(self, target: ForwardTarget) -> list[Joint]:
        return []

    def edits(self, positions: Array) -> RowEdits | None:
        return self.canvas.edits(positions, self.state.tokens)

    def draws(self, positions: Array) -> Array | None:
        return self.canvas.draws(positions, self.num_steps)

    def is_reached(self, target: ForwardTarget) -> bool:
        """Whether the request, whose next forward is for `target`, has reached this state."""
        canvas = self.canvas
        is_due = self.num_steps == canvas.num_steps
        return is_due and self.state.is_of(canvas.tokens, canvas.rule, target)
