# SPDX-License-Identifier: Apache-2.0
"""`POST /generate`: from a body to requests of the engine, and from their outputs to an answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.door import RequestRefused
from vllm.diffusion.api.protocol import (
    DiffusionReport,
    GenerateChunk,
    GenerateResponse,
    Usage,
    diffusion_fields,
    split_prompt,
)
from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.params import SEED_BITS
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, VLLMError, VLLMNotFoundError
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from vllm.diffusion.api.door import Door
    from vllm.diffusion.api.protocol import GenerateBody
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.renderers.params import ChatParams


@dataclass(frozen=True)
class _Choice:
    """One answer to come: a prompt that is ready for the engine, and its parameters."""

    request_id: str
    engine_input: Any
    sampling: SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.engine_input["prompt_token_ids"])


class GenerateHandler:
    """Serves `/generate` over one engine.

    Args:
        engine: the engine's client.
        door: decides requests of this engine.
        model_names: names under which the model is served; the first is reported.
        chat_params: template settings of the server.
    """

    def __init__(
        self, engine: EngineClient, door: Door, model_names: list[str], chat_params: ChatParams
    ) -> None:
        self._engine = engine
        self._door = door
        self._model_names = model_names
        self._chat_params = chat_params

    async def choices(self, body: GenerateBody, request_id: str) -> list[_Choice]:
        """Everything that can be refused is refused here, before anything is sent.

        Raises:
            RequestRefused: HTTP 400, naming the field.
            VLLMNotFoundError: HTTP 404, for a model that is not served.
        """
        if body.model is not None and body.model not in self._model_names:
            raise VLLMNotFoundError(
                f"model: given {body.model!r}; wanted one of: {', '.join(self._model_names)}"
            )
        try:
            fields = diffusion_fields(body)
            inputs = await self._render(body)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        found: list[_Choice] = []
        for engine_input in inputs:
            for i in range(body.n):
                sampling = self._sampling(body, fields, i)
                decided = self._door.decide(sampling, engine_input["prompt_token_ids"])
                sampling.max_tokens = decided.max_tokens
                sampling.extra_args = {
                    **(sampling.extra_args or {}),
                    "gen_length": decided.gen_length,
                    "max_tokens": decided.max_tokens,
                }
                found.append(_Choice(f"{request_id}-{len(found)}", engine_input, sampling))
        return found

    async def answer(self, body: GenerateBody, request_id: str) -> GenerateResponse:
        """Run a request to its end; cancelling this coroutine aborts it."""
        choices = await self.choices(body, request_id)
        async with _Cancelling() as tasks:
            finals = await asyncio.gather(*(tasks.start(self._last(c)) for c in choices))
        return self._response(request_id, choices, list(finals))

    async def stream(self, choices: list[_Choice], request_id: str) -> AsyncIterator[str]:
        """Server-sent events: the growing prefix of each answer, the whole answer, [DONE]."""
        finals: list[RequestOutput | None] = [None] * len(choices)
        try:
            async for index, output in merge_async_iterators(*(self._run(c) for c in choices)):
                finals[index] = output
                completion = output.outputs[0]
                chunk = GenerateChunk(
                    id=request_id,
                    index=index,
                    text=completion.text,
                    token_ids=_answer_ids(completion),
                )
                yield _event(chunk.model_dump_json())
            done = [output for output in finals if output is not None]
            response = self._response(request_id, choices, done)
            yield _event(json.dumps(response.content()))
        except VLLMError as error:
            # The status line is gone: the error is an event, in the shape of an error answer.
            yield _event(str(create_error_response(error).model_dump_json()))
        yield _event("[DONE]")

    async def _render(self, body: GenerateBody) -> list[Any]:
        """Prompts as the engine takes them: token ids, with upstream's tokenisation."""
        renderer = self._engine.renderer
        messages = body.messages
        if body.apply_chat_template:
            messages = [{"role": "user", "content": body.prompt}]
        if messages is not None:
            _, rendered = await renderer.render_chat_async([messages], self._chat_params)
            return list(rendered)
        prompts = [
            TextPrompt(prompt=p) if isinstance(p, str) else TokensPrompt(prompt_token_ids=p)
            for p in split_prompt(body.prompt)
        ]
        tokenization = renderer.default_cmpl_tok_params.with_kwargs(
            add_special_tokens=body.add_special_tokens
        )
        parsed = [parse_model_prompt(self._engine.model_config, p) for p in prompts]
        return list(await renderer.render_cmpl_async(parsed, tokenization))

    @staticmethod
    def _sampling(body: GenerateBody, fields: dict[str, Any], index: int) -> SamplingParams:
        """Upstream's parameters of choice `index`; greedy unless a temperature is given."""
        temperature = fields.get("temperature", 0.0)
        seed = fields.get("seed")
        # Ours is the temperature among the extra arguments: upstream's own has a narrower range.
        extra = {k: v for k, v in fields.items() if k != "seed"} | {"temperature": temperature}
        return SamplingParams(
            temperature=min(max(temperature, 0.01), 2.0) if temperature > 0 else 0.0,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logprobs=body.logprobs,
            seed=None if seed is None else (seed + index) % 2**SEED_BITS,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            include_stop_str_in_output=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            detokenize=body.detokenize,
            ignore_eos=fields.get("ignore_eos", False),
            max_tokens=None,
            output_kind=(
                RequestOutputKind.CUMULATIVE if body.stream else RequestOutputKind.FINAL_ONLY
            ),
            extra_args=extra,
        )

    async def _run(self, choice: _Choice) -> AsyncGenerator[RequestOutput, None]:
        outputs = self._engine.generate(choice.engine_input, choice.sampling, choice.request_id)
        async for output in outputs:
            if output.outputs[0].finish_reason == "error":
                raise GenerationError(_report(output).get("error", "the engine failed"))
            yield output

    async def _last(self, choice: _Choice) -> RequestOutput:
        last = None
        async for output in self._run(choice):
            last = output
        if last is None:
            raise GenerationError("the request ended without an answer")
        return last

    def _response(
        self, request_id: str, choices: list[_Choice], finals: list[RequestOutput]
    ) -> GenerateResponse:
        completions = [output.outputs[0] for output in finals]
        prompt_tokens = sum(choice.num_prompt_tokens for choice in choices)
        completion_tokens = sum(len(c.token_ids) for c in completions)
        return GenerateResponse(
            id=request_id,
            created=int(time.time()),
            model=self._model_names[0],
            text=[c.text for c in completions],
            token_ids=[_answer_ids(c) for c in completions],
            finish_reason=[c.finish_reason or "abort" for c in completions],
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                total_tokens=prompt_tokens + completion_tokens,
            ),
            diffusion=_diffusion_report([_report(output) for output in finals]),
        )


class _Cancelling:
    """Tasks that are cancelled together when the block is left before they are done."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> _Cancelling:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _answer_ids(completion: Any) -> list[int]:
    """The answer's token ids; the token that ended it is not part of it."""
    ids = list(completion.token_ids)
    ended_by_token = completion.finish_reason == "stop" and not isinstance(
        completion.stop_reason, str
    )
    return ids[:-1] if ended_by_token else ids


def _report(output: RequestOutput) -> dict[str, Any]:
    """What the scheduler says of a request on its last output."""
    return dict((output.kv_transfer_params or {}).get("dllm", {}))


def _diffusion_report(reports: list[dict[str, Any]]) -> DiffusionReport:
    found = [r for r in reports if "num_forwards" in r]
    forwards = sum(r["num_forwards"] for r in found)
    committed = sum(r["num_committed"] for r in found)
    infilled = [r.get("infilled", {}) for r in found]
    largest = max(found, key=lambda r: r.get("peak_bytes", 0), default={})
    return DiffusionReport(
        steps=found[0]["steps"] if found else None,
        num_forwards=forwards,
        tokens_per_forward=round(committed / forwards, 3) if forwards else 0.0,
        queue_ms=max((r["queue_ms"] for r in found), default=0.0),
        denoise_ms=max((r["denoise_ms"] for r in found), default=0.0),
        seeds=[r["seed"] for r in found],
        peak_bytes=largest.get("peak_bytes"),
        average_bytes=largest.get("average_bytes"),
        budget_bytes=largest.get("budget_bytes"),
        infilled=infilled if any(infilled) else None,
    )


def _event(data: str) -> str:
    return f"data: {data}\n\n"
