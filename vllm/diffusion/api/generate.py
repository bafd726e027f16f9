# SPDX-License-Identifier: Apache-2.0
"""`POST /generate`: converts a body to engine requests, and their outputs to an answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.adapter_requests import answered_model
from vllm.diffusion.api.bodies import ignored_fields
from vllm.diffusion.api.choices import RequestTimedOut, stream_outputs
from vllm.diffusion.api.protocol import (
    AlternativeToken,
    GenerateBody,
    GenerateCanvas,
    GenerateChunk,
    GenerateResponse,
    TokenLogprob,
    Usage,
    check_body,
    check_model,
    split_prompt,
)
from vllm.diffusion.api.report import (
    CanvasState,
    DiffusionReport,
    TokenTexts,
    reports_by_choice,
    timeout_in,
    trajectories_in,
)
from vllm.diffusion.api.schema import check_logprobs
from vllm.diffusion.api.streams import DONE, TaskScope, event, final_output, wait_for_first
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import STRUCTURED, requested_spec
from vllm.diffusion.request.decision import IGNORED, attach
from vllm.diffusion.request.fields import SPELLINGS, canonical
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from vllm.diffusion.api.validator import Validator
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.renderers.params import ChatParams


@dataclass(frozen=True)
class _Choice:
    """One answer to generate: a tokenised prompt and its parameters."""

    request_id: str
    engine_input: Any
    sampling: SamplingParams
    decided: DiffusionParams

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.engine_input["prompt_token_ids"])


class GenerateHandler:
    """Handler of `/generate` for one engine; answers report the adapter or the first model name."""

    def __init__(
        self,
        engine: EngineClient,
        validator: Validator,
        model_names: list[str],
        chat_params: ChatParams,
    ) -> None:
        self._engine = engine
        self._validator = validator
        self._token_texts = TokenTexts(engine.renderer.tokenizer)
        self._model_names = model_names
        self._chat_params = chat_params

    async def choices(self, body: GenerateBody, request_id: str) -> list[_Choice]:
        """Check a body and return its choices; all checks happen here.

        Raises:
            RequestRefused: HTTP 400, naming the field.
            VLLMNotFoundError: HTTP 404, for a model that is not served.
        """
        check_model(body.model, self._model_names)
        try:
            request = _request_values(body)
            await self._validator.compile(request.get(STRUCTURED))
            check_logprobs("logprobs", body.logprobs, self._engine.model_config)
            inputs = await self._render(body)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        choices: list[_Choice] = []
        for engine_input in inputs:
            decided = self._validator.decide(request, engine_input["prompt_token_ids"])
            decided = decided.with_answers(body.n)
            for index in range(body.n):
                sampling = _sampling(body, decided)
                attach(sampling, decided, index)
                choices.append(
                    _Choice(f"{request_id}-{len(choices)}", engine_input, sampling, decided)
                )
        return choices

    async def answer(self, body: GenerateBody, request_id: str) -> GenerateResponse:
        """Run a request and return its answer. Cancelling this coroutine aborts the request."""
        choices = await self.choices(body, request_id)
        async with TaskScope() as tasks:
            finals = await asyncio.gather(
                *(tasks.start(final_output(self._run(c))) for c in choices)
            )
        return self._response(request_id, choices, list(finals))

    async def stream(self, choices: list[_Choice], request_id: str) -> AsyncIterator[str]:
        """Yield server-sent events: growing prefixes of each answer, the whole answer, `[DONE]`.

        Raises:
            RequestTimedOut: HTTP 504, raised before the first event.
        """
        events = self._stream(choices, request_id)
        is_timed = any(choice.decided.timeout_s is not None for choice in choices)
        return await wait_for_first(events) if is_timed else events

    async def _stream(self, choices: list[_Choice], request_id: str) -> AsyncGenerator[str, None]:
        finals: list[RequestOutput | None] = [None] * len(choices)
        is_begun = False
        try:
            outputs = merge_async_iterators(*(self._run(c) for c in choices))
            async with aclosing(outputs):
                async for index, output in outputs:
                    late = timeout_in(reports_by_choice(output).get(0, {}))
                    if late is not None and not is_begun:
                        raise RequestTimedOut(late)
                    news = self._events(request_id, index, choices[index], finals[index], output)
                    for data in news:
                        is_begun = True
                        yield event(data)
                    finals[index] = output
            done = [output for output in finals if output is not None]
            response = self._response(request_id, choices, done)
            yield event(response.encode().decode())
        except VLLMError as error:
            if isinstance(error, RequestTimedOut) and not is_begun:
                raise
            # The status line has been sent, so the error is an event with the content of an error
            # answer.
            yield event(str(create_error_response(error).model_dump_json()))
        yield DONE

    def _events(
        self,
        request_id: str,
        index: int,
        choice: _Choice,
        before: RequestOutput | None,
        output: RequestOutput,
    ) -> Iterator[str]:
        """Yield the canvas of an output, and the answer's prefix if it has grown or ended."""
        report, completion = reports_by_choice(output).get(0, {}), output.outputs[0]
        if "canvas" in report:
            canvas = CanvasState.of(report["canvas"], self._token_texts)
            event_canvas = GenerateCanvas(id=request_id, index=index, canvas=canvas)
            yield event_canvas.model_dump_json(exclude_none=True)
        if completion.token_ids:
            text = completion.text
            yield GenerateChunk(
                id=request_id,
                index=index,
                text=text,
                token_ids=_answer_ids(completion, choice.decided),
                delta=text if before is None else text.removeprefix(before.outputs[0].text),
            ).model_dump_json()

    async def _render(self, body: GenerateBody) -> list[Any]:
        """Convert prompts to token ids for the engine, with upstream's tokenisation."""
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
        rendered = list(await renderer.render_cmpl_async(parsed, tokenization))
        for prompt, text_prompt in zip(split_prompt(body.prompt), rendered, strict=True):
            if not text_prompt["prompt_token_ids"]:
                raise InvalidParameterError("prompt", prompt, "wanted at least one token")
        return rendered

    def _run(self, choice: _Choice) -> AsyncGenerator[RequestOutput, None]:
        return stream_outputs(self._engine, choice.engine_input, choice.sampling, choice.request_id)

    def _response(
        self, request_id: str, choices: list[_Choice], finals: list[RequestOutput]
    ) -> GenerateResponse:
        completions = [output.outputs[0] for output in finals]
        reports = [reports_by_choice(output).get(0, {}) for output in finals]
        trajectories = trajectories_in(reports)
        decided = choices[0].decided
        prompt_tokens = sum(choice.num_prompt_tokens for choice in choices)
        completion_tokens = sum(len(c.token_ids) for c in completions)
        return GenerateResponse(
            id=request_id,
            created=int(time.time()),
            model=answered_model(self._model_names),
            text=[c.text for c in completions],
            token_ids=[_answer_ids(c, decided) for c in completions],
            finish_reason=[c.finish_reason or "abort" for c in completions],
            logprobs=None
            if decided.logprobs is None
            else [_logprobs(c, decided) for c in completions],
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                total_tokens=prompt_tokens + completion_tokens,
            ),
            trajectory=trajectories,
            diffusion=DiffusionReport.of(r | {"trajectory": None} for r in reports),
        )


def _request_values(body: GenerateBody) -> dict[str, Any]:
    """Return the parameters of a body by canonical name; refuse misspelt and unsupported fields."""
    check_body(body)
    known_fields, sent = GenerateBody.model_fields, body.model_dump(exclude_unset=True)
    given = {name: value for name, value in sent.items() if name not in known_fields}
    ignored = ignored_fields(sent, known_fields.keys() | SPELLINGS.keys())
    request = canonical(given, also_known=known_fields)
    if request.get("stream_canvas") and not body.stream:
        raise InvalidParameterError("stream_canvas", True, "wanted false, or stream: true")
    stop_token_ids = tuple(body.stop_token_ids or ())
    spec = requested_spec(body.response_format, body.structured_outputs)
    structured = {} if spec is None else {STRUCTURED: spec}
    own_fields = {"stop_token_ids": stop_token_ids, "logprobs": body.logprobs}
    more = {"logprob_token_ids": body.logprob_token_ids, IGNORED: ignored}
    return {**request, **structured, **own_fields, **more}


def _sampling(body: GenerateBody, decided: DiffusionParams) -> SamplingParams:
    """Return the parameters that upstream's front end uses; all others are in the decision."""
    return SamplingParams(
        temperature=0.0,
        logprobs=None if decided.logprob_token_ids else body.logprobs,
        logprob_token_ids=list(decided.logprob_token_ids) or None,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        detokenize=body.detokenize,
        ignore_eos=decided.ignore_eos,
        min_tokens=0 if decided.edits is None else decided.edits.min_tokens,
        max_tokens=decided.max_tokens,
        output_kind=RequestOutputKind.CUMULATIVE if body.stream else RequestOutputKind.FINAL_ONLY,
    )


def _answer_ids(completion: Any, decided: DiffusionParams) -> list[int]:
    """Return the answer's token ids, without the token that ended it."""
    ids = list(completion.token_ids)
    return ids[:-1] if ids and ids[-1] in decided.stop_ids else ids


def _logprobs(completion: Any, decided: DiffusionParams) -> list[TokenLogprob]:
    """Return the log probabilities of the answer's tokens, without the token that ended it."""
    return [
        TokenLogprob(
            **_alternative(token, by_token[token]).model_dump(),
            top_logprobs=_top(by_token, decided),
        )
        for token, by_token in zip(
            _answer_ids(completion, decided), completion.logprobs, strict=False
        )
    ]


def _top(by_token: dict[int, Any], decided: DiffusionParams) -> list[AlternativeToken]:
    """Return log probabilities of the named tokens, or of the most likely ones if none is named."""
    tokens = decided.logprob_token_ids
    if not tokens:
        tokens = tuple(sorted(by_token, key=lambda token: by_token[token].rank)[: decided.logprobs])
    return [_alternative(token, by_token[token]) for token in tokens]


def _alternative(token: int, logprob: Any) -> AlternativeToken:
    return AlternativeToken(
        token_id=token, token=logprob.decoded_token or "", logprob=max(logprob.logprob, -9999.0)
    )
