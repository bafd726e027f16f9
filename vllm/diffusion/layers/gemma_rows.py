# SPDX-License-Identifier: Apache-2.0
"""Row-wise operations of Gemma's layers: a Triton kernel each on a GPU, PyTorch elsewhere.

Every operation is rounded to the model dtype, as separate operations of PyTorch are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import gelu

from vllm.diffusion.core.triton_kernels import IS_INTERPRETED, load_kernels, on_device_of

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm


class Scalars(NamedTuple):
    """Factors of the residual stream after a layer, [1] each: of rows of a block, and of others."""

    in_block: Tensor
    in_context: Tensor


def add_normed(x: Tensor, result: Tensor, norm: RMSNorm) -> None:
    """Add norm(result) to x, in place; both are [R, D]."""
    kernels = _kernels_for(x)
    if kernels is None or not x.numel():
        x.add_(norm(result))
        return
    with on_device_of(x):
        nothing = (None, None, None)
        kernels.launch_add_normed(
            x, result, None, None, (None, None, norm.weight), nothing, norm.eps
        )


def add_branches(
    x: Tensor,
    dense: Tensor,
    terms: Tensor,
    shares: Tensor | None,
    norms: tuple[RMSNorm, RMSNorm, RMSNorm],
    scalars: Scalars,
    is_block: Tensor | None,
) -> None:
    """Add the normed results of a dense MLP and of experts to x [R, D], and scale, in place.

    Args:
        x: the residual stream.
        dense: [R, D], the result of the dense MLP.
        terms: [R, k, D], results of the experts of each row.
        shares: [R, k] fp32, factors of the terms in their sum; None for 1.
        norms: of `dense`, of the sum of terms, and of the sum of both; with the same epsilon.
        scalars: factors of the result.
        is_block: [R] bool, whether a row has the factor of rows of a block; None if all rows have.
    """
    kernels = _kernels_for(x)
    if kernels is not None and x.numel():
        weights = tuple(norm.weight for norm in norms)
        with on_device_of(x):
            marks = (is_block, *scalars)
            kernels.launch_add_normed(x, dense, terms, shares, weights, marks, norms[2].eps)
        return
    wide = terms.float() if shares is None else terms.float() * shares[:, :, None]
    mixed = wide.sum(dim=1).to(x.dtype)
    x.add_(norms[2](norms[0](dense) + norms[1](mixed)))
    scalar = scalars.in_block
    if is_block is not None:
        scalar = torch.where(is_block[:, None], scalar, scalars.in_context)
    x.mul_(scalar)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up [R, I] of gate_up [R, 2I], the gate's columns first; tanh form."""
    kernels = _kernels_for(gate_up)
    if kernels is None or not gate_up.numel():
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate, approximate="tanh") * up
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    with on_device_of(gate_up):
        kernels.launch_gelu_mul(gate_up, out)
    return out


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Replace logits [R, V] fp32 by cap * tanh(logits / cap), in place, and return them."""
    kernels = _kernels_for(logits)
    if kernels is None or not logits.numel():
        return logits.div_(cap).tanh_().mul_(cap)
    with on_device_of(logits):
        kernels.launch_cap(logits, cap)
    return logits


def rounded_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return softmax(logits) [R, V] in a 16-bit or wider dtype, in which logits are rounded first.

    Args:
        logits: [R, V] fp32, of which at least one per row is finite.
        dtype: dtype of the result. The softmax is computed in fp32.
    """
    kernels = _kernels_for(logits)
    if kernels is None or not logits.numel():
        # A 16-bit softmax of PyTorch computes in fp32 and rounds its result.
        return torch.softmax(logits.to(dtype), dim=-1)
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    with on_device_of(logits):
        kernels.launch_rounded_softmax(logits, out)
    return out


def _kernels_for(rows: Tensor) -> ModuleType | None:
    is_interpreted = IS_INTERPRETED and rows.dtype != torch.bfloat16
    is_taken = rows.is_cuda or is_interpreted
    return load_kernels("vllm.diffusion.layers.gemma_kernels") if is_taken else None
