# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms: which candidates of a forward are committed."""

from vllm.diffusion.decoding.base import (
    BlockwiseRule,
    Candidates,
    Commit,
    DecodingRule,
    Work,
    most_certain_first,
)
from vllm.diffusion.decoding.registry import RULES, make_rule
from vllm.diffusion.decoding.selection import Selector, select

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
