# SPDX-License-Identifier: Apache-2.0
"""Fused CUDA operations of the LLaDA family.

If this folder itself is on ``PYTHONPATH``, ``import fused_ops`` works too.
"""

from . import fused_ops

__all__ = ["fused_ops"]
