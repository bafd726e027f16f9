# SPDX-License-Identifier: Apache-2.0
"""Memory of the adapters that requests use, at addresses that stay."""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.adapters.joined_weights import append_matrices, tail_depth
from vllm.diffusion.adapters.slot_allocator import ArenaSlotAllocator, SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from vllm.diffusion.adapters.matrices import Matrices, Shard
    from vllm.diffusion.adapters.peft_files import Adapter

# Each product has ranks and scales of this number of parts, so that its numbers are aligned.
_PARTS = 4


class LayerProduct(NamedTuple):
    """A product of the layers.

    Attributes:
        base: its projection.
        columns: number of columns.
        is_gated: whether the columns are gate and up.
    """

    base: ops.Projection
    columns: int
    is_gated: bool


class _Part(NamedTuple):
    """A matrix of the checkpoint that one product multiplies by, alone or with others.

    `columns` are its columns of the product, `rows` and `features` the part of the matrix on this
    rank.
    """

    name: str
    columns: slice
    rows: list[slice]
    features: slice

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)


class ProductParts(list[_Part]):
    """The parts of one product."""

    @property
    def depth(self) -> int:
        """Depth of the product on this rank."""
        return int(self[0].features.stop - self[0].features.start)

    @property
    def width(self) -> int:
        """Number of columns that adapters may change."""
        return sum(part.width for part in self)

    def shapes(self, max_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of both kinds of matrices in a slot."""
        return (len(self), max_rank, self.depth), (max_rank, self.width)

    def tail_shape(
        self, product: LayerProduct | None, num_slots: int, max_rank: int
    ) -> tuple[int, int]:
        """Return the shape of the tail of all slots; it is empty if the product has none."""
        if product is None or not (product.is_gated and ops.can_add_tail(product.base)):
            return 0, 0
        return product.columns, tail_depth(num_slots * len(self) * max_rank, self.depth)


class ProductSlots:
    """Slots of the matrices that one product multiplies by.

    Args:
        parts: the matrices, in the order of their columns.
        matrices: their slots; `up` has their columns one after the other.
        extended: projection of the product's weight with the first matrices appended; None if they
            have memory of their own.
        tail: copy of the second matrices [columns, slots * parts * maximum rank], zeros where a
            part has no columns; None without one.
    """

    def __init__(
        self,
        parts: ProductParts,
        matrices: ops.LowRank,
        extended: ops.PlainProjection | None = None,
        tail: Tensor | None = None,
    ) -> None:
        self._parts, self.matrices = parts, matrices
        self.extended, self.tail = extended, tail
        self._changed_by: set[int] = set()

    def is_changed_by(self, slot: int) -> bool:
        """Whether the adapter in a slot changes the product."""
        return slot in self._changed_by

    def has_part_at(self, column: int) -> bool:
        """Whether adapters may change the matrix whose columns begin there."""
        return any(part.columns.start == column for part in self._parts)

    def pieces(self, columns: slice) -> tuple[ops.Piece, ...]:
        """Return the columns of all parts within some columns of the product."""
        pieces, source = list[ops.Piece](), 0
        for number, part in enumerate(self._parts):
            first = max(part.columns.start, columns.start)
            count = min(part.columns.stop, columns.stop) - first
            if count > 0:
                own = source + first - part.columns.start
                pieces.append(ops.Piece(number, own, first - columns.start, count))
            source += part.width
        return tuple(pieces)

    def write(self, slot: int, adapter: Adapter | None) -> list[tuple[int, float]]:
        """Copy an adapter's matrices into a slot; return rank and scale of each part.

        Numbers of higher ranks stay as they are, because nothing reads them. The device cuts and
        transposes the matrices: a part that the host had cut would not be in pinned memory.
        """
        described, start = list[tuple[int, float]](), 0
        max_rank = self.matrices.up.shape[1]
        for number, (part, downs) in enumerate(
            zip(self._parts, self.matrices.down[slot], strict=True)
        ):
            low_rank = None if adapter is None else adapter.low_ranks.get(part.name)
            columns = slice(start, start + part.width)
            start = columns.stop
            if low_rank is None:
                described.append((0, 0.0))
                continue
            rank = len(low_rank.down)
            down = low_rank.down.to(downs.device, non_blocking=True)
            up = low_rank.up.to(downs.device, non_blocking=True)
            downs[:rank].copy_(down[:, part.features])
            up = torch.cat([up[own] for own in part.rows])
            self.matrices.up[slot, :rank, columns].copy_(up.t())
            if self.tail is not None:
                first = (slot * len(self._parts) + number) * max_rank
                self.tail[part.columns, first : first + rank].copy_(up)
            described.append((rank, low_rank.scale))
        self._changed_by.discard(slot)
        if any(rank for rank, _ in described):
            self._changed_by.add(slot)
        return described


class SlotMemory:
    """Memory of the device for `num_slots` adapters.

    Args:
        matrices: the matrices that adapters may change.
        num_slots: number of adapters.
        max_rank: highest rank of an adapter.
        shard: the part of every matrix on this rank.
        dtype, device: dtype and device of the model.
        can_release: whether `release` gives the memory back to the device.
        products: products of the layers, by path. Their weights are extended by the matrices where
            this saves time.

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
        products: Mapping[str, LayerProduct] = MappingProxyType({}),
    ) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._is_released = False
        is_releasable = can_release and device.type == "cuda"
        allocator = ArenaSlotAllocator if is_releasable else SlotAllocator
        self._allocator = allocator(dtype, device)
        all_parts = parts_of(matrices, shard)
        self.slot_bytes = slot_bytes(matrices, num_slots, max_rank, shard, dtype, products)
        # All ranks and scales are written at once: products, slots, parts.
        shape = len(all_parts), num_slots, _PARTS
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self.products = dict[str, ProductSlots]()
        for number, (path, parts) in enumerate(all_parts.items()):
            down_shape, up_shape = ((num_slots, *own) for own in parts.shapes(max_rank))
            product, joined = products.get(path), None
            if product is not None and parts.width == product.columns:
                joined = append_matrices(product.base, product.columns, down_shape)
            extended, down = joined or (None, self._allocator.zeros(down_shape))
            up = self._allocator.zeros(up_shape)
            tail_shape = parts.tail_shape(product, num_slots, max_rank)
            tail = self._allocator.zeros(tail_shape) if prod(tail_shape) else None
            described = (table[number, :, : len(parts)] for table in (self._ranks, self._scales))
            low_rank = ops.LowRank(down, up, *described)
            self.products[path] = ProductSlots(parts, low_rank, extended, tail)

    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Copy an adapter into a slot; None empties it. After a release, `restore` copies it.

        The copies run on the current stream, behind the steps that read the old contents. They do
        not delay the host if the adapter is in pinned memory (`AdapterReader`).
        """
        self._adapters[slot] = adapter
        if self._is_released:
            return
        shape = len(self.products), _PARTS
        ranks, scales = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for number, product in enumerate(self.products.values()):
            for part, (rank, scale) in enumerate(product.write(slot, adapter)):
                ranks[number, part], scales[number, part] = rank, scale
        tables = ops.to_device((ranks, scales), self._ranks.device)
        self._ranks[:, slot], self._scales[:, slot] = tables

    def release(self) -> None:
        """Release the memory of the slots. The adapters stay on the host, each with its slot."""
        self._is_released = True
        self._allocator.release()

    def restore(self) -> None:
        """Allocate the memory again, at the same addresses, and copy the adapters into it."""
        self._is_released = False
        self._allocator.restore()
        for slot, adapter in enumerate(self._adapters):
            self.write(slot, adapter)


def parts_of(matrices: Matrices, shard: Shard) -> dict[str, ProductParts]:
    """Return the parts of every product that adapters may change, by the path of its module."""
    parts, ends = dict[str, ProductParts](), dict[str, int]()
    for name, matrix in matrices.all.items():
        product, rows, features = matrix.product, shard.rows(matrix), shard.columns(matrix)
        start = ends.get(product, 0)
        ends[product] = start + sum(own.stop - own.start for own in rows)
        if name in matrices.allowed:
            part = _Part(name, slice(start, ends[product]), rows, features)
            parts.setdefault(product, ProductParts()).append(part)
    return parts


def slot_bytes(
    matrices: Matrices,
    num_slots: int,
    max_rank: int,
    shard: Shard,
    dtype: torch.dtype,
    products: Mapping[str, LayerProduct] = MappingProxyType({}),
) -> int:
    """Return the bytes of one of several slots on one rank."""
    count = 0
    for path, parts in parts_of(matrices, shard).items():
        count += sum(map(prod, parts.shapes(max_rank)))
        count += prod(parts.tail_shape(products.get(path), num_slots, max_rank)) // num_slots
    return dtype.itemsize * count
