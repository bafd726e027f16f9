# SPDX-License-Identifier: Apache-2.0
"""4-bit weights of checkpoints, converted to our packing after a layer is loaded.

GPTQ (Frantar et al. 2022, arXiv:2210.17323): `qweight` int32 [K / 8, N], `qzeros` int32 [groups, N
/ 8], `scales` [groups, N] and `g_idx` int32 [K], the group of each column. If columns were
quantised in the order of their importance (desc_act), the columns of a group are not adjacent.
Then the columns are stored group by group here, and rows are put into that order before a product.

AWQ (Lin et al. 2023, arXiv:2306.00978): `qweight` int32 [K, N / 8], `qzeros` int32 [groups, N / 8]
and `scales` [groups, N]; the columns of a word are in the order `_AWQ`.

compressed-tensors ("pack-quantized"): `weight_packed` int32 [N, K / 8], `weight_scale` [N, groups]
and `weight_shape`; the zero point is 8.

Each 32-bit word contains eight numbers, the first in the lowest bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion.core.errors import CheckpointError, ServerConfigError
from vllm.diffusion.core.quantisation import PackedScheme
from vllm.diffusion.core.stages import Buffer
from vllm.diffusion.ops.loading import RankMatrix, StreamedMethod, StreamedParameter
from vllm.diffusion.ops.packed import PackedProjection, group_of, reserve_unpacked
from vllm.diffusion.ops.projection import ALL
from vllm.diffusion.ops.weight_spec import ProjectionKind, WeightSpec, Workspace
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm_add_llada.cuda_kernels.fused_ops import pack

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.ops.projection import ParallelLayer

_IN_WORD = 8
_ONES = 0x11111111  # a word of eight ones
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of the columns in a word


def numbers_in(words: Tensor) -> Tensor:
    """Unpack int32 [..., n] to 4-bit numbers [..., 8 n], uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).flatten(-2).to(torch.uint8)


@register_weight_loader_v2_supported_method
class PackedCheckpointMethod(StreamedMethod[PackedScheme]):
    """Loads a checkpoint's 4-bit weights in upstream's linear layers."""

    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Register a parameter for each tensor, and buffers for the converted weight."""
        scheme, num_rows, depth = self._scheme, matrix.num_rows, matrix.depth
        input_size = matrix.full_depth
        group = scheme.group if scheme.group > 0 else input_size
        if scheme.has_order and depth < input_size and get_tensor_model_parallel_world_size() > 1:
            raise ServerConfigError(
                "tensor_parallel_size: given more than 1 for GPTQ with desc_act; wanted 1"
            )
        _check_groups(depth, group)
        size = (num_rows, depth // group)
        words = torch.zeros(num_rows, depth // _IN_WORD, dtype=torch.int32)
        scales, zeros = torch.ones(size), torch.full(size, 8, dtype=torch.uint8)
        self._register(layer, matrix.loader, words, scales, zeros)
        reserve_unpacked(words.device, num_rows, depth, matrix.dtype)

    def _register(
        self, layer: torch.nn.Module, loader: Any, words: Tensor, scales: Tensor, zeros: Tensor
    ) -> None:
        is_gptq = self._scheme.layout == "gptq"

        def parameter(name: str, data: Tensor) -> None:
            def take(rows: slice, part: Tensor) -> None:
                data[rows].copy_(part)

            def load(param: Any, tensor: Tensor, *shard: Any) -> None:
                loader(param, tensor.t() if is_gptq else tensor, *shard)

            count = data.numel() * _IN_WORD if data is words else 0
            made = StreamedParameter(data=data, loader=load, take_part=take, num_weights=count)
            layer.register_parameter(name, made)

        parameter("qweight" if is_gptq else "weight_packed", words)
        parameter("scales" if is_gptq else "weight_scale", scales)
        layer.register_buffer("weight_zero", zeros, persistent=False)
        if not is_gptq:
            shape = StreamedParameter(
                data=torch.zeros(2, dtype=torch.int64), loader=None, take_part=_ignore
            )
            shape.weight_loader = _ignore_tensor
            layer.register_parameter("weight_shape", shape)
            return

        def load_zeros(param: Any, tensor: Tensor, *shard: Any) -> None:
            # The offset is added to whole words, as writers subtract it: a zero borrows from the
            # next number.
            loader(param, numbers_in(tensor + self._scheme.zero_offset * _ONES).t(), *shard)

        def take_zeros(rows: slice, part: Tensor) -> None:
            zeros[rows].copy_(part)

        layer.register_parameter(
            "qzeros", StreamedParameter(data=zeros, loader=load_zeros, take_part=take_zeros)
        )
        places = torch.full((words.shape[1] * _IN_WORD,), -1, dtype=torch.int32)
        order = StreamedParameter(data=places, loader=None, take_part=_ignore)
        order.weight_loader = _load_order
        layer.register_parameter("g_idx", order)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the numbers to our packing, in groups of adjacent columns."""
        is_gptq = self._scheme.layout == "gptq"
        words: Tensor = (layer.qweight if is_gptq else layer.weight_packed).data
        numbers, depth = numbers_in(words), words.shape[1] * _IN_WORD
        scales: Tensor = (layer.scales if is_gptq else layer.weight_scale).data
        order = None
        if is_gptq:
            order = self._order(layer, depth, scales.shape[1])
            numbers = numbers if order is None else numbers[:, order]
        _finish(layer, pack(numbers), scales, layer.weight_zero)
        layer.register_buffer("order", order, persistent=False)

    def _order(self, layer: Any, depth: int, num_groups: int) -> Tensor | None:
        """Return the order of the columns group by group, or None if they already have this order.

        Raises:
            CheckpointError: groups have different sizes, or unexpectedly are not adjacent.
        """
        places = layer.g_idx.data.long()
        neighbours = torch.arange(num_groups, device=places.device)
        neighbours = neighbours.repeat_interleave(depth // num_groups)
        order: Tensor | None = places.argsort(stable=True) if self._scheme.has_order else None
        if not torch.equal(places if order is None else places[order], neighbours):
            raise CheckpointError(
                f"{layer.prefix}.g_idx: given groups of several sizes, or out of order without "
                "desc_act; wanted groups of one size"
            )
        return order


@register_weight_loader_v2_supported_method
class AwqMethod(StreamedMethod[PackedScheme]):
    """Loads AWQ's 4-bit weights, which are packed while they are read."""

    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Register a parameter for each tensor."""
        num_rows, depth = matrix.num_rows, matrix.depth
        group = self._scheme.group if self._scheme.group > 0 else matrix.full_depth
        _check_groups(depth, group)
        size = (num_rows, depth // group)

        def parameter(name: str, data: Tensor, *, in_words: bool, num_weights: int = 0) -> None:
            def take(rows: slice, part: Tensor) -> None:
                data[rows].copy_(pack(part) if num_weights else part)

            def load(param: Any, tensor: Tensor, *shard: Any) -> None:
                columns = _awq_numbers_in(tensor) if in_words else tensor
                matrix.loader(param, columns.t(), *shard)

            made = StreamedParameter(
                data=data, loader=load, take_part=take, num_weights=num_weights
            )
            layer.register_parameter(name, made)

        values = torch.zeros(num_rows, depth // 2, dtype=torch.uint8)
        parameter("qweight", values, in_words=True, num_weights=num_rows * depth)
        parameter("qzeros", torch.zeros(size, dtype=torch.uint8), in_words=True)
        parameter("scales", torch.ones(size), in_words=False)
        reserve_unpacked(values.device, num_rows, depth, matrix.dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the checkpoint's tensors by tensors with our names."""
        _finish(layer, layer.qweight.data, layer.scales.data, layer.qzeros.data)


def _awq_numbers_in(words: Tensor) -> Tensor:
    numbers: Tensor = numbers_in(words).unflatten(-1, (-1, _IN_WORD))[..., list(_AWQ)].flatten(-2)
    return numbers


def _check_groups(depth: int, group: int) -> None:
    if depth % group or depth % _IN_WORD:
        raise ServerConfigError(
            f"quantization: given groups of {group} for a matrix of depth {depth} on a rank; "
            "wanted whole groups"
        )


def _finish(layer: Any, values: Tensor, scales: Tensor, zeros: Tensor) -> None:
    """Replace a checkpoint's parameters by ours, with a group size that kernels support."""
    num_weights = 2 * values.numel()
    depth = 2 * values.shape[1]
    group = min(depth // scales.shape[1], group_of(depth, 128))
    repeats = depth // group // scales.shape[1]
    for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
        delattr(layer, name)
    weight = torch.nn.Parameter(values, requires_grad=False)
    vars(weight)["num_weights"] = num_weights
    layer.register_parameter("weight", weight)
    for name, tensor in (
        ("weight_scale", scales.repeat_interleave(repeats, 1)),
        ("weight_zero", zeros.repeat_interleave(repeats, 1)),
        ("table", None),
    ):
        layer.register_buffer(name, tensor, persistent=False)


@register_weight_loader_v2_supported_method
class OrderedMethod(PackedCheckpointMethod):
    """Loads GPTQ weights whose columns are ordered by importance (desc_act)."""


class OrderedProjection(PackedProjection):
    """Projection with a matrix whose groups are not adjacent: rows are reordered first."""

    can_slice = False

    def __init__(self, layer: ParallelLayer) -> None:
        super().__init__(layer)
        self._order: Tensor = layer.order

    @classmethod
    def workspace(cls, use: ProjectionKind, matrix: WeightSpec) -> Workspace:
        ordered = Buffer("ordered rows", (matrix.depth,), matrix.dtype)
        said = super().workspace(use, matrix)
        return Workspace((ordered, *said.buffers), said.most_rows, (ordered, *said.beyond))

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        super().project(self._ordered(x, scratch), out, scratch, columns)

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        super().gated(self._ordered(x, scratch), out, scratch)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        super().multiply(self._ordered(h, scratch), out, scratch, features)

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        # Otherwise `multiply` reorders the rows.
        in_place = self._adds_in_place
        super().add_to(x, self._ordered(h, scratch) if in_place else h, scratch, features)

    def _ordered(self, x: Tensor, scratch: Buffers) -> Tensor:
        out = Buffer("ordered rows", x.shape[1:], x.dtype).take(scratch, len(x))
        return torch.index_select(x, 1, self._order, out=out)


def _load_order(param: Any, tensor: Tensor, *_shard: Any) -> None:
    """Load the order of the columns, which all parts of a matrix must share.

    Raises:
        CheckpointError: the parts have different orders.
    """
    known = param.data
    if known[0] >= 0 and not torch.equal(known, tensor.to(known)):
        raise CheckpointError("g_idx: given several orders for one matrix; wanted one")
    known.copy_(tensor)


def _ignore(rows: slice, part: Tensor) -> None:
    """Do nothing, because these tensors are not loaded in parts."""


def _ignore_tensor(*_: Any) -> None:
    """Do nothing, because the shape of the matrix is known."""
