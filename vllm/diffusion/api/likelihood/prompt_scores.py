# SPDX-License-Identifier: Apache-2.0
"""Engine client for forward passes that score tokens and commit nothing.

Every query is a request to the engine. So queries share steps with each other and with all other
requests, and priorities, timeouts and aborts apply to them as to any request.
"""

from __future__ import annotations

import asyncio
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm.diffusion.api.choices import stream_outputs
from vllm.diffusion.api.report import reports_by_choice
from vllm.diffusion.api.streams import TaskScope, final_output
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

# Parameters of a query for upstream's front end, which processes the output.
_SAMPLING = SamplingParams(
    temperature=0.0,
    max_tokens=1,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
    # Each query makes its own shallow copy; a deep copy takes longer than all other work here.
    skip_clone=True,
)

# Parameters of an HTTP request that apply to each of its queries, too.
TERMS = tuple(sorted(BESIDE_A_SCORE))
# Queries of one HTTP request that are in the engine at a time.
MAX_CONCURRENT_SCORES = 256


class ScoreQuery(NamedTuple):
    """One forward pass that computes log probabilities of given tokens.

    Attributes:
        prompt: the sequence, with its masks.
        positions: scored positions, ascending.
        token_ids: for each position, the tokens whose log probabilities are returned.
        num_top: number of most likely tokens that are returned as well.
        cfg_scale, context_length: guidance, see `ScoreRequest`.
        shares_prefix: see `ScoreRequest`.
    """

    prompt: list[int]
    positions: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    num_top: int = 0
    cfg_scale: float = 0.0
    context_length: int = 0
    shares_prefix: bool = False

    def score(self, group: str, group_size: int) -> ScoreRequest:
        """Return the query in the form of the engine's request."""
        return ScoreRequest(
            tuple(self.positions),
            tuple(map(tuple, self.token_ids)),
            self.num_top,
            self.cfg_scale,
            self.context_length,
            self.shares_prefix,
            group,
            group_size,
        )

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Key of queries with the same decision except for the scored positions and tokens."""
        return len(self.prompt), self.cfg_scale > 0, self.shares_prefix


class ScoreResult(NamedTuple):
    """Result of a query, the scheduler's report about it, and its number of cached positions."""

    scores: TokenScores
    report: dict[str, Any]
    num_cached: int = 0


class ScoreClient:
    """Runs queries on one engine.

    Args:
        engine: the engine's client.
        validator: decides the parameters of requests to this engine.
    """

    def __init__(self, engine: EngineClient | ChoicesClient, validator: Validator) -> None:
        self._engine = engine
        self._validator = validator

    async def run(
        self,
        queries: Sequence[ScoreQuery],
        request_id: str,
        terms: Mapping[str, Any],
        *,
        group: str = "",
        group_size: int = 1,
        cache_salt: str | None = None,
        **options: Any,
    ) -> list[ScoreResult]:
        """Return the result of each query. Cancelling this coroutine aborts all queries.

        Args:
            queries: the forward passes; query i has the engine's request id `{request_id}-{i}`.
            request_id: id of the HTTP request.
            terms: `priority` and `timeout_s`, under canonical names, if given.
            group, group_size: name and size of a group of queries that share a step; other calls
                may add queries to it. A group is sent as a whole.
            cache_salt: part of the hash of pages, in families that share them.
            options: arguments of the engine's `generate`.

        Raises:
            RequestRefused: HTTP 400, naming the field, before a query is sent.
            RequestTimedOut: HTTP 504.
            GenerationError: the engine failed.
        """
        decided = self.check(queries, terms)
        room = asyncio.Semaphore(max(MAX_CONCURRENT_SCORES, group_size))

        async def one(index: int) -> ScoreResult:
            query = queries[index]
            sampling = copy(_SAMPLING)
            async with room:
                score = query.score(group, group_size)
                attach(sampling, replace(decided[query.kind], score=score))
                outputs = stream_outputs(
                    self._engine,
                    tokens_input(query.prompt, cache_salt=cache_salt),
                    sampling,
                    f"{request_id}-{index}",
                    **options,
                )
                output = await final_output(outputs)
            report = dict(reports_by_choice(output).get(0, {}))
            scores = msgspec.convert(report.pop("scores"), TokenScores)
            return ScoreResult(scores, report, output.num_cached_tokens or 0)

        async with TaskScope() as tasks:
            return list(await asyncio.gather(*(tasks.start(one(i)) for i in range(len(queries)))))

    def check(
        self, queries: Sequence[ScoreQuery], terms: Mapping[str, Any]
    ) -> dict[tuple[int, bool, bool], DiffusionParams]:
        """Decide the parameters of each kind of query.

        Raises:
            RequestRefused: HTTP 400, naming the field.
        """
        decided: dict[tuple[int, bool, bool], DiffusionParams] = {}
        for query in queries:
            if query.kind not in decided:
                score = {name: value for name, value in query._asdict().items() if name != "prompt"}
                decided[query.kind] = self._validator.decide_query(score, query.prompt, terms)
        return decided
