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
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ConfigDict, create_model

from vllm.diffusion.api.choices import RequestTimedOut
from vllm.diffusion.api.handlers import rebuild_as
from vllm.diffusion.api.likelihood.prompt_scores import (
    MAX_CONCURRENT_SCORES,
    TERMS,
    ScoreClient,
    ScoreQuery,
)
from vllm.diffusion.api.likelihood.sheets import (
    FORMS,
    LONG,
    Labels,
    Place,
    sheet_of,
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
from vllm.entrypoints.generate.structured_decisions.serving import ServingStructuredDecisions
from vllm.entrypoints.openai.decisions.question_types import (
    LABELS,
    StructuredDecisionError,
    label_softmax,
)
from vllm.entrypoints.openai.decisions.strategies import (
    READ_STRATEGIES,
    DecisionLimits,
    JointSlot,
    NextTokenStrategy,
    QuestionRead,
    ReadContext,
    ReadStrategy,
    prompt_tail,
)
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from vllm.diffusion.api.likelihood.prompt_scores import ScoreResult
    from vllm.diffusion.api.validator import Validator
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.decisions.question_types import Question
    from vllm.sampling_params import SamplingParams

MAX_QUESTIONS = 64

PASSES = Parameter(
    "passes",
    int,
    "2: every question is read once more, with the answers to all others in their places",
    default=1,
    minimum=1,
    maximum=2,
)
FORMAT = Parameter(
    "format",
    str,
    "how several questions are written: short has one line per question and per answer",
    default=LONG,
    choices=FORMS,
)
PARAMETERS: tuple[Parameter, ...] = (
    PASSES,
    FORMAT,
    Parameter(
        "codes",
        bool,
        "whether labels that begin alike in this model are replaced by letters or codes",
        default=False,
    ),
    BY_NAME["timeout_s"],
)


class _WithOtherFields(StructuredDecisionRequest):
    model_config = ConfigDict(extra="allow")  # unknown fields are refused with our own words


DecisionRequest = create_model(
    "DecisionRequest",
    __base__=_WithOtherFields,
    __doc__="Body of POST /v1/systemone.",
    **described(PARAMETERS),
)


class ReadOptions(NamedTuple):
    """How the questions of a call are read.

    Attributes:
        passes: number of times that each question is scored.
        form: form of sheets with several questions, see `sheets`.
        has_codes: whether codes replace labels that begin alike or do not suffice.
        is_joint: whether the questions share a sequence, if the family can.
        in_parts: whether questions that do not fit into one sequence are divided.
        shares_prefix: whether sequences share the keys and values of their first positions with
            other requests, in families and servers that can.
        cache_salt: part of the hash of their pages.
        terms: `timeout_s` and `priority`, if given.
    """

    passes: int = 1
    form: str = LONG
    has_codes: bool = False
    is_joint: bool = True
    in_parts: bool = False
    shares_prefix: bool = False
    cache_salt: str | None = None
    terms: Mapping[str, Any] = MappingProxyType({})


class Reading(NamedTuple):
    """Results of a call.

    Attributes:
        orders: for each list of questions, one result per question.
        num_sequences: sequences of the first pass.
        num_forwards: forward passes, as the engine counted them.
        num_tokens: rows of all forward passes.
        num_cached: positions whose keys and values were cached.
        forms: the forms of sheets with several questions that were used.
    """

    orders: list[list[QuestionRead]]
    num_sequences: int
    num_forwards: int
    num_tokens: int
    num_cached: int
    forms: frozenset[str]


class SequenceTooLong(Exception):
    """A state and one question have more tokens than a sequence of the model."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"given {num_tokens} tokens; wanted at most {limit}")


class BlockStrategy(NextTokenStrategy):
    """Strategy of block-causal families: a sequence per question, scored at its first token.

    The sequence is that of the first forward pass of an answer, with masks up to the end of the
    block.

    Attributes:
        options: how the questions of this call are read.
        labels: the tokens of labels.
    """

    max_passes = 1
    options = ReadOptions()

    def __init__(self, context: ReadContext) -> None:
        ReadStrategy.__init__(self, context)
        validator = validator_of(context.engine_client.input_processor)
        if validator is None:
            raise ValueError("the served model is not a diffusion language model")
        self._validator: Validator = validator
        self._score_client = ScoreClient(context.engine_client, validator)
        self.labels = Labels(lambda text: self._tokenizer().encode(text, add_special_tokens=False))

    @property
    def mask_token(self) -> str:
        """The text of the mask token."""
        return str(self._tokenizer().convert_ids_to_tokens(self._validator.mask_id))

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a sequence."""
        return int(self.context.engine_client.model_config.max_model_len)

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
        reading = await self.read_orders(
            [questions],
            instructions,
            state,
            request_id=request_id,
            chat_template_kwargs=chat_template_kwargs,
            priority=priority,
            trace_headers=trace_headers,
        )
        return reading.orders[0]

    async def read_orders(
        self,
        orders: Sequence[Sequence[Question]],
        instructions: str | None,
        state: str,
        *,
        request_id: str,
        chat_template_kwargs: dict[str, Any] | None,
        **options: Any,
    ) -> Reading:
        """Score several lists of questions about one state, all in one step.

        Raises:
            StructuredDecisionError: a question cannot be read, or a text has a mask token.
            SequenceTooLong: a question does not fit, with `in_parts`.
        """
        read_request = self._read_request(chat_template_kwargs, self.options.cache_salt)

        async def prompt(content: str) -> list[int]:
            messages = [{"role": "user", "content": content}]
            if instructions:
                messages.insert(0, {"role": "system", "content": instructions})
            try:
                rendered: list[int] = (await self._render(read_request, messages))[1]
            except VLLMValidationError as error:
                if not self.options.in_parts or error.parameter != "input_tokens":
                    raise
                num_tokens = len(self._tokenizer().encode(content, add_special_tokens=False))
                raise SequenceTooLong(
                    max(num_tokens, self.max_length + 1), self.max_length
                ) from None
            if self._validator.mask_id in rendered:
                raise StructuredDecisionError("state, questions: wanted them without mask tokens")
            return rendered

        sequences = [await self._sequences(state, questions, prompt) for questions in orders]
        queries = [sequence.query for each in sequences for sequence in each]
        reads, results = await self._scores(queries, request_id, options)
        num_sequences = len(queries)
        if self.options.passes > 1 and len(reads) > len(queries):
            again = _read_again(queries, reads)
            queries = [*queries, *again]
            first = sum(read.input_tokens for read in reads)
            reads, second = await self._scores(again, f"{request_id}-again", options)
            reads[0].input_tokens += first
            results += second
        remaining = iter(reads)
        return Reading(
            orders=[[next(remaining) for _ in questions] for questions in orders],
            num_sequences=num_sequences,
            num_forwards=sum(result.report.get("num_forwards", 1) for result in results),
            num_tokens=sum(len(query.prompt) for query in queries),
            num_cached=sum(result.num_cached for result in results),
            forms=frozenset(sequence.form for each in sequences for sequence in each),
        )

    async def _sequences(
        self,
        state: str,
        questions: Sequence[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> list[_Sequence]:
        """Return the sequences of a call, with a mask at the position of each answer.

        The scored tokens of a position are the first tokens of the labels there.
        """
        return [await self._lone_sequence(state, question, prompt) for question in questions]

    async def _lone_sequence(
        self, state: str, question: Question, prompt: Callable[[str], Awaitable[list[int]]]
    ) -> _Sequence:
        """Return the sequence of one question, whose answer is the first token of the reply."""
        if not question.labels:
            place = Place(self._end_of(await prompt(state)))
            question, _ = self.labels.labelled(place, question, has_codes=True)
        before = await prompt(self._content(state, question))
        place = Place(self._end_of(before))
        coded, ids = self.labels.labelled(place, question, has_codes=self.options.has_codes)
        if coded is not question:
            before = await prompt(self._content(state, coded))
        return self._checked(self._masked(before), [len(before)], [ids], LONG)

    def _masked(self, prompt: list[int]) -> list[int]:
        """Return the tokens of a prompt and of a reply of one mask."""
        return masked_behind(prompt, self._validator)

    def _checked(
        self,
        tokens: list[int],
        positions: list[int],
        ids: list[tuple[int, ...]],
        form: str,
    ) -> _Sequence:
        if self.options.in_parts and len(tokens) > self.max_length:
            raise SequenceTooLong(len(tokens), self.max_length)
        shares = self.options.shares_prefix and self._validator.shares_prefixes
        return _Sequence(ScoreQuery(tokens, positions, ids, shares_prefix=shares), form)

    async def _scores(
        self, queries: list[ScoreQuery], request_id: str, options: dict[str, Any]
    ) -> tuple[list[QuestionRead], list[ScoreResult]]:
        group: dict[str, Any] = {"group": request_id, "group_size": len(queries)}
        salt = self.options.cache_salt
        results = await self._score_client.run(
            queries, request_id, self.options.terms, **group, cache_salt=salt, **options
        )
        question_reads = []
        for canvas, (query, result) in enumerate(zip(queries, results, strict=True)):
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
                        slot=JointSlot(canvas, len(query.prompt), query.positions[number]),
                    )
                )
        return question_reads, results

    def _end_of(self, prompt: list[int]) -> str:
        """Return the text of a prompt after its last special token."""
        tokenizer = self._tokenizer()
        return str(tokenizer.decode(prompt_tail(tokenizer, prompt)))


class MaskStrategy(BlockStrategy):
    """Strategy of families with full attention: one sequence for all questions of a call."""

    max_passes = 2
    joint_reads = True
    read_joint = BlockStrategy.read

    def num_requests(self, questions: list[Question], joint: bool = False) -> int:
        return 1

    async def _sequences(
        self,
        state: str,
        questions: Sequence[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> list[_Sequence]:
        if len(questions) == 1 or not self.options.is_joint:
            return await super()._sequences(state, questions, prompt)
        try:
            return [await self._joint_sequence(state, questions, prompt)]
        except SequenceTooLong:
            middle = len(questions) // 2
            return [
                *await self._sequences(state, questions[:middle], prompt),
                *await self._sequences(state, questions[middle:], prompt),
            ]

    async def _joint_sequence(
        self,
        state: str,
        questions: Sequence[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> _Sequence:
        """Return one sequence for all questions, whose reply has a mask at each answer."""
        options = self.options
        sheet = sheet_of(state, questions, options.form, self.labels, has_codes=options.has_codes)
        tokens, positions = await prompt(sheet.content), []
        for answer in sheet.answers:
            tokens += answer.before
            positions.append(len(tokens))
            tokens.append(self._validator.mask_id)
        tokens += [*sheet.end, *self._validator.turn_end]
        return self._checked(tokens, positions, [a.labels for a in sheet.answers], sheet.form)

    def _masked(self, prompt: list[int]) -> list[int]:
        return [*prompt, self._validator.mask_id, *self._validator.turn_end]


class _Sequence(NamedTuple):
    """A sequence to read, and the form of its sheet."""

    query: ScoreQuery
    form: str


def _read_again(queries: Sequence[ScoreQuery], reads: Sequence[QuestionRead]) -> list[ScoreQuery]:
    """Return a query for each answer; in it, the other answers of its sequence are in place."""
    again, start = [], 0
    for query in queries:
        own = reads[start : start + len(query.positions)]
        start += len(own)
        again += _answered(query, [read.probs.index(max(read.probs)) for read in own])
    return again


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
        strategy.options = ReadOptions(
            passes=values.get("passes", 1),
            form=values.get("format", LONG),
            has_codes=values.get("codes", False),
            terms={name: values[name] for name in TERMS if name in values},
        )
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
