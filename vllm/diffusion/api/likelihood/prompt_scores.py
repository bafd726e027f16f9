# SPDX-License-Identifier: Apache-2.0
"""Forwards for likelihoods, which commit nothing, as the HTTP handlers ask for them.

Every reading is a request to the engine, so readings share steps with each other and with all other
requests, and priority, timeouts and aborts act on them as on any request.
"""

from __future__ import annotations

import asyncio
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm.diffusion.api.choices import Cancelling, answers, last
from vllm.diffusion.api.report import reports_by_choice
from vllm.diffusion.request.decision import attach
from vllm.diffusion.request.likelihood import BESIDE_A_SCORE, ScoreRequest, TokenScores
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.api.choices import ChoicesClient
    from vllm.diffusion.api.validator import Validator
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.engine.protocol import EngineClient

_SAMPLING = SamplingParams(  # what upstream's front end does with the output
    temperature=0.0,
    max_tokens=1,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
    skip_clone=True,  # every reading has its own; a deep copy takes longer than all else here
)

TERMS = tuple(sorted(BESIDE_A_SCORE))  # of an HTTP request, that each of its readings has, too
MAX_CONCURRENT_SCORES = 256  # readings of one HTTP request that are in the engine at a time


class Reading(NamedTuple):
    """One forward whose log probabilities are wanted.

    Attributes:
        prompt: the sequence, with its masks.
        positions: positions that are read, ascending.
        token_ids: for each of them, the tokens whose log probabilities are wanted.
        num_top: number of most likely tokens wanted as well.
        cfg_scale, context_length: guidance, see `ScoreRequest`.
    """

    prompt: list[int]
    positions: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    num_top: int = 0
    cfg_scale: float = 0.0
    context_length: int = 0

    def score(self, group: ReadGroup) -> ScoreRequest:
        """Return the reading as the engine's request."""
        return ScoreRequest(
            tuple(self.positions),
            tuple(map(tuple, self.token_ids)),
            self.num_top,
            self.cfg_scale,
            self.context_length,
            *group,
        )

    @property
    def kind(self) -> tuple[int, bool]:
        """Key of the readings that share a decision, apart from the positions and tokens read."""
        return len(self.prompt), self.cfg_scale > 0


class ReadGroup(NamedTuple):
    """Readings that are to share a step, as in `ScoreRequest`; at most MAX_CONCURRENT_SCORES."""

    group: str
    group_size: int


_ALONE = ReadGroup("", 1)


class Read(NamedTuple):
    """Result of a reading, and the scheduler's report of it."""

    scores: TokenScores
    report: dict[str, Any]


class Reader:
    """Runs readings over one engine.

    Args:
        engine: the engine's client.
        validator: decides requests of this engine.
    """

    def __init__(self, engine: EngineClient | ChoicesClient, validator: Validator) -> None:
        self._engine = engine
        self._validator = validator

    async def read(
        self,
        readings: Sequence[Reading],
        request_id: str,
        terms: Mapping[str, Any],
        *,
        group: ReadGroup | None = None,
        **options: Any,
    ) -> list[Read]:
        """Return the result of each reading; cancelling this coroutine aborts them all.

        Args:
            readings: the forwards; the engine knows number i as `{request_id}-{i}`.
            request_id: id of the HTTP request.
            terms: `priority` and `timeout_s`, under canonical names, if given.
            group: readings that are to share a step; other calls may contribute to it.
            options: arguments of the engine's `generate`.

        Raises:
            RequestRefused: HTTP 400, naming the field, before anything is sent.
            RequestTimedOut: HTTP 504.
            GenerationError: the engine could not go on.
        """
        decided = self.check(readings, terms)
        room = asyncio.Semaphore(MAX_CONCURRENT_SCORES)

        async def one(index: int) -> Read:
            reading = readings[index]
            sampling = copy(_SAMPLING)
            async with room:
                score = reading.score(group or _ALONE)
                attach(sampling, replace(decided[reading.kind], score=score))
                outputs = answers(
                    self._engine,
                    tokens_input(reading.prompt),
                    sampling,
                    f"{request_id}-{index}",
                    **options,
                )
                found = reports_by_choice(await last(outputs)).get(0, {})
            scores = msgspec.convert(found["scores"], TokenScores)
            return Read(scores, {name: value for name, value in found.items() if name != "scores"})

        async with Cancelling() as tasks:
            return list(await asyncio.gather(*(tasks.start(one(i)) for i in range(len(readings)))))

    def check(
        self, readings: Sequence[Reading], terms: Mapping[str, Any]
    ) -> dict[tuple[int, bool], DiffusionParams]:
        """Make a decision for every kind of readings.

        Raises:
            RequestRefused: HTTP 400, naming the field.
        """
        decided: dict[tuple[int, bool], DiffusionParams] = {}
        for reading in readings:
            if reading.kind not in decided:
                score = {
                    name: value for name, value in reading._asdict().items() if name != "prompt"
                }
                decided[reading.kind] = self._validator.decide_reading(score, reading.prompt, terms)
        return decided
