# SPDX-License-Identifier: Apache-2.0
"""Computes several copies of a text in one step, for requests that revise a text.

Each copy has other tokens masked (`revised_canvas.py`). The copies do not depend on each other, so
a step computes all of a request's copies that fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding import ForwardTarget
from vllm.diffusion.engine.speculation.drafts import DraftWindow
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.revised_canvas import RevisedCanvas
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates
    from vllm.diffusion.engine.step_guest import BatchItem
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import Outcomes
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import Plan
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.sampling import RowEdits

logger = init_logger(__name__)


def scores_text(params: DiffusionParams) -> bool:
    """Whether a request scores a text."""
    if params.revision is None or params.scores_directly:
        return False
    return params.revision.changes_tokens


class ScoringCopy:
    """A copy of a request's text, in the form of `BatchItem`.

    Args:
        canvas: the request.
        positions: [R] int64, masked positions of the copy.
        window: all positions of the sequence.
    """

    pick = None
    num_extra_draws = 0
    wants_logprobs = True
    adjust_logits = None

    def __init__(self, canvas: RevisedCanvas, positions: Array, window: Window) -> None:
        self.canvas = canvas
        self.window = DraftWindow(None, canvas.window.kept_starts, canvas.window.num_sequences)
        self.req_id, self.params, self.rule = canvas.req_id, canvas.params, canvas.rule
        self.prompt_length, self.num_steps = canvas.prompt_length, canvas.num_steps
        self._positions, self._computed = positions, window

    @property
    def num_rows(self) -> int:
        """Number of rows of the copy's forward."""
        return self._computed.num_rows * self.window.num_sequences

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.masked_at(self._positions)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        return ForwardTarget(self._positions, (0, self._computed.stop)), self._computed

    def token_ids(self, positions: Array) -> Array:
        return self.canvas.named_tokens(positions)

    def joints(self, target: ForwardTarget) -> list[Joint]:
        return []

    def edits(self, positions: Array) -> RowEdits | None:
        return None

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
            window = canvas.window.without_cache(canvas.begin().rows[1])
            for positions in canvas.pending_copies[1:]:
                if canvas.window.has_fp8_attention:
                    break
                copy = ScoringCopy(canvas, positions, window)
                room -= copy.num_rows
                if room < 0:
                    return items
                items.append(copy)
        return items

    def accepts(self, batch: StepBatch, plan: Plan) -> bool:
        return plan.is_whole(batch.num_rows)

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
            try:
                item.canvas.commit_copy(result)
            except Exception as error:
                logger.exception("decoding of request %s failed", item.req_id)
                outcomes[item.req_id] = error
