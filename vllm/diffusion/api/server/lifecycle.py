# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of the server: whether it takes requests, and how it ends.

When it ends, running requests finish and new ones are refused. Upstream's server stops the engine
first and goes on answering HTTP meanwhile; requests that reach a stopping engine fail with
unhelpful errors. So the engine is stopped only after the last open request has its answer, and new
requests get 503 from the first moment.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.engine.protocol import EngineClient

logger = init_logger(__name__)

State = Literal["ready", "paused", "draining", "dead"]

LEAVING = "the server is shutting down; try again later or elsewhere"
_ANSWER_S = 1.0  # a probe's patience with an engine that is inside a step
_FLUSH_S = 2.0  # for the last errors to reach their clients
_WAKE_S = 0.5  # between polls of an engine that is ending


class Lifecycle:
    """State of one server process; must be made while its event loop runs.

    Args:
        engine: the engine's client; its `shutdown` drains from now on.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine: Any = engine
        self._loop = asyncio.get_running_loop()
        self._stop_engine = engine.shutdown
        self._is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._question: asyncio.Task[bool] | None = None
        self._was_paused = False
        self._engine.shutdown = self._shut_down

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Hold off the engine's stop while the context is open, for at most the drain's time."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    async def state(self) -> State:
        """Return the state that `/ready` reports."""
        if self._is_draining:
            return "draining"
        if self._engine.errored:
            return "dead"
        return "paused" if await self._is_paused() else "ready"

    async def _is_paused(self) -> bool:
        """Ask the engine; while it is inside a long step, return its last answer."""
        if self._question is None:
            self._question = asyncio.ensure_future(self._engine.is_paused())
        done, _ = await asyncio.wait([self._question], timeout=_ANSWER_S)
        if done:
            question, self._question = self._question, None
            self._was_paused = question.exception() is None and question.result()
        return self._was_paused

    def _shut_down(self, timeout: float | None = None) -> None:
        """Drain and stop; upstream calls it in a thread on a signal, and again at the very end."""
        drains = not self._is_draining and not self._is_on_loop()
        self._is_draining = True
        if not drains:
            self._stop_engine(timeout=timeout)
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

    async def _drain(self, timeout: float) -> None:
        if self._num_open:
            logger.info("shutting down: %d requests have %g s left", self._num_open, timeout)
        if not await self._is_idle_within(timeout):
            logger.warning("shutting down: %d requests are cut off", self._num_open)
            requests = self._engine.output_processor
            requests.propagate_error(GracefulHTTPError(LEAVING, HTTPStatus.SERVICE_UNAVAILABLE))
            await self._engine.abort(list(requests.request_states), internal=True)
            await self._is_idle_within(_FLUSH_S)
        # Else it would report the end of the engine's process as a failure.
        if self._engine.output_handler is not None:
            self._engine.output_handler.cancel()

    async def _keep_awake(self) -> None:
        """Ask the engine something repeatedly until this task is cancelled.

        On some machines a signal does not end an engine's wait for requests; a question does.
        """
        while True:
            with suppress(Exception):
                await asyncio.wait_for(self._engine.is_paused(), _WAKE_S)
            await asyncio.sleep(_WAKE_S)

    async def _is_idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()
