# SPDX-License-Identifier: Apache-2.0
"""Products of engines that are batch invariant: no row's result depends on other rows.

Every sum has one order, from low to high depth. Several kernels have that order, and rows only
decide which of them runs. docs/batch_invariance.md explains the whole mode.
"""

from __future__ import annotations

import functools
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

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
    fused_linear,
    has_fused_linear,
    silu_mul,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.buffers import Buffers
    from vllm.diffusion.ops.projection import ParallelLayer

_MARK = "_is_batch_invariant"
# Rows with which `cublas_order` checks cuBLAS, in addition to the least: both sides of its tiles.
_MORE_ROWS = (0, 1, 15, 16, 63, 64, 65, 128, 192, 257, 513, 769, 1024, 2000, 3072, 4096, 7000)
_MAX_CHECKED = 1 << 27  # numbers of a product that is checked


def make_invariant(model: torch.nn.Module) -> None:
    """Mark all modules of a model, before it is loaded, as parts of a batch-invariant engine."""
    for module in model.modules():
        vars(module)[_MARK] = True


def is_invariant(module: torch.nn.Module) -> bool:
    """Return whether a module belongs to a batch-invariant engine."""
    return getattr(module, _MARK, False)


class CublasOrder(NamedTuple):
    """Products of a matrix that cuBLAS sums from low to high depth.

    Attributes:
        min_rows: rows from which it does; None for no number of rows.
        adds: whether it also adds the product to its target with one rounding.
    """

    min_rows: int | None = None
    adds: bool = False


class InvariantProjection(Projection):
    """Projection with an unquantised matrix, whose sums have one order for any number of rows.

    Only whole sums have the order, so parts of the depth cannot be multiplied apart.
    """

    can_slice = False

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        weight: Tensor = layer.weight
        self._weight, self._cublas = weight, CublasOrder()
        if not weight.is_cuda:
            return
        columns, depth = weight.shape
        if not has_ordered(weight, weight):
            raise ServerConfigError(
                f"batch_invariant: given a matrix of {weight.dtype} {[columns, depth]}; "
                "wanted bfloat16 and sizes that are multiples of 8"
            )
        # A step has no memory for this check.
        self._cublas = cublas_order(columns, depth, weight.dtype, weight.device)

    def __str__(self) -> str:
        """Describe the matrix, and the rows from which cuBLAS multiplies by it."""
        columns, depth = self._weight.shape
        return f"{columns} x {depth}: {tuple(self._cublas)}"

    @property
    def uses_cublas(self) -> bool:
        """Whether cuBLAS multiplies many rows."""
        return self._cublas.min_rows is not None

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
        self._multiply(x, self._weight[columns], out, bias)

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        """Compute in one kernel with any number of rows, or in two with any number."""
        weight = self._weight
        if self._bias is None and x.is_cuda and has_fused_linear(x, weight):
            card, (columns, depth) = dispatch.card_of(x.device), weight.shape
            tiling = dispatch.unsplit_gated_tiling(len(x), columns, depth, card=card)
            if tiling is not None:
                options: Any = {"epilogue": Epilogue.SILU_MUL, "early": WEIGHTS_ARE_CONSTANT}
                fused_linear(x, weight, out, tiling=tiling, **options)
                return
        gate_up = stages.gate_up(x.dtype, len(weight)).take(scratch, len(x))
        self._multiply(x, weight, gate_up, self._bias)
        silu_mul(gate_up, out=out)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        _check_whole(features)
        self._multiply(h, self._weight, out, self._bias)

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        """Add in the product's epilogue: one rounding for any number of rows."""
        if self._is_summed:
            super().add_to(x, h, scratch, features)
            return
        _check_whole(features)
        self._multiply(h, self._weight, x, self._bias, adds=True)

    def rehearse(self, num_rows: int) -> None:
        """Compute every use of zeros, so that Triton compiles the kernels for `num_rows`."""
        columns, depth = self._weight.shape
        x, out = (self._weight.new_zeros(num_rows, width) for width in (depth, columns))
        for adds in (False, True):
            self._multiply(x, self._weight, out, self._bias, adds=adds)

    def _multiply(
        self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, *, adds: bool = False
    ) -> None:
        """Write x W^T + b to `out`, or add it, by the fastest kernel that has the order."""
        if not x.is_cuda:
            ordered_gemm(x, weight, out, bias=bias, adds=adds)
            return
        card, (columns, depth) = dispatch.card_of(x.device), weight.shape
        tiling = dispatch.unsplit_tiling(len(x), columns, depth, adds=adds, card=card)
        if tiling is not None and has_fused_linear(x, weight):
            epilogue = Epilogue.RESIDUAL if adds else Epilogue.STORE
            options: Any = {"epilogue": epilogue, "early": WEIGHTS_ARE_CONSTANT}
            fused_linear(x, weight, out, tiling=tiling, bias=bias, **options)
        elif bias is None and self._takes_cublas(len(x), columns, adds=adds):
            multiply_by_cublas(x, weight, out, adds=adds)
        else:
            ordered_gemm(x, weight, out, bias=bias, adds=adds)

    def _takes_cublas(self, num_rows: int, num_columns: int, *, adds: bool) -> bool:
        """Return whether cuBLAS was found to have the order; parts of the columns are unknown."""
        min_rows = self._cublas.min_rows
        is_known = min_rows is not None and num_rows >= min_rows
        is_known = is_known and num_columns == len(self._weight)
        return is_known and (self._cublas.adds or not adds)


def multiply_by_cublas(x: Tensor, weight: Tensor, out: Tensor, *, adds: bool) -> None:
    """Write or add the product by cuBLAS, with no more rows at a time than were measured."""
    count = max(ceil(len(x) / dispatch.MAX_MEASURED_ROWS), 1)
    for some, target in zip(x.tensor_split(count), out.tensor_split(count), strict=True):
        if adds:
            target.addmm_(some, weight.t())
        else:
            torch.mm(some, weight.t(), out=target)


def _check_whole(features: slice) -> None:
    if features != ALL:
        raise ValueError(f"features: given {features}; wanted all, to sum in one order")


@functools.cache
def cublas_order(
    num_columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> CublasOrder:
    """Check in which order cuBLAS, in its installed version, sums such products.

    cuBLAS chooses its kernels by shape alone, so random numbers give the same answer in every
    start. Random numbers are multiplied with several numbers of rows, and compared with
    `ordered_gemm`. Shapes that were not measured are not checked: a few numbers of rows would not
    be enough to trust cuBLAS with all others.
    """
    min_rows = dispatch.unsplit_cublas_rows(num_columns, depth)
    if min_rows is None:
        return CublasOrder()
    generator = torch.Generator(device).manual_seed(20261129)
    all_rows = [min_rows + more for more in _MORE_ROWS]
    all_rows = [rows for rows in all_rows if rows * num_columns <= _MAX_CHECKED]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    weight, x = random(num_columns, depth), random(all_rows[-1], depth)
    target = random(all_rows[-1], num_columns)
    is_same = {}
    for adds in (False, True):
        wanted = ordered_gemm(x, weight, target.clone(), adds=adds)
        products = [target[:rows].clone() for rows in all_rows]
        for out in products:
            multiply_by_cublas(x[: len(out)], weight, out, adds=adds)
        is_same[adds] = all(torch.equal(out, wanted[: len(out)]) for out in products)
        del wanted, products
    del weight, x, target
    torch.cuda.empty_cache()  # the engine's pool takes all memory that is left
    return CublasOrder(min_rows, is_same[True]) if is_same[False] else CublasOrder()
