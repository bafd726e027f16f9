# SPDX-License-Identifier: Apache-2.0
"""fp8 weights (e4m3) with one scale per channel, times fp8 rows with one scale each.

Rows are quantised in the kernel that computes them (norm, silu(gate) * up), or in a separate
kernel if that kernel is not ours (attention). Few rows are multiplied by our own kernel, which
applies the scales to the sums, more rows by PyTorch's. If one of our kernels reads the product
next, the product is stored without scales, and that kernel applies them.

On a CPU, the numbers are multiplied in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import CheckpointError, ServerConfigError
from vllm.diffusion.core.quantisation import Fp8Scheme
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.loading import RankMatrix, StreamedMethod, StreamedParameter, wide_rows
from vllm.diffusion.ops.projection import ALL, WEIGHTS_ARE_CONSTANT, Projection
from vllm.diffusion.ops.weight_spec import ProjectionKind, WeightSpec, Workspace
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm_add_llada.cuda_kernels.fused_ops import (
    FP8,
    Epilogue,
    QuantisedRows,
    Tiling,
    add_linear_fp8,
    fused_linear_fp8,
    has_add_linear_fp8,
    quantise_rows,
    rescale,
    silu_mul,
    silu_mul_quantised,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.stages import Buffer, Buffers
    from vllm.diffusion.ops.projection import ParallelLayer

_WIDE = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # divisor of both sizes of a matrix on a GPU


def quantise_weight(part: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantise rows of a matrix, each with its own scale.

    Args:
        part: [N, K], any float dtype, on any device.
        values: [N, K] fp8, written.
        scales: [N] fp32, written.
    """
    for rows, some in wide_rows(part, values.device):
        quantise_rows(some, QuantisedRows(values[rows], scales[rows]))


@register_weight_loader_v2_supported_method
class Fp8Method(StreamedMethod[Fp8Scheme]):
    """Stores fp8 weights in upstream's linear layers, for `Fp8Projection`."""

    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Register `weight` [N, K] fp8 and `weight_scale` [N].

        If rows do not have their own scales, `input_scale` [1] is registered, too.
        """
        loader, num_rows = matrix.loader, matrix.num_rows
        values = torch.empty(num_rows, matrix.depth, dtype=FP8)
        if values.is_cuda and any(size % _ALIGNMENT for size in values.shape):
            raise ServerConfigError(
                f"quantization: given fp8 for a matrix {list(values.shape)} of a rank; wanted "
                f"multiples of {_ALIGNMENT}"
            )
        scales = torch.ones(num_rows, dtype=torch.float32)

        tensors: Any = layer  # its tensors may move before a part arrives

        def put_values(rows: slice, part: Tensor) -> None:
            stored = tensors.weight.data[rows]
            if self._scheme.is_online:
                quantise_weight(part, stored, tensors.weight_scale[rows])
            elif part.dtype in _WIDE:
                raise CheckpointError(
                    f"given {part.dtype} for a matrix that the checkpoint has in fp8; wanted fp8 "
                    "with scales, or a plain checkpoint with --quantization fp8"
                )
            else:
                stored.copy_(part)

        def put_scales(rows: slice, part: Tensor) -> None:
            stored = tensors.weight_scale.data[rows]
            stored.copy_(part.flatten().expand(rows.stop - rows.start))

        weight = StreamedParameter(
            data=values, loader=loader, take_part=put_values, num_weights=values.numel()
        )
        layer.register_parameter("weight", weight)
        if self._scheme.is_online:
            layer.register_buffer("weight_scale", scales, persistent=False)
        else:
            scale = StreamedParameter(
                data=scales, loader=loader, take_part=put_scales, is_per_column=False
            )
            layer.register_parameter("weight_scale", scale)
        if self._scheme.has_input_scale:

            def put_largest(rows: slice, part: Tensor) -> None:  # over matrices that share rows
                fixed = largest.data
                if largest.should_reset:
                    largest.should_reset = False
                    fixed.zero_()
                fixed.copy_(torch.maximum(fixed, part.to(fixed)))

            largest = StreamedParameter(
                data=torch.zeros(1, dtype=torch.float32),
                loader=loader,
                take_part=put_largest,
                is_per_column=False,
            )
            layer.register_parameter("input_scale", largest)


class Fp8HeadMethod(Fp8Method):
    """Stores an output head in fp8; a rank has a part of its rows, and padding."""

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Create the parameters; upstream's layer calls it."""
        shard = layer.shard_indices

        def load(parameter: StreamedParameter, tensor: Tensor) -> None:
            rows = tensor[shard.org_vocab_start_index : shard.org_vocab_end_index]
            parameter.take_part(slice(0, len(rows)), rows)

        super().create_weights(layer, *sizes, **attributes | {"weight_loader": load})
        if layer.weight.is_cuda and shard.num_org_elements % _ALIGNMENT:
            raise ServerConfigError(
                f"dllm settings: fp8_head: given true with {shard.num_org_elements} logits of a "
                f"rank; wanted false, or a multiple of {_ALIGNMENT}"
            )


class Fp8Projection(Projection):
    """Projection with an fp8 matrix; see the module's documentation."""

    can_slice = True
    quantises = True
    weight_bytes = 1.0
    speed = 1.75  # measured on an H200, including the quantisation of rows

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        self._weight: Tensor = layer.weight.data
        self._scales: Tensor = layer.weight_scale.data
        fixed: Tensor | None = getattr(layer, "input_scale", None)
        self._fixed_scale = None if fixed is None else fixed.data
        self._dtype: torch.dtype = layer.params_dtype
        self._uses_cublas = self._weight.is_cuda
        self._one = torch.ones((), device=self._weight.device)

    @property
    def stored(self) -> Tensor:
        return self._weight

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        if use is ProjectionKind.GATED:
            most_rows = matrix.most_stored_rows(partial(dispatch.fp8_tiling, gated=True))
            gate_up = stages.gate_up(matrix.dtype, matrix.columns)
            # before it is converted to fp8
            product = stages.gate_up(matrix.dtype, matrix.columns // 2)
            return Workspace((gate_up,), most_rows, (product,))
        if use is ProjectionKind.ADD_TO:
            return Workspace((stages.projected(matrix.dtype, matrix.columns),))
        return Workspace()

    def rows(self, buffer: Buffer, num_rows: int, scratch: Buffers) -> QuantisedRows:
        values, scales = (part.take(scratch, num_rows) for part in buffer.quantised)
        return QuantisedRows(values, scales, self._fixed_scale)

    def project(
        self, x: Tensor | QuantisedRows, out: Tensor, scratch: Buffers, columns: slice = ALL
    ) -> None:
        x = self._quantised(x, scratch)
        weight, scales = self._weight[columns], self._scales[columns]
        bias = None if self._bias is None else self._bias[columns]
        tiling = self._tiling_of_columns(weight, len(out))
        if tiling is not None or not out.is_cuda:
            fused_linear_fp8(
                x,
                weight,
                scales,
                out,
                tiling=tiling,
                bias=bias,
                early=WEIGHTS_ARE_CONSTANT,
                ahead=self._ahead,
            )
            return
        torch._scaled_mm(
            x.values,
            weight.t(),
            x.scales[:, None],
            scales[None],
            bias,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )

    def gated(
        self, x: Tensor | QuantisedRows, out: Tensor | QuantisedRows, scratch: Buffers
    ) -> None:
        """Run one kernel, then one that quantises; without a tiling, store the product between."""
        x = self._quantised(x, scratch)
        num_rows, num_columns = len(x.values), len(self._weight)
        tiling = None if self._bias is not None else self._tiling(num_rows, is_gated=True)
        if tiling is not None:
            plain = out
            if isinstance(plain, QuantisedRows):
                plain = stages.gate_up(self._dtype, num_columns // 2).take(scratch, num_rows)
            self._fused(x, plain, tiling, Epilogue.SILU_MUL)
            if isinstance(out, QuantisedRows):
                quantise_rows(plain, out)
            return
        gate_up = stages.gate_up(self._dtype, num_columns).take(scratch, num_rows)
        scales: tuple[Tensor, ...] = ()
        if self._scales_gate_separately(num_rows):
            self._multiply(x, self._weight, gate_up)
            scales = (x.scales, self._scales)
        else:
            self.project(x, gate_up, scratch)
        if isinstance(out, QuantisedRows):
            silu_mul_quantised(gate_up, out, *scales)
            return
        if scales:
            rescale(gate_up, x.scales, self._scales, gate_up)
        silu_mul(gate_up, out=out)

    def multiply(
        self, h: Tensor | QuantisedRows, out: Tensor, scratch: Buffers, features: slice = ALL
    ) -> None:
        h = self._quantised(h, scratch)
        weight, bias = self._part(features)
        tiling = self._tiling(len(out)) if features == ALL else None
        if tiling is not None:
            self._fused(h, out, tiling, Epilogue.STORE)
        elif self._uses_cublas:
            self._multiply(h, weight, out)
            rescale(out, h.scales, self._scales, out, bias=bias)
        else:
            fused_linear_fp8(h, weight, self._scales, out, bias=bias)

    def add_to(
        self, x: Tensor, h: Tensor | QuantisedRows, scratch: Buffers, features: slice = ALL
    ) -> None:
        if self._is_summed:
            super().add_to(x, h, scratch, features)
            return
        h = self._quantised(h, scratch)
        weight, bias = self._part(features)
        tiling = self._tiling(len(x)) if features == ALL else None
        if tiling is not None:
            self._fused(h, x, tiling, Epilogue.RESIDUAL)
        elif bias is None and self._is_added(h, weight, x):
            add_linear_fp8(h, weight, self._scales, x)
        elif self._uses_cublas:
            out = stages.projected(x.dtype, x.shape[1]).take(scratch, len(x))
            self._multiply(h, weight, out)
            rescale(out, h.scales, self._scales, x, bias=bias, adds=True)
        else:
            epilogue = Epilogue.RESIDUAL
            fused_linear_fp8(h, weight, self._scales, x, bias=bias, epilogue=epilogue)

    def _part(self, features: slice) -> tuple[Tensor, Tensor | None]:
        """Return columns of the weight, and the bias if the columns include the first."""
        return self._weight[:, features], None if features.start else self._bias

    def _scales_gate_separately(self, num_rows: int) -> bool:
        """Return whether a gated product is stored without scales, which are applied with silu."""
        is_plain = self._uses_cublas and self._bias is None
        return is_plain and dispatch.should_scale_gate_separately(num_rows)

    def _is_added(self, h: QuantisedRows, weight: Tensor, x: Tensor) -> bool:
        """Return whether cuBLAS adds a product to x itself, without a separate pass over memory."""
        return dispatch.adds_fp8(len(x)) and has_add_linear_fp8(h, weight, self._scales, x)

    def _quantised(self, x: Tensor | QuantisedRows, scratch: Buffers) -> QuantisedRows:
        if isinstance(x, QuantisedRows):
            return x
        out = self.rows(stages.quantised_rows(x.dtype, x.shape[1]), len(x), scratch)
        quantise_rows(x, out)
        return out

    def _tiling_of_columns(self, weight: Tensor, num_rows: int) -> Tiling | None:
        """Return the tiling of our kernel for columns of a product; None for PyTorch's product."""
        card = dispatch.card_of(weight.device)
        return dispatch.fp8_tiling(num_rows, *weight.shape, gated=False, card=card)

    def _tiling(self, num_rows: int, *, is_gated: bool = False) -> Tiling | None:
        """Return the tiling of our kernel for the product; None for PyTorch's product."""
        card = dispatch.card_of(self._weight.device)
        return dispatch.fp8_tiling(num_rows, *self._weight.shape, gated=is_gated, card=card)

    def _fused(self, x: QuantisedRows, out: Tensor, tiling: Tiling, epilogue: Epilogue) -> None:
        bias = None if epilogue is Epilogue.SILU_MUL else self._bias
        fused_linear_fp8(
            x,
            self._weight,
            self._scales,
            out,
            tiling=tiling,
            bias=bias,
            epilogue=epilogue,
            early=WEIGHTS_ARE_CONSTANT,
            ahead=self._ahead,
        )

    def _multiply(self, x: QuantisedRows, weight: Tensor, out: Tensor) -> None:
        """Multiply the stored numbers without scales; bf16 has enough range for the result."""
        torch._scaled_mm(
            x.values,
            weight.t(),
            self._one,
            self._one,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )
