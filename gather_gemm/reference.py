# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the room's operations."""

import itertools

import torch
from torch import Tensor


def gather_gemm(x: Tensor, rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``x[rows] @ weight.T``; see `gather_gemm.gather_gemm`."""
    return torch.mm(x.index_select(0, rows), weight.t(), out=out)


def grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
    """Each group of rows times its own matrix, transposed; see `gather_gemm.grouped_gemm`."""
    if out is None:
        out = torch.empty((len(x), weight.shape[1]), dtype=x.dtype, device=x.device)
    bounds = itertools.pairwise([0, *ends.tolist()])
    for matrix, (start, end) in zip(weight, bounds, strict=True):
        if end > start:
            torch.mm(x[start:end], matrix.t(), out=out[start:end])
    return out
