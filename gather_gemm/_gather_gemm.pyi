# SPDX-License-Identifier: Apache-2.0
import enum

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

MAX_GROUPS: int

def weighted_gemm(
    *,
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
    num_blocks: int,
    early: bool,
    device: int,
    stream: int,
) -> None: ...

ROUTED_EXPERTS: int
MAX_ROUTED_ROWS: int
MAX_ROUTER_DEPTH: int
ROUTER_DEPTH_STEP: int

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
    num_chosen: int,
    depth: int,
    device: int,
    stream: int,
) -> None: ...
