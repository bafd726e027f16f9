# SPDX-License-Identifier: Apache-2.0
"""Sampling for diffusion language models: rows of logits become candidate tokens and scores.

`candidates` samples rows of many requests in one launch. `low_confidence`, `entropy`,
`entropy_witht` and `margin` are its simple forms. `partial` and `merge` sample over slices of the
vocabulary, which are tensor-parallel ranks or tiles that are never stored together.

The import never fails. Without the compiled module (see `is_built`) everything runs in PyTorch.
"""

from ._kernels import build_stamp, is_built
from ._ops import candidates, kept_columns, uniform
from ._scores import entropy, entropy_witht, low_confidence, margin
from ._slices import entropy_share, merge, partial
from .filters import Filters
from .rows import RECORD_FIELDS, Rows, Sampled, Score

__all__ = [
    "RECORD_FIELDS",
    "Filters",
    "Rows",
    "Sampled",
    "Score",
    "build_stamp",
    "candidates",
    "entropy",
    "entropy_share",
    "entropy_witht",
    "is_built",
    "kept_columns",
    "low_confidence",
    "margin",
    "merge",
    "partial",
    "uniform",
]
