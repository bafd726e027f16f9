# SPDX-License-Identifier: Apache-2.0
"""PyTorch reference of the gathered product."""

import torch
from torch import Tensor


def gather_gemm(x: Tensor, rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``x[rows] @ weight.T``; see `gather_gemm.gather_gemm`."""
    return torch.mm(x.index_select(0, rows), weight.t(), out=out)
