# SPDX-License-Identifier: Apache-2.0
"""Decoding rules by the name that requests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.semi_ar import SemiAutoregressive
from vllm.diffusion.decoding.threshold import Threshold

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import DecodingRule
    from vllm.diffusion.params import DiffusionParams

RULES: dict[str, type[DecodingRule]] = {
    "semi_ar": SemiAutoregressive,
    "threshold": Threshold,
}


def make_rule(params: DiffusionParams, prompt_length: int) -> DecodingRule:
    """The rule of `params.algorithm`, at the start of a request."""
    return RULES[params.algorithm](params, prompt_length)
