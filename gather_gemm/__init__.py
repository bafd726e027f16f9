# SPDX-License-Identifier: Apache-2.0
"""Triton products over gathered rows: with the output matrix, experts, or low-rank matrices.

There is no build step: kernels are compiled at first use. The import never fails; without Triton
(see `is_built`) everything runs in PyTorch.
"""

from ._ops import gather_gemm, is_built
from .grouped import gated_gemm, weighted_gemm
from .launch import MAX_SPLIT_ROWS, low_rank_splits, low_rank_tile, max_tiles
from .low_rank import LowRank, Piece, Tiles, expand, gated_expand, shrink
from .routing import Routing, route, route_rows, sum_terms
from .scoring import SOFTMAX, Scoring
from .top import MAX_COLUMNS, Top, gather_top, has_top

__all__ = [
    "MAX_COLUMNS",
    "MAX_SPLIT_ROWS",
    "SOFTMAX",
    "LowRank",
    "Piece",
    "Routing",
    "Scoring",
    "Tiles",
    "Top",
    "expand",
    "gated_expand",
    "gated_gemm",
    "gather_gemm",
    "gather_top",
    "has_top",
    "is_built",
    "low_rank_splits",
    "low_rank_tile",
    "max_tiles",
    "route",
    "route_rows",
    "shrink",
    "sum_terms",
    "weighted_gemm",
]
