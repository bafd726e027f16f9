# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms: which candidates of a forward are committed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vllm.diffusion.algorithms import ALGORITHMS
from vllm.diffusion.decoding.base import (
    BlockwiseRule,
    Candidates,
    Commit,
    DecodingRule,
    Work,
    most_certain_first,
)
from vllm.diffusion.decoding.score import ScoreTokens
from vllm.diffusion.decoding.selection import Selector, select

if TYPE_CHECKING:
    from vllm.diffusion.params import DiffusionParams

RULES: dict[str, type[DecodingRule]] = {
    name: getattr(import_module(f"{__name__}.{name}"), algorithm.rule)
    for name, algorithm in ALGORITHMS.items()
}


def make_rule(params: DiffusionParams, prompt_length: int) -> DecodingRule:
    """The rule of `params.algorithm`, or the one that only reads, at the start of a request."""
    if params.score is not None:
        return ScoreTokens(params, prompt_length)
    return RULES[params.algorithm](params, prompt_length)


__all__ = [
    "RULES",
    "BlockwiseRule",
    "Candidates",
    "Commit",
    "DecodingRule",
    "Selector",
    "Work",
    "make_rule",
    "most_certain_first",
    "select",
]
