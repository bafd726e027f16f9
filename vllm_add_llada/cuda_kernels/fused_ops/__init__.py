# SPDX-License-Identifier: Apache-2.0
"""Row-wise operations of a transformer layer, each in one pass over its rows.

Importing never fails: without the compiled module (`is_built`) everything runs in PyTorch.
"""

from ._ops import add_rms_norm, apply_rotary, is_built, rms_norm, silu_mul

__all__ = ["add_rms_norm", "apply_rotary", "is_built", "rms_norm", "silu_mul"]
