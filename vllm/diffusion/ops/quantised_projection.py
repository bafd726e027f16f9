# SPDX-License-Identifier: Apache-2.0
"""Projection by upstream's quantisation methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import Buffer
from vllm.diffusion.ops.projection import ALL, Projection
from vllm.diffusion.ops.weight_spec import ProjectionKind, WeightSpec, Workspace
from vllm_add_llada.cuda_kernels.fused_ops import silu_mul

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.ops.projection import ParallelLayer


class QuantisedProjection(Projection):
    """Projection by one of upstream's quantisation methods, which always compute all columns."""

    can_slice = False

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        self._layer = layer

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        product = _returned(matrix.dtype, matrix.columns)
        if use is ProjectionKind.ADD_TO and matrix.is_summed:
            return Workspace((product, stages.projected(matrix.dtype, matrix.columns)))
        return Workspace((product,))

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        out.copy_(self._product(x, scratch)[:, columns])

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        silu_mul(self._product(x, scratch), out=out)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        out.copy_(self._product(h, scratch))

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if self._is_summed:
            super().add_to(x, h, scratch, features)
        else:
            x.add_(self._product(h, scratch))

    def _product(self, h: Tensor, scratch: Buffers) -> Tensor:
        num_columns = self._layer.output_size_per_partition
        _returned(h.dtype, num_columns).expect(scratch, len(h))
        product: Tensor = self._layer.quant_method.apply(self._layer, h, self._bias)
        return product


def _returned(dtype: torch.dtype, num_columns: int) -> Buffer:
    """Product that a method of upstream allocates."""
    return Buffer("quantised product", (num_columns,), dtype, is_temporary=True)
