# SPDX-License-Identifier: Apache-2.0
"""Likelihood of given tokens: one forward, and no commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.core.errors import BrokenLogitsError
from vllm.diffusion.core.scoring import ScoredTokens
from vllm.diffusion.decoding.base import Candidates, DecodingRule, ForwardTarget
from vllm.diffusion.request.likelihood import TokenScores

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array
    from vllm.diffusion.request.params import DiffusionParams


class ScoreTokens(DecodingRule):
    """Requests the rows of `params.score` and records the log probabilities of its tokens."""

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.score is None:
            raise ValueError("score: wanted positions and token ids, got None")
        self._score = params.score
        self._width = max(len(ids) for ids in self._score.token_ids)
        padded = [ids + ids[:1] * (self._width - len(ids)) for ids in self._score.token_ids]
        self.token_ids = np.array(padded, dtype=np.int64)

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        if self.scores is not None:
            return None
        positions = np.array(self._score.positions, dtype=np.int64)
        is_causal = self.params.has_causal_context
        # With shared pages, earlier blocks may be stored before the scores are computed.
        unit = self.params.kept_unit if self.params.cache == "exact" else len(tokens)
        start = int(positions[0]) // unit * unit
        return ForwardTarget(positions, (start, len(tokens)), is_causal=is_causal)

    def choose(self, candidates: Candidates) -> Array:
        if candidates.logprobs is None:
            raise ValueError("logprobs: a scoring request needs them, got None")
        scored = ScoredTokens.unpack(candidates.logprobs, self._width, self._score.num_top)
        if np.isnan(scored.named).any():
            raise BrokenLogitsError
        named = scored.named.T.astype(np.float32).tolist()
        self.scores = TokenScores(
            logprobs=[
                values[: len(ids)] for values, ids in zip(named, self._score.token_ids, strict=True)
            ],
            likeliest=candidates.tokens.tolist(),
            top_tokens=scored.top_tokens.T.astype(np.int64).tolist(),
            top_logprobs=scored.top.T.astype(np.float32).tolist(),
        )
        return np.empty(0, dtype=np.int64)
