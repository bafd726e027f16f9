# SPDX-License-Identifier: Apache-2.0
"""Products with the matrices that upstream's parallel layers own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gather_gemm import Epilogue, fused_linear, is_fused_linear_faster
from vllm.diffusion.ops.fused import silu_mul
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
_AT_REST = True  # no kernel of a step writes a weight, so it may be read before the one before ends


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

    A plain matrix multiplies straight into `out`: few rows by our own kernel where it was measured
    faster, else PyTorch's product. A quantised layer computes all its columns by its own method;
    those wanted are copied.

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
    bias = None if bias is None else bias[columns]
    if is_fused_linear_faster(x, weight):
        return fused_linear(x, weight, out, bias=bias, early=_AT_REST)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def gated_linear(
    x: Tensor, layer: ParallelLayer, out: Tensor | None = None, gate_up: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of this rank's columns, where gate and up are the halves of `linear`.

    For few rows one kernel does it all where that was measured faster; it rounds where the two
    ops do.

    Args:
        x: [R, in], model dtype.
        layer: a layer of both matrices, the gate's columns first.
        out: [R, columns / 2] contiguous; None allocates.
        gate_up: [R, columns] contiguous, overwritten where the product is stored; None allocates.

    Returns:
        [R, columns / 2]: `out`, or a new tensor.
    """
    if is_plain(layer) and _local_bias(layer) is None:
        weight = plain_weight(layer)
        if is_fused_linear_faster(x, weight, Epilogue.SILU_MUL):
            return fused_linear(x, weight, out, epilogue=Epilogue.SILU_MUL, early=_AT_REST)
    return silu_mul(linear(x, layer, out=gate_up if is_plain(layer) else None), out=out)


def adds_in_place(x: Tensor, layer: RowParallelLinear) -> bool:
    """Whether `add_linear` adds to x in the product's epilogue and stores no product."""
    return x.is_cuda and layer.tp_size == 1 and is_plain(layer) and _local_bias(layer) is None


def add_linear(
    x: Tensor,
    h: Tensor,
    layer: RowParallelLinear,
    product: Tensor | None = None,
    *,
    features: slice = _ALL,
) -> None:
    """x += h W^T + b in place, summed over the ranks.

    On a GPU of its own a plain layer adds in the product's epilogue: one rounding to the model
    dtype instead of two, and a pass over x less.

    Args:
        x: [R, out], model dtype, contiguous.
        h: [R, in], this rank's part of the features, or those of `features`.
        layer: a row-parallel layer.
        product: the shape of x, overwritten unless `adds_in_place`; None allocates.
        features: of this rank's part; fewer than all of a plain layer's. The bias comes with the
            first.
    """
    if features != _ALL:
        _add_features(x, h, layer, product, features)
    elif adds_in_place(x, layer):
        weight = plain_weight(layer)
        if is_fused_linear_faster(h, weight, Epilogue.RESIDUAL):
            fused_linear(h, weight, x, epilogue=Epilogue.RESIDUAL, early=_AT_REST)
        else:
            x.addmm_(h, weight.t())
    else:
        out = product if is_plain(layer) else None
        x.add_(tensor_model_parallel_all_reduce(linear(h, layer, out=out)))


def _add_features(
    x: Tensor, h: Tensor, layer: RowParallelLinear, product: Tensor | None, features: slice
) -> None:
    """`add_linear` with some columns of a plain matrix."""
    weight = plain_weight(layer)[:, features]
    bias = _local_bias(layer) if features.start == 0 else None
    if adds_in_place(x, layer):
        x.addmm_(h, weight.t())
        return
    product = torch.mm(h, weight.t(), out=product)
    if bias is not None:
        product.add_(bias)
    x.add_(tensor_model_parallel_all_reduce(product))


def _local_bias(layer: ParallelLayer) -> Tensor | None:
    """The bias that this rank adds: of a row-parallel layer, whose results are summed over the
    ranks, only rank 0 adds it."""
    if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
        return None
    bias = layer.bias
    assert bias is None or isinstance(bias, torch.Tensor)
    return bias
