# SPDX-License-Identifier: Apache-2.0
"""Matrix products over gathered rows: masked rows times the output matrix, tokens times experts;
and products of few rows.

Importing never fails: without Triton, and without the compiled module, everything runs in PyTorch.
"""

from ._ops import gather_gemm, is_built
from .fused_linear import Epilogue, fused_linear, is_fused_linear_faster
from .grouped import gated_gemm, grouped_gemm, weighted_gemm
from .routing import Routing, add_terms, route, route_rows, sum_terms
from .top import Top, gather_top, is_top_faster

__all__ = [
    "Epilogue",
    "Routing",
    "Top",
    "add_terms",
    "fused_linear",
    "gated_gemm",
    "gather_gemm",
    "gather_top",
    "grouped_gemm",
    "is_built",
    "is_fused_linear_faster",
    "is_top_faster",
    "route",
    "route_rows",
    "sum_terms",
    "weighted_gemm",
]
