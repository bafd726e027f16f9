# SPDX-License-Identifier: Apache-2.0
"""The loop over engine steps: it launches steps, collects them, and handles their failures.

On GPUs the next step is launched before the previous results are returned. A failure in a step ends
the affected requests, never the engine. A rule that raises an error ends its own request, on every
rank. A step that runs out of memory is tried again without the requests that use the most memory.
Any other failure ends all requests of the step, on all ranks that run it (`agreement`).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from vllm.diffusion.engine.messages import DiffusionRunnerOutput, StepResult
from vllm.diffusion.engine.scheduler.turns import move_to_end
from vllm.diffusion.engine.worker.long_step_runner import LongStepRunner
from vllm.diffusion.engine.worker.run_ahead import StepLimits, next_behind
from vllm.diffusion.engine.worker.step_pause import StepPause
from vllm.diffusion.memory import OUT_OF_MEMORY
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from vllm.diffusion.engine.long_steps import StepSlice
    from vllm.diffusion.engine.messages import DiffusionSchedulerOutput, NewCanvas
    from vllm.diffusion.engine.worker.agreement import Agreement
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes
    from vllm.diffusion.engine.worker.step_memory import Step

logger = init_logger(__name__)

# Number of steps: one that runs, and one that follows it without a pause.
MAX_IN_FLIGHT = 2

A = TypeVar("A")
T = TypeVar("T")


class LaunchResult(NamedTuple):
    """Result of launching a step; failed requests are reported when the step is collected.

    Attributes:
        step: the launched step; None if nothing could be launched.
        failures: the error of each request that does not take part.
    """

    step: Step | None
    failures: dict[str, Exception]

    @property
    def req_ids(self) -> list[str]:
        return [*(() if self.step is None else self.step.req_ids), *self.failures]


class StepLoop:
    """Starts the requests of a runner and moves them one step at a time.

    Args:
        runner: owner of the requests.
        agreement: agreement with the ranks that run the same steps; None for one rank.
        runs_ahead: whether to launch a step before the results of the previous one are returned.
        limits: limits on the sizes of steps that are launched ahead; larger batches are split.

    Attributes:
        step_pause: the current pause of steps; None while steps run.
    """

    def __init__(
        self,
        runner: DiffusionModelRunner,
        agreement: Agreement | None = None,
        *,
        runs_ahead: bool = False,
        limits: StepLimits,
    ) -> None:
        self._runner, self._agreement = runner, agreement
        self.runs_ahead, self.limits = runs_ahead, limits
        self._in_flight: list[LaunchResult] = []  # in the order of their launches
        self._num_rows = 0  # rows of the steps collected for this message
        self.step_pause: StepPause | None = None

    def execute(self, message: DiffusionSchedulerOutput) -> DiffusionRunnerOutput:
        """Start and remove requests, then return the results of one step.

        Requests that start while a step is in flight take part in a later step.
        """
        self._num_rows = 0
        self._remove_finished(message.finished_req_ids)
        if self._runner.weight_generation != self._runner.model.weight_generation:
            self.pause_steps().invalidate()
        pause = self.step_pause
        if pause is not None and pause.can_resume(message):
            self.step_pause = pause = None
        results = self._start_all(message.admitted if pause is None else pause.admitted(message))
        self._runner.assign(message.new_pages)
        if pause is not None:
            results |= pause.take_results()
            return pause.add_results_to(self._output(message, results), message)
        part = message.long_steps.next_slice
        stepping = {
            req_id: rows
            for req_id, rows in message.num_scheduled_tokens.items()
            if req_id not in results and (part is None or req_id != part.req_id)
        }
        if stepping and message.should_drain:
            results |= self._drain()
        elif stepping and self.runs_ahead:
            results |= self._ahead(stepping, message.long_steps.req_ids)
        elif stepping:
            results |= self._plain(stepping)
        if part is not None and part.req_id not in results:
            results |= self._part(part)
        self._runner.report_collected()
        return self._output(message, results)

    def _output(
        self, message: DiffusionSchedulerOutput, results: dict[str, StepResult]
    ) -> DiffusionRunnerOutput:
        runner, req_ids = self._runner, list(message.num_scheduled_tokens)
        more = dict[str, Any]()
        for guest in runner.guests:
            more |= guest.output_fields()
        return DiffusionRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            results=results,
            usage=runner.usage if req_ids else runner.idle_usage,
            num_rows=self._num_rows,
            launched=[s.req_ids for s in self._in_flight],
            epoch=runner.epoch,
            **more,
        )

    def pause_steps(self) -> StepPause:
        """Collect the steps in flight, drop work of guests, and run no step until it ends."""
        pause = self.collect_steps()
        self._runner.release_memory(even_work=True)
        return pause

    def collect_steps(self) -> StepPause:
        """Collect the steps in flight, and run no other step until the pause ends."""
        pause = self.step_pause = self.step_pause or StepPause(self._runner, self._results)
        while self._in_flight:
            pause.add(self._collect(self._in_flight.pop(0)))
        self._runner.report_collected()
        return pause

    def _remove_finished(self, req_ids: Collection[str]) -> None:
        """Remove finished requests, and steps in flight without any running request."""
        for req_id in req_ids:
            self._runner.remove(req_id)
        if req_ids:
            running = self._runner.canvases.keys()
            self._in_flight = [s for s in self._in_flight if not running.isdisjoint(s.req_ids)]

    def _start_all(self, admitted: Sequence[NewCanvas]) -> dict[str, StepResult]:
        """Start requests.

        Returns:
            the failures of requests without memory for their keys and values, and the results of
            requests whose first step is computed from another request's results.
        """
        results = {}
        if num_kept := sum(new.kept_positions for new in admitted if not new.host_layers):
            # Grow the store once for all requests, so that cached keys move only once.
            self._runner.pages.provide(num_kept)
        for new in admitted:
            error = self._start(new)
            if isinstance(error, OUT_OF_MEMORY):
                self._runner.release_memory(even_work=False)
                self._runner.release_memory(even_work=True)
                self._runner.pool.trim()  # release memory that earlier steps have left reserved
                error = self._start(new)
            if error is not None:
                results[new.req_id] = self._failed(new.req_id, error)
                continue
            message = f"request {new.req_id} computes its first step itself"
            outcomes, _ = self._attempt(message, self._runner.commit_known_step, new)
            results |= self._results(outcomes or {})
        return results

    @torch.inference_mode()
    def _plain(self, rows: Mapping[str, int]) -> dict[str, StepResult]:
        """Run one step, in which each request may compute up to the given rows."""
        return self._results(self._collect(self._launch(rows)))

    @torch.inference_mode()
    def _ahead(self, rows: Mapping[str, int], apart: Collection[str]) -> dict[str, StepResult]:
        """Collect one step, and launch the next one before its results are returned.

        The device computes while results are on their way to the clients. If a step does not hold
        all requests, a second step follows it, so that the device computes while the scheduler
        handles the results of the first. If no step is in flight, the first step has the requests
        of `rows`, with their rows. Requests in `apart` take part in neither step.
        """
        if not self._in_flight:
            self._in_flight.append(self._launch(rows))
        self._launch_behind(apart)
        outcomes = self._collect(self._in_flight.pop(0))
        failed = [req_id for req_id, error in outcomes.items() if error]
        held_back = [guest.held_back(outcomes) for guest in self._runner.guests]
        self._launch_behind({*apart, *failed, *chain.from_iterable(held_back)})
        return self._results(outcomes)

    @torch.inference_mode()
    def _drain(self) -> dict[str, StepResult]:
        """Collect the first step in flight, if there is one, and launch none."""
        return self._results(self._collect(self._in_flight.pop(0))) if self._in_flight else {}

    @torch.inference_mode()
    def _part(self, part: StepSlice) -> dict[str, StepResult]:
        """Run the next part of a long step; return the request's result after the last part."""
        long_steps = self._runner.join(LongStepRunner)
        failures: dict[str, Exception] = {}
        step = None
        if self._is_ready(part.req_id, failures, part.rows):
            message = f"a part of a step of request {part.req_id} could not be launched"
            step, failure = self._attempt(message, long_steps.run, part)
            if failure is not None and not long_steps.restarts(part, failure):
                failures[part.req_id] = failure
        return self._results(self._collect(LaunchResult(step, failures)))

    def _start(self, new: NewCanvas) -> Exception | None:
        """Start a request; return its error if it cannot start on some rank."""
        _, failure = self._attempt(f"request {new.req_id} cannot start", self._runner.start, new)
        if failure is not None:
            self._runner.remove(new.req_id)
        return failure

    def _launch_behind(self, apart: Collection[str]) -> None:
        """Launch the step after the steps in flight, if it can be launched without waiting."""
        in_flight = {req_id for launched in self._in_flight for req_id in launched.req_ids}
        if len(self._in_flight) == MAX_IN_FLIGHT or in_flight.issuperset(self._runner.canvases):
            return
        rows = next_behind(self._runner, in_flight, apart, self.limits)
        if rows:
            self._in_flight.append(self._launch(rows))

    def _launch(self, rows: Mapping[str, int]) -> LaunchResult:
        """Launch a step in which each request may compute the given rows.

        If memory runs out, the loop tries again after each of these measures, in this order:
        release memory of guests without losing work, release memory that other steps have left
        reserved, drop work of guests, leave out the request with the most rows. If the launch fails
        for another reason, requests that also fail alone are left out.
        """
        failures: dict[str, Exception] = {}
        ready = [req_id for req_id in rows if self._is_ready(req_id, failures, rows[req_id])]
        has_trimmed = False
        while ready:
            message = "a denoising step could not be launched"
            step, failure = self._attempt(message, self._runner.launch, ready)
            if failure is None:
                return LaunchResult(step, failures)
            if not isinstance(failure, OUT_OF_MEMORY):
                alone = self._failing_alone(ready) if len(ready) > 1 else {}
                failures |= alone or dict.fromkeys(ready, failure)
                ready = [req_id for req_id in ready if req_id not in failures]
                continue
            if self._runner.release_memory(even_work=False):
                continue
            if has_trimmed and not self._runner.release_memory(even_work=True):
                largest = self._largest(ready)
                failures[largest] = failure
                ready.remove(largest)
                self._runner.pages.release(largest)
            self._runner.pool.trim()
            has_trimmed = True
        return LaunchResult(None, failures)

    def _failing_alone(self, req_ids: Iterable[str]) -> dict[str, Exception]:
        """Return the requests that also fail in a step of their own, with their errors."""
        failing = {}
        for req_id in req_ids:
            message = f"a denoising step of request {req_id} alone could not be launched"
            _, failure = self._attempt(message, self._runner.launch, [req_id])
            if failure is not None and not isinstance(failure, OUT_OF_MEMORY):
                failing[req_id] = failure
        return failing

    def _is_ready(self, req_id: str, failures: dict[str, Exception], room: int) -> bool:
        """Whether a request's rule can begin the step; if not, add its error to `failures`."""
        canvas = self._runner.canvases[req_id]
        canvas.window.room = room
        failure = canvas.failure_of(canvas.begin)
        if failure is not None:
            failures[req_id] = failure
        return failure is None

    def _largest(self, req_ids: list[str]) -> str:
        """Return the request with the most rows; the last one if several have the same number."""
        return max(
            reversed(req_ids), key=lambda req_id: self._runner.canvases[req_id].count_next_rows()
        )

    def _collect(self, launched: LaunchResult) -> Outcomes:
        """Wait for a step and commit it; skip requests that were removed since its launch."""
        step, failures = launched
        outcomes: Outcomes = {}
        if step is not None:
            self._num_rows += step.batch.num_rows
            message = f"a denoising step failed; its {len(step.req_ids)} requests end"
            collected, failure = self._attempt(message, self._runner.collect, step)
            outcomes = collected or {}
            if failure is not None:
                failures = failures | dict.fromkeys(step.req_ids, failure)
        canvases = self._runner.canvases
        outcomes |= {r: reason for r, reason in failures.items() if r in canvases}
        move_to_end(canvases, outcomes)
        return outcomes

    def _attempt(
        self, message: str, call: Callable[[A], T], argument: A
    ) -> tuple[T | None, Exception | None]:
        """Call a function; return its result or any rank's failure. `message` is the log message.

        Out-of-memory errors are not logged here, because the caller decides which request ends.
        """
        result, failure = None, None
        try:
            result = call(argument)
        except Exception as error:
            if not isinstance(error, OUT_OF_MEMORY):
                logger.exception(message)
            failure = error.with_traceback(None)  # the frames of its traceback hold tensors
        if self._agreement is not None:
            failure = self._agreement.reach(failure)
        return (result, None) if failure is None else (None, failure)

    def _results(self, outcomes: Outcomes) -> dict[str, StepResult]:
        """Return the clients' results of a committed step."""
        return {req_id: self._result(req_id, error) for req_id, error in outcomes.items()}

    def _result(self, req_id: str, error: Exception | None) -> StepResult:
        if error is None:
            try:
                result = self._runner.canvases[req_id].report()
                if result.new_lengths:
                    self._runner.release_pages(req_id)
                return result
            except Exception as failure:
                logger.exception("the result of request %s could not be reported", req_id)
                error = failure
        return self._failed(req_id, error)

    def _failed(self, req_id: str, error: Exception) -> StepResult:
        logger.warning("request %s ends: %s", req_id, error)
        canvas = self._runner.canvases.get(req_id)
        return StepResult(
            new_token_ids=[],
            num_steps=0 if canvas is None else canvas.num_steps,
            num_forwards=0 if canvas is None else canvas.num_forwards,
            num_committed=0,
            error=f"{type(error).__name__}: {error}",
        )
