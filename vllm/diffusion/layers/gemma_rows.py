# SPDX-License-Identifier: Apache-2.0
"""Row-wise operations of Gemma's layers: a Triton kernel each on a GPU, PyTorch elsewhere.

Every operation is rounded to the model dtype, as separate operations of PyTorch are.
"""

from __future__ import annotations

import functools
import importlib
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import gelu

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm


class Scalars(NamedTuple):
    """Factors of the residual stream after a layer, [1] each: of rows of a block, and of others."""

    in_block: Tensor
    in_context: Tensor


def add_normed(
    x: Tensor,
    branches: Tensor | tuple[tuple[Tensor, RMSNorm], tuple[Tensor, RMSNorm]],
    norm: RMSNorm,
    scalars: Scalars | None = None,
    is_block: Tensor | None = None,
) -> None:
    """Add a normed result to x [R, D], and scale the sum, in place.

    Args:
        x: the residual stream.
        branches: the result [R, D]; or two results, each with the norm that it passes before they
            are added.
        norm: norm of the result, or of the sum of both; all norms have the same epsilon.
        scalars: factors of the sum; None for none.
        is_block: [R] bool, whether a row has the factor of rows of a block; None if all rows have.
    """
    parts = [(branches, None)] if isinstance(branches, torch.Tensor) else list(branches)
    kernels = _kernels_for(x)
    if kernels is not None and x.numel():
        (first, *second), gains = zip(*parts, strict=True)
        weights = [None if own is None else own.weight for own in gains]
        weights += [None] * (2 - len(weights))
        of_rows = (None, None, None) if scalars is None else (is_block, *scalars)
        rest = (second[0] if second else None), (*weights, norm.weight), of_rows
        with _guard(x):
            kernels.launch_add_normed(x, first, *rest, norm.eps)
        return
    results = [result if own is None else own(result) for result, own in parts]
    x.add_(norm(sum(results[1:], results[0])))
    if scalars is not None:
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
    with _guard(gate_up):
        kernels.launch_gelu_mul(gate_up, out)
    return out


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Replace logits [R, V] fp32 by cap * tanh(logits / cap), in place, and return them."""
    kernels = _kernels_for(logits)
    if kernels is None or not logits.numel():
        return logits.div_(cap).tanh_().mul_(cap)
    with _guard(logits):
        kernels.launch_cap(logits, cap)
    return logits


def _guard(rows: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because a kernel is launched on the current device."""
    return torch.cuda.device(rows.device) if rows.is_cuda else nullcontext()


def _kernels_for(rows: Tensor) -> ModuleType | None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and rows.dtype != torch.bfloat16
    return _kernels() if rows.is_cuda or is_interpreted else None


@functools.cache
def _kernels() -> ModuleType | None:
    """Import the Triton kernels; return None without Triton."""
    try:
        return importlib.import_module("vllm.diffusion.layers.gemma_kernels")
    except (ImportError, RuntimeError):
        return None
