# SPDX-License-Identifier: Apache-2.0
"""`echo` beside `logprobs`: log probabilities of the tokens of a prompt, from left to right.

A masked model does not compute these while it generates: at a row that holds its own token it would
only copy. So every token is read in its own forward, in which it and all tokens behind it are
masked: the chain rule of an autoregressive likelihood. In a block-causal family the masks end with
the token's block.
"""

from __future__ import annotations

from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.choices import Cancelling
from vllm.diffusion.api.likelihood.prompt_scores import Reader, Reading
from vllm.diffusion.api.report import reports_by_choice
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from vllm.diffusion.api.choices import ChoicesClient
    from vllm.diffusion.api.likelihood.prompt_scores import Read
    from vllm.diffusion.api.report import TokenTexts
    from vllm.diffusion.api.validator import Validator
    from vllm.sampling_params import SamplingParams

MAX_PROMPT_TOKENS = 2048  # of a prompt: as many forwards of as many rows
PromptLogprobs = list[dict[int, Logprob] | None]


class EchoClient:
    """Engine client whose outputs have the log probabilities of the prompt's tokens.

    Args:
        inner: client that runs the request itself.
        validator: decides requests of this engine.
        texts: token texts of the server's tokenizer.
        terms: `priority` and `timeout_s` of the request, if given.
        writes: whether an answer is generated behind the prompt.
    """

    def __init__(
        self,
        inner: ChoicesClient,
        validator: Validator,
        texts: TokenTexts,
        terms: Mapping[str, Any],
        *,
        writes: bool,
    ) -> None:
        self._inner, self._validator, self._texts = inner, validator, texts
        self._terms, self._writes = terms, writes
        self._reader = Reader(inner, validator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generate(
        self, engine_input: Any, sampling: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; `sampling.prompt_logprobs` is the number of alternatives.

        Raises:
            RequestRefused: HTTP 400, naming the field.
        """
        prompt = list(engine_input["prompt_token_ids"])
        if len(prompt) > MAX_PROMPT_TOKENS:
            wanted = f"wanted at most {MAX_PROMPT_TOKENS} tokens beside echo and logprobs"
            raise RequestRefused(InvalidParameterError("prompt", len(prompt), wanted))
        block_length, mask_id = self._validator.block_length, self._validator.mask_id
        readings = readings_of(prompt, mask_id, sampling.prompt_logprobs or 0, block_length)
        self._reader.check(readings, self._terms)
        own = copy(sampling)
        own.prompt_logprobs = None
        answer = None
        if self._writes:
            answer = self._inner.generate(engine_input, own, request_id, **options)
        return self._run(prompt, readings, answer, request_id, options)

    async def _run(
        self,
        prompt: list[int],
        readings: list[Reading],
        answer: AsyncGenerator[RequestOutput, None] | None,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer's outputs, or one without an answer; each with the prompt's readings."""
        own_id = f"{request_id}-echo"
        async with Cancelling() as tasks:
            reading = tasks.start(self._reader.read(readings, own_id, self._terms, **options))
            if answer is None:
                yield self._with(await reading, prompt, _without_answer(request_id, prompt))
                return
            async with aclosing(answer):
                async for output in answer:
                    yield self._with(await reading, prompt, output)

    def _with(self, found: list[Read], prompt: list[int], output: RequestOutput) -> RequestOutput:
        """Add the log probabilities of its prompt to an output, and the forwards that they took."""
        output.prompt_logprobs = prompt_logprobs(prompt, found, self._texts)
        reports = reports_by_choice(output)
        if not self._writes and found:
            reports = {0: {**found[0].report, "num_forwards": 0, "num_steps": 0}}
        if "num_forwards" in reports.get(0, {}):  # of the first of several answers
            taken = sum(read.report["num_forwards"] for read in found)
            for name in ("num_forwards", "num_steps"):
                reports[0][name] += taken
            is_several = len(output.outputs) > 1
            output.kv_transfer_params = {"dllm": [*reports.values()] if is_several else reports[0]}
        return output


def readings_of(
    prompt: Sequence[int], mask_id: int, num_top: int, block_length: int | None
) -> list[Reading]:
    """Make a reading for each token except the first, which no token precedes."""
    readings = []
    for position in range(1, len(prompt)):
        end = len(prompt)
        if block_length is not None:
            end = (position // block_length + 1) * block_length
        masked = [*prompt[:position], *[mask_id] * (end - position)]
        readings.append(Reading(masked, [position], [[prompt[position]]], num_top))
    return readings


def prompt_logprobs(
    prompt: Sequence[int], found: Sequence[Read], texts: TokenTexts
) -> PromptLogprobs:
    """Convert readings to upstream's type: for each token, itself first and then the likeliest."""
    rows: PromptLogprobs = [None]
    written = texts.in_turn(prompt)[1:]
    for token, text, read in zip(prompt[1:], written, found, strict=True):
        scores = read.scores
        ids = [token, *scores.top_tokens[0]]
        values = [scores.logprobs[0][0], *scores.top_logprobs[0]]
        row: dict[int, Logprob] = {}
        for rank, (own, value, alone) in enumerate(zip(ids, values, texts.of(ids), strict=True)):
            row[own] = Logprob(value, rank or None, text if own == token else alone)
        rows.append(row)
    return rows


def _without_answer(request_id: str, prompt: list[int]) -> RequestOutput:
    completion = CompletionOutput(0, "", [], None, None, finish_reason="length")
    return RequestOutput(request_id, None, prompt, None, [completion], finished=True)
