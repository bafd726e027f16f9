# SPDX-License-Identifier: Apache-2.0
"""Parameters whose parts are worked on as they come from a checkpoint, and methods that make them.

Upstream's layers say which part of a parameter a tensor of the checkpoint is; here that part, cut
to this rank, is handed to a function. So a weight can be quantised tensor by tensor, and the whole
of it exists nowhere.
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
# Of a weight that is being quantised: some words of 32 bits each are in use then.
NUMBERS_AT_ONCE = 1 << 22


def wide_rows(part: Tensor, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of a matrix [N, K] after the other, [some, K] fp32 on a device: never all of it."""
    step = max(1, NUMBERS_AT_ONCE // part.shape[1])
    for start in range(0, len(part), step):
        rows = slice(start, start + step)
        yield rows, part[rows].to(device, torch.float32).contiguous()


class TakePart(Protocol):
    """What takes a part."""

    def __call__(self, rows: slice, part: Tensor) -> None:
        """Take the part of these rows of the parameter; of one number it is for all of them."""


class StreamedParameter(BasevLLMParameter):
    """A parameter [rows, ...] of a linear layer, whose parts go to `take_part`.

    Args:
        data: the parameter.
        loader: upstream's, of the layer.
        take_part: takes the parts.
        unit: rows of the layer's weight for each row of the parameter.
        is_per_column: the second dimension goes with the layer's features, which may be sharded.
        num_weights: elements of the matrix that it stores; 0 for what stands beside a matrix.
    """

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
            if tensor.numel() == 1 and not shard:  # of the whole matrix
                self.take_part(slice(0, len(self.data)), tensor.reshape(1))
            else:
                loader(parameter, tensor, *shard)

        return load

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        """All rows of this rank."""
        self._put_rows(0, len(self.data), self.tp_rank, loaded_weight)

    def load_merged_column_weight(self, loaded_weight: Tensor, **place: Any) -> None:
        """One of several matrices side by side."""
        self._put_rows(*self._rows(place), self.tp_rank, loaded_weight)

    def load_qkv_weight(self, loaded_weight: Tensor, **place: Any) -> None:
        """Queries, keys or values, of which ranks may share heads."""
        rank = self.tp_rank if place["shard_id"] == "q" else self.tp_rank // place["num_heads"]
        self._put_rows(*self._rows(place), rank, loaded_weight)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        """All rows, and of the columns those of this rank."""
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
    """What a rank has of a linear layer's weight.

    Attributes:
        num_rows, depth: of the rank's part.
        full_depth: of all ranks together.
        dtype: of the model.
        loader: upstream's, of the layer.
    """

    num_rows: int
    depth: int
    full_depth: int
    dtype: torch.dtype
    loader: Any


class StreamedMethod(LinearMethodBase, Generic[S]):
    """How upstream's linear layers store weights of a scheme of ours.

    A projection of the same kind multiplies by them.
    """

    def __init__(self, scheme: S) -> None:
        self._scheme = scheme

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
        """Upstream's way to ask for parameters."""
        num_rows, loader = sum(output_partition_sizes), attributes["weight_loader"]
        matrix = RankMatrix(num_rows, input_size_per_partition, input_size, params_dtype, loader)
        self.make_parameters(layer, matrix)

    @abstractmethod
    def make_parameters(self, layer: torch.nn.Module, matrix: RankMatrix) -> None:
        """Give a layer the parameters of its weight."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Upstream's way to multiply, which no stage goes."""
        raise NotImplementedError("quantised weights are multiplied by their projections")
