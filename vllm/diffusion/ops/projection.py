# SPDX-License-Identifier: Apache-2.0
"""Products with the weights of upstream's parallel layers: one projection per weight.

A projection is created once, after its weight is loaded and processed. Only the projection depends
on how the weight is stored, which kernel multiplies by it, in which dtype it reads rows, and how
much scratch memory it requires. To support another storage of weights, add a class and a line in
`kinds.py`; layers and plans need no change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gather_gemm import gather_gemm
from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.ops import collectives, dispatch
from vllm.diffusion.ops.weight_spec import ProjectionKind, Workspace
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm_add_llada.cuda_kernels.fused_ops import (
    Epilogue,
    QuantisedRows,
    Tiling,
    fused_linear,
    has_fused_linear,
    silu_mul,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffer, Buffers
    from vllm.diffusion.ops.weight_spec import WeightSpec
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    ParallelLayer: TypeAlias = LinearBase | VocabParallelEmbedding

ALL = slice(None)
# No kernel of a step writes a weight, so a kernel may read weights before the previous one ends.
WEIGHTS_ARE_CONSTANT = True


class Projection(ABC):
    """Computes x W^T + b with this rank's part of a weight W [columns, depth]; never gathers.

    Args:
        layer: an upstream parallel layer (column or row parallel, or a head), loaded.

    Attributes:
        can_slice: whether a part of the columns or features costs less than all of them.
        quantises: whether methods take quantised rows, and `gated` writes quantised rows.
        weight_bytes: bytes of a stored number of W, including its share of the scales; None: the
            same as in a row.
        speed: rate of products of many rows relative to plain weights.
    """

    can_slice: ClassVar[bool]
    quantises: ClassVar[bool] = False
    weight_bytes: ClassVar[float | None] = None
    speed: ClassVar[float] = 1.0

    def __init__(self, layer: ParallelLayer) -> None:
        is_row_parallel = isinstance(layer, RowParallelLinear)
        self._is_summed = is_row_parallel and layer.tp_size > 1
        # The products of a row-parallel layer are summed, so only rank 0 adds the bias.
        self._bias: Tensor | None = None if is_row_parallel and layer.tp_rank > 0 else layer.bias
        self._ahead: Tensor | None = None  # start of the weight that is read after this one

    @property
    def is_summed(self) -> bool:
        """Whether `add_to` sums the products of several ranks."""
        return self._is_summed

    @property
    def stored(self) -> Tensor | None:
        """The weight as it is stored, contiguous; None if upstream stores it."""
        return None

    @property
    def bias(self) -> Tensor | None:
        """The bias b [columns] that this rank adds."""
        return self._bias

    def precedes(self, following: Projection) -> None:
        """Set the projection whose weight is read after this one's in every step.

        A kernel of few rows prefetches the start of that weight into the cache while it would
        otherwise be idle.
        """
        stored = following.stored
        if stored is not None and stored.is_cuda:
            flat = stored.flatten()
            self._ahead = flat[: dispatch.AHEAD_BYTES // flat.element_size()]

    def matrix(self, columns: slice) -> Tensor | None:
        """Return rows of the weight if the product uses exactly these numbers; else None."""
        return None

    @classmethod
    @abstractmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        """Return the scratch memory of a use on one rank, which depends only on shapes.

        Rows are in the form that `rows` returns.
        """

    def rows(self, buffer: Buffer, num_rows: int, scratch: Buffers) -> Tensor | QuantisedRows:
        """Take uninitialised memory for rows to be multiplied, in the best dtype.

        Args:
            buffer: buffer of rows [depth], model dtype.
            num_rows: R.
            scratch: source of the memory.
        """
        return buffer.take(scratch, num_rows)

    @abstractmethod
    def project(self, x: Any, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        """Write some columns of the product, by default all.

        Args:
            x: [R, depth], model dtype, or as returned by `rows`; also in the other methods.
            out: [R, columns] contiguous, the dtype of x; written.
            scratch: memory for the computation.
            columns: columns of the product, which are rows of the weight.
        """

    @abstractmethod
    def gated(self, x: Any, out: Any, scratch: Buffers) -> None:
        """Write silu(gate) * up, where gate and up are the halves of the product.

        Args:
            x: [R, depth], model dtype.
            out: [R, columns / 2] contiguous, written; from `rows` of another projection if both
                projections quantise.
        """

    @abstractmethod
    def multiply(self, h: Any, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        """Write the product with some of the features.

        Args:
            h: [R, features], model dtype, or as returned by `rows`.
            out: [R, columns] contiguous, model dtype; written.
            features: range of `depth`; a part of it requires `can_slice`. The bias is added with
                the first feature.
        """

    def add_to(self, x: Tensor, h: Any, scratch: Buffers, features: slice = ALL) -> None:
        """Add h W^T + b to x in place, summed over the ranks if the layer is row parallel.

        Args:
            x: [R, columns], model dtype, contiguous; written.
            h, scratch, features: see `multiply`.
        """
        if not self._is_summed:
            product = stages.projected(x.dtype, x.shape[1]).take(scratch, len(x))
            self.multiply(h, product, scratch, features)
            x.add_(product)
            return

        def write(rows: slice, out: Tensor) -> None:
            self.multiply(rows_of(h, rows), out, scratch, features)

        collectives.tensor_parallel().add_sum(x, write, scratch)


class PlainProjection(Projection):
    """Projection with an unquantised matrix, by the faster of our kernel and cuBLAS.

    On a single GPU, a product without a bias is added to x in its epilogue, which saves one pass
    over x. Our kernel adds before it rounds, cuBLAS rounds the product first.

    Attributes:
        weight: this rank's part of W.
    """

    can_slice = True

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        self.weight: Tensor = layer.weight
        self._adds_in_place = self.weight.is_cuda and self._bias is None and not self._is_summed

    def matrix(self, columns: slice) -> Tensor | None:
        return self.weight[columns] if self._bias is None else None

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        if use is ProjectionKind.GATED:
            gate_up = stages.gate_up(matrix.dtype, matrix.columns)
            return Workspace(
                (gate_up,),
                matrix.most_stored_rows(partial(dispatch.linear_tiling, gated=True)),
            )
        adds_in_place = matrix.device.type == "cuda" and not matrix.has_bias
        if use is ProjectionKind.PROJECT or (adds_in_place and not matrix.is_summed):
            return Workspace()
        return Workspace((stages.projected(matrix.dtype, matrix.columns),))

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        weight, bias = self.weight[columns], self._bias
        bias = None if bias is None else bias[columns]
        tiling = self._tiling(x, weight, Epilogue.STORE)
        if tiling is None:
            self._multiply(x, weight, out, bias)
        else:
            fused_linear(x, weight, out, tiling=tiling, bias=bias, early=WEIGHTS_ARE_CONSTANT)

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        """Compute in one kernel if that is faster; it rounds at the same points as two kernels."""
        weight, tiling = self.weight, None
        if self._bias is None:
            tiling = self._tiling(x, weight, Epilogue.SILU_MUL)
        if tiling is not None:
            epilogue = Epilogue.SILU_MUL
            fused_linear(
                x, weight, out, tiling=tiling, epilogue=epilogue, early=WEIGHTS_ARE_CONSTANT
            )
            return
        gate_up = stages.gate_up(x.dtype, len(weight)).take(scratch, len(x))
        self.project(x, gate_up, scratch)
        silu_mul(gate_up, out=out)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if features == ALL:
            self.project(h, out, scratch)
            return
        torch.mm(h, self.weight[:, features].t(), out=out)
        if self._bias is not None and features.start == 0:
            out.add_(self._bias)

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if not self._adds_in_place:
            super().add_to(x, h, scratch, features)
            return
        weight = self.weight[:, features]
        tiling = self._tiling(h, weight, Epilogue.RESIDUAL) if features == ALL else None
        if tiling is None:
            self._add(x, h, weight)
        else:
            fused_linear(
                h, weight, x, tiling=tiling, epilogue=Epilogue.RESIDUAL, early=WEIGHTS_ARE_CONSTANT
            )

    @classmethod
    def _tiling(cls, x: Tensor, weight: Tensor, epilogue: Epilogue) -> Tiling | None:
        """Return the tiling of `fused_linear` for a product, or None to use PyTorch's."""
        if not x.is_cuda or not has_fused_linear(x, weight):
            return None
        gated, card = epilogue is Epilogue.SILU_MUL, dispatch.card_of(x.device)
        return dispatch.linear_tiling(len(x), *weight.shape, gated=gated, card=card)

    def _multiply(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Write the product with rows of the weight."""
        if bias is not None:
            torch.addmm(bias, x, weight.t(), out=out)
        elif x.element_size() == 2 and dispatch.multiplies_head(len(x), len(weight), x.device):
            gather_gemm(x, None, weight, out)
        else:
            torch.mm(x, weight.t(), out=out)

    def _add(self, x: Tensor, h: Tensor, weight: Tensor) -> None:
        """Add the product of h with columns of the weight to x."""
        x.addmm_(h, weight.t())


def rows_of(h: Any, rows: slice) -> Any:
    """Return some rows of a projection's input."""
    if not isinstance(h, QuantisedRows):
        return h[rows]
    return h._replace(values=h.values[rows], scales=h.scales[rows])


def embed_rows(table: VocabParallelEmbedding, ids: Tensor, out: Tensor) -> Tensor:
    """Write the embeddings of ids [T] to out [T, D], and return out.

    Each row comes from the only rank that stores it.
    """
    if not isinstance(table.quant_method, UnquantizedEmbeddingMethod):
        return out.copy_(table(ids))
    if table.tp_size == 1:
        return torch.index_select(table.weight, 0, ids, out=out)
    shard, out = table.shard_indices, out.zero_()
    places = ids - shard.org_vocab_start_index
    is_here = (places >= 0) & (places < shard.num_org_elements)
    places = places.clamp(0, max(shard.num_org_elements - 1, 0))

    def write(rows: slice, part: Tensor) -> None:
        torch.index_select(table.weight, 0, places[rows], out=part)
        part.mul_(is_here[rows, None])

    collectives.tensor_parallel().add_sum(out, write, FreshBuffers(out.device))
    return out
