# SPDX-License-Identifier: Apache-2.0
"""The compiled router: some rows to 64 experts, bf16, on a card of compute capability 9.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._native import hopper_multiprocessors, is_describable, native
from ._triton import guard

if TYPE_CHECKING:
    from torch import Tensor


# Up to 8 rows Triton's two kernels are as fast. On an H200 in CUDA graphs, 16, 32 and 64 rows: 4.8,
# 5.3 and 6.0 us; Triton's, which are three then, 7.1, 7.8 and 8.2.
_MIN_ROWS = 9


def takes(x: Tensor, gate: Tensor) -> bool:
    """Whether there is a compiled kernel that is faster for rows x [R, D] and a router [E, D]."""
    if native is None or not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    if hopper_multiprocessors(x.device.index) == 0:
        return False
    num_rows, depth = x.shape
    return (
        len(gate) == native.ROUTED_EXPERTS
        and _MIN_ROWS <= num_rows <= native.MAX_ROUTED_ROWS
        and depth % native.ROUTER_DEPTH_STEP == 0
        and depth <= native.MAX_ROUTER_DEPTH
        and is_describable(x)
        and is_describable(gate)
    )


def launch_route(
    x: Tensor,
    gate: Tensor,
    num_chosen: int,
    bias: Tensor | None,
    weights: Tensor,
    slots: Tensor,
    ends: Tensor,
) -> None:
    """Enqueue the product with the router, the choice and the order of the rows.

    The arguments are checked. The gate and the bias may be read before the kernel before this one
    has ended.
    """
    assert native is not None
    with guard(x):
        native.route(
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            weights=weights.data_ptr(),
            slots=slots.data_ptr(),
            ends=ends.data_ptr(),
            x_stride=x.stride(0),
            gate_stride=gate.stride(0),
            num_rows=len(x),
            num_chosen=num_chosen,
            depth=x.shape[1],
            device=x.device.index,
            stream=torch.cuda.current_stream().cuda_stream,
        )
