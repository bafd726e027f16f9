# SPDX-License-Identifier: Apache-2.0
"""Products of consecutive groups of rows, where each group has its own matrix.

The rows of an expert are such a group. No group is padded to the size of another, an empty group
costs nothing, and launches depend on shapes alone. Triton kernels run on CUDA. Without Triton the
references run, which copy `ends` to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from ._ops import _check, _check_exact
from ._triton import can_take, guard, load_kernels

_kernels = load_kernels("grouped_kernel")


def gated_gemm(
    x: Tensor,
    slots: Tensor,
    num_chosen: int,
    weight: Tensor,
    ends: Tensor,
    weight_scales: Tensor | None = None,
    *,
    is_gelu: bool = False,
) -> Tensor:
    """Compute silu(gate) * up of the products of gathered rows with their experts.

    The rows are read in place, and neither they nor the products are stored. Both halves of the
    product are rounded to the dtype, then silu, and then the result.

    Args:
        x: [R, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        slots: int32 [S]: row * k + any index below k, sorted by expert. Not checked, because the
            host would wait for values on a GPU.
        num_chosen: k.
        weight: [E, 2I, D] of the same dtype, or fp8 (e4m3), the gate's rows first; D is contiguous.
        ends: int32 [E], the end of each group's rows: non-decreasing, the last one S. Not checked.
        weight_scales: [E, 2I] fp32, factors of the sums with an fp8 weight.
        is_gelu: whether gelu in its tanh form takes the place of silu.

    Returns:
        [S, I], in the order of `slots`.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "gated_gemm"
    _check(op, "x", x, x, (-1, -1))
    _check_weight(op, weight, weight_scales, x)
    _check_exact(op, "slots", slots, (len(x) * num_chosen,), x, torch.int32)
    _check_exact(op, "ends", ends, (len(weight),), x, torch.int32)
    if weight.shape[1] % 2:
        raise ValueError(f"{op}: weight must be [E, 2I, D], got {list(weight.shape)}")
    out = x.new_empty(len(slots), weight.shape[1] // 2)
    if out.numel() == 0:
        return out
    if _kernels is None or not can_take(x):
        rows = x.index_select(0, slots // num_chosen)
        product = reference.grouped_gemm(rows, weight, ends, weight_scales)
        return reference.gated(product, is_gelu=is_gelu)
    operands = x, slots, num_chosen, weight, ends, out
    with guard(x):
        _kernels.launch_gated(*operands, weight_scales=weight_scales, is_gelu=is_gelu)
    return out


def weighted_gemm(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    slots: Tensor,
    weights: Tensor,
    *,
    is_weighted: bool = True,
    early: bool = False,
    weight_scales: Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows by its own transposed matrix, and write weighted terms by slot.

    Sums are fp32.

    Args:
        x: [S, D] bf16, fp16 or fp32, the rows of group 0 first; rows may be strided, D is
            contiguous.
        weight: [E, N, D] of the same dtype, or fp8 (e4m3), one matrix per group; D is contiguous.
        ends: int32 [E], as for `gated_gemm`.
        slots: int32 [S], a permutation of the slots. Not checked.
        weights: [R, k] of the dtype of x, R * k = S, contiguous.
        is_weighted: whether products are weighted; if not, only the shape of the weights, of any
            dtype, is used.
        early: allow the kernel to read `ends` and fetch `weight` while the previous kernel of the
            stream ends. Requires that this kernel belongs to `gated_gemm` or to this product,
            because these start only after `ends` is written.
        weight_scales: [E, N] fp32, factors of the sums with an fp8 weight.

    Returns:
        [R, k, N]: the products rounded to the dtype, and rounded again after the weight.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "weighted_gemm"
    _check(op, "x", x, x, (-1, -1))
    _check_weight(op, weight, weight_scales, x)
    _check_exact(op, "ends", ends, (len(weight),), x, torch.int32)
    _check_exact(op, "slots", slots, (len(x),), x, torch.int32)
    _check_slot_weights(op, weights, x, is_weighted=is_weighted)
    out = x.new_empty(*weights.shape, weight.shape[1])
    if out.numel() == 0:
        return out
    if _kernels is None or not can_take(x):
        products = reference.grouped_gemm(x, weight, ends, weight_scales)
        return reference.weighted_terms(products, slots, weights, is_weighted=is_weighted)
    scales = weights if is_weighted else None
    with guard(x):
        into = out.view(len(x), -1)
        _kernels.launch_weighted(
            x, weight, ends, slots, scales, into, early, weight_scales=weight_scales
        )
    return out


def _check_slot_weights(op: str, weights: Tensor, x: Tensor, *, is_weighted: bool) -> None:
    if is_weighted:
        _check(op, "weights", weights, x, (-1, -1))
    if weights.dim() != 2 or weights.numel() != len(x) or not weights.is_contiguous():
        raise ValueError(
            f"{op}: weights must be [R, k] contiguous with R * k = {len(x)}, "
            f"got {list(weights.shape)} with strides {weights.stride()}"
        )


def _check_weight(op: str, weight: Tensor, scales: Tensor | None, x: Tensor) -> None:
    if scales is None:
        _check(op, "weight", weight, x, (-1, -1, x.shape[1]))
        return
    is_fp8 = weight.dtype == torch.float8_e4m3fn and weight.device == x.device
    if not is_fp8 or weight.dim() != 3 or weight.shape[2] != x.shape[1] or weight.stride(2) != 1:
        raise ValueError(
            f"{op}: a weight with scales must be fp8 [E, any, {x.shape[1]}] on {x.device}, "
            f"got {weight.dtype} {list(weight.shape)} on {weight.device}"
        )
    _check_exact(op, "weight_scales", scales, tuple(weight.shape[:2]), x, torch.float32)
