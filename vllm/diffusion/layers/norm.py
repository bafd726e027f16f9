# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms (Zhang and Sennrich 2019): fp32 statistics, cast back, then the gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm(nn.Module):
    """Computes weight * cast(x / rms(x)) over the last dimension.

    Args:
        width: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor, out: Any = None) -> Any:
        """Normalise x [..., width], into `out` if given, which may be quantised; return it."""
        if isinstance(out, ops.QuantisedRows):
            ops.rms_norm_quantised(x, self.weight, self.eps, out)
            return out
        return ops.rms_norm(x, self.weight, self.eps, out=out)


class AllHeadsRMSNorm(RMSNorm):
    """Norm of a query or key projection over all heads at once.

    The heads are divided among the tensor-parallel ranks, so the mean square needs one all-reduce
    of a number per row. Each rank keeps the gains of its heads.

    Args:
        num_heads: number of heads of the whole model; with more ranks than heads, several ranks
            hold the same head.
        head_dim: width of a head.
        eps: added to the mean square.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        num_ranks = get_tensor_model_parallel_world_size()
        super().__init__(max(1, num_heads // num_ranks) * head_dim, eps)
        self.num_ranks = num_ranks
        self.num_replicas = max(1, num_ranks // num_heads)
        self.full_width = num_heads * head_dim
        set_weight_attrs(self.weight, {"weight_loader": self._load_gains})

    def _load_gains(self, param: nn.Parameter, gains: Tensor) -> None:
        """Copy this rank's part of the gains [all heads * hd]."""
        start = get_tensor_model_parallel_rank() // self.num_replicas * param.shape[0]
        param.data.copy_(gains[start : start + param.shape[0]])

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalise x [R, heads of this rank, hd], into `out` if given."""
        flat = x.flatten(-2)
        if self.num_ranks == 1:
            into = None if out is None else out.view(flat.shape)
            normed: Tensor = super().forward(flat, out=into)
            return normed.view(x.shape)
        wide = flat.to(torch.float32)
        squares = ops.tensor_parallel().sum(wide.square().sum(dim=-1, keepdim=True))
        mean_square = squares / (self.num_replicas * self.full_width)
        unit = (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype)
        result = (self.weight * unit).view(x.shape)
        return result if out is None else out.copy_(result)
