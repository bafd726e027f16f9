# SPDX-License-Identifier: Apache-2.0
"""Step after step: each collected before the next is launched, or launched while others compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.engine.first_forwards import is_copied
from vllm.diffusion.engine.turns import by_priority, step_behind, to_the_end

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.diffusion.engine.messages import Slice, StepResult
    from vllm.diffusion.engine.recovery import Attempt, Recovery
    from vllm.diffusion.engine.step import Outcomes, StepRunner

MOST_UNDER_WAY = 2  # steps: one that computes, and one that follows it without a pause


class StepLoop:
    """Moves the requests of a runner one step at a time.

    Args:
        runner: whose requests they are.
        recovery: launches and collects steps, and survives their errors.

    Attributes:
        num_rows: of the step that was collected last.
    """

    def __init__(self, runner: StepRunner, recovery: Recovery) -> None:
        self._runner, self._recovery = runner, recovery
        self._under_way: list[Attempt] = []  # in the order in which they were launched
        self.num_rows = 0

    @torch.inference_mode()
    def plain(self, rows: Mapping[str, int]) -> dict[str, StepResult]:
        """One step, in which each request may have so many rows."""
        return self._recovery.results(self._collect(self._recovery.launch(rows)))

    @torch.inference_mode()
    def ahead(self, rows: Mapping[str, int], apart: Collection[str] = ()) -> dict[str, StepResult]:
        """The same where the device works by itself.

        The next step is launched before the results are made and handed out, so that it computes
        while they are on their way to the clients. Where one step does not hold everybody, a second
        one follows it, so that the device computes while the results of the first are taken in.
        Requests that are kept apart take no part in either.

        Args:
            rows: who takes part, with how many rows, where no step is under way.
            apart: requests that are kept apart.
        """
        if not self._under_way:
            self._under_way.append(self._recovery.launch(rows))
        self._launch_behind(apart)
        outcomes = self._collect(self._under_way.pop(0))
        stays = (req_id for req_id, error in outcomes.items() if error or self._is_copied(req_id))
        self._launch_behind({*apart, *stays})
        return self._recovery.results(outcomes)

    def _is_copied(self, req_id: str) -> bool:
        """Whether siblings may start with the next message, before what a request keeps changes."""
        canvas = self._runner.canvases.get(req_id)
        return canvas is not None and is_copied(canvas)

    @torch.inference_mode()
    def slice(self, asked: Slice) -> dict[str, StepResult]:
        """The next slice of a long step; the request's result, if it was the last one."""
        outcomes = self._recovery.advance_slice(asked)
        to_the_end(self._runner.canvases, outcomes)
        return self._recovery.results(outcomes)

    @property
    def launched(self) -> list[list[str]]:
        """Requests of the steps that are under way, in the order of these."""
        return [attempt.req_ids for attempt in self._under_way]

    def forget(self) -> None:
        """Requests have gone; steps under way that nobody waits for go with them."""
        running = self._runner.canvases.keys()
        self._under_way = [a for a in self._under_way if not running.isdisjoint(a.req_ids)]

    def _collect(self, attempt: Attempt) -> Outcomes:
        self.num_rows = 0 if attempt.step is None else attempt.step.batch.num_rows
        outcomes = self._recovery.collect(attempt)
        to_the_end(self._runner.canvases, outcomes)
        return outcomes

    def _launch_behind(self, apart: Collection[str]) -> None:
        """Launch the step that follows those under way, where that can be done at once.

        A step in chunks launches more kernels than a GPU's queue holds, so launching would wait
        for it.
        """
        if len(self._under_way) == MOST_UNDER_WAY:
            return
        canvases = by_priority(self._runner.canvases, lambda canvas: canvas.params.priority or 0)
        wishes = {
            req_id: canvas.wish
            for req_id, canvas in canvases.items()
            if req_id not in apart and not canvas.is_complete
        }
        under_way = {req_id for attempt in self._under_way for req_id in attempt.req_ids}
        planner = self._runner.planner
        taken = step_behind(under_way, wishes, planner.row_budget, self._runner.shares)
        if taken and planner.runs_whole(sum(taken.values()), self._runner.kept_bytes):
            self._under_way.append(self._recovery.launch(taken))
