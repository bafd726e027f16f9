# SPDX-License-Identifier: Apache-2.0
"""The compiled module: addresses, sizes and streams as integers; `fused_ops` checks them."""

from collections.abc import Sequence
from typing import Final, TypeAlias

_Rows: TypeAlias = tuple[int, int, int, int]  # address, inner rows, outer stride, inner stride
_Integers: TypeAlias = tuple[int, bool]  # address, whether int64 (else int32)

FLOAT32: Final[int]
FLOAT16: Final[int]
BFLOAT16: Final[int]
STORE: Final[int]
RESIDUAL: Final[int]
SILU_MUL: Final[int]
MAX_QUANTISED_COLUMNS: Final[int]
MAX_GROUPS: Final[int]
MAX_ROUTER_GROUPS: Final[int]
MAX_ROUTED_ROWS: Final[int]
MAX_ROUTER_DEPTH: Final[int]
ROUTER_DEPTH_STEP: Final[int]
MAX_RANKS: Final[int]
MAX_RANK_BLOCKS: Final[int]

def rms_norm(
    *,
    x: _Rows,
    weight: int,
    out: _Rows,
    dtype: int,
    num_rows: int,
    num_columns: int,
    eps: float,
    device: int,
    stream: int,
) -> None: ...
def rotary_tables(
    *,
    positions: _Integers,
    inverse_frequencies: int,
    cos: _Rows,
    sin: _Rows,
    dtype: int,
    num_rows: int,
    rotary_dim: int,
    device: int,
    stream: int,
) -> None: ...
def apply_rotary(
    *,
    q: _Rows,
    k: _Rows,
    cos: int,
    sin: int,
    cos_stride: int,
    sin_stride: int,
    dtype: int,
    table_dtype: int,
    num_tokens: int,
    rotary_dim: int,
    device: int,
    stream: int,
) -> None: ...
def norm_rotary(
    *,
    q: _Rows,
    k: _Rows,
    q_weight: int,
    k_weight: int,
    eps: float,
    cos: int,
    sin: int,
    cos_stride: int,
    sin_stride: int,
    dtype: int,
    table_dtype: int,
    num_tokens: int,
    head_dim: int,
    rotary_dim: int,
    device: int,
    stream: int,
) -> None: ...
def silu_mul(
    *,
    gate: _Rows,
    up: _Rows,
    out: _Rows,
    dtype: int,
    num_rows: int,
    num_columns: int,
    device: int,
    stream: int,
) -> None: ...
def store_keys_values(
    *,
    k: _Rows,
    v: _Rows,
    k_cache: _Rows,
    v_cache: _Rows,
    slots: _Integers,
    dtype: int,
    num_rows: int,
    num_slots: int,
    head_dim: int,
    device: int,
    stream: int,
) -> None: ...
def linear(
    *,
    x: int,
    weight: int,
    x_scales: int,
    weight_scales: int,
    bias: int,
    out: int,
    x_stride: int,
    weight_stride: int,
    out_stride: int,
    num_rows: int,
    num_columns: int,
    depth: int,
    epilogue: int,
    rows: int,
    columns: int,
    split: int,
    early: bool,
    ahead: tuple[int, int],
    device: int,
    stream: int,
) -> None: ...
def packed_linear(
    *,
    x: int,
    values: int,
    scales: int,
    zeros: int,
    table: tuple[int, ...],
    bias: int,
    out: int,
    strides: tuple[int, int, int, int],
    num_rows: int,
    num_columns: int,
    depth: int,
    group: int,
    epilogue: int,
    columns: int,
    split: int,
    early: bool,
    ahead: tuple[int, int],
    device: int,
    stream: int,
) -> None: ...
def unpack(
    *,
    values: int,
    scales: int,
    zeros: int,
    table: int,
    out: int,
    values_stride: int,
    scales_stride: int,
    num_rows: int,
    depth: int,
    group: int,
    is_fp8: bool,
    device: int,
    stream: int,
) -> None: ...
def quantise(
    *,
    x: _Rows,
    weight: int,
    eps: float,
    row_scales: int,
    column_scales: int,
    fixed_scale: int,
    out: int,
    scales: int,
    is_gated: bool,
    num_rows: int,
    num_columns: int,
    device: int,
    stream: int,
) -> None: ...
def scale(
    *,
    product: _Rows,
    row_scales: int,
    column_scales: int,
    bias: int,
    out: _Rows,
    adds: bool,
    num_rows: int,
    num_columns: int,
    device: int,
    stream: int,
) -> None: ...
def grouped_gemm(
    *,
    is_gated: bool,
    x: int,
    weight: int,
    ends: int,
    slots: int,
    scales: int,
    out: int,
    x_stride: int,
    weight_stride: int,
    num_rows: int,
    num_groups: int,
    num_columns: int,
    depth: int,
    num_chosen: int,
    num_blocks: int,
    early: bool,
    device: int,
    stream: int,
) -> None: ...
def route(
    *,
    x: int,
    gate: int,
    bias: int,
    weights: int,
    slots: int,
    ends: int,
    x_stride: int,
    gate_stride: int,
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    depth: int,
    is_sigmoid: bool,
    num_groups: int,
    num_kept_groups: int,
    is_normalised: bool,
    scale: float,
    in_fp32: bool,
    device: int,
    stream: int,
) -> None: ...
def sum_ranks(
    *,
    parts: Sequence[int],
    flags: Sequence[int],
    calls: int,
    is_over: int,
    rank: int,
    num_blocks: int,
    residual: int,
    out: int,
    dtype: int,
    count: int,
    device: int,
    stream: int,
) -> None: ...
def gather_ranks(
    *,
    parts: Sequence[int],
    flags: Sequence[int],
    calls: int,
    is_over: int,
    rank: int,
    num_blocks: int,
    out: int,
    count: int,
    device: int,
    stream: int,
) -> None: ...
