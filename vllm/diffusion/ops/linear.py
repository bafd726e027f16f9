# SPDX-License-Identifier: Apache-2.0
"""Products with the matrices that upstream's parallel layers own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    ParallelLayer: TypeAlias = LinearBase | VocabParallelEmbedding

_ALL = slice(None)


def is_plain(layer: ParallelLayer) -> bool:
    """Whether the layer holds an unquantised matrix [out, in] that can be sliced by rows."""
    method = layer.quant_method
    return isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))


def plain_weight(layer: ParallelLayer) -> Tensor:
    """The matrix [out, in] of this rank, padding rows of a vocabulary included; see `is_plain`."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def linear(
    x: Tensor, layer: ParallelLayer, out: Tensor | None = None, *, columns: slice = _ALL
) -> Tensor:
    """x W^T + b with this rank's part of a parallel layer; never gathers, never reduces.

    A plain matrix multiplies straight into `out`. A quantised layer computes all its columns by
    its own method; those wanted are copied.

    Args:
        x: [R, in], model dtype.
        layer: an upstream parallel layer (column or row parallel, or a head).
        out: [R, columns] contiguous, the dtype of x; None allocates.
        columns: of the result, that is rows of the matrix; all of them by default.

    Returns:
        [R, columns]: `out`, or a new tensor (a view into all columns where quantised).
    """
    bias = _local_bias(layer)
    if not is_plain(layer):
        product = layer.quant_method.apply(layer, x, bias)[:, columns]
        return product if out is None else out.copy_(product)
    weight = plain_weight(layer)[columns]
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias[columns], x, weight.t(), out=out)


def add_linear(x: Tensor, h: Tensor, layer: RowParallelLinear) -> None:
    """x += h W^T + b in place, summed over the ranks.

    On a GPU of its own a plain layer adds in the product's epilogue: one rounding to the model
    dtype instead of two, and a pass over x less.

    Args:
        x: [R, out], model dtype, contiguous.
        h: [R, in], this rank's part of the features.
        layer: a row-parallel layer.
    """
    if x.is_cuda and layer.tp_size == 1 and is_plain(layer) and _local_bias(layer) is None:
        x.addmm_(h, plain_weight(layer).t())
    else:
        x.add_(tensor_model_parallel_all_reduce(linear(h, layer)))


def _local_bias(layer: ParallelLayer) -> Tensor | None:
    """The bias that this rank adds: of a row-parallel layer, whose results are summed over the
    ranks, only rank 0 adds it."""
    if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
        return None
    bias = layer.bias
    assert bias is None or isinstance(bias, torch.Tensor)
    return bias
