# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a step ends the requests that it concerns, never the engine.

A rule that raises ends its own request, and every rank sees it raise. A step that runs out of
memory is tried again without the requests that take most. What else fails ends all requests of the
step, on all ranks that run it (`agreement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.engine.agreement import OUT_OF_MEMORY
from vllm.diffusion.engine.messages import StepResult
from vllm.diffusion.engine.windows import ALL_ROWS
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.diffusion.decoding import Candidates
    from vllm.diffusion.engine.agreement import Agreement
    from vllm.diffusion.engine.canvas import Canvas
    from vllm.diffusion.engine.messages import NewCanvas, Slice
    from vllm.diffusion.engine.step import Outcomes, Step, StepRunner

logger = init_logger(__name__)


class Attempt(NamedTuple):
    """What came of launching a step; those who failed hear of it when the step is collected.

    Attributes:
        step: None where nothing could be launched.
        failures: requests that do not take part, and why.
    """

    step: Step | None
    failures: dict[str, Exception]

    @property
    def req_ids(self) -> list[str]:
        return [*(() if self.step is None else self.step.req_ids), *self.failures]


class Recovery:
    """Starts requests, launches and collects steps, and turns errors into results.

    Args:
        runner: whose steps they are.
        agreement: with the ranks that run the same steps.
    """

    def __init__(self, runner: StepRunner, agreement: Agreement) -> None:
        self._runner, self._agreement = runner, agreement
        self._begun_anew: str | None = None  # whose long step has run out of memory once

    def start(self, admitted: Iterable[NewCanvas]) -> dict[str, StepResult]:
        """Take in requests.

        Returns:
            the failures of those for whose keys and values there is no memory, and the results of
            those whose first step needs none but what a sibling has computed.
        """
        results = {}
        for new in admitted:
            error = self._start(new)
            if error is not None:
                error = self._start_again(new)
            if error is not None:
                results[new.req_id] = self._result(new.req_id, error)
            else:
                results |= self._step_known(new)
        return results

    def _step_known(self, new: NewCanvas) -> dict[str, StepResult]:
        """Where that fails, the request computes its first step itself."""
        outcomes: Outcomes = {}
        failure: Exception | None = None
        try:
            outcomes = self._runner.step_known(new)
        except Exception as error:
            logger.exception("request %s computes its first step itself", new.req_id)
            failure = error
        return self.results(outcomes) if self._agreement.reach(failure) is None else {}

    def _start(self, new: NewCanvas) -> Exception | None:
        """Take in a request; why it could not be, on any rank."""
        failure: Exception | None = None
        try:
            self._runner.start(new)
        except OUT_OF_MEMORY as error:
            failure = error.with_traceback(None)
        failure = self._agreement.reach(failure)
        if failure is not None:
            self._runner.forget(new.req_id)
        return failure

    def _start_again(self, new: NewCanvas) -> Exception | None:
        self._runner.pool.trim()  # what steps have left behind
        return self._start(new)

    def launch(self, rows: Mapping[str, int]) -> Attempt:
        """Launch a step; where memory runs out, without the requests that take most.

        Each request may have so many rows.

        What other steps have left behind is given back first, then what a paused step holds, and
        the same step tried again.
        """
        failures: dict[str, Exception] = {}
        ready = [req_id for req_id in rows if self._is_ready(req_id, failures, rows[req_id])]
        has_trimmed = False
        while ready:
            step, failure = self._launched(ready)
            if failure is None:
                return Attempt(step, failures)
            if not isinstance(failure, OUT_OF_MEMORY):
                logger.error("denoise step failed; its %d requests end", len(ready))
                return Attempt(None, failures | dict.fromkeys(ready, failure))
            if has_trimmed and not self._runner.drop_slices():
                largest = self._largest(ready)
                failures[largest] = failure
                ready.remove(largest)
                self._runner.caches.release(largest)
            self._runner.pool.trim()
            has_trimmed = True
        return Attempt(None, failures)

    def _launched(self, req_ids: list[str]) -> tuple[Step | None, Exception | None]:
        """A step, or what failed on any rank."""
        step, failure = None, None
        try:
            step = self._runner.launch(req_ids)
        except Exception as error:
            if not isinstance(error, OUT_OF_MEMORY):
                logger.exception("a denoise step could not be launched")
            failure = error.with_traceback(None)  # whose frames hold tensors
        return step, self._agreement.reach(failure)

    def advance_slice(self, asked: Slice) -> Outcomes:
        """The next slice of a request's step, committed if that was the last one.

        Where memory runs out, what steps have left behind is given back, and the step begins anew
        with the next slice, once.
        """
        failures: dict[str, Exception] = {}
        step, failure = None, None
        if self._is_ready(asked.req_id, failures, asked.rows):
            try:
                step = self._runner.launch_slice(asked)
            except Exception as error:
                logger.exception("a slice of request %s could not be launched", asked.req_id)
                failure = error.with_traceback(None)
            failure = self._agreement.reach(failure)
        if failure is not None:
            self._runner.drop_slices()
            if isinstance(failure, OUT_OF_MEMORY) and self._begun_anew != asked.req_id:
                self._begun_anew = asked.req_id
                self._runner.pool.trim()
                return {}
            logger.error("denoise step failed; request %s ends", asked.req_id)
            step, failures[asked.req_id] = None, failure
        if step is not None:
            self._begun_anew = None
        return self.collect(Attempt(step, failures))

    def _is_ready(self, req_id: str, failures: dict[str, Exception], room: int = ALL_ROWS) -> bool:
        """Whether a request's rule says what the step is for; else it is among the failures."""
        canvas = self._runner.canvases[req_id]
        canvas.room = room
        try:
            canvas.begin()
        except Exception as error:
            logger.exception("decoding of request %s failed", req_id)
            failures[req_id] = error.with_traceback(None)
            return False
        return True

    def _largest(self, req_ids: list[str]) -> str:
        """The request with the most rows, of several the last one."""
        return max(reversed(req_ids), key=lambda req_id: self._runner.canvases[req_id].next_rows)

    def collect(self, attempt: Attempt) -> Outcomes:
        """Wait for a step and commit it; requests that have gone meanwhile are left out."""
        step, failures = attempt
        outcomes: Outcomes = {}
        if step is not None:
            failure: Exception | None = None
            try:
                outcomes = self._runner.collect(step)
            except Exception as error:
                logger.exception("denoise step failed; its %d requests end", len(step.req_ids))
                failure = error
            failure = self._agreement.reach(failure)
            if failure is not None:
                outcomes, failures = {}, failures | dict.fromkeys(step.req_ids, failure)
        running = self._runner.canvases
        return outcomes | {r: reason for r, reason in failures.items() if r in running}

    def commit(self, canvas: Canvas, candidates: Candidates) -> Exception | None:
        """Commit what a step found for a request, which ends alone where that fails."""
        try:
            canvas.commit(candidates)
        except Exception as error:
            logger.exception("decoding of request %s failed", canvas.req_id)
            return error
        return None

    def results(self, outcomes: Outcomes) -> dict[str, StepResult]:
        """What clients are told of a step that is committed."""
        canvases = self._runner.canvases
        return {
            req_id: canvases[req_id].report() if error is None else self._result(req_id, error)
            for req_id, error in outcomes.items()
        }

    def _result(self, req_id: str, error: Exception) -> StepResult:
        logger.warning("request %s ends: %s", req_id, error)
        canvas = self._runner.canvases.get(req_id)
        return StepResult(
            new_token_ids=[],
            num_forwards=0 if canvas is None else canvas.num_forwards,
            num_committed=0,
            error=f"{type(error).__name__}: {error}",
        )
