# SPDX-License-Identifier: Apache-2.0
"""Typed decisions: upstream's `/v1/systemone` and `/generative_scoring` computed from masks.

Upstream reads the first token of a reply, with one request per question. A model that fills masks
answers all questions of a call at once: the reply has a mask at each answer, and one forward pass
computes the distribution of each answer, given the state and all questions. In a block-causal
family each question is a request of its own, because a mask would change the blocks that follow.
"""

from __future__ import annotations

import math
import uuid
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from vllm.diffusion.api.choices import RequestTimedOut
from vllm.diffusion.api.handlers import rebuild_as
from vllm.diffusion.api.likelihood.prompt_scores import (
    MAX_CONCURRENT_SCORES,
    TERMS,
    ScoreClient,
    ScoreQuery,
)
from vllm.diffusion.api.protocol import set_priority
from vllm.diffusion.api.schema import described, parameters_of
from vllm.diffusion.api.validator import RequestRefused, validator_of
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.families import FAMILIES
from vllm.diffusion.request.fields import BY_NAME
from vllm.diffusion.request.values import Field as Parameter
from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
from vllm.entrypoints.generate.structured_decisions.protocol import StructuredDecisionRequest
from vllm.entrypoints.generate.structured_decisions.question_types import (
    LABELS,
    StructuredDecisionError,
    label_softmax,
)
from vllm.entrypoints.generate.structured_decisions.serving import ServingStructuredDecisions
from vllm.entrypoints.generate.structured_decisions.strategies import (
    READ_STRATEGIES,
    DecisionLimits,
    NextTokenStrategy,
    QuestionRead,
    ReadContext,
    ReadStrategy,
    prompt_tail,
)
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from vllm.diffusion.api.validator import Validator
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.generate.structured_decisions.question_types import Question
    from vllm.sampling_params import SamplingParams

MAX_QUESTIONS = 64

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "passes",
        int,
        "2: every question is read once more, with the answers to all others in their places",
        default=1,
        minimum=1,
        maximum=2,
    ),
    BY_NAME["timeout_s"],
)

DecisionRequest = create_model(
    "DecisionRequest",
    __base__=StructuredDecisionRequest,
    __doc__="Body of POST /v1/systemone.",
    **described(PARAMETERS),
)


class BlockStrategy(NextTokenStrategy):
    """Strategy of block-causal families: one sequence per question, scored at its first reply
    token.

    The sequence is that of the first forward pass of an answer, with masks up to the end of the
    block.

    Attributes:
        passes: number of times that each question is scored.
        terms: `timeout_s`, if given.
    """

    max_passes = 1
    passes: int = 1
    terms: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, context: ReadContext) -> None:
        ReadStrategy.__init__(self, context)
        validator = validator_of(context.engine_client.input_processor)
        if validator is None:
            raise ValueError("the served model is not a diffusion language model")
        self._validator: Validator = validator
        self._score_client = ScoreClient(context.engine_client, validator)
        self._known: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}
        self._pieces: dict[str, list[int]] = {}  # tokens of the text before each answer

    def limits(self) -> DecisionLimits:
        return DecisionLimits(max_questions=MAX_QUESTIONS, max_options=len(LABELS))

    async def read(
        self,
        questions: list[Question],
        instructions: str | None,
        state: str,
        *,
        request_id: str,
        chat_template_kwargs: dict[str, Any] | None,
        priority: int,
        trace_headers: Mapping[str, str] | None = None,
        **_: Any,
    ) -> list[QuestionRead]:
        """Score the questions and return one result for each, in order."""

        async def prompt(content: str) -> list[int]:
            messages = [{"role": "user", "content": content}]
            if instructions:
                messages.insert(0, {"role": "system", "content": instructions})
            read_request = self._read_request(chat_template_kwargs)
            rendered: list[int] = (await self._render(read_request, messages))[1]
            if self._validator.mask_id in rendered:
                raise StructuredDecisionError("state, questions: wanted them without mask tokens")
            return rendered

        options = {"priority": priority, "trace_headers": trace_headers}
        queries = await self._queries(state, questions, prompt)
        reads = await self._scores(queries, request_id, options)
        if self.passes == 1 or len(questions) == 1:
            return reads
        chosen = [read.probs.index(max(read.probs)) for read in reads]
        again = [other for query in queries for other in _answered(query, chosen)]
        second = await self._scores(again, f"{request_id}-again", options)
        second[0].input_tokens += sum(read.input_tokens for read in reads)
        return second

    async def _queries(
        self,
        state: str,
        questions: list[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> list[ScoreQuery]:
        """Return the sequences of a call, with a mask at the position of each answer.

        The scored tokens of a position are the first tokens of the labels there.
        """
        queries = []
        for question in questions:
            before = await prompt(self._content(state, question))
            labels = self._label_ids(self._end_of(before), question)
            masked = masked_behind(before, self._validator)
            queries.append(ScoreQuery(masked, [len(before)], [labels]))
        return queries

    async def _scores(
        self, queries: list[ScoreQuery], request_id: str, options: dict[str, Any]
    ) -> list[QuestionRead]:
        group: dict[str, Any] = {"group": request_id, "group_size": len(queries)}
        results = await self._score_client.run(queries, request_id, self.terms, **group, **options)
        question_reads = []
        for query, result in zip(queries, results, strict=True):
            for number, labels in enumerate(query.token_ids):
                logprobs = result.scores.logprobs[number]
                question_reads.append(
                    QuestionRead(
                        probs=label_softmax(logprobs),
                        label_mass=math.fsum(map(math.exp, logprobs)),
                        argmax_is_label=result.scores.likeliest[number] in labels,
                        # One forward pass scores all questions of a sequence, so only the first
                        # one counts it.
                        input_tokens=0 if number else len(query.prompt),
                        output_tokens=0,
                    )
                )
        return question_reads

    def _end_of(self, prompt: list[int]) -> str:
        """Return the text of a prompt after its last special token."""
        tokenizer = self._tokenizer()
        return str(tokenizer.decode(prompt_tail(tokenizer, prompt)))

    def _label_ids(self, before: str, question: Question) -> tuple[int, ...]:
        """Return the first token of each label of a question after the text `before`.

        Raises:
            StructuredDecisionError: two labels have the same first token, or a label adds no token.
        """
        if (before, question.labels) not in self._known:
            encode = self._tokenizer().encode
            start, label_ids = encode(before, add_special_tokens=False), list[int]()
            for label in question.labels:
                whole = encode(before + label, add_special_tokens=False)
                if len(whole) == len(start) or whole[: len(start)] != start:
                    raise StructuredDecisionError(f"{question.id!r}: {label!r} is no token here")
                label_ids.append(whole[len(start)])
            if len(set(label_ids)) < len(label_ids):
                raise StructuredDecisionError(
                    f"question {question.id!r}: labels {question.labels} begin alike in this model"
                )
            self._known[before, question.labels] = tuple(label_ids)
        return self._known[before, question.labels]


class MaskStrategy(BlockStrategy):
    """Strategy of families with full attention: one sequence for all questions of a call."""

    max_passes = 2

    def num_requests(self, questions: list[Question]) -> int:
        return 1

    async def _queries(
        self,
        state: str,
        questions: list[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> list[ScoreQuery]:
        if len(questions) == 1:
            tokens = await prompt(self._content(state, questions[0]))
            pieces = [self._end_of(tokens)]
        else:
            tokens = await prompt(_content_of_several(state, questions))
            pieces = [f"\nQuestion {number}:\n" for number in range(1, len(questions) + 1)]
            pieces[0] = pieces[0].lstrip()
        positions, label_ids = [], []
        for piece, question in zip(pieces, questions, strict=True):
            if len(questions) > 1:
                if piece not in self._pieces:
                    self._pieces[piece] = self._tokenizer().encode(piece, add_special_tokens=False)
                tokens += self._pieces[piece]
            positions.append(len(tokens))
            label_ids.append(self._label_ids(piece, question))
            tokens.append(self._validator.mask_id)
        return [ScoreQuery([*tokens, *self._validator.turn_end], positions, label_ids)]


def _answered(query: ScoreQuery, chosen: Sequence[int]) -> list[ScoreQuery]:
    """Return a query for each position; in each, the other positions contain the chosen labels."""
    places = list(zip(query.positions, query.token_ids, strict=True))
    answered = list(query.prompt)
    for (position, label_ids), label in zip(places, chosen, strict=True):
        answered[position] = label_ids[label]
    queries = []
    for position, label_ids in places:
        tokens = list(answered)
        tokens[position] = query.prompt[position]
        queries.append(ScoreQuery(tokens, [position], [label_ids]))
    return queries


def _content_of_several(state: str, questions: list[Question]) -> str:
    """Return the user's turn: the state, then the numbered questions, which the reply answers."""
    texts = [
        f"Question {number}:\n{question.type.prompt(question)}"
        for number, question in enumerate(questions, start=1)
    ]
    return "\n\n".join([state, *texts])


def masked_behind(prompt: list[int], validator: Validator) -> list[int]:
    """Append the mask of a reply's first token; block-causal families fill the block with masks."""
    end, block_length = len(prompt) + 1, validator.block_length
    if block_length is not None:
        end = -(-end // block_length) * block_length
    return [*prompt, *[validator.mask_id] * (end - len(prompt))]


class DiffusionDecisions(ServingStructuredDecisions):
    """Handler of POST /v1/systemone."""

    async def create_decision(self, request: Any, raw_request: Any = None) -> Any:
        values = _values_of(request, self.strategy)
        if raw_request is not None:
            set_priority(request, raw_request.headers)
        strategy = copy(self.strategy)
        strategy.passes = values.get("passes", 1)
        strategy.terms = {name: values[name] for name in TERMS if name in values}
        handler = rebuild_as(self, DiffusionDecisions, strategy=strategy)
        return await super(DiffusionDecisions, handler).create_decision(request, raw_request)


def _values_of(request: Any, strategy: BlockStrategy) -> dict[str, Any]:
    """Return the checked diffusion parameters of a body.

    Raises:
        RequestRefused: HTTP 400, naming the field.
    """
    try:
        values = parameters_of(request, StructuredDecisionRequest, PARAMETERS)
        if values.get("passes", 1) > strategy.max_passes:
            raise InvalidParameterError(
                "passes", values["passes"], "wanted 1: this model reads each question by itself"
            )
        return values
    except InvalidParameterError as error:
        raise RequestRefused(error) from None


class DiffusionScoring(ServingGenerativeScoring):
    """Handler of POST /generative_scoring."""

    validator: Validator

    async def create_generative_scoring(self, request: Any, raw_request: Any = None) -> Any:
        try:
            terms = parameters_of(request, type(request), [BY_NAME["timeout_s"]])
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        if raw_request is not None:
            set_priority(request, raw_request.headers)
        client = _NextTokens(self.engine_client, self.validator, len(request.items), terms)
        handler = rebuild_as(self, DiffusionScoring, engine_client=client)
        answer = await super(DiffusionScoring, handler).create_generative_scoring(
            request, raw_request
        )
        # Upstream would answer this error with another status.
        if client.error is not None:
            raise client.error
        return answer


class _NextTokens:
    """Engine client that answers requests for one token by scoring a mask after the prompt.

    Args:
        engine: the engine's client.
        validator: decides the parameters of requests to this engine.
        num_items: number of requests that are sent together.
        terms: `timeout_s`, if given.

    Attributes:
        error: why a request was refused or timed out; None if all succeeded.
    """

    error: RequestRefused | RequestTimedOut | None = None

    def __init__(
        self,
        engine: EngineClient,
        validator: Validator,
        num_items: int,
        terms: Mapping[str, Any],
    ) -> None:
        self._engine, self._validator, self._terms = engine, validator, terms
        self._score_client = ScoreClient(engine, validator)
        self._group = uuid.uuid4().hex
        self._group_size = min(num_items, MAX_CONCURRENT_SCORES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        engine_input: Any,
        sampling: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the most likely token, with the log probabilities of `logprob_token_ids`."""
        prompt, labels = engine_input["prompt_token_ids"], sampling.logprob_token_ids or []
        query = ScoreQuery(masked_behind(prompt, self._validator), [len(prompt)], [labels])
        try:
            (result,) = await self._score_client.run(
                [query],
                request_id,
                self._terms,
                group=self._group,
                group_size=self._group_size,
                **options,
            )
        except (RequestRefused, RequestTimedOut) as error:
            self.error = error
            raise ValueError(str(error)) from None
        (likeliest,), (values,) = result.scores.likeliest, result.scores.logprobs
        logprobs = {token: Logprob(value) for token, value in zip(labels, values, strict=True)}
        completion = CompletionOutput(0, "", [likeliest], None, [logprobs], finish_reason="length")
        yield RequestOutput(request_id, None, prompt, None, [completion], finished=True)


def register() -> None:
    """Register the strategies of diffusion families with upstream's server."""
    for family in FAMILIES:
        strategy = BlockStrategy if family.is_block_causal else MaskStrategy
        READ_STRATEGIES.update(dict.fromkeys(family.architectures, strategy))


def replace_decision_handlers(state: Any, validator: Validator) -> None:
    """Replace upstream's handlers of the server with our subclasses."""
    decisions, scoring = state.serving_structured_decisions, state.serving_generative_scoring
    if decisions is not None:
        state.serving_structured_decisions = rebuild_as(decisions, DiffusionDecisions)
    if scoring is not None:
        state.serving_generative_scoring = rebuild_as(
            scoring, DiffusionScoring, validator=validator
        )
