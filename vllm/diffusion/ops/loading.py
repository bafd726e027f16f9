# SPDX-License-Identifier: Apache-2.0
"""Parameters whose parts are processed as they are read, and methods that create them.

Upstream's layers determine to which part of a parameter a tensor of the checkpoint belongs. Here
that part, reduced to this rank, is passed to a function. So a weight can be quantised tensor by
tensor, and the unquantised weight never exists as a whole.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import BasevLLMParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

S = TypeVar("S")  # the scheme of a method
# Numbers of a weight that are quantised at a time; meanwhile each uses some words of 32 bits.
NUMBERS_AT_ONCE = 1 << 22


def wide_rows(part: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield a matrix [N, K] in groups of rows [some, K], as fp32 on a device."""
    step = max(1, NUMBERS_AT_ONCE // part.shape[1])
    for start in range(0, len(part), step):
        rows = slice(start, start + step)
        yield rows, part[rows].to(device, torch.float32).contiguous()


class TakePart(Protocol):
    """Function that receives a part of a parameter."""

    def __call__(self, rows: slice, part: Tensor) -> None:
        """Process the part for these rows; a single number is for all of them."""


class StreamedParameter(BasevLLMParameter):
    """Parameter [rows, ...] of a linear layer, whose parts are passed to `take_part`.

    Args:
        data: the parameter.
        loader: upstream's weight loader of the layer.
        take_part: receives the parts.
        unit: rows of the layer's weight for each row of the parameter.
        is_per_column: whether the second dimension is that of the features, which may be sharded.
        num_weights: elements of the matrix that it stores; 0 for scales and similar parameters.
    """

    should_reset = True  # a running maximum is reset before new weights
    output_dim = 0
    input_dim = 1

    def __init__(
        self,
        data: Tensor,
        loader: Any,
        take_part: TakePart,
        *,
        unit: int = 1,
        is_per_column: bool = True,
        num_weights: int = 0,
    ) -> None:
        super().__init__(data=data, weight_loader=self._loader(loader))
        self.take_part = take_part
        self.unit = unit
        self.is_per_column = is_per_column
        self.num_weights = num_weights

    def _loader(self, loader: Any) -> Any:
        def load(parameter: StreamedParameter, tensor: Tensor, *shard: Any) -> None:
            if tensor.numel() == 1 and not shard:  # one number for the whole matrix
                self.take_part(slice(0, len(self.data)), tensor.reshape(1))
            else:
                loader(parameter, tensor, *shard)

        return load

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Load all rows of this rank."""
        self._put_rows(0, len(self.data), self.tp_rank, loaded_weight)

    def load_merged_column_weight(self, loaded_weight: Tensor, **place: Any) -> None:
        """Load one of several matrices that are stored side by side."""
        self._put_rows(*self._rows(place), self.tp_rank, loaded_weight)

    def load_qkv_weight(self, loaded_weight: Tensor, **place: Any) -> None:
        """Load queries, keys or values, whose heads several ranks may share."""
        rank = self.tp_rank if place["shard_id"] == "q" else self.tp_rank // place["num_heads"]
        self._put_rows(*self._rows(place), rank, loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """Load all rows, with the columns of this rank."""
        part = loaded_weight
        if self.is_per_column and part.dim() > 1 and part.shape[1] >= self.tp_size:
            width = part.shape[1] // self.tp_size
            part = part.narrow(1, self.tp_rank * width, width)
        self.take_part(slice(0, len(self.data)), part)

    def _rows(self, place: dict[str, Any]) -> tuple[int, int]:
        return place["shard_offset"] // self.unit, place["shard_size"] // self.unit

    def _put_rows(self, first: int, count: int, rank: int, tensor: Tensor) -> None:
        part = tensor.reshape(1) if tensor.numel() == 1 else tensor.narrow(0, rank * count, count)
        self.take_part(slice(first, first + count), part)


class RankMatrix(NamedTuple):
    """A rank's part of a linear layer's weight.

    Attributes:
        num_rows, depth: sizes of the rank's part.
        full_depth: depth over all ranks.
        dtype: dtype of the model.
        loader: upstream's weight loader of the layer.
    """

    num_rows: int
    depth: int
    full_depth: int
    dtype: torch.dtype
    loader: Any


class StreamedMethod(LinearMethodBase, Generic[S]):
    """Stores weights of one of our schemes in upstream's linear layers.

    The projection of the scheme multiplies by these weights.
    """

    def __init__(self, scheme: S) -> None:
        self._scheme = scheme

    @property
    def scheme(self) -> S:
        """The quantisation scheme of the weights."""
        return self._scheme

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Create the parameters; upstream's layer calls it."""
        num_rows, loader = sum(output_partition_sizes), attributes["weight_loader"]
        matrix = RankMatrix(num_rows, input_size_per_partition, input_size, params_dtype, loader)
        self.make_parameters(layer, matrix)

    @abstractmethod
    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Register the parameters of a layer's weight."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Refuse to multiply; no stage multiplies with upstream's layers."""
        raise NotImplementedError("quantised weights are multiplied by their projections")
