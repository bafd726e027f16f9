# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters whose products belong to the sums of another product.

A kernel multiplies x by `down` and by the scales, rounds the result to `low`, and multiplies it by
`up`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# What the kernels take without adapters.
NO_ADAPTERS = (0,) * 14


class Adapters(NamedTuple):
    """LoRA adapters in slots; each row has the adapter of one slot, or none.

    A part is a matrix with its own rank, such as that of queries. P is the number of parts, r the
    maximum rank, N the number of columns of the product. Matrices have the dtype of x.

    Attributes:
        down: first matrices [slots, P, r, D], contiguous.
        up: second matrices [N, slots * P * r], zeros where a part has no columns; rows may be
            strided. Numbers of ranks that are not in use must be finite.
        ranks: int32 [slots, P], the ranks in use.
        scales: fp32 [slots, P], factors of the products, with the strides of `ranks`.
        tiles: int32 [tiles, 3], contiguous: slot, first row, number of rows. The slot of rows
            without an adapter is negative; such rows may also be left out. Not checked, because the
            host would wait for values on a GPU.
        first_row: row of the tiles that is the first row of x.
        low: [R, slots * P * r], contiguous, written: the rows' products with `down`, zeros for
            other slots.
        counters: int32 [2], zeros, which no other kernel uses at the same time.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    scales: Tensor
    tiles: Tensor
    first_row: int
    low: Tensor
    counters: Tensor

    def check(self, op: str, x: Tensor, num_columns: int) -> None:
        """Check the tensors for rows x [R, D].

        Raises:
            ValueError: A shape, dtype, device or stride is not as above.
        """
        num_slots, num_parts, max_rank, _ = self.down.shape
        num_numbers = num_slots * num_parts * max_rank
        wanted = {
            "down": ((num_slots, num_parts, max_rank, x.shape[1]), x.dtype),
            "up": ((num_columns, num_numbers), x.dtype),
            "ranks": ((num_slots, num_parts), torch.int32),
            "scales": ((num_slots, num_parts), torch.float32),
            "tiles": ((len(self.tiles), 3), torch.int32),
            "low": ((len(x), num_numbers), x.dtype),
            "counters": ((2,), torch.int32),
        }
        for name, (shape, dtype) in wanted.items():
            tensor: Tensor = getattr(self, name)
            is_dense = tensor.is_contiguous() or name in ("up", "ranks", "scales")
            is_placed = tensor.device == x.device and tensor.stride(-1) == 1 and is_dense
            if tensor.shape != shape or tensor.dtype != dtype or not is_placed:
                raise ValueError(
                    f"{op}: adapters.{name} must be {list(shape)} {dtype} on {x.device}, got "
                    f"{tensor.dtype} {list(tensor.shape)} on {tensor.device} with strides "
                    f"{tensor.stride()}"
                )
        if self.ranks.stride() != self.scales.stride():
            raise ValueError(
                f"{op}: adapters.scales must have the strides {self.ranks.stride()} of ranks, got "
                f"{self.scales.stride()}"
            )

    def described(self) -> tuple[int, ...]:
        """Return what the kernels take: addresses, strides, sizes, and the first row."""
        _, num_parts, max_rank, _ = self.down.shape
        tensors = self.down, self.up, self.low, self.ranks, self.scales, self.tiles, self.counters
        strides = self.up.stride(0), self.ranks.stride(0)
        sizes = self.low.shape[1], num_parts, max_rank, len(self.tiles)
        return *(tensor.data_ptr() for tensor in tensors), *strides, *sizes, self.first_row

    def multiply_down(self, x: Tensor) -> Tensor:
        """Write `low` in PyTorch, and return it."""
        num_slots, num_parts, max_rank, _ = self.down.shape
        low = self.low.zero_().view(len(x), num_slots, num_parts, max_rank)
        for slot, first, count in self.tiles.tolist():
            rows = slice(
                max(first - self.first_row, 0), max(min(first - self.first_row + count, len(x)), 0)
            )
            for part in range(num_parts) if slot >= 0 else ():
                rank = int(self.ranks[slot, part])
                product = x[rows].float() @ self.down[slot, part, :rank].float().t()
                low[rows, slot, part, :rank] = (self.scales[slot, part] * product).to(x.dtype)
        return self.low
