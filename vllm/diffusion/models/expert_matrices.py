# SPDX-License-Identifier: Apache-2.0
"""Stacked matrices of all experts of a layer, with one class per storage format."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.quantisation import Fp8Scheme, PackedScheme, stores_experts
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    from vllm.model_executor.layers.quantization import QuantizationConfig

    ExpertScheme: TypeAlias = Fp8Scheme | PackedScheme

# Tensors of packed matrices in addition to the numbers.
_PARTS = ("weight_scale", "weight_zero", "table")


class ExpertMatrices(nn.Module):
    """One matrix, or several stacked ones, of every expert; the experts' width is sharded.

    Args:
        num_experts: E.
        num_parts: number of matrices stacked by rows.
        shape: [out, in] of a matrix of the whole model.
        sharded_dim: index of the experts' width in `shape`.
        scheme: storage format of the matrices; None for the model dtype.

    Raises:
        ServerConfigError: the tensor-parallel size does not divide the width, or the resulting
            width does not fit the storage format.
    """

    def __init__(
        self,
        num_experts: int,
        num_parts: int,
        shape: tuple[int, int],
        sharded_dim: int,
        scheme: ExpertScheme | None = None,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        num_ranks = get_tensor_model_parallel_world_size()
        width = shape[sharded_dim]
        if width % num_ranks:
            raise ServerConfigError(
                f"tensor_parallel_size: given {num_ranks}; "
                f"wanted a divisor of the experts' width {width}"
            )
        self.width = width // num_ranks
        self.sharded_dim = sharded_dim
        rows, columns = (
            size // num_ranks if dim == sharded_dim else size for dim, size in enumerate(shape)
        )
        self.rows = rows
        self.size = (num_experts, num_parts * rows, columns)
        self._make()

    def _make(self) -> None:
        """Create the parameters."""
        self._add_weight(torch.empty(self.size))

    @property
    def matrices(self) -> ops.ExpertWeights:
        """The matrices in the type that the products require."""
        return ops.DenseExperts(self.weight.data)

    def _put(self, expert: int, rows: slice, matrix: Tensor) -> None:
        """Store rows of an expert's matrix, [rows, in] of this rank."""
        self.weight.data[expert, rows].copy_(matrix)

    def _add_weight(self, values: Tensor) -> None:
        self.weight = nn.Parameter(values, requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": self._load})

    def _load(self, _param: nn.Parameter, matrix: Tensor, place: tuple[int, int]) -> None:
        """Store this rank's part of a matrix [out, in] as (expert, part)."""
        start = get_tensor_model_parallel_rank() * self.width
        expert, rows = self._rows(place)
        self._put(expert, rows, matrix.narrow(self.sharded_dim, start, self.width))

    def _rows(self, place: tuple[int, int]) -> tuple[int, slice]:
        expert, part = place
        return expert, slice(part * self.rows, (part + 1) * self.rows)

    def _add_quantised(self, values: Tensor) -> None:
        """Add a quantised weight, stored in fewer bytes than its numbers need."""
        self._add_weight(values)
        num_experts, num_rows, depth = self.size

        def put_all(experts: slice, matrices: Tensor) -> None:
            for expert, matrix in zip(range(num_experts)[experts], matrices, strict=True):
                self._put(expert, slice(0, num_rows), matrix)

        count = num_experts * num_rows * depth
        set_weight_attrs(self.weight, {"take_part": put_all, "num_weights": count})


class Fp8Matrices(ExpertMatrices):
    """Experts' matrices in fp8, with one scale per row."""

    def _make(self) -> None:
        assert isinstance(self.scheme, Fp8Scheme)
        scales = torch.ones(self.size[:2], dtype=torch.float32)
        self._add_quantised(torch.empty(self.size, dtype=torch.float8_e4m3fn))
        if self.scheme.is_online:
            self.register_buffer("weight_scale", scales, persistent=False)
            return
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        set_weight_attrs(self.weight_scale, {"weight_loader": self._load_scales})

    @property
    def matrices(self) -> ops.ExpertWeights:
        return ops.DenseExperts(self.weight.data, self.weight_scale.data)

    def _put(self, expert: int, rows: slice, matrix: Tensor) -> None:
        values, scales = self.weight.data[expert, rows], self.weight_scale[expert, rows]
        if matrix.dtype == torch.float8_e4m3fn:
            values.copy_(matrix)
        else:
            ops.quantise_weight(matrix, values, scales)

    def _load_scales(self, param: nn.Parameter, scales: Tensor, place: tuple[int, int]) -> None:
        """Load the scales of a matrix [out, in]: one number, [out] or [out, 1]."""
        expert, rows = self._rows(place)
        if scales.numel() > 1 and self.sharded_dim == 0:
            start = get_tensor_model_parallel_rank() * self.width
            scales = scales.narrow(0, start, self.width)
        param.data[expert, rows].copy_(scales.flatten().expand(self.rows))


class PackedExpertMatrices(ExpertMatrices):
    """Experts' matrices in 4 bits, grouped along the depth, with memory to unpack a layer."""

    def _make(self) -> None:
        assert isinstance(self.scheme, PackedScheme)
        num_experts, num_rows, depth = self.size
        packed = ops.empty_packed(num_experts * num_rows, depth, self.scheme)
        self._add_quantised(packed.values.unflatten(0, self.size[:2]))
        for name, tensor in zip(_PARTS, packed[1:], strict=True):
            self.register_buffer(name, tensor, persistent=False)
        ops.reserve(packed.values.device, packed.values.numel() * 2, torch.get_default_dtype())

    @property
    def matrices(self) -> ops.ExpertWeights:
        return ops.PackedExperts(self._packed(), self.size[0])

    def _packed(self) -> ops.Packed:
        return ops.Packed(self.weight.data.flatten(0, 1), *(getattr(self, name) for name in _PARTS))

    def _put(self, expert: int, rows: slice, matrix: Tensor) -> None:
        first = expert * self.size[1]
        ops.quantise_packed(
            matrix, self._packed().rows(slice(first + rows.start, first + rows.stop))
        )


def expert_matrices(
    num_experts: int,
    num_parts: int,
    shape: tuple[int, int],
    sharded_dim: int,
    scheme: ExpertScheme | None,
) -> ExpertMatrices:
    """Create matrices stored by a scheme; other arguments as in `ExpertMatrices`."""
    kind = ExpertMatrices
    if scheme is not None:
        kind = Fp8Matrices if isinstance(scheme, Fp8Scheme) else PackedExpertMatrices
    return kind(num_experts, num_parts, shape, sharded_dim, scheme)


def scheme_of_experts(quant_config: QuantizationConfig | None, prefix: str) -> ExpertScheme | None:
    """Return the storage format of a module's expert matrices; None for the model dtype.

    Raises:
        ServerConfigError: the format is not supported for experts.
    """
    if quant_config is None:
        return None
    if not isinstance(quant_config, ops.SchemeConfig) or not stores_experts(quant_config.scheme):
        raise ServerConfigError(
            f"quantization: given {quant_config.get_name()}; wanted fp8, int4 or nf4, or none, "
            "for a model with experts"
        )
    if quant_config.ignores(f"{prefix}.experts.0.gate_proj"):
        return None
    return cast("ExpertScheme", quant_config.scheme)
