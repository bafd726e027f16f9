# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms: which candidates of a forward are committed."""

from vllm.diffusion.decoding.base import (
    BlockwiseRule,
    Candidates,
    DecodingRule,
    Work,
    most_certain_first,
)
from vllm.diffusion.decoding.registry import RULES, make_rule

__all__ = [
    "RULES",
    "BlockwiseRule",
    "Candidates",
    "DecodingRule",
    "Work",
    "make_rule",
    "most_certain_first",
]
