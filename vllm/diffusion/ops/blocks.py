# SPDX-License-Identifier: Apache-2.0
"""fp8 weights of a checkpoint with a scale for every block, 128 x 128 as published.

They are read exactly and multiplied by rows in the model dtype, unpacked part by part like 4-bit
weights: each row keeps a scale for every block of the depth, as for a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.quantisation import BlockScheme
from vllm.diffusion.ops.loading import RankMatrix, StreamedMethod, StreamedParameter
from vllm.diffusion.ops.packed import reserve_unpacked
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method


@register_weight_loader_v2_supported_method
class BlockMethod(StreamedMethod[BlockScheme]):
    """Loads block-scaled weights in upstream's linear layers, for `PackedProjection`."""

    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Make `weight` [N, K] fp8 and the scales of its blocks."""
        rows, columns = self._scheme.block
        num_rows, depth = matrix.num_rows, matrix.depth
        if num_rows % rows or depth % columns:
            raise ServerConfigError(
                f"quantization: given scales of blocks {[rows, columns]} for a matrix "
                f"{[num_rows, depth]} of a rank; wanted whole blocks"
            )
        values = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn)
        scales = torch.ones(num_rows // rows, depth // columns)

        def put(data: Tensor) -> Any:
            def take(part_rows: slice, part: Tensor) -> None:
                if data[part_rows].shape != part.shape:
                    raise ServerConfigError(
                        f"quantization: given a part {list(part.shape)} of a matrix for "
                        f"{list(data[part_rows].shape)}; wanted whole blocks of {[rows, columns]}"
                    )
                data[part_rows].copy_(part)

            return take

        weight = StreamedParameter(
            data=values, loader=matrix.loader, take_part=put(values), num_weights=values.numel()
        )
        layer.register_parameter("weight", weight)
        scale = StreamedParameter(
            data=scales, loader=matrix.loader, take_part=put(scales), unit=rows
        )
        layer.register_parameter(self._scheme.scale_name, scale)
        reserve_unpacked(values.device, num_rows, depth, matrix.dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expand the scales of blocks to scales of rows."""
        scales: Tensor = getattr(layer, self._scheme.scale_name).data
        delattr(layer, self._scheme.scale_name)
        for name, tensor in (
            ("weight_scale", scales.repeat_interleave(self._scheme.block[0], 0)),
            ("weight_zero", None),
            ("table", None),
        ):
            layer.register_buffer(name, tensor, persistent=False)
