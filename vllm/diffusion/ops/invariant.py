# SPDX-License-Identifier: Apache-2.0
"""Products of engines that are batch invariant: no row's result depends on other rows.

cuBLAS multiplies, as in other engines. The number of rows changes its order of a sum in two cases
only: if it splits the sum, which needs a workspace, and if there are very few rows. So these
engines give cuBLAS no workspace, and multiply at least `MIN_ROWS` rows.
docs/batch_invariance.md explains the whole mode.
"""

from __future__ import annotations

import functools
import os
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.fp8 import Fp8Projection
from vllm.diffusion.ops.projection import ALL, PlainProjection, rows_of
from vllm.diffusion.ops.weight_spec import ProjectionKind, WeightSpec, Workspace
from vllm_add_llada.cuda_kernels.fused_ops import FP8, Epilogue, QuantisedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.ops.projection import ParallelLayer, Projection
    from vllm_add_llada.cuda_kernels.fused_ops import Tiling

    # Writes the product of rows with some columns of a weight, or adds it.
    Multiply: TypeAlias = Callable[[Tensor, Tensor], object]

MIN_ROWS = 16  # with fewer rows cuBLAS may choose kernels with another order
MAX_ROWS = 8192  # rows up to which the order was measured
_MARK = "_is_batch_invariant"
# cuBLAS reads the first variable when a handle gets its workspace, cuBLASLt the second one at each
# call.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
# Rows with which a product is checked: both sides of the sizes of tiles.
_CHECKED_ROWS = (1, 15, 16, 17, 33, 63, 64, 65, 128, 129, 193, 257, 385, 513, 769, 1025, 2000)
_MAX_CHECKED_ROWS = 4096
_MAX_NUMBERS = 1 << 27  # numbers of a product that is checked
_PART = 1024  # columns of the narrowest part that is multiplied, and that is checked
_PART_ROWS = 1024  # rows of a narrower part that are multiplied at a time


def make_invariant(model: torch.nn.Module) -> None:
    """Mark all modules of a model, before it is loaded, as parts of a batch-invariant engine."""
    allow_workspace(False)
    for module in model.modules():
        vars(module)[_MARK] = True


def allow_workspace(is_allowed: bool) -> None:
    """Allow cuBLAS a workspace in this process from now on, or forbid it so that no sum is split.

    If it is allowed, it has PyTorch's default size.
    """
    for name, value in _NO_WORKSPACE.items():
        if is_allowed:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


def is_invariant(module: torch.nn.Module) -> bool:
    """Return whether a module belongs to a batch-invariant engine."""
    return getattr(module, _MARK, False)


class _FewRows(NamedTuple):
    """Memory for products of fewer than `MIN_ROWS` rows, which all weights of a shape share.

    Attributes:
        x: [MIN_ROWS, depth]; rows after the given ones are padding with any numbers.
        out: [MIN_ROWS * columns].
    """

    x: Tensor
    out: Tensor

    def multiply(self, multiply: Multiply, x: Tensor, out: Tensor, *, adds: bool) -> None:
        """Multiply rows x, padded to `MIN_ROWS` rows, and write their product to `out`."""
        num_rows, columns = out.shape
        product = self.out[: MIN_ROWS * columns].view(MIN_ROWS, columns)
        self.x[:num_rows].copy_(x)
        if adds:
            product[:num_rows].copy_(out)
        multiply(self.x, product)
        out.copy_(product[:num_rows])


@functools.cache
def _few_rows(
    columns: int, depth: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> _FewRows:
    x = torch.zeros(MIN_ROWS, depth, device=device)
    return _FewRows(x.to(dtype), torch.zeros(MIN_ROWS * columns, dtype=out_dtype, device=device))


def multiply_rows(
    multiply: Multiply, x: Tensor, out: Tensor, few_rows: _FewRows, *, adds: bool = False
) -> None:
    """Multiply rows x [R, depth] in products with `MIN_ROWS` to `MAX_ROWS` rows.

    Args:
        multiply: writes a product, or adds it if `adds`. On a CPU it gets one row at a time.
        out: [R, columns], written.
    """
    if 0 < len(x) < MIN_ROWS and x.is_cuda:
        few_rows.multiply(multiply, x, out, adds=adds)
        return
    for rows in _row_parts(out):
        multiply(x[rows], out[rows])


def _row_parts(out: Tensor) -> Iterator[slice]:
    """Yield parts of the rows of `out`, each of at most `MAX_ROWS`, or on a CPU of one row."""
    num_rows = len(out)
    count = ceil(num_rows / MAX_ROWS) if out.is_cuda else num_rows
    for part in range(count):
        yield slice(num_rows * part // count, num_rows * (part + 1) // count)


def project_part(
    project: Callable[[Any, Tensor, slice], None], x: Any, out: Tensor, columns: slice, count: int
) -> None:
    """Write some columns of a product; narrow ones are copied from a product with `_PART` columns.

    A narrow product may have other bits than the same columns of a wider one. A rank multiplies
    narrow parts if it has few key/value heads and computes keys and values without queries.

    Args:
        project: (rows, out, columns) writes columns of the product.
        x: R rows, as for `Projection.project`.
        out: [R, columns], written.
        columns: columns of the product.
        count: columns of the whole product.
    """
    start, stop, _ = columns.indices(count)
    width = min(max(stop - start, _PART), count)
    if width == stop - start:
        project(x, out, columns)
        return
    first = max(stop - width, 0)
    memory = _part_memory(out.dtype, out.device)
    for row in range(0, len(out), _PART_ROWS):
        rows = slice(row, min(row + _PART_ROWS, len(out)))
        product = memory[: (rows.stop - row) * width].view(-1, width)
        project(rows_of(x, rows), product, slice(first, first + width))
        out[rows].copy_(product[:, start - first : stop - first])


@functools.cache
def _part_memory(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(_PART_ROWS * _PART, dtype=dtype, device=device)


class InvariantProjection(PlainProjection):
    """Projection with an unquantised matrix, whose sums have one order for any number of rows.

    A sum is rounded, and then added to the residual stream, as cuBLAS does.
    """

    can_slice = False  # parts of the depth have other sums

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        weight = self.weight
        self._few_rows = _few_rows(*weight.shape, weight.dtype, weight.dtype, weight.device)
        _part_memory(weight.dtype, weight.device)  # before free memory is measured
        check_order(self, weight, weight.dtype)

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        if use is not ProjectionKind.GATED:
            return super().workspace(use, matrix)
        gate_up = stages.gate_up(matrix.dtype, matrix.columns)
        return Workspace((gate_up,), matrix.most_stored_rows(dispatch.unsplit_gated_tiling))

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        def multiply(x: Tensor, out: Tensor, columns: slice) -> None:
            PlainProjection.project(self, x, out, scratch, columns)

        project_part(multiply, x, out, columns, len(self.weight))

    @classmethod
    def _tiling(cls, x: Tensor, weight: Tensor, epilogue: Epilogue) -> Tiling | None:
        """Return a tiling that sums in cuBLAS's order; one for all numbers of rows if gated."""
        if epilogue is not Epilogue.SILU_MUL:
            tiling = super()._tiling(x, weight, epilogue)
            return tiling if epilogue is Epilogue.STORE and _is_whole(tiling) else None
        return dispatch.unsplit_gated_tiling(len(x), *weight.shape, card=dispatch.card_of(x.device))

    def _multiply(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None:
        multiply_rows(partial(_multiply_plain, weight, bias), x, out, self._few_rows)

    def _add(self, x: Tensor, h: Tensor, weight: Tensor) -> None:
        multiply_rows(partial(_add_plain, weight), h, x, self._few_rows, adds=True)


def _is_whole(tiling: Tiling | None) -> bool:
    """Whether a kernel with this tiling does not split sums."""
    return tiling is not None and tiling.split == 1


def _multiply_plain(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_plain(weight: Tensor, x: Tensor, out: Tensor) -> None:
    out.addmm_(x, weight.t())


_gated_tiling = partial(dispatch.unsplit_gated_tiling, is_fp8=True)


class InvariantFp8Projection(Fp8Projection):
    """Projection with an fp8 matrix, whose sums have one order for any number of rows.

    `project` applies the scales before it rounds the sums, in our kernels and in cuBLAS. Before a
    sum is added to the residual stream, cuBLAS stores it without scales, and a kernel that works on
    each number alone applies them.
    """

    can_slice = False

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        weight, self._uses_cublas = self._weight, True
        self._few_rows = _few_rows(*weight.shape, FP8, self._dtype, weight.device)
        _part_memory(self._dtype, weight.device)  # before free memory is measured
        check_order(self, weight, self._dtype)

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        own = super().workspace(use, matrix)
        if use is not ProjectionKind.GATED:
            return own
        return own._replace(most_rows=matrix.most_stored_rows(_gated_tiling))

    def project(
        self, x: Tensor | QuantisedRows, out: Tensor, scratch: Buffers, columns: slice = ALL
    ) -> None:
        def multiply(x: QuantisedRows, out: Tensor, columns: slice) -> None:
            for rows in _row_parts(out):
                Fp8Projection.project(self, rows_of(x, rows), out[rows], scratch, columns)

        project_part(multiply, self._quantised(x, scratch), out, columns, len(self._weight))

    def _tiling_of_columns(self, weight: Tensor, num_rows: int) -> Tiling | None:
        """Return a tiling with cuBLAS's bits; None with a bias, whose bits were not compared."""
        tiling = super()._tiling_of_columns(weight, num_rows)
        return tiling if self._bias is None and _is_whole(tiling) else None

    def _tiling(self, num_rows: int, *, is_gated: bool = False) -> Tiling | None:
        """Return a tiling of a gated product; others are rounded before scales are applied."""
        weight = self._weight
        card = dispatch.card_of(weight.device)
        return _gated_tiling(num_rows, *weight.shape, card=card) if is_gated else None

    def _is_added(self, h: QuantisedRows, weight: Tensor, x: Tensor) -> bool:
        return False

    def _scales_gate_separately(self, num_rows: int) -> bool:
        return self._bias is None

    def _multiply(self, x: QuantisedRows, weight: Tensor, out: Tensor) -> None:
        multiply_rows(partial(_multiply_fp8, weight, self._one), x.values, out, self._few_rows)


def _multiply_fp8(weight: Tensor, one: Tensor, x: Tensor, out: Tensor) -> None:
    if not x.is_cuda:
        out.copy_(torch.mm(x.float(), weight.float().t()))
        return
    options: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": True, "out": out}
    torch._scaled_mm(x, weight.t(), one, one, **options)


_checked = set[tuple[object, ...]]()


def check_order(projection: Projection, weight: Tensor, dtype: torch.dtype) -> None:
    """Check that products of some rows, or columns, are parts of the product of all.

    Kernels are chosen by shape alone, so one weight of each shape is enough.

    Args:
        weight: [columns, depth]; a weight on a CPU is not checked.
        dtype: dtype of rows.

    Raises:
        ServerConfigError: the order of a sum depends on the number of rows.
    """
    key = (type(projection), *weight.shape, weight.device)
    if not weight.is_cuda or key in _checked:
        return
    num_rows = _differing_rows(projection, weight, dtype)
    torch.cuda.empty_cache()  # the engine's pool takes all memory that is left
    if num_rows is not None:
        raise ServerConfigError(
            f"batch_invariant: given torch {torch.__version__}, whose product of {num_rows} rows "
            f"with a matrix {list(weight.shape)} differs from that of more rows; wanted a version "
            f"with one order, or a new process that starts with {_NO_WORKSPACE}"
        )
    _checked.add(key)


def _differing_rows(projection: Projection, weight: Tensor, dtype: torch.dtype) -> int | None:
    """Return a number of rows whose product is not part of a larger one; None if there is none."""
    columns, depth = weight.shape
    generator = torch.Generator(weight.device).manual_seed(20261129)
    most = min(_MAX_CHECKED_ROWS, _MAX_NUMBERS // columns)

    def random(width: int) -> Tensor:
        drawn = torch.randn(most, width, generator=generator, device=weight.device)
        return drawn.to(dtype)

    x, target, scratch = random(depth), random(columns), FreshBuffers(weight.device)

    # A product may be added to the residual stream. A rank's part of it is stored before it is
    # added to the parts of other ranks.
    adds = columns <= depth and not projection.is_summed

    def products(rows: slice, part: slice) -> list[Tensor]:
        made = [torch.empty_like(target[rows, part])]
        projection.project(x[rows], made[0], scratch, part)
        if adds and part == ALL:
            made.append(target[rows].clone())
            projection.add_to(made[1], x[rows], scratch)
        return made

    whole, last = products(ALL, ALL), slice(max(columns - _PART, 0), None)
    for count in (*(rows for rows in _CHECKED_ROWS if rows < most), most):
        ends = slice(0, count), slice(most - count, most)
        for rows, part in ((ends[0], ALL), (ends[1], ALL), (ends[0], last)):
            pairs = zip(products(rows, part), whole, strict=False)
            if not all(torch.equal(some, wanted[rows, part]) for some, wanted in pairs):
                return count
    return None


INVARIANT: dict[type[Projection], type[Projection]] = {
    PlainProjection: InvariantProjection,
    Fp8Projection: InvariantFp8Projection,
}
