# SPDX-License-Identifier: Apache-2.0
"""Decoding rules by the name that requests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.credit import Credit
from vllm.diffusion.decoding.dream import Dream
from vllm.diffusion.decoding.entropy_threshold import EntropyThreshold
from vllm.diffusion.decoding.factor import Factor
from vllm.diffusion.decoding.full_attn_multi_block import FullAttnMultiBlock
from vllm.diffusion.decoding.hierarchy import Hierarchy
from vllm.diffusion.decoding.local_leap import LocalLeap
from vllm.diffusion.decoding.multi_block import MultiBlock
from vllm.diffusion.decoding.score import ScoreTokens
from vllm.diffusion.decoding.semi_ar import SemiAutoregressive
from vllm.diffusion.decoding.threshold import Threshold

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import DecodingRule
    from vllm.diffusion.params import DiffusionParams

RULES: dict[str, type[DecodingRule]] = {
    "semi_ar": SemiAutoregressive,
    "threshold": Threshold,
    "factor": Factor,
    "local_leap": LocalLeap,
    "entropy_threshold": EntropyThreshold,
    "full_attn_multi_block": FullAttnMultiBlock,
    "multi_block": MultiBlock,
    "hierarchy": Hierarchy,
    "credit": Credit,
    "dream": Dream,
}


def make_rule(params: DiffusionParams, prompt_length: int) -> DecodingRule:
    """The rule of `params.algorithm`, or the one that only reads, at the start of a request."""
    if params.score is not None:
        return ScoreTokens(params, prompt_length)
    return RULES[params.algorithm](params, prompt_length)
