# SPDX-License-Identifier: Apache-2.0
"""Upstream's handlers of the OpenAI routes, extended for diffusion language models.

They accept the bodies of `openai_protocol`, run the choices of a request as separate requests, and
add a `diffusion` object to answers. It contains the report of the whole request. If
`stream_canvas` is set, earlier chunks of a stream contain the canvas after every step.
"""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.diffusion.api.choices import ChoicesClient, RequestTimedOut
from vllm.diffusion.api.handlers import rebuild_as
from vllm.diffusion.api.likelihood.prompt_scores import TERMS
from vllm.diffusion.api.openai.echo import EchoClient
from vllm.diffusion.api.openai.openai_protocol import prepare, reads_prompt
from vllm.diffusion.api.openai.tool_calls import put_calls, with_calls
from vllm.diffusion.api.report import (
    CanvasState,
    DiffusionReport,
    TokenTexts,
    reports_by_choice,
    timeout_in,
)
from vllm.diffusion.api.streams import DONE, StreamMerger, event, wait_for_first
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import SPEC, unpacked
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from vllm.diffusion.api.validator import Validator
    from vllm.outputs import RequestOutput

Handler = TypeVar("Handler", bound="Diffusion")
Chunk = TypeVar("Chunk")  # chunk of a stream: upstream's object, or its text
Item = TypeVar("Item")


def replace_handler(upstreams: Any, kind: type[Handler], validator: Validator) -> Handler:
    """Return a handler of class `kind` with the server's arguments from upstream's handler."""
    reports_shared = upstreams.enable_prompt_tokens_details or validator.shares_prefixes
    handler: Handler = rebuild_as(
        upstreams,
        kind,
        engine_client=ChoicesClient(upstreams.engine_client, validator),
        validator=validator,
        token_texts=TokenTexts(upstreams.renderer.tokenizer),
        enable_prompt_tokens_details=reports_shared,
    )
    return handler


class Diffusion:
    """Base class of the handlers of OpenAI routes."""

    token_texts: TokenTexts
    validator: Validator
    engine_client: Any
    enable_prompt_tokens_details: bool
    default_sampling_params: dict[str, Any]
    model_config: Any
    online_renderer: Any
    renderer: Any

    async def prepare(self, request: Any) -> None:
        """Convert a body to upstream's form, and compile the format of its answer.

        Raises:
            RequestRefused: HTTP 400, naming the field.
        """
        try:
            self.refuse_template(request)
            template, suffix = self.template_of(request), getattr(request, "suffix", None)
            prepare(request, self.model_config, template, self.default_sampling_params)
            if suffix and "suffix_ids" in request.vllm_xargs:
                self.validator.refuse_suffix(suffix)
            given = request.vllm_xargs.get(SPEC)
            spec = None if given is None else unpacked(given)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        await self.validator.compile(spec)

    def refuse_template(self, request: Any) -> None:
        """Refuse a chat template in the request unless the server trusts such templates."""
        given = getattr(request, "chat_template", None)
        if given is not None and not self.online_renderer.trust_request_chat_template:
            wanted = "wanted none, or a server with --trust-request-chat-template"
            raise InvalidParameterError("chat_template", given, wanted)

    def template_of(self, request: Any) -> str:
        """Return the chat template of a request, or "" if it is not available here."""
        tokenizer_template = getattr(self.renderer.tokenizer, "chat_template", None)
        given = getattr(request, "chat_template", None)
        return str(given or getattr(self, "chat_template", None) or tokenizer_template or "")

    async def wait_for_output(
        self,
        request: Any,
        outputs: AsyncGenerator[Item, None],
        output_of: Callable[[Any], RequestOutput] = lambda item: item,
    ) -> AsyncGenerator[Item, None]:
        """Return the outputs of a request. If it has a timeout, wait for the first one.

        Args:
            output_of: function that returns the engine's output of an item of `outputs`.

        Raises:
            RequestTimedOut: HTTP 504; the first output reports the timeout.
        """
        if not self.validator.times(request.vllm_xargs):
            return outputs

        async def checked() -> AsyncGenerator[Item, None]:
            is_first = True
            async with aclosing(outputs):
                async for item in outputs:
                    reports = reports_by_choice(output_of(item)).values() if is_first else ()
                    for late in filter(None, map(timeout_in, reports)):
                        raise RequestTimedOut(late)
                    is_first = False
                    yield item

        return await wait_for_first(checked())

    async def wait_until_begun(self, request: Any, answer: Any) -> Any:
        """Return the answer. A stream with a timeout is returned only after its first event.

        Raises:
            RequestTimedOut: HTTP 504, raised before the first event.
        """
        is_stream = request.stream and hasattr(answer, "__aiter__")
        if is_stream and self.validator.times(request.vllm_xargs):
            return await wait_for_first(answer)
        return answer


class DiffusionServingChat(Diffusion, OpenAIServingChat):
    """Handler of POST /v1/chat/completions."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        await self.prepare(request)
        answer = await super().create_chat_completion(request, raw_request)
        return await self.wait_until_begun(request, answer)

    async def chat_completion_stream_generator(
        self,
        request: Any,
        result_generator: AsyncGenerator[RequestOutput, None],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        # Upstream's generators turn every error into an event, also before the first event.
        outputs = await self.wait_for_output(request, result_generator)
        events = super().chat_completion_stream_generator(request, outputs, *args, **kwargs)
        async with aclosing(events):
            async for text in events:
                yield text

    async def chat_completion_stream_generator_raw(
        self,
        request: Any,
        result_generator: AsyncGenerator[RequestOutput, None],
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[Any, None]:
        merger = StreamMerger(request.n or 1)
        outputs = _tap(result_generator, merger)
        chunks = super().chat_completion_stream_generator_raw(
            request, outputs, request_id, model_name, *args, **kwargs
        )
        if _calls_tools(request):
            chunks = with_calls(chunks)
        if request.vllm_xargs.get("stream_canvas"):
            head = _head(request_id, "chat.completion.chunk", model_name)
            choice: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": None}
            write = _canvas_writer(
                self.token_texts, head, choice, ChatCompletionStreamResponse.model_validate
            )
            chunks = _after_the_first(chunks, lambda tail: merger.merge(tail, write))
        async for chunk in _with_report(chunks, merger, put_report):
            yield chunk

    async def chat_completion_full_generator(
        self,
        request: Any,
        result_generator: AsyncGenerator[RequestOutput, None],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        merger = StreamMerger()
        outputs = _tap(result_generator, merger)
        response = await super().chat_completion_full_generator(request, outputs, *args, **kwargs)
        if not isinstance(response, ErrorResponse):
            if _calls_tools(request):
                put_calls(response)
            put_report(response, merger.reports)
        return response


class DiffusionServingCompletion(Diffusion, OpenAIServingCompletion):
    """Handler of POST /v1/completions."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        await self.prepare(request)
        handler = self
        if reads_prompt(request):
            client = EchoClient(
                self.engine_client,
                self.validator,
                self.token_texts,
                {name: request.vllm_xargs[name] for name in TERMS if name in request.vllm_xargs},
                writes=request.max_tokens > 0,
            )
            handler = rebuild_as(self, DiffusionServingCompletion, engine_client=client)
        answer = await super(DiffusionServingCompletion, handler).create_completion(
            request, raw_request
        )
        return await self.wait_until_begun(request, answer)

    async def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: AsyncGenerator[tuple[int, RequestOutput], None],
        request_id: str,
        created_time: int,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        num_choices = request.n or 1
        merger = StreamMerger(num_choices * len(engine_inputs))
        begun = await self.wait_for_output(request, result_generator, itemgetter(1))
        outputs = _tap_by_prompt(begun, merger, num_choices)
        chunks = super().completion_stream_generator(
            request, engine_inputs, outputs, request_id, created_time, model_name, *args, **kwargs
        )
        if request.vllm_xargs.get("stream_canvas"):
            head = _head(request_id, "text_completion", model_name)
            choice = {"text": "", "logprobs": None, "finish_reason": None}
            write = _canvas_writer(self.token_texts, head, choice, _text_event)
            chunks = merger.merge(chunks, write)
        async for text in _with_report(chunks, merger, _with_report_in_text):
            yield text

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], *args: Any, **kwargs: Any
    ) -> Any:
        response = super().request_output_to_completion_response(final_res_batch, *args, **kwargs)
        reports = [
            report for output in final_res_batch for report in reports_by_choice(output).values()
        ]
        put_report(response, dict(enumerate(reports)))
        return response


class DiffusionServingChatBatch(Diffusion, OpenAIServingChatBatch):
    """Handler of POST /v1/chat/completions/batch."""

    async def render_batch_chat_request(self, request: Any) -> Any:
        rendered = await super().render_batch_chat_request(request)
        if not isinstance(rendered, ErrorResponse):
            for single in rendered[0]:
                await self.prepare(single)
        return rendered

    async def chat_completion_full_generator_batch(
        self, request: Any, generators: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        merger = StreamMerger(len(generators))
        outputs = [
            _tap(generator, merger, first_choice=index)
            for index, generator in enumerate(generators)
        ]
        response = await super().chat_completion_full_generator_batch(
            request, outputs, *args, **kwargs
        )
        if not isinstance(response, ErrorResponse):
            put_report(response, merger.reports)
        return response


def _calls_tools(request: Any) -> bool:
    kind, *_ = request.vllm_xargs.get(SPEC, [None])
    return bool(kind == "tools")


async def _tap(
    outputs: AsyncGenerator[RequestOutput, None], merger: StreamMerger, first_choice: int = 0
) -> AsyncGenerator[RequestOutput, None]:
    """Yield outputs that have news for upstream, and the first one, which carries the role."""
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if merger.feed(output, first_choice) or is_first:
                yield output
            is_first = False


async def _tap_by_prompt(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], merger: StreamMerger, n: int
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(outputs):
        async for prompt, output in outputs:
            if merger.feed(output, first_choice=prompt * n):
                yield prompt, output


async def _after_the_first(
    chunks: AsyncGenerator[Chunk, None],
    follow: Callable[[AsyncGenerator[Chunk, None]], AsyncGenerator[Chunk, None]],
) -> AsyncGenerator[Chunk, None]:
    async with aclosing(chunks):
        yield await anext(chunks)
        async with aclosing(follow(chunks)) as remaining:
            async for chunk in remaining:
                yield chunk


async def _with_report(
    chunks: AsyncGenerator[Chunk, None],
    merger: StreamMerger,
    put: Callable[[Chunk, dict[int, dict[str, Any]]], Chunk],
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks, with the report in the last one.

    The last chunk of a stream of texts is the one before [DONE]. A chunk is identified as the last
    one only when [DONE] or the end follows. So once all answers have ended, each chunk is held back
    until the next one arrives. Earlier chunks are not delayed.

    Args:
        put: function that returns a chunk with the reports of the choices, by number of the choice.
    """
    held: Chunk | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            is_end = chunk == DONE
            if held is not None:
                yield put(held, merger.reports) if is_end else held
            held = chunk if merger.is_finished and not is_end else None
            if held is None:
                yield chunk
    if held is not None:
        yield put(held, merger.reports)


def _with_report_in_text(chunk: str, reports: dict[int, dict[str, Any]]) -> str:
    content = json.loads(chunk.removeprefix("data: "))
    content["diffusion"] = {**content.get("diffusion", {}), **_content(reports)}
    return _text_event(content)


def put_report(response: Any, reports: dict[int, dict[str, Any]]) -> Any:
    """Put the reports of the choices, by number of the choice, into an answer or a chunk."""
    response.diffusion = {**getattr(response, "diffusion", {}), **_content(reports)}
    response.kv_transfer_params = None  # upstream's field that carried the report
    return response


def _content(reports: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return DiffusionReport.of(reports[index] for index in sorted(reports)).content()


def _head(request_id: str, kind: str, model_name: str) -> dict[str, Any]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model_name}


def _text_event(content: dict[str, Any]) -> str:
    return event(json.dumps(content))


def _canvas_writer(
    texts: TokenTexts,
    head: dict[str, Any],
    choice: dict[str, Any],
    form: Callable[[dict[str, Any]], Chunk],
) -> Callable[[int, dict[str, Any]], Chunk]:
    """Return a function that makes a chunk with a canvas and without new text.

    Args:
        form: function that converts the content of a chunk to the form of the other chunks.
    """

    def write(index: int, packed: dict[str, Any]) -> Chunk:
        canvas = CanvasState.of(packed, texts).model_dump(exclude_none=True)
        return form(
            {**head, "choices": [{"index": index, **choice}], "diffusion": {"canvas": canvas}}
        )

    return write
