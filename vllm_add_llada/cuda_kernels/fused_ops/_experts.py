# SPDX-License-Identifier: Apache-2.0
"""Router of a mixture of experts, for few rows, and the experts' products.

Unlike the other operations these have no reference in this module: call `has_router` and
`has_grouped_gemm` first.
"""

import torch
from torch import Tensor

from ._quantise import FP8, QuantisedRows
from ._support import (
    check_vector,
    feeds_tensor_cores,
    hopper_multiprocessors,
    launch,
    native,
)

_VECTOR_BYTES = 16  # bytes of a row that are copied at once
_ROUTED_EXPERTS = (64, 128)
_COLUMNS = 16  # The columns of a matrix are a multiple of this: eight gates and eight ups.


def has_router(x: Tensor, gate: Tensor) -> bool:
    """Whether `route_rows` has a kernel for rows x [R, D] and a router [E, D]."""
    if native is None or not feeds_tensor_cores(x, gate):
        return False
    num_rows, depth = x.shape
    return (
        gate.shape[1] == depth
        and len(gate) in _ROUTED_EXPERTS
        and 1 <= num_rows <= native.MAX_ROUTED_ROWS
        and depth % native.ROUTER_DEPTH_STEP == 0
        and depth <= native.MAX_ROUTER_DEPTH
    )


def route_rows(
    x: Tensor,
    gate: Tensor,
    num_chosen: int,
    bias: Tensor | None = None,
    *,
    is_sigmoid: bool = False,
    num_groups: int = 1,
    num_kept_groups: int = 1,
    is_normalised: bool = False,
    scale: float = 1.0,
    in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logits ``x @ gate.T``, choose experts and sort the rows by expert, in one launch.

    The choice uses fp32 scores, by default a softmax over all experts; ties go to the lowest.

    Args:
        x: [R, D] bf16.
        gate: [E, D] bf16. The previous kernel of the stream must write neither gate nor bias.
        num_chosen: k, from 1 to E.
        bias: fp32 [E], added to the scores for the choice only.
        is_sigmoid: whether the score of an expert is the sigmoid of its logit.
        num_groups, num_kept_groups: consecutive experts form at most 32 groups of equal size. Only
            the `num_kept_groups` with the largest sums of their two best scores can be chosen.
        is_normalised: whether the weights of a row are divided by their sum.
        scale: factor of the weights, applied last.
        in_fp32: whether logits stay unrounded and weights are fp32.

    Returns:
        weights: [R, k] bf16 or fp32, the scores of a row's experts, in ascending order of experts.
        slots: int32 [R * k]: row * k + index among the row's experts, sorted by expert, then row.
        ends: int32 [E], the end of each expert's part of ``slots``.

    Raises:
        ValueError: There is no kernel (`has_router`), or an argument is not as above.
    """
    _check_route(x, gate, num_chosen, bias, num_groups, num_kept_groups)
    assert native is not None
    weights = x.new_empty(len(x), num_chosen, dtype=torch.float32 if in_fp32 else x.dtype)
    sizes = weights.numel(), len(gate)
    slots, ends = (torch.empty(n, dtype=torch.int32, device=x.device) for n in sizes)
    launch(
        native.route,
        x,
        x=x.data_ptr(),
        gate=gate.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        weights=weights.data_ptr(),
        slots=slots.data_ptr(),
        ends=ends.data_ptr(),
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        num_rows=len(x),
        num_experts=len(gate),
        num_chosen=num_chosen,
        depth=x.shape[1],
        scoring=(is_sigmoid, num_groups, num_kept_groups, is_normalised, scale, in_fp32),
    )
    return weights, slots, ends


def _check_route(
    x: Tensor,
    gate: Tensor,
    num_chosen: int,
    bias: Tensor | None,
    num_groups: int,
    num_kept_groups: int,
) -> None:
    name = "route_rows"
    if not has_router(x, gate):
        raise ValueError(
            f"{name}: no kernel for x {x.dtype} {list(x.shape)} on {x.device} "
            f"and gate {gate.dtype} {list(gate.shape)}"
        )
    if not 1 <= num_chosen <= len(gate):
        raise ValueError(f"{name}: num_chosen must be from 1 to {len(gate)}, got {num_chosen}")
    if bias is not None:
        check_vector(name, "bias", bias, (torch.float32,), (len(gate),), x.device)
    size, rest = divmod(len(gate), num_groups)
    assert native is not None
    if num_groups > 1 and (
        rest
        or size < 2
        or num_groups > native.MAX_ROUTER_GROUPS
        or not num_chosen <= num_kept_groups * size <= len(gate)
    ):
        raise ValueError(
            f"{name}: wanted at most {native.MAX_ROUTER_GROUPS} groups of two or more experts, and "
            f"{num_chosen} in those that are kept, got {num_kept_groups} of {num_groups} groups"
        )


def has_grouped_gemm(x: Tensor | QuantisedRows, weight: Tensor) -> bool:
    """Whether `gated_gemm` and `weighted_gemm` support rows x [S, D] and matrices [E, N, D]."""
    values, dtype = (x.values, FP8) if isinstance(x, QuantisedRows) else (x, torch.bfloat16)
    if native is None or not len(weight) or not feeds_tensor_cores(values, weight[0], dtype=dtype):
        return False
    num_groups, num_columns, depth = weight.shape
    return (
        num_groups <= native.MAX_GROUPS
        and num_columns % _COLUMNS == 0
        and depth == values.shape[1]
        and depth * dtype.itemsize % _VECTOR_BYTES == 0
        and (num_groups == 1 or weight.stride(0) == num_columns * weight.stride(1))
    )


def gated_gemm(
    x: Tensor | QuantisedRows,
    slots: Tensor,
    num_chosen: int,
    weight: Tensor,
    ends: Tensor,
    weight_scales: Tensor | None = None,
    *,
    is_gelu: bool = False,
) -> Tensor:
    """Compute silu(gate) * up of the products of gathered rows with their groups' matrices.

    Args:
        x: [R, D] bf16 with rows that may be strided, or fp8 with scales.
        slots: int32 [S]: row * k + any index below k, sorted by group. Not checked.
        num_chosen: k.
        weight: [E, 2I, D] of the dtype of x, the gate's rows first.
        ends: int32 [E], the end of each group's rows: non-decreasing, the last one S. Not checked.
        weight_scales: [E, 2I] fp32, for an fp8 weight. Products are multiplied by these and by the
            scales of x before they are rounded.
        is_gelu: whether gelu in its tanh form takes the place of silu.

    Returns:
        [S, I] bf16, in the order of ``slots``: both products are rounded, then silu, and then
        the result.

    Raises:
        ValueError: There is no kernel for these tensors (`has_grouped_gemm`), or an argument is not
            as above.
    """
    name = "gated_gemm"
    values, scales = _check_groups(name, x, weight, ends, weight_scales)
    num_slots = len(values) * num_chosen
    check_vector(name, "slots", slots, (torch.int32,), (num_slots,), values.device)
    out = values.new_empty(num_slots, weight.shape[1] // 2, dtype=torch.bfloat16)
    operands = values, scales, weight, weight_scales
    _launch_groups(operands, ends, slots, None, out, num_chosen=num_chosen, is_gelu=is_gelu)
    return out


def weighted_gemm(
    x: Tensor | QuantisedRows,
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

    Args:
        x: [S, D] bf16 with rows that may be strided, or fp8 with scales; the rows of group 0 first.
        weight: [E, N, D] of the dtype of x, a matrix for each group.
        ends: int32 [E], the end of each group's rows: non-decreasing, the last one S. Not checked.
        slots: int32 [S], a permutation of the slots. Not checked.
        weights: [R, k] bf16, R * k = S, contiguous.
        is_weighted: whether products are weighted; if not, only the shape of the weights, bf16 or
            fp32, is used.
        early: allow the kernel to read `ends` and fetch `weight` while the previous kernel of the
            stream ends. Requires that this kernel writes neither of them, and starts only after
            `ends` is written.
        weight_scales: [E, N] fp32 of an fp8 weight, as for `gated_gemm`.

    Returns:
        [R, k, N] bf16: the products rounded to bf16, and rounded again after the weight.

    Raises:
        ValueError: There is no kernel for these tensors (`has_grouped_gemm`), or an argument is not
            as above.
    """
    name = "weighted_gemm"
    values, x_scales = _check_groups(name, x, weight, ends, weight_scales)
    num_rows, device = len(values), values.device
    check_vector(name, "slots", slots, (torch.int32,), (num_rows,), device)
    dtypes = (torch.bfloat16,) if is_weighted else (torch.bfloat16, torch.float32)
    check_vector(name, "weights", weights, dtypes, (-1, -1), device)
    if weights.numel() != num_rows:
        raise ValueError(
            f"{name}: weights must be [R, k] with R * k = {num_rows}, got {list(weights.shape)}"
        )
    out = values.new_empty(*weights.shape, weight.shape[1], dtype=torch.bfloat16)
    operands = values, x_scales, weight, weight_scales
    _launch_groups(operands, ends, slots, weights if is_weighted else None, out, is_early=early)
    return out


def _check_groups(
    name: str,
    x: Tensor | QuantisedRows,
    weight: Tensor,
    ends: Tensor,
    weight_scales: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments; return the values of x and their scales."""
    values, scales = x[:2] if isinstance(x, QuantisedRows) else (x, None)
    if not has_grouped_gemm(x, weight):
        raise ValueError(
            f"{name}: no kernel for x {values.dtype} {list(values.shape)} on {values.device} "
            f"and weight {weight.dtype} {list(weight.shape)}"
        )
    check_vector(name, "ends", ends, (torch.int32,), (len(weight),), values.device)
    if (scales is None) != (weight_scales is None):
        raise ValueError(f"{name}: weight_scales must be given with fp8 rows, and with no others")
    if scales is not None and weight_scales is not None:
        fp32, device = (torch.float32,), values.device
        check_vector(name, "x.scales", scales, fp32, (len(values),), device)
        check_vector(name, "weight_scales", weight_scales, fp32, tuple(weight.shape[:2]), device)
    return values, scales


def _launch_groups(
    operands: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    ends: Tensor,
    slots: Tensor,
    scales: Tensor | None,
    out: Tensor,
    *,
    num_chosen: int | None = None,
    is_early: bool = False,
    is_gelu: bool = False,
) -> None:
    """Enqueue the product of x and weight, both with scales if they have any.

    It is the gated product if `num_chosen` is given, else the weighted one.
    """
    if out.numel() == 0:
        return
    assert native is not None
    x, x_scales, weight, weight_scales = operands
    launch(
        native.grouped_gemm,
        x,
        is_gated=num_chosen is not None,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        x_scales=0 if x_scales is None else x_scales.data_ptr(),
        weight_scales=0 if weight_scales is None else weight_scales.data_ptr(),
        ends=ends.data_ptr(),
        slots=slots.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        weight_stride=weight.stride(1),
        num_rows=len(slots),
        num_groups=len(weight),
        num_columns=out.shape[-1],
        depth=x.shape[1],
        num_chosen=num_chosen or 1,
        num_blocks=hopper_multiprocessors(x.device.index),
        early=is_early,
        is_gelu=is_gelu,
    )
