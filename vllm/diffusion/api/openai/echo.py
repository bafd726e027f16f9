# SPDX-License-Identifier: Apache-2.0
"""`echo` with `logprobs`: log probabilities of the tokens of a prompt, from left to right.

A masked model does not compute these while it generates: at a row that contains the token itself
it would only copy the token. So every token is scored in a forward pass of its own, in which the
token and all later tokens are masked, as in the chain rule of an autoregressive likelihood. In a
block-causal family the masks end with the token's block.
"""

from __future__ import annotations

from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.likelihood.prompt_scores import ScoreClient, ScoreQuery
from vllm.diffusion.api.report import reports_by_choice
from vllm.diffusion.api.streams import TaskScope
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from vllm.diffusion.api.choices import ChoicesClient
    from vllm.diffusion.api.likelihood.prompt_scores import ScoreResult
    from vllm.diffusion.api.report import TokenTexts
    from vllm.diffusion.api.validator import Validator
    from vllm.sampling_params import SamplingParams

# Each token of the prompt takes a forward pass over all rows of the prompt.
MAX_PROMPT_TOKENS = 2048
PromptLogprobs = list[dict[int, Logprob] | None]


class EchoClient:
    """Engine client that adds the log probabilities of the prompt's tokens to outputs.

    Args:
        inner: client that runs the request itself.
        validator: decides the parameters of requests to this engine.
        texts: token texts of the server's tokenizer.
        terms: `priority` and `timeout_s` of the request, if given.
        writes: whether an answer is generated after the prompt.
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
        self._score_client = ScoreClient(inner, validator)

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
            wanted = f"wanted at most {MAX_PROMPT_TOKENS} tokens with echo and logprobs"
            raise RequestRefused(InvalidParameterError("prompt", len(prompt), wanted))
        queries = queries_of(prompt, self._validator, sampling.prompt_logprobs or 0)
        self._score_client.check(queries, self._terms)
        params = copy(sampling)
        params.prompt_logprobs = None
        answer = None
        if self._writes:
            answer = self._inner.generate(engine_input, params, request_id, **options)
        return self._run(prompt, queries, answer, request_id, options)

    async def _run(
        self,
        prompt: list[int],
        queries: list[ScoreQuery],
        answer: AsyncGenerator[RequestOutput, None] | None,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer's outputs, or one output without an answer, with the prompt's scores."""
        own_id = f"{request_id}-echo"
        async with TaskScope() as tasks:
            scoring = tasks.start(self._score_client.run(queries, own_id, self._terms, **options))
            if answer is None:
                yield self._with(await scoring, prompt, _without_answer(request_id, prompt))
                return
            async with aclosing(answer):
                async for output in answer:
                    yield self._with(await scoring, prompt, output)

    def _with(
        self, results: list[ScoreResult], prompt: list[int], output: RequestOutput
    ) -> RequestOutput:
        """Add the prompt's log probabilities, and the forward passes they took, to an output."""
        output.prompt_logprobs = prompt_logprobs(prompt, results, self._texts)
        reports = reports_by_choice(output)
        if not self._writes and results:
            reports = {0: {**results[0].report, "num_forwards": 0, "num_steps": 0}}
        # Only the first of several answers counts the forward passes of the prompt.
        if "num_forwards" in reports.get(0, {}):
            taken = sum(result.report["num_forwards"] for result in results)
            for name in ("num_forwards", "num_steps"):
                reports[0][name] += taken
            is_several = len(output.outputs) > 1
            output.kv_transfer_params = {"dllm": [*reports.values()] if is_several else reports[0]}
        return output


def queries_of(prompt: Sequence[int], validator: Validator, num_top: int) -> list[ScoreQuery]:
    """Return the queries for all tokens except the first, which has no token before it.

    Where a token depends only on the tokens before it, a single query has all tokens. Otherwise
    each token has its own query, in which it and the tokens behind it are masked.
    """
    if validator.reads_causally:
        positions, tokens = [*range(1, len(prompt))], [[token] for token in prompt[1:]]
        return [ScoreQuery(list(prompt), positions, tokens, num_top)] if tokens else []
    block_length, mask_id = validator.block_length, validator.mask_id
    queries = []
    for position in range(1, len(prompt)):
        end = len(prompt)
        if block_length is not None:
            end = (position // block_length + 1) * block_length
        masked = [*prompt[:position], *[mask_id] * (end - position)]
        queries.append(ScoreQuery(masked, [position], [[prompt[position]]], num_top))
    return queries


def prompt_logprobs(
    prompt: Sequence[int], results: Sequence[ScoreResult], texts: TokenTexts
) -> PromptLogprobs:
    """Convert results to upstream's type: per token its own log probability, then the top ones."""
    rows: PromptLogprobs = [None]
    written = texts.in_turn(prompt)[1:]
    scored = [
        (own, top, values)
        for scores in (result.scores for result in results)
        for own, top, values in zip(
            scores.logprobs, scores.top_tokens, scores.top_logprobs, strict=True
        )
    ]
    for token, text, (own, top, values) in zip(prompt[1:], written, scored, strict=True):
        ids = [token, *top]
        values = [own[0], *values]
        row: dict[int, Logprob] = {}
        for rank, (token_id, value, alone) in enumerate(
            zip(ids, values, texts.of(ids), strict=True)
        ):
            row[token_id] = Logprob(value, rank or None, text if token_id == token else alone)
        rows.append(row)
    return rows


def _without_answer(request_id: str, prompt: list[int]) -> RequestOutput:
    completion = CompletionOutput(0, "", [], None, None, finish_reason="length")
    return RequestOutput(request_id, None, prompt, None, [completion], finished=True)
