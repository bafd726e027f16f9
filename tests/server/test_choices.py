# SPDX-License-Identifier: Apache-2.0
"""One request for several answers as several requests, over an engine that only pretends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind

from vllm import SamplingParams
from vllm.diffusion.api.choices import ChoicesClient
from vllm.diffusion.api.report import DiffusionReport, told

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PROMPT = {"prompt_token_ids": [1, 2, 3]}
REPORT = {"steps": 4, "num_forwards": 3, "num_forwards_saved": 1, "num_committed": 6}
TIMES = {"queue_ms": 1.0, "denoise_ms": 2.0, "ignored": []}


class Engine:
    """Answers with the seed as text, in two outputs."""

    def __init__(self, *, fails: bool = False) -> None:
        self.asked: list[tuple[str, SamplingParams]] = []
        self.num_closed = 0
        self.name = "engine"
        self._fails = fails

    async def generate(
        self, prompt: Any, sampling: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        self.asked.append((request_id, sampling))
        try:
            if self._fails:
                yield output("", "error", {"error": "out of memory"})
                return
            yield output("...", None, None)
            await asyncio.sleep(0)
            yield output(str(sampling.seed), "stop", {**REPORT, **TIMES, "seed": sampling.seed})
        finally:
            self.num_closed += 1


class Door:
    def decide(self, sampling: SamplingParams, prompt_token_ids: list[int]) -> Any:
        assert prompt_token_ids == PROMPT["prompt_token_ids"]
        if sampling.extra_args:
            raise ValueError("refused")
        return None


def output(text: str, finish_reason: str | None, found: dict[str, Any] | None) -> Any:
    completion = SimpleNamespace(index=0, text=text, finish_reason=finish_reason)
    carried = None if found is None else {"dllm": found}
    return SimpleNamespace(outputs=[completion], kv_transfer_params=carried)


def client(engine: Engine) -> Any:
    return ChoicesClient(engine, Door())  # type: ignore[arg-type]


def collect(stream: AsyncGenerator[Any, None]) -> list[Any]:
    async def read() -> list[Any]:
        return [found async for found in stream]

    return asyncio.run(read())


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, **fields)


def test_one_answer_is_upstreams_request() -> None:
    engine, sampling = Engine(), sampled(seed=7)
    found = collect(client(engine).generate(PROMPT, sampling, "r"))
    assert [f.outputs[0].text for f in found] == ["...", "7"]
    assert engine.asked == [("r", sampling)]
    assert client(engine).name == "engine"  # everything else is the engine's


def test_several_answers_in_turn() -> None:
    engine = Engine()
    sampling = sampled(n=3, seed=2**64 - 2, output_kind=RequestOutputKind.DELTA)
    found = collect(client(engine).generate(PROMPT, sampling, "r"))
    assert [(i, s.n, s.seed) for i, s in engine.asked] == [
        ("r-0", 1, 2**64 - 2),
        ("r-1", 1, 2**64 - 1),
        ("r-2", 1, 0),
    ]
    last = {f.outputs[0].index: f for f in found if f.outputs[0].finish_reason}
    assert {index: f.outputs[0].text for index, f in last.items()} == {
        0: str(2**64 - 2),
        1: str(2**64 - 1),
        2: "0",
    }
    assert told(last[2]) == {2: {**REPORT, **TIMES, "seed": 0}}


def test_several_answers_together() -> None:
    sampling = sampled(n=3, seed=5, output_kind=RequestOutputKind.FINAL_ONLY)
    (whole,) = collect(client(Engine()).generate(PROMPT, sampling, "r"))
    assert [(c.index, c.text) for c in whole.outputs] == [(0, "5"), (1, "6"), (2, "7")]
    report = DiffusionReport.of(told(whole).values())
    assert report.seeds == [5, 6, 7]
    assert (report.num_forwards, report.num_forwards_saved) == (9, 3)
    assert report.tokens_per_forward == 2.0


def test_without_a_seed_the_engine_draws_each() -> None:
    engine = Engine()
    collect(client(engine).generate(PROMPT, sampled(n=2), "r"))
    assert [s.seed for _, s in engine.asked] == [None, None]


def test_a_request_is_refused_before_it_starts() -> None:
    with pytest.raises(ValueError, match="refused"):
        client(Engine()).generate(PROMPT, sampled(extra_args={"steps": 0}), "r")


@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_of_the_engine_says_why(n: int) -> None:
    engine = Engine(fails=True)
    with pytest.raises(GenerationError, match="out of memory"):
        collect(client(engine).generate(PROMPT, sampled(n=n), "r"))


def test_a_reader_that_leaves_closes_every_request() -> None:
    engine = Engine()

    async def leave() -> None:
        stream = client(engine).generate(PROMPT, sampled(n=3), "r")
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert engine.num_closed == len(engine.asked)


def test_an_aborted_request_reports_nothing() -> None:
    report = DiffusionReport.of([{}, {**REPORT, **TIMES, "seed": 3}])
    assert (report.seeds, report.num_forwards) == ([3], 3)
    empty = DiffusionReport.of([])
    assert (empty.steps, empty.num_forwards, empty.tokens_per_forward) == (None, 0, 0.0)
    assert told(output("", None, None)) == {}
