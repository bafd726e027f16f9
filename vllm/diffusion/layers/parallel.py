# SPDX-License-Identifier: Apache-2.0
"""Upstream's parallel layers, adapted to the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

if TYPE_CHECKING:
    from torch import nn

LayerT = TypeVar("LayerT", bound="LinearBase | VocabParallelEmbedding")


class _PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Unquantised embedding or head whose weight stays as loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing, whereas upstream would also pack a copy on CPU."""


def without_weight_packing(layer: LayerT) -> LayerT:
    """Keep the matrix of an unquantised layer as loaded, and return the layer.

    On CPU upstream packs such a matrix for its own GEMM and may drop the original. Without
    upstream's compiled kernels this fails on machines with AMX. The stages multiply by the plain
    matrix, or by a slice of it. Quantised layers are not changed.
    """
    method = layer.quant_method
    if isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
        vars(layer)["_cpu_skip_gemm_dispatch"] = True
    elif isinstance(method, UnquantizedEmbeddingMethod):
        layer.quant_method = _PlainEmbeddingMethod()
    return layer
