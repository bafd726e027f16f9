# SPDX-License-Identifier: Apache-2.0
"""Memory of the adapters that requests use, at addresses that stay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion.ops import arena as vmm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from vllm.diffusion.adapters.matrices import Matrices, Shard
    from vllm.diffusion.adapters.peft_files import Adapter

_ALIGNMENT = 512  # bytes


class Term(NamedTuple):
    """What an adapter adds to some columns of a product: scale * up @ down @ x.

    Attributes:
        columns: the columns.
        down: [r, in].
        up: [columns, r].
        scale: the scale, which is not part of `up`.
    """

    columns: slice
    down: Tensor
    up: Tensor
    scale: float


class _Part(NamedTuple):
    """Slots of one matrix: `down` [slots, max rank, in], `up` [slots, out, max rank].

    `columns` are its columns of the product, `rows` and `features` the part of the matrix on this
    rank.
    """

    name: str
    columns: slice
    rows: list[slice]
    features: slice
    down: Tensor
    up: Tensor


class ProductSlots:
    """Slots of the matrices that one product multiplies by."""

    def __init__(self, parts: Iterable[_Part], num_slots: int) -> None:
        self._parts = tuple(parts)
        self._terms: list[tuple[Term, ...]] = [()] * num_slots

    def terms(self, slot: int) -> tuple[Term, ...]:
        """Return what the adapter in a slot adds to the product; empty for nothing."""
        return self._terms[slot]

    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Copy an adapter's matrices into a slot; None empties it."""
        terms = list[Term]()
        for name, columns, rows, features, downs, ups in self._parts:
            low_rank = None if adapter is None else adapter.low_ranks.get(name)
            if low_rank is None:
                continue
            rank = len(low_rank.down)
            down, up = downs[slot, :rank], ups[slot, :, :rank]
            down.copy_(low_rank.down[:, features], non_blocking=True)
            up.copy_(torch.cat([low_rank.up[own] for own in rows]), non_blocking=True)
            terms.append(Term(columns, down, up, low_rank.scale))
        self._terms[slot] = tuple(terms)

    @property
    def num_bytes(self) -> int:
        return sum(part.down.nbytes + part.up.nbytes for part in self._parts)


class _SlotRoom:
    """Memory of all slots, which sleep cannot release: it only discards the contents."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tensors: list[Tensor] = []

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of zeros, whose address stays."""
        tensor = torch.zeros(*shape, dtype=self._dtype, device=self._device)
        self._tensors.append(tensor)
        return tensor

    def release(self) -> None:
        """Lose the contents of all tensors."""
        for tensor in self._tensors:
            tensor.fill_(torch.nan)

    def restore(self) -> None:
        """Make all tensors zeros, at the addresses that they had."""
        for tensor in self._tensors:
            tensor.zero_()


class _ArenaSlots(_SlotRoom):
    """Memory of all slots in a range of a GPU's addresses, which sleep releases."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        index = torch.cuda.current_device() if device.index is None else device.index
        card = torch.cuda.get_device_properties(index).total_memory
        self._arena = vmm.Arena(card, device=index)
        self._end = 0

    def zeros(self, shape: Sequence[int]) -> Tensor:
        start, num_bytes = self._end, math.prod(shape) * self._dtype.itemsize
        self._arena.grow(start + num_bytes)
        tensor: Tensor = self._arena.tensor(start, tuple(shape), self._dtype, holds=False)
        self._tensors.append(tensor.zero_())
        self._end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def release(self) -> None:
        self._arena.shrink(0)
        self._arena.trim()

    def restore(self) -> None:
        self._arena.grow(self._end)
        super().restore()


class SlotMemory:
    """Room for `num_slots` adapters in the memory of the device.

    Args:
        matrices: the matrices that adapters may change.
        num_slots: number of adapters.
        max_rank: highest rank of an adapter.
        shard: the part of every matrix on this rank.
        dtype, device: dtype and device of the model.
        can_release: whether `release` gives the memory back to the device.

    Attributes:
        products: the slots of each product, by the path of its module in the model.
    """

    def __init__(
        self,
        matrices: Matrices,
        num_slots: int,
        max_rank: int,
        shard: Shard,
        *,
        dtype: torch.dtype,
        device: torch.device,
        can_release: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._is_released = False
        make_room = _ArenaSlots if can_release and device.type == "cuda" else _SlotRoom
        self._room = make_room(dtype, device)
        parts, ends = dict[str, list[_Part]](), dict[str, int]()
        for name, matrix in matrices.all.items():
            product, rows, features = matrix.product, shard.rows(matrix), shard.columns(matrix)
            num_rows, start = sum(own.stop - own.start for own in rows), ends.get(product, 0)
            ends[product] = start + num_rows
            if name not in matrices.allowed:
                continue
            down, up = (
                self._room.zeros((num_slots, *shape))
                for shape in (
                    (max_rank, features.stop - features.start),
                    (num_rows, max_rank),
                )
            )
            part = _Part(name, slice(start, ends[product]), rows, features, down, up)
            parts.setdefault(product, []).append(part)
        self.products = {path: ProductSlots(own, num_slots) for path, own in parts.items()}

    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Copy an adapter into a slot; None empties it. After a release, `restore` copies it."""
        self._adapters[slot] = adapter
        if not self._is_released:
            for product in self.products.values():
                product.write(slot, adapter)

    def release(self) -> None:
        """Release the memory of the slots. The adapters stay on the host, each with its slot."""
        self._is_released = True
        self._room.release()

    def restore(self) -> None:
        """Allocate the memory again, at the same addresses, and copy the adapters into it."""
        self._is_released = False
        self._room.restore()
        for slot, adapter in enumerate(self._adapters):
            self.write(slot, adapter)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(product.num_bytes for product in self.products.values()) // self.num_slots
