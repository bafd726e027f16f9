# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, with canvases between the chunks of an answer.

A reader that is slow, or stops reading, blocks nothing: for every choice only the newest canvas
waits, older ones are dropped, and upstream joins deltas that were not fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.report import reports_by_choice, timeout_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from vllm.outputs import RequestOutput


def event(data: str) -> str:
    """Format one server-sent event."""
    return f"data: {data}\n\n"


DONE = event("[DONE]")


class StreamMerger:
    """Collects the scheduler's reports and canvases from outputs on their way to a handler.

    Args:
        num_choices: number of answers.

    Attributes:
        reports: newest report of every choice.
    """

    def __init__(self, num_choices: int = 1) -> None:
        self.reports: dict[int, dict[str, Any]] = {}
        self._num_choices = num_choices
        self._num_ended = 0
        self._canvases: dict[int, dict[str, Any]] = {}  # those that nobody has taken yet
        self._news = asyncio.Event()

    def feed(self, output: RequestOutput, first_choice: int = 0) -> bool:
        """Note the report and canvas of an output, whose choices count from `first_choice`.

        Returns:
            whether there is more to the output than that.
        """
        for index, report in reports_by_choice(output).items():
            choice = first_choice + index
            self.reports[choice] = report
            if "canvas" in report:
                self._canvases[choice] = report["canvas"]
                self._news.set()
        self._num_ended += sum(c.finish_reason is not None for c in output.outputs)
        return any(c.token_ids or c.finish_reason is not None for c in output.outputs)

    @property
    def timeout(self) -> str | None:
        """Error of an answer whose time was over; None if there is none."""
        return next(filter(None, map(timeout_in, self.reports.values())), None)

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return self._num_ended >= self._num_choices

    async def merge(
        self, chunks: AsyncGenerator[str, None], canvas_event: Callable[[int, dict[str, Any]], str]
    ) -> AsyncGenerator[str, None]:
        """Yield `chunks`, and before each the canvases that came meanwhile.

        Args:
            chunks: a handler's events. The handler goes on while canvases are sent.
            canvas_event: function of a choice and its packed canvas that returns the event.
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
                        for text in self._take(canvas_event):
                            yield text
                finally:
                    next_chunk.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([next_chunk])
                chunk = next_chunk.result()
                if chunk is None:
                    return
                yield chunk

    def _take(self, canvas_event: Callable[[int, dict[str, Any]], str]) -> list[str]:
        taken, self._canvases = self._canvases, {}
        return [canvas_event(choice, canvas) for choice, canvas in sorted(taken.items())]
