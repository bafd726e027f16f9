# SPDX-License-Identifier: Apache-2.0
"""fp8 weights of a checkpoint with a scale per block, which is 128 x 128 in published checkpoints.

They are kept exactly and multiplied by rows in the model dtype. They are unpacked part by part
like 4-bit weights: each row stores a scale for every block of the depth, as for a group.
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


def quantise_blocks(part: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a matrix [N, K] in fp8, and the scale of each block from its largest magnitude."""
    rows, columns = block
    wide = part.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (wide.abs().amax(dim=(1, 3)) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = wide / scales[:, None, :, None]
    return numbers.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), scales


@register_weight_loader_v2_supported_method
class BlockMethod(StreamedMethod[BlockScheme]):
    """Loads block-scaled weights in upstream's linear layers, for `PackedProjection`."""

    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Register `weight` [N, K] fp8 and the scales of its blocks."""
        (height, width), name = self._scheme.block, self._scheme.scale_name
        num_rows, depth = matrix.num_rows, matrix.depth
        if num_rows % height or depth % width:
            raise ServerConfigError(
                f"quantization: given scales of blocks {[height, width]} for a matrix "
                f"{[num_rows, depth]} of a rank; wanted whole blocks"
            )
        values = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn)
        scales = torch.ones(num_rows // height, depth // width)

        def check(stored: Tensor, part: Tensor) -> None:
            if stored.shape != part.shape:
                raise ServerConfigError(
                    f"quantization: given a part {list(part.shape)} of a matrix for "
                    f"{list(stored.shape)}; wanted whole blocks of {[height, width]}"
                )

        # The functions use the layer's current tensors, which may have moved before a part
        # arrives.
        def put_scales(rows: slice, part: Tensor) -> None:
            stored = getattr(layer, name).data[rows]
            check(stored, part)
            stored.copy_(part)
            # the layer has been loaded before
            if name in layer._parameters and "weight_scale" in layer._buffers:
                of_rows = layer.get_buffer("weight_scale")
                first, last = rows.start * height, rows.stop * height
                of_rows[first:last] = stored.repeat_interleave(height, 0)

        def put_values(rows: slice, part: Tensor) -> None:
            stored: Tensor = layer.get_parameter("weight").data[rows]
            check(stored, part)
            if part.dtype != stored.dtype:  # an unquantised part, from a trainer
                blocks = slice(rows.start // height, rows.stop // height)
                part, own_scales = quantise_blocks(part.to(stored.device), (height, width))
                put_scales(blocks, own_scales)
            stored.copy_(part)

        weight = StreamedParameter(
            data=values, loader=matrix.loader, take_part=put_values, num_weights=values.numel()
        )
        layer.register_parameter("weight", weight)
        scale = StreamedParameter(
            data=scales, loader=matrix.loader, take_part=put_scales, unit=height
        )
        layer.register_parameter(name, scale)
        reserve_unpacked(values.device, num_rows, depth, matrix.dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Expand the scales of blocks to scales of rows."""
        scales: Tensor = getattr(layer, self._scheme.scale_name).data
        if self._scheme.scale_name == "weight_scale":
            del layer.weight_scale
        for name, tensor in (
            ("weight_scale", scales.repeat_interleave(self._scheme.block[0], 0)),
            ("weight_zero", None),
            ("table", None),
        ):
            layer.register_buffer(name, tensor, persistent=False)
