# SPDX-License-Identifier: Apache-2.0
"""Fused CUDA operations of the LLaDA family.

This folder itself may stand on ``PYTHONPATH``; then ``import fused_ops`` works too.
"""

from . import fused_ops

__all__ = ["fused_ops"]
