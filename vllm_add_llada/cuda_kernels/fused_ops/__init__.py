# SPDX-License-Identifier: Apache-2.0
"""Fused operations of a transformer layer.

Row-wise operations take one launch each. Products of few rows run in one kernel with the operation
that follows them, in bf16, fp8 (`QuantisedRows`) or 4 bits (`Packed`).

The import never fails. Without the compiled module (see `is_built`) everything runs in PyTorch,
except attention and the operations on experts and 4-bit weights. For these, `has_attention`,
`has_router`, `has_grouped_gemm` and `has_packed_linear` report whether they can run.
"""

from ._attention import ATTENTION_PAGE, Attended, attention, has_attention
from ._experts import gated_gemm, has_grouped_gemm, has_router, route_rows, weighted_gemm
from ._fp8_heads import Fp8Heads
from ._linear import PORTABLE, Epilogue, Tiling, fused_linear, has_fused_linear
from ._ops import (
    apply_rotary,
    build_stamp,
    is_built,
    norm_rotary,
    rms_norm,
    rotary_tables,
    silu_mul,
    store_keys_values,
)
from ._packed import Packed, pack, unpack
from ._packed_linear import fused_linear_packed, has_packed_linear, look_up_table
from ._portable import has_portable, has_portable_packed
from ._quantise import (
    FP8,
    QuantisedRows,
    add_linear_fp8,
    fused_linear_fp8,
    has_add_linear_fp8,
    has_quantise,
    quantise_rows,
    rescale,
    rms_norm_quantised,
    silu_mul_quantised,
)
from ._ranks import Meeting, call_counts, flag_bytes, gather_ranks, has_sum_ranks, sum_ranks
from ._support import capability_of
from .reference import Kept

__all__ = [
    "ATTENTION_PAGE",
    "FP8",
    "PORTABLE",
    "Attended",
    "Epilogue",
    "Fp8Heads",
    "Kept",
    "Meeting",
    "Packed",
    "QuantisedRows",
    "Tiling",
    "add_linear_fp8",
    "apply_rotary",
    "attention",
    "build_stamp",
    "call_counts",
    "capability_of",
    "flag_bytes",
    "fused_linear",
    "fused_linear_fp8",
    "fused_linear_packed",
    "gated_gemm",
    "gather_ranks",
    "has_add_linear_fp8",
    "has_attention",
    "has_fused_linear",
    "has_grouped_gemm",
    "has_packed_linear",
    "has_portable",
    "has_portable_packed",
    "has_quantise",
    "has_router",
    "has_sum_ranks",
    "is_built",
    "look_up_table",
    "norm_rotary",
    "pack",
    "quantise_rows",
    "rescale",
    "rms_norm",
    "rms_norm_quantised",
    "rotary_tables",
    "route_rows",
    "silu_mul",
    "silu_mul_quantised",
    "store_keys_values",
    "sum_ranks",
    "unpack",
    "weighted_gemm",
]
