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
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    columns: Sequence[int] = (),
    forbidden: int | Tensor = 0,
    excluded: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum, its column, sum of exp and probability by rows; see `gather_gemm.gather_top`."""
    logits = torch.mm(x if rows is None else x.index_select(0, rows), weight.t()).float()
    hidden = torch.zeros(2, len(logits), logits.shape[1], dtype=torch.bool, device=logits.device)
    for mask, marks in zip((forbidden, excluded), hidden, strict=True):
        bits = torch.as_tensor(mask, device=logits.device)
        for i, special in enumerate(columns):
            marks[:, special] |= (bits >> i & 1).bool()
    logits.masked_fill_(hidden[0], -torch.inf)
    maximum, column = logits.amax(dim=-1), logits.argmax(dim=-1)
    logits.masked_fill_(hidden[1], -torch.inf)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    sum_exp = (logits - shift[:, None]).exp().sum(dim=-1)
    is_zero = hidden[1].gather(1, column[:, None])[:, 0] | (maximum == -torch.inf)
    probability = (1.0 / sum_exp).masked_fill(is_zero & ~sum_exp.isnan(), 0.0)
    return maximum, column, sum_exp, probability
