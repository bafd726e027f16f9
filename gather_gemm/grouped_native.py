# SPDX-License-Identifier: Apache-2.0
"""The compiled weighted product: few rows a group, bf16, on a card of compute capability 9.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._native import hopper_multiprocessors, is_describable, native
from ._triton import guard

if TYPE_CHECKING:
    from torch import Tensor

_DEPTH = 64  # of one step of the sum
_COLUMNS = 8  # that lie together in a thread's part of the result


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a compiled product of rows x [S, D] with matrices [E, N, D]."""
    if native is None or not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    num_groups, num_columns, depth = weight.shape
    return (
        hopper_multiprocessors(x.device.index) > 0
        and num_groups <= native.MAX_GROUPS
        and num_columns % _COLUMNS == 0
        and depth % _DEPTH == 0
        and (num_groups == 1 or weight.stride(0) == num_columns * weight.stride(1))
        and is_describable(x)
        and is_describable(weight[0])
    )


def launch_weighted(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    slots: Tensor,
    weights: Tensor,
    out: Tensor,
    early: bool,
) -> None:
    """Enqueue the weighted products; the arguments are checked.

    Row i is weighted and becomes row ``slots[i]`` of `out` [S, N], contiguous. If `early`, `ends`
    and `weight` are read before the kernel before this one has ended.
    """
    assert native is not None
    num_groups, num_columns, depth = weight.shape
    with guard(x):
        native.weighted_gemm(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            ends=ends.data_ptr(),
            slots=slots.data_ptr(),
            scales=weights.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            weight_stride=weight.stride(1),
            num_rows=len(x),
            num_groups=num_groups,
            num_columns=num_columns,
            depth=depth,
            num_blocks=hopper_multiprocessors(x.device.index),
            early=early,
            device=x.device.index,
            stream=torch.cuda.current_stream().cuda_stream,
        )
