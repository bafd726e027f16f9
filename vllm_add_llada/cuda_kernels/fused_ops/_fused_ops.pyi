# SPDX-License-Identifier: Apache-2.0
"""The compiled module: addresses, sizes and streams as integers; `fused_ops` checks them."""

from typing import Final

class DataType:
    FLOAT32: Final[DataType]
    FLOAT16: Final[DataType]
    BFLOAT16: Final[DataType]

class Rows:
    def __init__(self, data: int, inner: int, outer_stride: int, inner_stride: int) -> None: ...

class RmsNormParams:
    def __init__(
        self,
        *,
        x: Rows,
        residual: Rows,
        weight: int,
        out: Rows,
        dtype: DataType,
        num_rows: int,
        num_columns: int,
        eps: float,
    ) -> None: ...

class RotaryParams:
    def __init__(
        self,
        *,
        q: Rows,
        k: Rows,
        cos: int,
        sin: int,
        cos_stride: int,
        sin_stride: int,
        dtype: DataType,
        table_dtype: DataType,
        num_tokens: int,
        rotary_dim: int,
    ) -> None: ...

class SiluMulParams:
    def __init__(
        self, *, gate: Rows, up: Rows, out: Rows, dtype: DataType, num_rows: int, num_columns: int
    ) -> None: ...

def rms_norm(params: RmsNormParams, device: int, stream: int) -> None: ...
def add_rms_norm(params: RmsNormParams, device: int, stream: int) -> None: ...
def apply_rotary(params: RotaryParams, device: int, stream: int) -> None: ...
def silu_mul(params: SiluMulParams, device: int, stream: int) -> None: ...
