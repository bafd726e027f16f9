# SPDX-License-Identifier: Apache-2.0
"""Guessed states, packed into a step like requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from vllm.diffusion.decoding import ForwardTarget
    from vllm.diffusion.decoding.drafting import State
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import RowEdits


class BranchWindow(NamedTuple):
    """Where a guess keeps the keys and values that it computes, as `ForwardWindow` says it.

    Attributes:
        cache: the request's pages, but own ones where positions of the window lie; None where the
            request keeps nothing.
        kept_starts, num_sequences: those of the request.
        has_fp8_attention: as in `ForwardWindow`.
    """

    cache: KeptSequence | None
    kept_starts: tuple[int, ...]
    num_sequences: int
    has_fp8_attention: bool = False


class Branch:
    """A guessed state, which a step packs like a request of its own.

    Args:
        canvas: the request.
        state: the guess.
        positions: positions that are computed.
    """

    adjust_logits = None
    pick = None

    def __init__(self, canvas: Canvas, state: State, positions: Window) -> None:
        self.canvas, self.state, self.positions = canvas, state, positions
        self.window = BranchWindow(None, canvas.window.kept_starts, canvas.window.num_sequences)
        self.req_id, self.params = canvas.req_id, canvas.params
        self.prompt_length, self.wants_logprobs = canvas.prompt_length, canvas.wants_logprobs
        self.num_steps = canvas.num_steps + state.depth
        self.rule, self.later_draws = state.rule, canvas.later_draws

    @property
    def num_rows(self) -> int:
        """Rows of its forward."""
        return self.positions.num_rows * self.window.num_sequences

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.sequences_of(self.state.tokens)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        return self.state.work, self.positions

    def token_ids(self, positions: Array) -> None:
        """Return no tokens to be scored: likelihoods are not guessed."""

    def joints(self, work: ForwardTarget) -> list[Joint]:
        return []

    def edits(self, positions: Array) -> RowEdits | None:
        return self.canvas.edits(positions, self.state.tokens)

    def draws(self, positions: Array) -> Array | None:
        return self.canvas.draws(positions, self.num_steps)

    def is_reached(self, work: ForwardTarget) -> bool:
        """Whether this is the request's state, whose next forward is for `work`."""
        canvas = self.canvas
        is_due = self.num_steps == canvas.num_steps
        return is_due and self.state.is_of(canvas.tokens, canvas.rule, work)


# What a step packs.
Packed: TypeAlias = "Canvas | Branch"
