# SPDX-License-Identifier: Apache-2.0
"""Computes several copies of a text in one step, for requests that revise a text.

Each copy has other tokens masked (`revised_canvas.py`). The copies do not depend on each other, so
a step computes all of a request's copies that fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding import ForwardTarget
from vllm.diffusion.engine.batch_item import ExtraItem
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.revised_canvas import RevisedCanvas
from vllm.diffusion.engine.worker.window import Window
from vllm.diffusion.request.visibility import Forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import Outcomes
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams


def scores_text(params: DiffusionParams) -> bool:
    """Whether a request scores a text."""
    if params.revision is None or params.scores_directly:
        return False
    return params.revision.changes_tokens


class ScoringCopy(ExtraItem):
    """A copy of a request's text.

    Args:
        canvas: the request.
        positions: [R] int64, masked positions of the copy.
        window: all positions of the sequence.
    """

    canvas: RevisedCanvas
    wants_logprobs = True

    def __init__(self, canvas: RevisedCanvas, positions: Array, window: Window) -> None:
        super().__init__(canvas, canvas.rule, ForwardTarget(positions, (0, window.stop)), window)
        self._masked = positions

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.masked_at(self._masked)

    def token_ids(self, positions: Array) -> Array:
        return self.canvas.named_tokens(positions)

    def draws(self, positions: Array) -> Array | None:
        return self.canvas.draws(positions)


class ScoringCopies(StepGuest):
    """Adds the further copies of a text to the step that computes its first copy."""

    def extra_items(self, canvases: Sequence[Canvas], row_budget: int) -> Sequence[BatchItem]:
        scoring = [c for c in canvases if isinstance(c, RevisedCanvas) and c.pending_copies]
        if not scoring:
            return ()
        room = row_budget - sum(canvas.count_next_rows() for canvas in canvases)
        items = list[ScoringCopy]()
        for canvas in scoring:
            forward = Forward(range(canvas.begin().rows[1]))
            window = Window.of(forward, canvas.window.visibility)
            for positions in canvas.pending_copies[1:]:
                if canvas.window.has_fp8_attention:
                    break
                copy = ScoringCopy(canvas, positions, window)
                room -= copy.num_rows
                if room < 0:
                    return items
                items.append(copy)
        return items

    def collected(
        self, step: Step, candidates: Sequence[Candidates | BatchedCommit], outcomes: Outcomes
    ) -> None:
        """Commit the scores of the copies, after the requests' own."""
        canvases = self._runner.canvases
        for item, result in zip(step.batch.items, candidates, strict=True):
            if not isinstance(item, ScoringCopy) or canvases.get(item.req_id) is not item.canvas:
                continue
            if outcomes.get(item.req_id, True) is not None:
                continue
            outcomes[item.req_id] = item.canvas.failure_of(item.canvas.commit_copy, result)
