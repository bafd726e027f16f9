# SPDX-License-Identifier: Apache-2.0
"""Products whose sums have one order, so that a row's result does not depend on other rows."""

import functools

import torch
from torch import Tensor

from . import reference
from ._ops import _check
from ._triton import can_take, guard, load_kernels
from .launch import OrderedConfig, choose_ordered

_kernels = load_kernels("ordered_kernel")
_ALIGNMENT = 16  # bytes, of the addresses that the copy engine reads


def has_ordered(x: Tensor, weight: Tensor) -> bool:
    """Whether `ordered_gemm` has a kernel for rows x [R, D] and a matrix [N, D].

    The kernel needs 16-bit numbers (under Triton's interpreter also fp32), and rows of x, weight
    and product that begin at multiples of 16 bytes.
    """
    if _kernels is None or not can_take(x) or (x.is_cuda and x.element_size() != 2):
        return False
    can_store = len(weight) * x.element_size() % _ALIGNMENT == 0
    return can_store and _is_aligned(x) and _is_aligned(weight)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the copy engine can read and write these rows."""
    row_bytes = tensor.stride(0) * tensor.element_size()
    return tensor.data_ptr() % _ALIGNMENT == 0 and row_bytes % _ALIGNMENT == 0


def ordered_gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    adds: bool = False,
    config: OrderedConfig | None = None,
) -> Tensor:
    """Compute x W^T with sums in one order, for any number of rows.

    The terms are summed in fp32 from low to high depth, then the bias is added, then the target.
    The result is rounded once. Tilings of `fused_linear` that are not split have the same order, so
    they write the same bits. Tensors that `has_ordered` refuses are multiplied by the reference.

    Args:
        x: [R, D] bf16 or fp16; rows may be strided.
        weight: [N, D] of the same dtype; rows may be strided.
        out: [R, N] of the same dtype; rows may be strided. Allocated when not given.
        bias: [N] of the same dtype, contiguous.
        adds: whether the product is added to `out`, which is then required.
        config: tile, instead of the fastest one. It does not change the result.

    Returns:
        `out`, or a new tensor.

    Raises:
        ValueError: a shape, dtype, device, stride or argument is not as above.
    """
    op = "ordered_gemm"
    _check(op, "x", x, x, (-1, -1))
    _check(op, "weight", weight, x, (-1, x.shape[1]))
    shape = (len(x), len(weight))
    if adds and out is None:
        raise ValueError(f"{op}: with adds, out must be given")
    if bias is not None:
        _check(op, "bias", bias, x, (len(weight),))
    out = x.new_empty(shape) if out is None else out
    _check(op, "out", out, x, shape)
    if 0 in shape:
        return out
    if _kernels is None or not has_ordered(x, weight) or not _is_aligned(out):
        return reference.ordered_gemm(x, weight, out, bias=bias, adds=adds)
    chosen = config or choose_ordered(*shape, _num_multiprocessors(x.device))
    with guard(x):
        _kernels.launch(x, weight, out, bias, chosen, adds=adds)
    return out


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
