# SPDX-License-Identifier: Apache-2.0
"""Streams of outputs and of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.diffusion.api.report import reports_by_choice
from vllm.exceptions import GenerationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from vllm.outputs import RequestOutput

Item = TypeVar("Item")


def event(data: str) -> str:
    """Format one server-sent event."""
    return f"data: {data}\n\n"


DONE = event("[DONE]")


async def wait_for_first(items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """Wait for the first item of a stream, then return a generator of all items.

    An error before the first item is raised here, so that it can be answered with its own status.
    """
    first = await anext(items, None)

    async def remaining() -> AsyncGenerator[Item, None]:
        async with aclosing(items):
            if first is not None:
                yield first
            async for item in items:
                yield item

    return remaining()


async def final_output(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the last output of a request.

    Raises:
        GenerationError: the request ended without an output.
    """
    latest = None
    async for output in outputs:
        latest = output
    if latest is None:
        raise GenerationError("the request ended without an answer")
    return latest


class TaskScope:
    """Context manager that cancels its unfinished tasks on exit."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> TaskScope:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class StreamMerger:
    """Collects reports and canvases from the engine's outputs before a handler receives them, and
    sends the canvases between the chunks of the answer.

    A slow or stalled reader does not block the engine. For every choice only the latest canvas is
    kept, older canvases are dropped, and upstream joins deltas that were not fetched.

    Args:
        num_choices: number of answers.

    Attributes:
        reports: latest report of every choice.
    """

    def __init__(self, num_choices: int = 1) -> None:
        self.reports: dict[int, dict[str, Any]] = {}
        self._num_choices = num_choices
        self._num_ended = 0
        self._canvases: dict[int, dict[str, Any]] = {}  # canvases that have not been sent yet
        self._news = asyncio.Event()

    def feed(self, output: RequestOutput, first_choice: int = 0) -> bool:
        """Store the report and the canvas of an output.

        Args:
            first_choice: number of the choice that the output's choice 0 belongs to.

        Returns:
            whether the output also has tokens or a finish reason for the handler.
        """
        for index, report in reports_by_choice(output).items():
            choice = first_choice + index
            self.reports[choice] = report
            if "canvas" in report:
                self._canvases[choice] = report["canvas"]
                self._news.set()
        output.kv_transfer_params = None  # upstream would send it in a stream's last chunk
        self._num_ended += sum(c.finish_reason is not None for c in output.outputs)
        return any(c.token_ids or c.finish_reason is not None for c in output.outputs)

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return self._num_ended >= self._num_choices

    async def merge(
        self,
        chunks: AsyncGenerator[Item, None],
        canvas_chunk: Callable[[int, dict[str, Any]], Item],
    ) -> AsyncGenerator[Item, None]:
        """Yield `chunks`, and before each chunk the canvases that arrived in the meantime.

        Args:
            chunks: a handler's chunks. The handler continues while canvases are sent.
            canvas_chunk: function that makes the chunk for a choice and its packed canvas.
        """
        async with aclosing(chunks):
            while True:
                next_chunk = asyncio.ensure_future(anext(chunks, None))
                next_chunk.add_done_callback(lambda _: self._news.set())
                is_ready = False
                try:
                    while not is_ready:
                        await self._news.wait()
                        self._news.clear()
                        is_ready = next_chunk.done()
                        for canvas in self._take():
                            yield canvas_chunk(*canvas)
                finally:
                    next_chunk.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([next_chunk])
                chunk = next_chunk.result()
                if chunk is None:
                    return
                yield chunk

    def _take(self) -> list[tuple[int, dict[str, Any]]]:
        taken, self._canvases = self._canvases, {}
        return sorted(taken.items())
