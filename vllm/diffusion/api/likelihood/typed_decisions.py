# SPDX-License-Identifier: Apache-2.0
"""Typed decisions: upstream's `/v1/systemone` and `/generative_scoring` over masks.

Upstream reads the first token of a reply, one request a question. A model that fills masks reads
all questions of a call at once: the reply is written with a mask at each answer, and one forward
gives the distribution of each answer, given the state and all questions. In a block-causal family a
question is a request of its own, as a mask would change the blocks behind it.
"""

from __future__ import annotations

import math
import uuid
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import create_model

from vllm.diffusion.api.choices import RequestTimedOut
from vllm.diffusion.api.handlers import remade
from vllm.diffusion.api.likelihood.prompt_scores import (
    MAX_CONCURRENT_SCORES,
    TERMS,
    Reader,
    ReadGroup,
    Reading,
)
from vllm.diffusion.api.protocol import set_priority
from vllm.diffusion.api.schema import described
from vllm.diffusion.api.validator import RequestRefused, validator_of
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.families import FAMILIES
from vllm.diffusion.request.fields import BY_NAME, by_spelling, checked
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

_TIMEOUT = by_spelling([BY_NAME["timeout_s"]])

DecisionRequest = create_model(
    "DecisionRequest",
    __base__=StructuredDecisionRequest,
    __doc__="Body of POST /v1/systemone.",
    **described(PARAMETERS),
)


class Slot(NamedTuple):
    """A mask in place of an answer.

    Attributes:
        position: position in the sequence.
        label_ids: for each label, its first token at that position.
    """

    position: int
    label_ids: tuple[int, ...]


class Sheet(NamedTuple):
    """A sequence that asks some questions, with a mask at each answer."""

    tokens: list[int]
    slots: list[Slot]

    @property
    def reading(self) -> Reading:
        """Reading that this sheet asks for."""
        positions = [slot.position for slot in self.slots]
        return Reading(self.tokens, positions, [slot.label_ids for slot in self.slots])

    def without(self, chosen: Sequence[int]) -> list[Sheet]:
        """For each slot, make a sheet with that slot alone and the chosen labels in all others."""
        answered = list(self.tokens)
        for slot, label in zip(self.slots, chosen, strict=True):
            answered[slot.position] = slot.label_ids[label]
        sheets = []
        for slot in self.slots:
            tokens = list(answered)
            tokens[slot.position] = self.tokens[slot.position]
            sheets.append(Sheet(tokens, [slot]))
        return sheets


class BlockStrategy(NextTokenStrategy):
    """Strategy of block-causal families: each question is a sequence, read where its reply begins.

    It is read in the first forward of an answer: masks from there to the end of the block.

    Attributes:
        passes: number of times that a question is read.
        terms: `timeout_s`, if given.
    """

    most_passes = 1
    passes: int = 1
    terms: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, context: ReadContext) -> None:
        ReadStrategy.__init__(self, context)
        validator = validator_of(context.engine_client.input_processor)
        if validator is None:
            raise ValueError("the served model is not a diffusion language model")
        self._validator: Validator = validator
        self._reader = Reader(context.engine_client, validator)
        self._known: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}
        self._pieces: dict[str, list[int]] = {}  # tokens of what stands before an answer

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
        """Read the questions; one result each, in order."""

        async def prompt(content: str) -> list[int]:
            messages = [{"role": "user", "content": content}]
            if instructions:
                messages.insert(0, {"role": "system", "content": instructions})
            asked = self._read_request(chat_template_kwargs)
            found: list[int] = (await self._render(asked, messages))[1]
            if self._validator.mask_id in found:
                raise StructuredDecisionError("state, questions: wanted them without mask tokens")
            return found

        options = {"priority": priority, "trace_headers": trace_headers}
        sheets = await self._sheets(state, questions, prompt)
        reads = await self._read_sheets(sheets, request_id, options)
        if self.passes == 1 or len(questions) == 1:
            return reads
        again = [
            other
            for sheet in sheets
            for other in sheet.without([read.probs.index(max(read.probs)) for read in reads])
        ]
        second = await self._read_sheets(again, f"{request_id}-again", options)
        second[0].input_tokens += sum(read.input_tokens for read in reads)
        return second

    async def _sheets(
        self,
        state: str,
        questions: list[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> list[Sheet]:
        """Make the sequences of a call, from its prompts."""
        sheets = []
        for question in questions:
            before = await prompt(self._content(state, question))
            labels = self._label_ids(self._end_of(before), question)
            slot = Slot(len(before), labels)
            sheets.append(Sheet(masked_behind(before, self._validator), [slot]))
        return sheets

    async def _read_sheets(
        self, sheets: list[Sheet], request_id: str, options: dict[str, Any]
    ) -> list[QuestionRead]:
        readings = [sheet.reading for sheet in sheets]
        group = ReadGroup(request_id, len(readings))
        found = await self._reader.read(readings, request_id, self.terms, group=group, **options)
        reads = []
        for reading, read in zip(readings, found, strict=True):
            for number, labels in enumerate(reading.token_ids):
                logprobs = read.scores.logprobs[number]
                reads.append(
                    QuestionRead(
                        probs=label_softmax(logprobs),
                        label_mass=math.fsum(map(math.exp, logprobs)),
                        argmax_is_label=read.scores.likeliest[number] in labels,
                        # One forward reads the sequence for all of its questions.
                        input_tokens=0 if number else len(reading.prompt),
                        output_tokens=0,
                    )
                )
        return reads

    def _end_of(self, prompt: list[int]) -> str:
        """Return the text of a prompt behind its last special token."""
        tokenizer = self._tokenizer()
        return str(tokenizer.decode(prompt_tail(tokenizer, prompt)))

    def _label_ids(self, before: str, question: Question) -> tuple[int, ...]:
        """Return the first token of each label of a question behind some text.

        Raises:
            StructuredDecisionError: two of them begin alike, or none begins there.
        """
        if (before, question.labels) not in self._known:
            encode = self._tokenizer().encode
            start, found = encode(before, add_special_tokens=False), list[int]()
            for label in question.labels:
                whole = encode(before + label, add_special_tokens=False)
                if len(whole) == len(start) or whole[: len(start)] != start:
                    raise StructuredDecisionError(f"{question.id!r}: {label!r} is no token here")
                found.append(whole[len(start)])
            if len(set(found)) < len(found):
                raise StructuredDecisionError(
                    f"question {question.id!r}: labels {question.labels} begin alike in this model"
                )
            self._known[before, question.labels] = tuple(found)
        return self._known[before, question.labels]


class MaskStrategy(BlockStrategy):
    """Strategy of families with full attention: one sequence for all questions of a call."""

    most_passes = 2

    def num_requests(self, questions: list[Question]) -> int:
        return 1

    async def _sheets(
        self,
        state: str,
        questions: list[Question],
        prompt: Callable[[str], Awaitable[list[int]]],
    ) -> list[Sheet]:
        if len(questions) == 1:
            tokens = await prompt(self._content(state, questions[0]))
            pieces = [self._end_of(tokens)]
        else:
            tokens = await prompt(_content_of_several(state, questions))
            pieces = [f"\nQuestion {number}:\n" for number in range(1, len(questions) + 1)]
            pieces[0] = pieces[0].lstrip()
        slots = []
        for piece, question in zip(pieces, questions, strict=True):
            if len(questions) > 1:
                if piece not in self._pieces:
                    self._pieces[piece] = self._tokenizer().encode(piece, add_special_tokens=False)
                tokens += self._pieces[piece]
            slots.append(Slot(len(tokens), self._label_ids(piece, question)))
            tokens.append(self._validator.mask_id)
        return [Sheet([*tokens, *self._validator.turn_end], slots)]


def _content_of_several(state: str, questions: list[Question]) -> str:
    """Make the user's turn: the state, then the questions, which the reply answers by number."""
    asked = [
        f"Question {number}:\n{question.type.prompt(question)}"
        for number, question in enumerate(questions, start=1)
    ]
    return "\n\n".join([state, *asked])


def masked_behind(prompt: list[int], validator: Validator) -> list[int]:
    """Append the mask that a reply begins with; in block-causal families, a whole block."""
    end, block_length = len(prompt) + 1, validator.block_length
    if block_length is not None:
        end = -(-end // block_length) * block_length
    return [*prompt, *[validator.mask_id] * (end - len(prompt))]


class DiffusionDecisions(ServingStructuredDecisions):
    """Handler of POST /v1/systemone."""

    async def create_decision(self, request: Any, raw_request: Any = None) -> Any:
        asked = _asked(request, self.strategy)
        if raw_request is not None:
            set_priority(request, raw_request.headers)
        strategy = copy(self.strategy)
        strategy.passes = asked.get("passes", 1)
        strategy.terms = {name: asked[name] for name in TERMS if name in asked}
        handler = remade(self, DiffusionDecisions, strategy=strategy)
        return await super(DiffusionDecisions, handler).create_decision(request, raw_request)


def _asked(request: Any, strategy: BlockStrategy) -> dict[str, Any]:
    """Return our parameters of a body, checked.

    Raises:
        RequestRefused: HTTP 400, naming the field.
    """
    own = StructuredDecisionRequest.model_fields
    given = {k: v for k, v in request.model_dump(exclude_unset=True).items() if k not in own}
    try:
        asked = checked(given, by_spelling(PARAMETERS), also_known=own)
        if asked.get("passes", 1) > strategy.most_passes:
            raise InvalidParameterError(
                "passes", asked["passes"], "wanted 1: this model reads each question by itself"
            )
        return asked
    except InvalidParameterError as error:
        raise RequestRefused(error) from None


class DiffusionScoring(ServingGenerativeScoring):
    """Handler of POST /generative_scoring."""

    validator: Validator

    async def create_generative_scoring(self, request: Any, raw_request: Any = None) -> Any:
        try:
            known = type(request).model_fields
            terms = checked(request.model_extra or {}, _TIMEOUT, also_known=known)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        if raw_request is not None:
            set_priority(request, raw_request.headers)
        client = _NextTokens(self.engine_client, self.validator, len(request.items), terms)
        handler = remade(self, DiffusionScoring, engine_client=client)
        answer = await super(DiffusionScoring, handler).create_generative_scoring(
            request, raw_request
        )
        if client.error is not None:  # upstream's answer to it has another status
            raise client.error
        return answer


class _NextTokens:
    """Engine client that answers requests for one token by reading the mask behind the prompt.

    Args:
        engine: the engine's client.
        validator: decides requests of this engine.
        num_items: number of requests that come together.
        terms: `timeout_s`, if given.

    Attributes:
        error: why one of them was refused, or did not end.
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
        self._reader = Reader(engine, validator)
        self._group = ReadGroup(uuid.uuid4().hex, min(num_items, MAX_CONCURRENT_SCORES))

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
        """Yield the likeliest token, with the log probabilities of `logprob_token_ids`."""
        prompt, labels = engine_input["prompt_token_ids"], sampling.logprob_token_ids or []
        reading = Reading(masked_behind(prompt, self._validator), [len(prompt)], [labels])
        try:
            (read,) = await self._reader.read(
                [reading], request_id, self._terms, group=self._group, **options
            )
        except (RequestRefused, RequestTimedOut) as error:
            self.error = error
            raise ValueError(str(error)) from None
        (likeliest,), (values,) = read.scores.likeliest, read.scores.logprobs
        found = {own: Logprob(value) for own, value in zip(labels, values, strict=True)}
        completion = CompletionOutput(0, "", [likeliest], None, [found], finish_reason="length")
        yield RequestOutput(request_id, None, prompt, None, [completion], finished=True)


def register() -> None:
    """Register our strategies with upstream's server."""
    for family in FAMILIES:
        strategy = BlockStrategy if family.is_block_causal else MaskStrategy
        READ_STRATEGIES.update(dict.fromkeys(family.architectures, strategy))


def adopt_decisions(state: Any, validator: Validator) -> None:
    """Replace upstream's handlers of the server by ours."""
    decisions, scoring = state.serving_structured_decisions, state.serving_generative_scoring
    if decisions is not None:
        state.serving_structured_decisions = remade(decisions, DiffusionDecisions)
    if scoring is not None:
        state.serving_generative_scoring = remade(scoring, DiffusionScoring, validator=validator)
