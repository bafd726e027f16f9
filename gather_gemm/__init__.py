# SPDX-License-Identifier: Apache-2.0
"""Matrix products over gathered rows: masked rows times the output matrix, tokens times experts.

Importing never fails: without Triton everything runs in PyTorch.
"""

from ._ops import gather_gemm, is_built
from .grouped import gated_gemm, grouped_gemm, weighted_gemm
from .routing import Routing, add_terms, route, sum_terms

__all__ = [
    "Routing",
    "add_terms",
    "gated_gemm",
    "gather_gemm",
    "grouped_gemm",
    "is_built",
    "route",
    "sum_terms",
    "weighted_gemm",
]
