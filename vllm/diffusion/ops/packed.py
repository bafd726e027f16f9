# SPDX-License-Identifier: Apache-2.0
"""4-bit weights in groups along the depth, times rows in the model dtype.

Up to several thousand rows, our own kernel multiplies by the packed numbers directly. For more
rows, the columns of a matrix are unpacked slice by slice into scratch memory that all layers
share. This memory is allocated, and so counted, with the weights. A slice is then multiplied like
a plain matrix: by cuBLAS, or, if it contains gate and up and their tiles fill the GPU, by the
kernel that also computes silu(gate) * up.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.quantisation import PackedScheme
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.loading import RankMatrix, StreamedMethod, StreamedParameter, wide_rows
from vllm.diffusion.ops.projection import ALL, WEIGHTS_ARE_CONSTANT, Projection
from vllm.diffusion.ops.weight_spec import ProjectionKind, WeightSpec, Workspace
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm_add_llada.cuda_kernels.fused_ops import (
    Epilogue,
    Packed,
    Tiling,
    fused_linear,
    fused_linear_packed,
    has_fused_linear,
    has_packed_linear,
    look_up_table,
    pack,
    silu_mul,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.ops.projection import ParallelLayer

# Numbers that are unpacked at a time on a GPU, except for matrices of great depth.
_UNPACKED = 36 << 20
_MIN_COLUMNS = 256
_SMALLEST_GROUP = 8

# NF4 of QLoRA (Dettmers et al. 2023, arXiv:2305.14314): quantiles of a normal distribution.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, -0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Entry of NF4 for each code q, in the order of the kernel's table (`look_up_table`).
NF4_ORDER = (0, 4, 1, 5, 8, 12, 9, 13, 3, 6, 2, 7, 11, 15, 10, 14)

_scratch: dict[torch.device, Tensor] = {}


def group_of(depth: int, largest: int) -> int:
    """Return the largest power-of-two group, at most `largest`, that divides the depth.

    Raises:
        ServerConfigError: the group would be too small to be worth its scale.
    """
    group = largest
    while depth % group:
        group //= 2
    if group < _SMALLEST_GROUP:
        raise ServerConfigError(
            f"quantization: given 4-bit weights for a matrix of depth {depth}; wanted a multiple "
            f"of {_SMALLEST_GROUP}, or fp8"
        )
    return group


def empty_packed(num_rows: int, depth: int, scheme: PackedScheme) -> Packed:
    """Allocate a matrix of a scheme.

    Raises:
        ServerConfigError: its depth cannot be divided into groups, or not into the checkpoint's.
    """
    group, is_int = group_of(depth, scheme.group), scheme.name == "int4"
    if scheme.layout is not None and group != scheme.group:
        raise ServerConfigError(
            f"quantization: given blocks of {scheme.group} for a matrix of depth {depth} on a "
            f"rank; wanted whole blocks, or a plain checkpoint with --quantization {scheme.name}"
        )
    size = (num_rows, depth // group)
    return Packed(
        torch.zeros(num_rows, depth // 2, dtype=torch.uint8),
        torch.ones(size, dtype=torch.float32),
        torch.zeros(size, dtype=torch.uint8) if is_int else None,
        None if is_int else torch.tensor([NF4[i] for i in NF4_ORDER], dtype=torch.float32),
    )


def quantise_packed(part: Tensor, packed: Packed) -> None:
    """Quantise rows of a matrix, each group with the parameters that have the least error.

    Args:
        part: [N, K], any float dtype, on any device.
        packed: [N, K], written.
    """
    for rows, wide in wide_rows(part, packed.values.device):
        some = packed.rows(rows)
        groups = wide.unflatten(1, (-1, packed.group))
        if some.table is not None:
            numbers, scales = _nearest(groups, some.table)
        else:
            assert some.zeros is not None
            numbers, scales, zeros = _rounded(groups)
            some.zeros.copy_(zeros)
        some.values.copy_(pack(numbers.flatten(1)))
        some.scales.copy_(scales)


def _nearest(groups: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of the nearest table entries, and scales, which are the largest magnitudes."""
    scales = groups.abs().amax(dim=2)
    unit = groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    ascending, numbers = table.sort()
    borders = (ascending[1:] + ascending[:-1]) / 2
    return numbers[torch.bucketize(unit, borders)], scales


def _rounded(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points of groups [N, groups, G] with least squared error.

    Each group has six candidates. Two are symmetric around 8, and a third spans the smallest to
    the largest number. The others are these three with a scale that is a tenth smaller, which
    clips the ends and has a better resolution in the middle.
    """
    low, largest = groups.amin(dim=2), groups.amax(dim=2)
    magnitude = torch.maximum(-low, largest)
    signed = torch.where(largest >= -low, largest, low)
    span = (largest.clamp(min=0) - low.clamp(max=0)) / 15
    middle = torch.full_like(span, 8.0)
    spanned_zero = (-low.clamp(max=0) / _not_zero(span)).round().clamp(0, 15)
    best: tuple[Tensor, ...] = ()
    whole = ((magnitude / 7, middle), (signed / -8, middle), (span, spanned_zero))
    for scales, zeros in (*whole, *((0.9 * scales, zeros) for scales, zeros in whole)):
        steps = groups / _not_zero(scales)[:, :, None]
        numbers = (steps.round() + zeros[:, :, None]).clamp(0, 15)
        error = ((numbers - zeros[:, :, None]) * scales[:, :, None] - groups).square().sum(dim=2)
        chosen: tuple[Tensor, ...] = (error, scales, zeros, numbers)
        if best:
            wins = error < best[0]
            chosen = tuple(
                torch.where(wins if new.dim() == 2 else wins[:, :, None], new, old)
                for new, old in zip(chosen, best, strict=True)
            )
        best = chosen
    _, scales, zeros, numbers = best
    return numbers, scales, zeros


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


@register_weight_loader_v2_supported_method
class PackedMethod(StreamedMethod[PackedScheme]):
    """Stores 4-bit weights in upstream's linear layers, for `PackedProjection`."""

    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Register `weight` [N, K / 2], `weight_scale` [N, K / G], and `weight_zero` or `table`."""
        num_rows, depth = matrix.num_rows, matrix.depth
        packed = empty_packed(num_rows, depth, self._scheme)

        # The function uses the layer's current tensors, which may have moved before a part
        # arrives.
        def take(rows: slice, part: Tensor) -> None:
            tensors: Any = layer
            stored = Packed(
                tensors.weight.data, tensors.weight_scale, tensors.weight_zero, tensors.table
            )
            quantise_packed(part, stored.rows(rows))

        weight = StreamedParameter(
            data=packed.values,
            loader=matrix.loader,
            take_part=take,
            num_weights=num_rows * depth,
        )
        layer.register_parameter("weight", weight)
        layer.register_buffer("weight_scale", packed.scales, persistent=False)
        layer.register_buffer("weight_zero", packed.zeros, persistent=False)
        layer.register_buffer("table", packed.table, persistent=False)
        reserve_unpacked(packed.values.device, num_rows, depth, matrix.dtype)


class PackedProjection(Projection):
    """Projection with a matrix of 4-bit numbers; see the module's documentation."""

    can_slice = True
    weight_bytes = 0.53
    speed = 0.9  # measured on an H200, including unpacking

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        values, scales = layer.weight.data, layer.weight_scale
        self._packed = Packed(values, scales, layer.weight_zero, layer.table)
        self._look_up = () if layer.table is None else look_up_table(layer.table.tolist())
        self._adds_in_place = self._packed.values.is_cuda and not self._is_summed

    @property
    def stored(self) -> Tensor:
        return self._packed.values

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        if use is ProjectionKind.GATED:
            gate_up = stages.gate_up(matrix.dtype, matrix.columns)
            return Workspace((gate_up,), matrix.most_stored_rows(dispatch.gated_tiling))
        if use is ProjectionKind.PROJECT or (matrix.device.type == "cuda" and not matrix.is_summed):
            return Workspace()
        return Workspace((stages.projected(matrix.dtype, matrix.columns),))

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        if self._multiply_packed(x, out, columns, Epilogue.STORE):
            return
        for part, weight in self._slices(x, columns):
            torch.mm(x, weight.t(), out=out[:, part])
        if self._bias is not None:
            out.add_(self._bias[columns])

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        if self._bias is None and self._multiply_packed(x, out, ALL, Epilogue.SILU_MUL):
            return
        tiling = self._gated_tiling(x, out)
        if tiling is not None:
            for part, weight in self._gated_slices(x, tiling):
                fused_linear(x, weight, out[:, part], tiling=tiling, epilogue=Epilogue.SILU_MUL)
            return
        gate_up = stages.gate_up(x.dtype, self._packed.shape[0]).take(scratch, len(x))
        # x is multiplied unchanged, also in a subclass that reorders its columns.
        PackedProjection.project(self, x, gate_up, scratch)
        silu_mul(gate_up, out=out)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if features == ALL and self._multiply_packed(h, out, ALL, Epilogue.STORE):
            return
        for part, weight in self._slices(h, ALL):
            torch.mm(h, weight[:, features].t(), out=out[:, part])
        if self._bias is not None and not features.start:
            out.add_(self._bias)

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if not self._adds_in_place:
            super().add_to(x, h, scratch, features)
            return
        if features == ALL and self._multiply_packed(h, x, ALL, Epilogue.RESIDUAL):
            return
        for part, weight in self._slices(h, ALL):
            x[:, part].addmm_(h, weight[:, features].t())
        if self._bias is not None and not features.start:
            x.add_(self._bias)

    def _multiply_packed(self, x: Tensor, out: Tensor, columns: slice, epilogue: Epilogue) -> bool:
        """Run our own kernel if it is faster; return whether it ran."""
        some = self._packed.rows(columns)
        card = dispatch.card_of(x.device)
        tiling = dispatch.packed_tiling(len(x), *some.shape, some.group, card=card)
        if tiling is None or not has_packed_linear(x, some):
            return False
        bias = None if self._bias is None else self._bias[columns]
        fused_linear_packed(
            x,
            some,
            out,
            tiling=tiling,
            look_up=self._look_up,
            bias=bias,
            epilogue=epilogue,
            early=WEIGHTS_ARE_CONSTANT,
            ahead=self._ahead,
        )
        return True

    def _slices(self, x: Tensor, columns: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of some columns, counted from the first of them, each unpacked."""
        packed = self._packed.rows(columns)
        for part in _slices_of(x, packed.shape[0], self._packed, dispatch.UNPACKED):
            yield part, unpacked((packed.rows(part),), x.dtype)

    def _gated_slices(self, x: Tensor, tiling: Tiling) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of columns of silu(gate) * up, with their gate and up matrices unpacked."""
        num_columns = self._packed.shape[0]
        for both in _slices_of(x, num_columns, self._packed, tiling):
            gate = slice(both.start // 2, both.stop // 2)
            up = slice(gate.start + num_columns // 2, gate.stop + num_columns // 2)
            yield gate, unpacked((self._packed.rows(gate), self._packed.rows(up)), x.dtype)

    def _gated_tiling(self, x: Tensor, out: Tensor) -> Tiling | None:
        """Return the tiling with which one kernel multiplies slices of gate and up, or None."""
        if self._bias is not None or not has_fused_linear(x, out):
            return None
        card = dispatch.card_of(x.device)
        return dispatch.gated_tiling(len(x), *self._packed.shape, card=card)


def _slices_of(x: Tensor, num_columns: int, packed: Packed, tiling: Tiling) -> Iterator[slice]:
    """Yield `num_columns` columns in slices for which there is room to unpack them."""
    depth = packed.shape[1]
    step = dispatch.slice_columns(
        *(len(x), num_columns, depth, _most_columns(depth), tiling),
        card=dispatch.card_of(x.device),
    )
    for start in range(0, num_columns, step):
        yield slice(start, min(start + step, num_columns))


def _most_columns(depth: int) -> int:
    """Return the number of columns that are unpacked at a time."""
    return max(_UNPACKED // depth, _MIN_COLUMNS)


def reserve_unpacked(device: torch.device, num_rows: int, depth: int, dtype: torch.dtype) -> None:
    """Reserve memory of a GPU for unpacking slices of a matrix."""
    reserve(device, min(num_rows, _most_columns(depth)) * depth, dtype)


def reserve(device: torch.device, count: int, dtype: torch.dtype) -> None:
    """Reserve memory of a GPU for `count` unpacked numbers."""
    if device.type != "cuda":
        return
    there = _scratch.get(device)
    if there is None or there.numel() < count or there.dtype != dtype:
        _scratch[device] = torch.empty(count, dtype=dtype, device=device)


def unpacked(parts: Sequence[Packed], dtype: torch.dtype) -> Tensor:
    """Unpack matrices of equal depth into one matrix, one below the other.

    On a GPU the result is in memory that all layers share, which must have been reserved. The next
    call overwrites it.
    """
    depth, device = parts[0].shape[1], parts[0].values.device
    rows = [0, *accumulate(part.shape[0] for part in parts)]
    there = _scratch.get(device)
    if there is None:
        there = torch.empty(rows[-1] * depth, dtype=dtype, device=device)
    weight = there[: rows[-1] * depth].view(rows[-1], depth)
    for part, (start, stop) in zip(parts, pairwise(rows), strict=True):
        unpack(part, weight[start:stop])
    return weight
