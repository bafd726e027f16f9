# SPDX-License-Identifier: Apache-2.0
"""Engine client for the HTTP handlers that splits a request for n answers into n requests.

Upstream splits such a request too, but it passes on only the engine's report of the last answer,
and it decides a streamed request only after it has sent the status line.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from copy import copy
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.adapter_requests import requested_adapter
from vllm.diffusion.api.prometheus import count_abort
from vllm.diffusion.api.report import (
    add_stop_string,
    describe_edits,
    reports_by_choice,
    timeout_in,
)
from vllm.diffusion.request.decision import DECISION, attach, is_decided
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind
from vllm.utils.async_utils import merge_async_iterators

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from vllm.diffusion.api.validator import Validator
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


# Extra time for an engine that is inside a step when the timeout of a request expires.
GRACE_S = 5.0


class RequestTimedOut(GracefulHTTPError):
    """HTTP 504: the request was not complete in time, and nothing of its answer has been sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.GATEWAY_TIMEOUT)


class ChoicesClient:
    """Wrapper of upstream's engine client that replaces `generate`."""

    def __init__(self, engine: EngineClient, validator: Validator) -> None:
        self._engine = engine
        self._validator = validator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, engine_input: Any, sampling: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Decide the parameters of a request now; start it when the first output is requested.

        Yields:
            the engine's outputs, each with one choice; with RequestOutputKind.FINAL_ONLY a single
            output with all choices.

        Raises:
            RequestRefused: HTTP 400, naming the field.
            GenerationError: raised by the generator if the engine failed.
            VLLMValidationError: raised by the generator if the engine refused the request.
        """
        if is_decided(sampling):
            decided = sampling.extra_args[DECISION]
        else:
            decided = self._validator.decide_sampling(sampling, engine_input["prompt_token_ids"])
        decided = decided.with_answers(sampling.n)

        def run(index: int, own_id: str) -> AsyncGenerator[RequestOutput, None]:
            params = copy(sampling)
            params.n = 1
            attach(params, decided, index)
            return stream_outputs(self._engine, engine_input, params, own_id, **options)

        if sampling.n == 1:
            return run(0, request_id)
        choices = [run(i, f"{request_id}-{i}") for i in range(sampling.n)]
        if sampling.output_kind == RequestOutputKind.FINAL_ONLY:
            return _together(choices)
        return _in_turn(choices)


async def stream_outputs(
    engine: EngineClient, engine_input: Any, sampling: SamplingParams, *args: Any, **options: Any
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the engine's outputs of a request; count the request as aborted if it is cancelled.

    The engine cannot count aborts, because it also receives one whenever a stop string has ended
    an answer.

    Raises:
        GenerationError: the engine failed.
        VLLMValidationError: the engine refused the request, for example because it is too large.
        RequestTimedOut: the answer is not streamed and was not complete in time.
    """
    is_whole = sampling.output_kind == RequestOutputKind.FINAL_ONLY
    is_delta = sampling.output_kind == RequestOutputKind.DELTA
    is_complete, length = False, 0
    adapter = requested_adapter()
    if adapter is not None:
        options.setdefault("lora_request", adapter)
    try:
        async with aclosing(engine.generate(engine_input, sampling, *args, **options)) as outputs:
            async for output in _in_time(outputs, sampling.extra_args[DECISION].timeout_s):
                completion = output.outputs[0]
                reason = completion.finish_reason
                is_complete = reason is not None
                report = reports_by_choice(output).get(0, {})
                length = (length if is_delta else 0) + len(completion.token_ids)
                add_stop_string(report, completion, length)
                if "edits" in report:
                    decided, tokenizer = sampling.extra_args[DECISION], engine.renderer.tokenizer
                    describe_edits(report, decided, tokenizer)
                late = timeout_in(report)
                if is_whole and late is not None:
                    raise RequestTimedOut(late)
                yield output
    except (asyncio.CancelledError, GeneratorExit):
        if not is_complete:
            count_abort()
        raise


async def _in_time(
    outputs: AsyncIterator[RequestOutput], timeout_s: float | None
) -> AsyncIterator[RequestOutput]:
    """Yield outputs; raise `RequestTimedOut` if the request runs `GRACE_S` beyond its timeout."""
    if timeout_s is None:
        async for output in outputs:
            yield output
        return
    deadline = asyncio.get_running_loop().time() + timeout_s + GRACE_S
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                output = await anext(outputs)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"timeout: the engine has not answered {timeout_s:g} s after arrival"
            raise RequestTimedOut(message) from None
        yield output


async def _in_turn(
    choices: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(merge_async_iterators(*choices)) as outputs:
        async for index, output in outputs:
            output.outputs[0].index = index
            yield output


async def _together(
    choices: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[RequestOutput, None]:
    finals: dict[int, RequestOutput] = {}
    async with aclosing(_in_turn(choices)) as outputs:
        async for output in outputs:
            finals[output.outputs[0].index] = output
    ordered = sorted(finals.items())
    _, whole = ordered[0]
    reports = [reports_by_choice(output).get(index, {}) for index, output in ordered]
    whole.outputs = [output.outputs[0] for _, output in ordered]
    whole.kv_transfer_params = {"dllm": reports}
    yield whole
