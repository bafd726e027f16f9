# SPDX-License-Identifier: Apache-2.0
"""Step after step: each collected before the next is launched, or the next one launched ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.engine.turns import take_turns, to_the_end

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.diffusion.engine.messages import Slice, StepResult
    from vllm.diffusion.engine.recovery import Attempt, Recovery
    from vllm.diffusion.engine.step import StepRunner


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
        self._ahead: Attempt | None = None
        self.num_rows = 0

    @torch.inference_mode()
    def plain(self, req_ids: list[str]) -> dict[str, StepResult]:
        """One step."""
        return self._collect(self._recovery.launch(req_ids))

    @torch.inference_mode()
    def ahead(self, req_ids: list[str], apart: Collection[str] = ()) -> dict[str, StepResult]:
        """The same where the device works by itself.

        The next step is launched before the results are handed out, so that it computes while they
        are on their way to the clients; requests that are kept apart take no part in it.
        """
        results = self._collect(self._ahead or self._recovery.launch(req_ids))
        self._ahead = self._launch_ahead(results, apart)
        return results

    @torch.inference_mode()
    def slice(self, asked: Slice) -> dict[str, StepResult]:
        """The next slice of a long step; the request's result, if it was the last one."""
        results = self._recovery.advance_slice(asked)
        to_the_end(self._runner.canvases, results)
        return results

    @property
    def launched(self) -> list[str]:
        """Requests of the step that is under way."""
        return [] if self._ahead is None else self._ahead.req_ids

    def forget(self) -> None:
        """Requests have gone; a step under way that nobody waits for goes with them."""
        if self._runner.canvases.keys().isdisjoint(self.launched):
            self._ahead = None

    def _collect(self, attempt: Attempt) -> dict[str, StepResult]:
        self.num_rows = 0 if attempt.step is None else attempt.step.batch.num_rows
        results = self._recovery.collect(attempt)
        to_the_end(self._runner.canvases, results)
        return results

    def _launch_ahead(
        self, results: Mapping[str, StepResult], apart: Collection[str]
    ) -> Attempt | None:
        """Launch the next step, of everybody whose turn it is, where that can be done at once.

        A step in chunks launches more kernels than a GPU's queue holds, so launching would wait
        for it.
        """
        failed = {req_id for req_id, result in results.items() if result.error is not None}
        next_rows = {
            req_id: canvas.next_rows
            for req_id, canvas in self._runner.canvases.items()
            if req_id not in failed and req_id not in apart and not canvas.is_complete
        }
        planner = self._runner.planner
        taken = take_turns(next_rows, planner.row_budget)
        if not taken or not planner.runs_whole(sum(taken.values()), self._runner.kept_bytes):
            return None
        return self._recovery.launch(taken)
