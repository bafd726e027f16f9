# SPDX-License-Identifier: Apache-2.0
"""A request for several answers becomes several requests; a stub replaces the engine."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind

from vllm import SamplingParams
from vllm.diffusion.api.choices import ChoicesClient
from vllm.diffusion.api.generate import GenerateHandler
from vllm.diffusion.api.protocol import GenerateRequest
from vllm.diffusion.api.report import DiffusionReport, reports_by_choice
from vllm.diffusion.api.validator import RequestRefused, Validator
from vllm.diffusion.request.decision import DECISION, decision_of
from vllm.diffusion.request.families import LLADA
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

PROMPT = {"prompt_token_ids": [1, 2, 3]}
REPORT = {
    "steps": 4,
    "num_forwards": 3,
    "num_forwards_saved": 1,
    "num_committed": 6,
    "num_end_tokens": 2,
}
TIMES = {"queue_ms": 1.0, "denoise_ms": 2.0, "ignored": []}


class Engine:
    """Answers with the seed as text, in two outputs."""

    def __init__(self, *, fails: bool = False) -> None:
        self.requests: list[tuple[str, SamplingParams]] = []
        self.num_closed = 0
        self.name = "engine"
        self._fails = fails

    async def generate(
        self, prompt: Any, sampling: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        self.requests.append((request_id, sampling))
        try:
            if self._fails:
                raise GenerationError("out of memory")
            yield output("...", None, None)
            await asyncio.sleep(0)
            yield output(str(sampling.seed), "stop", {**REPORT, **TIMES, "seed": sampling.seed})
        finally:
            self.num_closed += 1


MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=51, eos=50, eot=None, stop=frozenset({50})),
    max_model_len=1024,
    vocab_size=52,
)


class CountingValidator(Validator):
    """A validator without a model, which counts the requests that it decides."""

    def __init__(self) -> None:
        super().__init__(None)
        self.num_decided = 0

    @property
    def _model(self) -> ServedModel:
        self.num_decided += 1
        return MODEL


def output(text: str, finish_reason: str | None, actual: dict[str, Any] | None) -> Any:
    completion = SimpleNamespace(
        index=0, text=text, token_ids=[], finish_reason=finish_reason, stop_reason=None
    )
    carried = None if actual is None else {"dllm": actual}
    return SimpleNamespace(outputs=[completion], kv_transfer_params=carried)


def client(engine: Engine, validator: Validator | None = None) -> Any:
    return ChoicesClient(engine, validator or CountingValidator())  # type: ignore[arg-type]


def collect(stream: AsyncGenerator[Any, None]) -> list[Any]:
    async def read() -> list[Any]:
        return [actual async for actual in stream]

    return asyncio.run(read())


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, **fields)


def test_one_answer_is_upstreams_request() -> None:
    engine, sampling = Engine(), sampled(seed=7, max_tokens=20)
    answer = collect(client(engine).generate(PROMPT, sampling, "r"))
    assert [f.outputs[0].text for f in answer] == ["...", "7"]
    ((request_id, own),) = engine.requests
    assert (request_id, own.n, own.seed, own.max_tokens) == ("r", 1, 7, 20)
    assert sampling.extra_args is None  # the caller's object is unchanged
    assert client(engine).name == "engine"  # other attributes are the engine's


def test_several_answers_in_turn() -> None:
    engine = Engine()
    sampling = sampled(n=3, seed=2**64 - 2, output_kind=RequestOutputKind.DELTA)
    answer = collect(client(engine).generate(PROMPT, sampling, "r"))
    assert [(i, s.n, s.seed) for i, s in engine.requests] == [
        ("r-0", 1, 2**64 - 2),
        ("r-1", 1, 2**64 - 1),
        ("r-2", 1, 0),
    ]
    last = {f.outputs[0].index: f for f in answer if f.outputs[0].finish_reason}
    assert {index: f.outputs[0].text for index, f in last.items()} == {
        0: str(2**64 - 2),
        1: str(2**64 - 1),
        2: "0",
    }
    assert reports_by_choice(last[2]) == {2: {**REPORT, **TIMES, "seed": 0}}


def test_several_answers_together() -> None:
    sampling = sampled(n=3, seed=5, output_kind=RequestOutputKind.FINAL_ONLY)
    (whole,) = collect(client(Engine()).generate(PROMPT, sampling, "r"))
    assert [(c.index, c.text) for c in whole.outputs] == [(0, "5"), (1, "6"), (2, "7")]
    report = DiffusionReport.of(reports_by_choice(whole).values())
    assert report.seeds == [5, 6, 7]
    assert (report.num_forwards, report.num_forwards_saved) == (9, 3)
    assert report.tokens_per_forward == 2.0
    assert report.num_end_tokens == 6


def test_without_a_seed_the_engine_draws_each() -> None:
    engine = Engine()
    collect(client(engine).generate(PROMPT, sampled(n=2), "r"))
    assert [s.seed for _, s in engine.requests] == [None, None]


def test_a_request_is_refused_before_it_starts() -> None:
    with pytest.raises(RequestRefused, match="steps: given 0"):
        client(Engine()).generate(PROMPT, sampled(extra_args={"steps": 0}), "r")


@pytest.mark.parametrize("n", [1, 3])
def test_all_answers_share_one_decision(n: int) -> None:
    engine, validator = Engine(), CountingValidator()
    sampling = sampled(n=n, seed=2**64 - 1, extra_args={"gen_length": 64, "steps": 8})
    collect(client(engine, validator).generate(PROMPT, sampling, "r"))
    assert validator.num_decided == 1
    owned = [own for _, own in engine.requests]
    assert len(owned) == n
    assert len({id(own.extra_args[DECISION]) for own in owned}) == 1
    actual = [decision_of(own, MODEL, [1, 2, 3]) for own in owned]
    assert [decided.seed for decided in actual] == [(2**64 - 1 + i) % 2**64 for i in range(n)]
    assert {(decided.gen_length, decided.steps) for decided in actual} == {(64, 8)}


@pytest.mark.parametrize("body", [{"prompt": [1, 2]}, {"prompt": [[1, 2], [3]], "n": 3}])
def test_generate_decides_once_a_prompt(body: dict[str, Any]) -> None:
    validator = CountingValidator()
    handler = GenerateHandler(Rendering(), validator, ["m"], None)  # type: ignore[arg-type]
    request = GenerateRequest(**body, gen_length=64, steps=8, seed=5, temperature=3.5)
    choices = asyncio.run(handler.choices(request, "r"))
    num_prompts, n = len(body["prompt"]) if "n" in body else 1, body.get("n", 1)
    assert validator.num_decided == num_prompts
    assert [c.request_id for c in choices] == [f"r-{i}" for i in range(num_prompts * n)]
    actual = [decision_of(c.sampling, MODEL, []) for c in choices]
    assert [decided.seed for decided in actual] == [5 + i for i in range(n)] * num_prompts
    assert {(d.gen_length, d.steps, d.temperature) for d in actual} == {(64, 8, 3.5)}


class Rendering:
    """The part of an engine that renders prompts."""

    model_config = SimpleNamespace(max_logprobs=20, is_encoder_decoder=False)

    class renderer:
        tokenizer = None
        default_cmpl_tok_params = SimpleNamespace(with_kwargs=lambda **_: None)

        @staticmethod
        async def render_cmpl_async(prompts: list[Any], _: Any) -> list[Any]:
            return prompts


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
    assert engine.num_closed == len(engine.requests)


@pytest.mark.parametrize(("num_outputs", "is_counted"), [(1, True), (2, False)])
def test_a_reader_that_leaves_is_counted_unless_it_has_its_answer(
    num_outputs: int, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[bool] = []
    monkeypatch.setattr("vllm.diffusion.api.choices.count_abort", lambda: counted.append(True))

    async def leave() -> None:
        stream = client(Engine()).generate(PROMPT, sampled(), "r")
        for _ in range(num_outputs):
            await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert counted == [True] * is_counted


def test_an_aborted_request_reports_nothing() -> None:
    report = DiffusionReport.of([{}, {**REPORT, **TIMES, "seed": 3}])
    assert (report.seeds, report.num_forwards) == ([3], 3)
    empty = DiffusionReport.of([])
    assert (empty.steps, empty.num_forwards, empty.tokens_per_forward) == (None, 0, 0.0)
    assert reports_by_choice(output("", None, None)) == {}
