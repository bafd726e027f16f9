# SPDX-License-Identifier: Apache-2.0
"""Triton products over gathered rows: some rows times the output matrix, tokens times experts.

There is no build step: kernels are compiled at first use. The import never fails; without Triton
(see `is_built`) everything runs in PyTorch.
"""

from ._ops import gather_gemm, is_built
from .grouped import gated_gemm, weighted_gemm
from .routing import Routing, route, route_rows, sum_terms
from .scoring import SOFTMAX, Scoring
from .top import MAX_COLUMNS, Top, gather_top, has_top

__all__ = [
    "MAX_COLUMNS",
    "SOFTMAX",
    "Routing",
    "Scoring",
    "Top",
    "gated_gemm",
    "gather_gemm",
    "gather_top",
    "has_top",
    "is_built",
    "route",
    "route_rows",
    "sum_terms",
    "weighted_gemm",
]
