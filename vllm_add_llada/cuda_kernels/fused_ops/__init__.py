# SPDX-License-Identifier: Apache-2.0
"""Row-wise operations of a transformer layer and the commit of a step, each in one launch.

Importing never fails: without the compiled module (`is_built`) everything runs in PyTorch.
"""

from ._commit import commit
from ._ops import (
    add_rms_norm,
    apply_rotary,
    is_built,
    norm_rotary,
    rms_norm,
    rotary_tables,
    silu_mul,
    store_keys_values,
)
from .reference import ABOVE_THRESHOLD, AT_LEAST_THRESHOLD, Committed, Proposals, Selection

__all__ = [
    "ABOVE_THRESHOLD",
    "AT_LEAST_THRESHOLD",
    "Committed",
    "Proposals",
    "Selection",
    "add_rms_norm",
    "apply_rotary",
    "commit",
    "is_built",
    "norm_rotary",
    "rms_norm",
    "rotary_tables",
    "silu_mul",
    "store_keys_values",
]
