# SPDX-License-Identifier: Apache-2.0
import enum

MAX_ROWS: int

class Epilogue(enum.Enum):
    STORE = 0
    RESIDUAL = 1
    SILU_MUL = 2

def linear(
    *,
    x: int,
    weight: int,
    bias: int,
    out: int,
    x_stride: int,
    weight_stride: int,
    out_stride: int,
    num_rows: int,
    num_columns: int,
    depth: int,
    epilogue: Epilogue,
    rows: int,
    columns: int,
    split: int,
    early: bool,
    device: int,
    stream: int,
) -> None: ...
