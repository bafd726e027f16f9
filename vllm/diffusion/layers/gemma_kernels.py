# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of the row-wise operations in Gemma's layers."""

from math import ceil

import triton
import triton.language as tl
from torch import Tensor

from vllm.diffusion.core.triton_kernels import power_of_two


@triton.jit
def _normed(row, weight, columns, is_column, width, eps):
    """Return row / rms(row) * weight in fp32, rounded to the dtype of the weight after each."""
    dtype = weight.dtype.element_ty
    scale = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / width + eps)
    gains = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    return ((row * scale).to(dtype).to(tl.float32) * gains).to(dtype).to(tl.float32)


@triton.jit
def add_normed_kernel(
    x,  # [R, D], updated
    first,  # [R, D]
    terms,  # [R, K, D], or None
    shares,  # [R, K] fp32, or None
    first_weight,  # [D], or None without `terms`
    second_weight,  # [D], or None without `terms`
    weight,  # [D]
    is_block,  # [R] bool, or None if all rows are of a block
    in_block,  # [1], or None
    in_context,  # [1], or None
    x_stride,
    first_stride,
    terms_stride,
    shares_stride,
    width,
    eps,
    NUM_TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < width
    dtype = x.dtype.element_ty
    total = tl.load(first + row * first_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if terms is not None:
        more = tl.zeros((COLUMNS,), dtype=tl.float32)
        for index in tl.static_range(NUM_TERMS):
            at = terms + row * terms_stride + index * width + columns
            term = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
            if shares is not None:
                term *= tl.load(shares + row * shares_stride + index)
            more += term
        more = more.to(dtype).to(tl.float32)
        total = _normed(total, first_weight, columns, is_column, width, eps)
        total += _normed(more, second_weight, columns, is_column, width, eps)
        total = total.to(dtype).to(tl.float32)
    at = x + row * x_stride + columns
    result = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    result += _normed(total, weight, columns, is_column, width, eps)
    if in_block is not None:
        scalar = tl.load(in_block).to(tl.float32)
        if is_block is not None:
            scalar = tl.where(tl.load(is_block + row), scalar, tl.load(in_context).to(tl.float32))
        result = result.to(dtype).to(tl.float32) * scalar
    tl.store(at, result.to(dtype), mask=is_column)


def launch_add_normed(
    x: Tensor,
    first: Tensor,
    terms: Tensor | None,
    shares: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None, Tensor],
    marks: tuple[Tensor | None, Tensor | None, Tensor | None],
    eps: float,
) -> None:
    """Enqueue `gemma_rows.add_normed`, or `add_branches` with `terms`; arguments are checked."""
    num_rows, width = x.shape
    add_normed_kernel[(num_rows,)](
        x,
        first,
        terms,
        shares,
        *weights,
        *marks,
        x.stride(0),
        first.stride(0),
        0 if terms is None else terms.stride(0),
        0 if shares is None else shares.stride(0),
        width,
        eps,
        NUM_TERMS=1 if terms is None else terms.shape[1],
        COLUMNS=power_of_two(width),
        num_warps=4,
    )


@triton.jit
def gelu_mul_kernel(gate_up, out, width, gate_up_stride, out_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    dtype = out.dtype.element_ty
    at = gate_up + row * gate_up_stride + columns
    gate = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_column, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is the sigmoid of 2z, with 2z = 2 sqrt(2 / pi) (g + c g^3).
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    tl.store(out + row * out_stride + columns, (active * up).to(dtype), mask=is_column)


def launch_gelu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Enqueue gelu(gate) * up of gate_up [R, 2I] into out [R, I]; the arguments are checked."""
    num_rows, width = out.shape
    columns = min(1024, power_of_two(width))
    gelu_mul_kernel[(num_rows, ceil(width / columns))](
        gate_up, out, width, gate_up.stride(0), out.stride(0), COLUMNS=columns, num_warps=4
    )


@triton.jit
def cap_kernel(logits, cap, num_columns, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    at = logits + row * stride + columns
    value = tl.load(at, mask=is_column, other=0.0)
    # tanh(z) is (1 - p) / (1 + p) with p = exp(-2 |z|), which never overflows.
    power = tl.exp(-2.0 / cap * tl.abs(value))
    capped = cap * (1.0 - power) / (1.0 + power)
    tl.store(at, tl.where(value < 0.0, -capped, capped), mask=is_column)


def launch_cap(logits: Tensor, cap: float) -> None:
    """Enqueue cap * tanh(logits / cap) of logits [R, V] fp32, in place."""
    num_rows, num_columns = logits.shape
    cap_kernel[(num_rows, ceil(num_columns / 4096))](
        logits, cap, num_columns, logits.stride(0), COLUMNS=4096, num_warps=8
    )


@triton.jit
def rounded_softmax_kernel(logits, out, num_columns, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    columns = tl.arange(0, COLUMNS)
    highest, total = float("-inf"), 0.0
    # The second pass reads the row again, because it does not fit into registers.
    for first in range(0, num_columns, COLUMNS):
        is_column = first + columns < num_columns
        at = logits + row * stride + first + columns
        value = tl.load(at, mask=is_column, other=float("-inf")).to(dtype).to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(value - base), axis=0)
        highest = higher
    for first in range(0, num_columns, COLUMNS):
        is_column = first + columns < num_columns
        at = logits + row * stride + first + columns
        value = tl.load(at, mask=is_column, other=0.0).to(dtype).to(tl.float32)
        share = tl.exp(value - highest) / total
        tl.store(out + row * num_columns + first + columns, share.to(dtype), mask=is_column)


def launch_rounded_softmax(logits: Tensor, out: Tensor) -> None:
    """Enqueue `gemma_rows.rounded_softmax`; the arguments are checked."""
    num_rows, num_columns = logits.shape
    columns = min(8192, power_of_two(num_columns))
    rounded_softmax_kernel[(num_rows,)](
        logits, out, num_columns, logits.stride(0), COLUMNS=columns, num_warps=8
    )
