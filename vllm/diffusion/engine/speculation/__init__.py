# SPDX-License-Identifier: Apache-2.0
"""Lossless speculation: a step guest that also evaluates predicted next states of requests."""

from vllm.diffusion.engine.speculation.speculation import Speculation, can_speculate

__all__ = ["Speculation", "can_speculate"]
