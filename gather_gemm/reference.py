# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the products of gathered rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_gemm(
    x: Tensor, rows: Tensor | None, weight: Tensor, out: Tensor | None = None
) -> Tensor:
    """``x[rows] @ weight.T``; see `gather_gemm.gather_gemm`."""
    return torch.mm(x if rows is None else x.index_select(0, rows), weight.t(), out=out)


def gather_top(
    x: Tensor, rows: Tensor | None, weight: Tensor, excluded: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum, its column, sum of exp and probability by rows; see `gather_gemm.gather_top`."""
    logits = torch.mm(x if rows is None else x.index_select(0, rows), weight.t()).float()
    maximum, column = logits.amax(dim=-1), logits.argmax(dim=-1)
    logits[:, list(excluded)] = -torch.inf
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    sum_exp = (logits - shift[:, None]).exp().sum(dim=-1)
    is_zero = maximum == -torch.inf
    for excluded_column in excluded:
        is_zero |= column == excluded_column
    probability = (1.0 / sum_exp).masked_fill(is_zero & ~sum_exp.isnan(), 0.0)
    return maximum, column, sum_exp, probability
