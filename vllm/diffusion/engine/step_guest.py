# SPDX-License-Identifier: Apache-2.0
"""Base class of step guests: capabilities of some requests that take part in the runner's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.diffusion.decoding import (
        BatchedCommit,
        Candidates,
    )
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.memory import Plan


class StepGuest:
    """Base class of step guests, which changes nothing.

    `guests_needed` in `engine/worker/step_guests.py` decides which guests a request needs. A guest
    joins the runner, on all ranks, when the first such request starts. It never leaves, and its
    methods are called for all requests, so it must skip requests that do not need it.

    Args:
        runner: the runner of the requests.
    """

    def __init__(self, runner: DiffusionModelRunner) -> None:
        self._runner = runner

    # ---- requests ----

    def started(self, canvas: Canvas, new: NewCanvas) -> None:
        """Handle the start of a request."""

    def first_candidates(self, new: NewCanvas) -> Candidates | BatchedCommit | None:
        """Return the results of a started request's first forward if they need no forward."""
        return None

    def held_back(self, req_ids: Iterable[str]) -> list[str]:
        """Return the requests whose next step must wait for the scheduler's next message."""
        return []

    def pages_changed(self, req_id: str, *, are_replaced: bool) -> None:
        """Handle new pages of a request, which extend its pages or replace all of them."""

    def removed(self, req_id: str) -> None:
        """Handle the end of a request. Its pages are released afterwards."""

    # ---- a step ----

    def extra_items(self, canvases: Sequence[Canvas], row_budget: int) -> Sequence[BatchItem]:
        """Return items to pack in addition to the next forwards of the step's requests.

        The step may have `row_budget` rows in all.
        """
        return ()

    def accepts(self, batch: StepBatch, plan: Plan) -> bool:
        """Whether a step with extra items may run; otherwise it runs without them.

        By default all stages must compute the step's rows as one chunk.
        """
        return plan.is_whole(batch.num_rows)

    def launching(self, batch: StepBatch) -> None:
        """Prepare a planned step, which is computed next unless its extra items are refused."""

    def collected(
        self, step: Step, candidates: Sequence[Candidates | BatchedCommit], outcomes: Outcomes
    ) -> None:
        """Handle the results of a step whose requests have committed their candidates.

        Args:
            step: the step. Its batch may have items of requests that were removed since its launch,
                and extra items of guests.
            candidates: candidates or finished choice of each item of the batch.
            outcomes: requests that have committed, each with its error or None. Errors of further
                commits may be added.
        """

    def output_fields(self) -> dict[str, Any]:
        """Return fields of `DiffusionRunnerOutput`, the message to the scheduler."""
        return {}

    def status(self) -> dict[str, Any]:
        """Return entries of this rank's status, which `/status.json` shows."""
        return {}

    def invalidate(self) -> None:
        """Drop all cached results, except keys and values in pages."""

    def forget(self, req_id: str) -> None:
        """Drop the cached results of a request that goes on, except keys and values in pages."""

    def release_memory(self, *, even_work: bool) -> bool:
        """Release memory for the next step, and return whether there was any.

        Args:
            even_work: whether to drop work that must be done again, instead of what costs nothing.
        """
        return False
