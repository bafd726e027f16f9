# SPDX-License-Identifier: Apache-2.0
"""Loop over steps: each is collected before the next is launched, or launched while others compute.

A failure in a step ends the requests that it concerns, never the engine. A rule that raises ends
its own request, on every rank. A step that runs out of memory is tried again without the requests
that take most. Any other failure ends all requests of the step, on all ranks that run it
(`agreement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from vllm.diffusion.engine.messages import StepResult
from vllm.diffusion.engine.scheduler.turns import by_priority, step_behind, to_the_end
from vllm.diffusion.engine.worker.agreement import OUT_OF_MEMORY
from vllm.diffusion.engine.worker.first_forwards import is_copied
from vllm.diffusion.engine.worker.window import ALL_ROWS
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vllm.diffusion import ops
    from vllm.diffusion.decoding import BatchedCommit, Candidates
    from vllm.diffusion.engine.messages import NewCanvas, Slice
    from vllm.diffusion.engine.scheduler.turns import NextForward, StepLimits
    from vllm.diffusion.engine.worker.agreement import Agreement
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.step_memory import StepMemory
    from vllm.diffusion.memory import ActivationPool, PageStore, Planner

logger = init_logger(__name__)

MOST_UNDER_WAY = 2  # steps: one that computes, and one that follows it without a pause

A = TypeVar("A")
T = TypeVar("T")
# The requests of a step, and why those failed that did.
Outcomes: TypeAlias = "dict[str, Exception | None]"


class Step(NamedTuple):
    """A launched step, to be waited for and committed.

    Attributes:
        started: time.perf_counter() before its first instruction.
        batch: its input.
        sampled: its result.
        memory: memory that it took.
    """

    started: float
    batch: StepBatch
    sampled: ops.HostCopy
    memory: StepMemory

    @property
    def req_ids(self) -> list[str]:
        return [canvas.req_id for canvas in self.batch.canvases]


class StepRunner(Protocol):
    """Interface of the model runner that the loop uses."""

    canvases: dict[str, Canvas]
    planner: Planner
    pool: ActivationPool
    caches: PageStore
    shares: StepLimits

    @property
    def kept_bytes(self) -> int: ...

    def start(self, new: NewCanvas) -> None: ...

    def forget(self, req_id: str) -> None: ...

    def step_known(self, new: NewCanvas) -> Outcomes: ...

    def launch(self, req_ids: list[str]) -> Step: ...

    def launch_slice(self, asked: Slice) -> Step | None: ...

    def drop_slices(self) -> bool: ...

    def collect(self, step: Step) -> Outcomes: ...


class LaunchResult(NamedTuple):
    """Result of launching a step; failed requests are reported when the step is collected.

    Attributes:
        step: None where nothing could be launched.
        failures: per request that does not take part, why.
    """

    step: Step | None
    failures: dict[str, Exception]

    @property
    def req_ids(self) -> list[str]:
        return [*(() if self.step is None else self.step.req_ids), *self.failures]


class Follows(NamedTuple):
    """Question of which requests follow the steps under way; its answer is cached.

    Attributes:
        under_way: requests whose step has been launched.
        wishes: next forwards of all requests that may take part, in the order of their turns.
        planner: plans of the steps.
        shares: limits above which a step takes only some requests.
        kept_bytes: bytes of the pool that a step cannot have.
    """

    under_way: set[str]
    wishes: list[tuple[str, NextForward]]
    planner: Planner
    shares: StepLimits
    kept_bytes: int

    def answer(self) -> dict[str, int]:
        """Return the requests of the next step, with their rows; none if it would not run whole."""
        planner = self.planner
        taken = step_behind(self.under_way, dict(self.wishes), planner.row_budget, self.shares)
        fits = bool(taken) and planner.runs_whole(sum(taken.values()), self.kept_bytes)
        return taken if fits else {}


class StepLoop:
    """Starts the requests of a runner and moves them one step at a time.

    Args:
        runner: owner of the requests.
        agreement: agreement with the ranks that run the same steps.

    Attributes:
        num_rows: rows of the steps collected since it was last set.
    """

    def __init__(self, runner: StepRunner, agreement: Agreement) -> None:
        self._runner, self._agreement = runner, agreement
        self._under_way: list[LaunchResult] = []  # in the order in which they were launched
        self._begun_anew: str | None = None  # whose long step has run out of memory once
        self._answered: tuple[Follows | None, dict[str, int]] = None, {}  # the newest question
        self.num_rows = 0

    def start(self, admitted: Iterable[NewCanvas]) -> dict[str, StepResult]:
        """Take in requests.

        Returns:
            the failures of those for whose keys and values there is no memory, and the results of
            those whose first step needs none but what a sibling has computed.
        """
        results = {}
        for new in admitted:
            error = self._start(new)
            if isinstance(error, OUT_OF_MEMORY):
                self._runner.pool.trim()  # what steps have left behind
                error = self._start(new)
            if error is not None:
                results[new.req_id] = self._failed(new.req_id, error)
                continue
            what = f"request {new.req_id} computes its first step itself"
            outcomes, _ = self._tried(what, self._runner.step_known, new)
            results |= self._results(outcomes or {})
        return results

    @torch.inference_mode()
    def plain(self, rows: Mapping[str, int]) -> dict[str, StepResult]:
        """Run one step, in which each request may compute up to the given rows."""
        return self._results(self._collect(self._launch(rows)))

    @torch.inference_mode()
    def ahead(self, rows: Mapping[str, int], apart: Collection[str] = ()) -> dict[str, StepResult]:
        """Collect one step, with the next one launched before its results are handed out.

        So the device computes while results are on their way to the clients. Where one step does
        not hold everybody, a second one follows it, so that the device computes while the results
        of the first are taken in. Requests that are kept apart take part in neither.

        Args:
            rows: requests that take part, with their rows, if no step is under way.
            apart: requests that are kept apart.
        """
        if not self._under_way:
            self._under_way.append(self._launch(rows))
        self._launch_behind(apart)
        outcomes = self._collect(self._under_way.pop(0))
        # Siblings may start with the next message, before what a request keeps changes.
        canvases = self._runner.canvases
        stays = [r for r, error in outcomes.items() if error or is_copied(canvases[r])]
        self._launch_behind({*apart, *stays})
        return self._results(outcomes)

    @torch.inference_mode()
    def slice(self, asked: Slice) -> dict[str, StepResult]:
        """Run the next slice of a long step; return the request's result if it was the last one.

        Where memory runs out, what steps have left behind is given back, and the step begins anew
        with the next slice, once.
        """
        failures: dict[str, Exception] = {}
        step, req_id = None, asked.req_id
        if self._is_ready(req_id, failures, asked.rows):
            what = f"a slice of request {req_id} could not be launched"
            step, failure = self._tried(what, self._runner.launch_slice, asked)
            if failure is not None:
                self._runner.drop_slices()
                if isinstance(failure, OUT_OF_MEMORY) and self._begun_anew != req_id:
                    self._begun_anew = req_id
                    self._runner.pool.trim()
                    return {}
                failures[req_id] = failure
        if step is not None:
            self._begun_anew = None
        return self._results(self._collect(LaunchResult(step, failures)))

    @property
    def launched(self) -> list[list[str]]:
        """Requests of each step under way, in the order of launch."""
        return [attempt.req_ids for attempt in self._under_way]

    def forget(self) -> None:
        """Drop steps under way whose requests have all gone."""
        running = self._runner.canvases.keys()
        self._under_way = [a for a in self._under_way if not running.isdisjoint(a.req_ids)]

    def _start(self, new: NewCanvas) -> Exception | None:
        """Take in a request; return why it could not start on some rank, if so."""
        _, failure = self._tried(f"request {new.req_id} cannot start", self._runner.start, new)
        if failure is not None:
            self._runner.forget(new.req_id)
        return failure

    def _launch_behind(self, apart: Collection[str]) -> None:
        """Launch the step that follows those under way, if that can be done without waiting.

        A step in chunks launches more kernels than a GPU's queue holds, so launching would wait for
        it.
        """
        under_way = {req_id for attempt in self._under_way for req_id in attempt.req_ids}
        if len(self._under_way) == MOST_UNDER_WAY or under_way.issuperset(self._runner.canvases):
            return
        canvases = by_priority(self._runner.canvases, lambda canvas: canvas.params.priority or 0)
        wishes = {
            req_id: canvas.wish
            for req_id, canvas in canvases.items()
            if req_id not in apart and not canvas.is_complete
        }
        asked = Follows(
            under_way,
            list(wishes.items()),  # whose order counts
            self._runner.planner,
            self._runner.shares,
            self._runner.kept_bytes,
        )
        if asked != self._answered[0]:
            self._answered = asked, asked.answer()
        if self._answered[1]:
            self._under_way.append(self._launch(self._answered[1]))

    def _launch(self, rows: Mapping[str, int]) -> LaunchResult:
        """Launch a step with these rows a request.

        Where memory runs out, what other steps have left behind is released, then what a paused
        step holds, then the requests that take most are left out, each time with another try.
        """
        failures: dict[str, Exception] = {}
        ready = [req_id for req_id in rows if self._is_ready(req_id, failures, rows[req_id])]
        has_trimmed = False
        while ready:
            what = "a denoise step could not be launched"
            step, failure = self._tried(what, self._runner.launch, ready)
            if failure is None:
                return LaunchResult(step, failures)
            if not isinstance(failure, OUT_OF_MEMORY):
                return LaunchResult(None, failures | dict.fromkeys(ready, failure))
            if has_trimmed and not self._runner.drop_slices():
                largest = self._largest(ready)
                failures[largest] = failure
                ready.remove(largest)
                self._runner.caches.release(largest)
            self._runner.pool.trim()
            has_trimmed = True
        return LaunchResult(None, failures)

    def _is_ready(self, req_id: str, failures: dict[str, Exception], room: int = ALL_ROWS) -> bool:
        """Whether a request's rule can begin the step; else `failures` gets its error."""
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
        """Return the request with the most rows, the last one of several."""
        return max(reversed(req_ids), key=lambda req_id: self._runner.canvases[req_id].next_rows)

    def _collect(self, attempt: LaunchResult) -> Outcomes:
        """Wait for a step and commit it; requests that have gone meanwhile are left out."""
        step, failures = attempt
        outcomes: Outcomes = {}
        if step is not None:
            self.num_rows += step.batch.num_rows
            what = f"a denoise step failed; its {len(step.req_ids)} requests end"
            found, failure = self._tried(what, self._runner.collect, step)
            outcomes = found or {}
            if failure is not None:
                failures = failures | dict.fromkeys(step.req_ids, failure)
        canvases = self._runner.canvases
        outcomes |= {r: reason for r, reason in failures.items() if r in canvases}
        to_the_end(canvases, outcomes)
        return outcomes

    def _tried(
        self, what: str, call: Callable[[A], T], argument: A
    ) -> tuple[T | None, Exception | None]:
        """Call, and return the result, or the failure of any rank; `what` is for the log.

        Memory that runs out is not logged here: the caller decides which request ends.
        """
        found, failure = None, None
        try:
            found = call(argument)
        except Exception as error:
            if not isinstance(error, OUT_OF_MEMORY):
                logger.exception(what)
            failure = error.with_traceback(None)  # whose frames hold tensors
        failure = self._agreement.reach(failure)
        return (found, None) if failure is None else (None, failure)

    def _results(self, outcomes: Outcomes) -> dict[str, StepResult]:
        """Make the clients' results of a committed step."""
        canvases = self._runner.canvases
        return {
            req_id: canvases[req_id].report() if error is None else self._failed(req_id, error)
            for req_id, error in outcomes.items()
        }

    def _failed(self, req_id: str, error: Exception) -> StepResult:
        logger.warning("request %s ends: %s", req_id, error)
        canvas = self._runner.canvases.get(req_id)
        return StepResult(
            new_token_ids=[],
            num_forwards=0 if canvas is None else canvas.num_forwards,
            num_committed=0,
            error=f"{type(error).__name__}: {error}",
        )


def commit(canvas: Canvas, found: Candidates | BatchedCommit) -> Exception | None:
    """Commit what a step found for a request; return the error that ends it alone, if any."""
    try:
        canvas.commit(found)
    except Exception as error:
        logger.exception("decoding of request %s failed", canvas.req_id)
        return error
    return None
