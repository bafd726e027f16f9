# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of the server: whether it accepts requests, and how it shuts down.

During a shutdown, running requests finish and new ones are refused. Upstream's server stops the
engine first and continues to accept HTTP requests, which then fail with unhelpful errors. So here
the engine is stopped only after the last open request has its answer, and new requests get 503
from the start.

If an engine process dies, the server exits too, because it cannot restart the engine. Requests get
503 at once, and the server exits with status 1 so that a supervisor can restart it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

from vllm import envs as upstream_envs
from vllm.diffusion.core import envs
from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm.engine.protocol import EngineClient

logger = init_logger(__name__)

State = Literal["ready", "paused", "unresponsive", "draining", "dead"]

LEAVING = "the server is shutting down; try again later or elsewhere"
LOST = "an engine of the server is gone; try again later or elsewhere"
_ANSWER_S = 1.0  # seconds that a probe waits for an engine that is inside a step
_FLUSH_S = 2.0  # seconds for the last errors to reach their clients
_WAKE_S = 0.5  # seconds between polls of an engine that is shutting down
_status = 0
_UPDATING = ("start_weight_update", "update_weights", "finish_weight_update", "reload_weights")
_END_S = 4.0  # deadline in seconds for the shutdown after an engine died


def fail() -> None:
    """Exit with a non-zero status after the shutdown."""
    global _status
    _status = 1


def take_status() -> int:
    """Return the exit status of this process, and reset it to 0."""
    global _status
    status, _status = _status, 0
    return status


class Lifecycle:
    """State of one server process; must be created while its event loop runs.

    Args:
        engine: the engine's client. Its `shutdown` is replaced by one that drains requests, and its
            `collective_rpc` by one that stops a weight update on all replicas if it fails on one.
        end: stops the HTTP server.
        engines: engine processes on this host: title by process id.
    """

    def __init__(
        self, engine: EngineClient, end: Callable[[], object], engines: Mapping[int, str]
    ) -> None:
        self._engine: Any = engine
        self._end = end
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._stop_engine = engine.shutdown
        self._is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._question: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._was_paused = False
        self._engine.shutdown = self._shut_down
        self._call_all, self._engine.collective_rpc = engine.collective_rpc, self._call_workers
        self._tell_requests = self._engine.output_processor.propagate_error
        self._engine.output_processor.propagate_error = self._end_requests_with
        self._is_lost = False
        self._losing: asyncio.Task[None] | None = None
        self._cut = threading.Timer(_END_S, os._exit, [1])
        self._cut.daemon = True
        self._watch_engines()

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused; None while they are accepted."""
        if self._is_draining:
            return LEAVING
        return LOST if self._is_lost else None

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Context of one open request; a shutdown waits for it, up to the drain's timeout."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    async def state(self) -> State:
        if self._is_draining:
            return "draining"
        if self._is_lost or self._engine.errored:
            return "dead"
        is_paused = await self._is_paused()
        if self.silent_s > envs.max_silence_s():
            return "unresponsive"
        return "paused" if is_paused else "ready"

    @property
    def silent_s(self) -> float:
        """Seconds since the pending query was sent to the engine; 0 if none is pending."""
        if self._question is None or self._question.done():
            return 0.0
        return self._loop.time() - self._asked_at

    async def _is_paused(self) -> bool:
        """Return whether the engine is paused; during a long step, return its last answer."""
        if self._question is None or self._question.done():
            self._asked_at = self._loop.time()
            self._question = asyncio.ensure_future(self._ask())
        await asyncio.wait([self._question], timeout=_ANSWER_S)
        return self._was_paused

    async def _ask(self) -> None:
        """Query whether the engine is paused, or its workers hold steps after a failed update."""
        try:
            paused = await self._engine.is_paused() or any(await self._call_all("holds_steps"))
        except Exception:
            paused = False
        self._was_paused = paused

    async def _call_workers(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of all workers.

        If a weight update fails on one replica, make it fail on all.
        """
        try:
            return await self._call_all(method, *args, **named)
        except Exception as error:
            if method in _UPDATING:
                with suppress(Exception):  # a replica may be gone, too
                    if any(await self._call_all("has_succeeded")):
                        await self._call_all("fail_with_others", args=(str(error),))
                    elif method == "update_weights":  # no replica has changed a weight
                        await self._call_all("cancel_update")
            raise

    def _shut_down(self, timeout: float | None = None) -> None:
        """Drain and stop. Upstream calls this in a thread on a signal, and once more at the end."""
        if self._engine.errored and not (self._is_draining or self._is_lost):
            # The engine was on another host, or failed with an error that it has logged.
            self._is_lost = True
            logger.error("an engine has ended: the server exits with status 1")
        drains = not self._is_draining and not self._is_on_loop()
        self._is_draining = True
        if not drains:
            self._stop_engine(timeout=timeout)
            if self._is_lost:
                self._cut.cancel()
                fail()
            return
        asyncio.run_coroutine_threadsafe(self._drain(timeout or 0.0), self._loop).result()
        waking = asyncio.run_coroutine_threadsafe(self._keep_awake(), self._loop)
        self._stop_engine(timeout=timeout)
        waking.cancel()

    def _is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _watch_engines(self) -> None:
        """Watch the engine processes with pidfds; upstream polls only every few seconds."""
        for pid, title in self._engines.items():
            with suppress(AttributeError, OSError):  # not supported by every system
                end = os.pidfd_open(pid)
                self._loop.add_reader(end, self._note_end, end, pid, title)

    def _note_end(self, end: int, pid: int, title: str) -> None:
        self._loop.remove_reader(end)
        os.close(end)
        if self._is_draining or self._is_lost:
            return
        self._is_lost = True
        self._end_requests_with(EngineDeadError())
        # Otherwise upstream's first process reports it.
        if multiprocessing.parent_process() is None:
            logger.error("%s (process %d) has ended: the server exits with status 1", title, pid)
        if upstream_envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            return
        # Upstream would let the other engines finish their requests.
        for other in self._engines.keys() - {pid}:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        self._cut.start()
        self._losing = self._loop.create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        await self._is_idle_within(_FLUSH_S)
        self._end()

    def _end_requests_with(self, error: Exception) -> None:
        """End open requests with an error. For a dead engine the error advises to try again."""
        if isinstance(error, EngineDeadError):
            error = GracefulHTTPError(LOST, HTTPStatus.SERVICE_UNAVAILABLE)
        self._tell_requests(error)

    async def _drain(self, timeout: float) -> None:
        if self._num_open:
            logger.info("shutting down: %d requests have %g s left", self._num_open, timeout)
        if not await self._is_idle_within(timeout):
            logger.warning("shutting down: %d requests are aborted", self._num_open)
            requests = self._engine.output_processor
            self._tell_requests(GracefulHTTPError(LEAVING, HTTPStatus.SERVICE_UNAVAILABLE))
            await self._engine.abort(list(requests.request_states), internal=True)
            await self._is_idle_within(_FLUSH_S)
        # Otherwise it would report the exit of the engine's process as a failure.
        if self._engine.output_handler is not None:
            self._engine.output_handler.cancel()

    async def _keep_awake(self) -> None:
        """Query the engine repeatedly until this task is cancelled.

        On some machines a signal does not interrupt an engine that waits for requests, but a query
        does.
        """
        while True:
            with suppress(Exception):
                await asyncio.wait_for(self._engine.is_paused(), _WAKE_S)
            await asyncio.sleep(_WAKE_S)

    async def _is_idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()
