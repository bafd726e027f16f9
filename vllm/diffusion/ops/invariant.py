# SPDX-License-Identifier: Apache-2.0
"""Products of engines that are batch invariant: no row's result depends on other rows.

Every weight has one order of its sums (`dispatch.Order`). Several kernels have that order, and
rows only decide which of them runs. docs/batch_invariance.md explains the whole mode.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gather_gemm import has_ordered, ordered_gemm
from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.projection import (
    ALL,
    WEIGHTS_ARE_CONSTANT,
    Projection,
    ProjectionKind,
    WeightSpec,
    Workspace,
)
from vllm_add_llada.cuda_kernels.fused_ops import (
    Epilogue,
    Tiling,
    fused_linear,
    has_fused_linear,
    silu_mul,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.buffers import Buffers
    from vllm.diffusion.ops.projection import ParallelLayer

_MARK = "_is_batch_invariant"
# Row counts with which `has_cublas_order` checks cuBLAS: few rows, and both sides of its tiles.
_CHECKED_ROWS = (1, 16, 17, 64, 65, 128, 129, 200, 256, 257, 512, 1000, 1024)


def make_invariant(model: torch.nn.Module) -> None:
    """Mark all modules of a model, before it is loaded, as parts of a batch-invariant engine."""
    for module in model.modules():
        vars(module)[_MARK] = True


def is_invariant(module: torch.nn.Module) -> bool:
    """Return whether a module belongs to a batch-invariant engine."""
    return getattr(module, _MARK, False)


class InvariantProjection(Projection):
    """Projection with an unquantised matrix, whose sums have one order for any number of rows.

    Only whole sums have the order, so parts of the depth cannot be multiplied apart.
    """

    can_slice = False

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        self._weight: Tensor = layer.weight
        weight = self._weight
        shape, card = tuple(weight.shape), dispatch.card_of(weight.device)
        self._order, self._gated_order = (
            dispatch.order_of(*shape, gated=gated, card=card) for gated in (False, True)
        )
        if weight.is_cuda and not has_ordered(weight, weight, self._order.parts):
            raise ServerConfigError(
                f"batch_invariant: given a matrix of {weight.dtype} {list(shape)}; "
                "wanted bfloat16 and rows of a multiple of 16 bytes"
            )
        # Columns of the product that cuBLAS may compute, which is checked once per shape, here:
        # no step has the memory for it.
        may_use_cublas = self._order.may_use_cublas or self._gated_order.may_use_cublas
        is_checked = may_use_cublas and weight.is_cuda
        if is_checked and not has_cublas_order(*shape, weight.dtype, weight.device):
            is_checked = False
        self._cublas_columns = shape[0] if is_checked else 0

    @property
    def order(self) -> dispatch.Order:
        """The order of the sums of all uses except `gated`, whose sums have one part."""
        return self._order

    @property
    def described(self) -> str:
        """The matrix, the parts of its sums, and whether cuBLAS serves many rows, as text."""
        columns, depth = self._weight.shape
        parts, by = self._order.parts, "cublas" if self._cublas_columns else "triton"
        return f"{columns} x {depth}: {parts}, {by}"

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        if use is ProjectionKind.GATED:
            gate_up = stages.gate_up(matrix.dtype, matrix.columns)
            return Workspace(
                (gate_up,), matrix.most_stored_rows(partial(dispatch.linear_tiling, gated=True))
            )
        if use is ProjectionKind.PROJECT or not matrix.is_summed:
            return Workspace()
        return Workspace((stages.projected(matrix.dtype, matrix.columns),))

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        bias = None if self._bias is None else self._bias[columns]
        self._multiply(x, self._weight[columns], out, self._order, bias)

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        """Compute in one or two kernels, which round at the same points."""
        weight, order = self._weight, self._gated_order
        tiling = None if self._bias is not None else _tiling(x, weight, order, gated=True)
        if tiling is not None:
            options: Any = {"epilogue": Epilogue.SILU_MUL, "early": WEIGHTS_ARE_CONSTANT}
            fused_linear(x, weight, out, tiling=tiling, **options)
            return
        gate_up = stages.gate_up(x.dtype, len(weight)).take(scratch, len(x))
        self._multiply(x, weight, gate_up, order, self._bias)
        silu_mul(gate_up, out=out)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        _check_whole(features)
        self._multiply(h, self._weight, out, self._order, self._bias)

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        """Add in the product's epilogue: one rounding for any number of rows."""
        if self._is_summed:
            super().add_to(x, h, scratch, features)
            return
        _check_whole(features)
        self._multiply(h, self._weight, x, self._order, self._bias, adds=True)

    def rehearse(self, num_rows: int) -> None:
        """Compute every use of zeros, so that Triton compiles the kernels for `num_rows`."""
        columns, depth = self._weight.shape
        x, out = (self._weight.new_zeros(num_rows, width) for width in (depth, columns))
        self._multiply(x, self._weight, out, self._order, self._bias)
        self._multiply(x, self._weight, out, self._gated_order, self._bias)
        self._multiply(x, self._weight, out, self._order, self._bias, adds=True)

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        order: dispatch.Order,
        bias: Tensor | None,
        *,
        adds: bool = False,
    ) -> None:
        """Write x W^T + b to `out`, or add it, by the fastest kernel that has this order."""
        tiling = _tiling(x, weight, order)
        if tiling is not None:
            epilogue = Epilogue.RESIDUAL if adds else Epilogue.STORE
            options: Any = {"epilogue": epilogue, "early": WEIGHTS_ARE_CONSTANT}
            fused_linear(x, weight, out, tiling=tiling, bias=bias, **options)
        elif self._may_use_cublas(weight, order) and bias is None and not adds:
            for rows in range(0, len(x), dispatch.MAX_MEASURED_ROWS):
                some = slice(rows, rows + dispatch.MAX_MEASURED_ROWS)
                torch.mm(x[some], weight.t(), out=out[some])
        else:
            ordered_gemm(x, weight, out, parts=order.parts, bias=bias, adds=adds)

    def _may_use_cublas(self, weight: Tensor, order: dispatch.Order) -> bool:
        return order.may_use_cublas and len(weight) == self._cublas_columns


def _check_whole(features: slice) -> None:
    if features != ALL:
        raise ValueError(f"features: given {features}; wanted all, to sum in one order")


def _tiling(
    x: Tensor, weight: Tensor, order: dispatch.Order, *, gated: bool = False
) -> Tiling | None:
    if not x.is_cuda or not has_fused_linear(x, weight):
        return None
    card, (columns, depth) = dispatch.card_of(x.device), weight.shape
    return dispatch.ordered_tiling(len(x), columns, depth, order, gated=gated, card=card)


@functools.cache
def has_cublas_order(
    num_columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether cuBLAS, in its installed version, sums such a product in one part.

    cuBLAS chooses its kernels by shape alone, so random numbers give the same answer in every
    start. Random numbers are multiplied with several numbers of rows, and compared with
    `ordered_gemm`.
    """
    generator = torch.Generator(device).manual_seed(20261129)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    weight, x = random(num_columns, depth), random(_CHECKED_ROWS[-1], depth)
    wanted = ordered_gemm(x, weight)
    return all(torch.equal(torch.mm(x[:rows], weight.t()), wanted[:rows]) for rows in _CHECKED_ROWS)
