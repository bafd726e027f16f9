# SPDX-License-Identifier: Apache-2.0
"""Decoding algorithms: which candidates of a forward are committed."""

from vllm.diffusion.decoding.base import Candidates, DecodingRule, most_certain_first
from vllm.diffusion.decoding.registry import RULES, make_rule

__all__ = ["RULES", "Candidates", "DecodingRule", "make_rule", "most_certain_first"]
