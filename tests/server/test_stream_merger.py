# SPDX-License-Identifier: Apache-2.0
"""Canvases between the chunks of a handler, for readers of any speed."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.diffusion.api.streams import StreamMerger


def output(step: int | None, text: str = "", choice: int = 0) -> Any:
    """Return an engine output with a canvas, new text, or both."""
    report = {} if step is None else {"canvas": {"step": step}}
    completion = SimpleNamespace(index=choice, token_ids=list(text), finish_reason=None)
    return SimpleNamespace(outputs=[completion], kv_transfer_params={"dllm": report})


def written(choice: int, canvas: dict[str, Any]) -> str:
    return f"canvas {choice}.{canvas['step']}"


class Handler:
    """Makes a chunk of every output with text, as upstream's handlers do."""

    def __init__(self, outputs: list[Any], *, pause_s: float = 0.0) -> None:
        self.merger = StreamMerger()
        self.num_heard = 0
        self.is_closed = False
        self._outputs = outputs
        self._pause_s = pause_s

    def stream(self) -> AsyncGenerator[str, None]:
        return self.merger.merge(self._chunks(), written)

    async def _chunks(self) -> AsyncGenerator[str, None]:
        try:
            for actual in self._outputs:
                await asyncio.sleep(self._pause_s)
                self.num_heard += 1
                if self.merger.feed(actual):
                    yield "".join(actual.outputs[0].token_ids)
            yield "[DONE]"
        finally:
            self.is_closed = True


def test_a_quick_reader_sees_every_step() -> None:
    handler = Handler([output(1), output(2, "a"), output(3), output(4, "b")], pause_s=0.01)

    async def read() -> list[str]:
        return [text async for text in handler.stream()]

    wanted = ["canvas 0.1", "canvas 0.2", "a", "canvas 0.3", "canvas 0.4", "b", "[DONE]"]
    assert asyncio.run(read()) == wanted
    assert handler.is_closed


def test_a_slow_reader_sees_the_newest_step() -> None:
    """While the reader handles an event, the handler receives outputs up to its next chunk."""
    steps = [output(step) for step in range(1, 100)]
    handler = Handler([output(0, "a"), *steps, output(100, "b"), output(101, "c")])

    async def read() -> list[str]:
        actual = []
        async for text in handler.stream():
            actual.append(text)
            for _ in range(1000):
                await asyncio.sleep(0)
        return actual

    actual = asyncio.run(read())
    assert [text for text in actual if not text.startswith("canvas")] == ["a", "b", "c", "[DONE]"]
    assert actual.index("canvas 0.100") < actual.index("b")
    assert actual.index("canvas 0.101") < actual.index("c")
    assert len(actual) <= 10


def test_every_choice_has_its_newest_canvas() -> None:
    handler = Handler([output(None, "a")])
    for early in (output(1, choice=1), output(1), output(2, choice=1)):
        assert not handler.merger.feed(early)

    async def read() -> list[str]:
        return [text async for text in handler.stream()]

    assert asyncio.run(read()) == ["canvas 0.1", "canvas 1.2", "a", "[DONE]"]
    assert handler.merger.reports[1] == {"canvas": {"step": 2}}


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_a_reader_that_leaves_closes_the_handler(way: str) -> None:
    handler = Handler([output(step) for step in range(1000)], pause_s=0.01)

    async def read() -> None:
        stream = handler.stream()
        assert await anext(stream) == "canvas 0.0"
        if way == "close":
            await stream.aclose()
            return
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(read())
    assert handler.is_closed
    assert handler.num_heard < 1000


def test_an_error_of_the_handler_reaches_the_reader() -> None:
    merger = StreamMerger()

    async def chunks() -> AsyncGenerator[str, None]:
        yield "a"
        raise ValueError("broken")

    async def read() -> None:
        async for _ in merger.merge(chunks(), written):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
