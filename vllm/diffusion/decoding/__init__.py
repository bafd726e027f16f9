# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms, which choose the candidates of a forward to commit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vllm.diffusion.decoding.base import (
    Candidates,
    Commit,
    DecodingRule,
    ForwardTarget,
    ScorePick,
    most_certain_first,
)
from vllm.diffusion.decoding.score import ScoreTokens
from vllm.diffusion.decoding.together import BatchedChoice, BatchedCommit
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.params import DiffusionParams


def _rules(table: Mapping[str, Algorithm], key: str = "rule") -> dict[str, type[DecodingRule]]:
    rules = {}
    for name, algorithm in table.items():
        module, _, rule = (getattr(algorithm, key) or "").partition(".")
        if rule:
            rules[name] = getattr(import_module(f"{__name__}.{module}"), rule)
    return rules


RULES = _rules(ALGORITHMS)
BLOCK_RULES = _rules(BLOCK_ALGORITHMS)  # rules of block-causal families
CAUSAL_RULES = _rules(BLOCK_ALGORITHMS, "causal_rule")  # rules of families with causal context
TEXT_RULES = _rules(BLOCK_ALGORITHMS, "text_rule")  # rules of canvases that begin with a text


def make_rule(params: DiffusionParams, prompt_length: int) -> DecodingRule:
    """Create the rule of a request: that of `params.algorithm`, or one for likelihoods or texts."""
    if params.score is not None:
        return ScoreTokens(params, prompt_length)
    if params.revision is not None and params.scores_directly:
        return TEXT_RULES[params.algorithm](params, prompt_length)
    rules = BLOCK_RULES if params.is_block_causal else RULES
    rules = CAUSAL_RULES if params.has_causal_context else rules
    return rules[params.algorithm](params, prompt_length)


__all__ = [
    "BLOCK_RULES",
    "CAUSAL_RULES",
    "RULES",
    "BatchedChoice",
    "BatchedCommit",
    "Candidates",
    "Commit",
    "DecodingRule",
    "ForwardTarget",
    "ScorePick",
    "make_rule",
    "most_certain_first",
]
