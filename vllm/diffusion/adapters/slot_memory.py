# SPDX-License-Identifier: Apache-2.0
"""Memory of the adapters that requests use, at addresses that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from vllm.diffusion.adapters.matrices import Matrices, Shard
    from vllm.diffusion.adapters.peft_files import Adapter


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


class SlotMemory:
    """Room for `num_slots` adapters in the memory of the device.

    Args:
        matrices: the matrices that adapters may change.
        num_slots: number of adapters.
        max_rank: highest rank of an adapter.
        shard: the part of every matrix on this rank.
        dtype, device: dtype and device of the model.

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
    ) -> None:
        self.num_slots = num_slots
        parts, ends = dict[str, list[_Part]](), dict[str, int]()
        for name, matrix in matrices.all.items():
            product, rows, features = matrix.product, shard.rows(matrix), shard.columns(matrix)
            num_rows, start = sum(own.stop - own.start for own in rows), ends.get(product, 0)
            ends[product] = start + num_rows
            if name not in matrices.allowed:
                continue
            down, up = (
                torch.zeros(num_slots, *shape, dtype=dtype, device=device)
                for shape in (
                    (max_rank, features.stop - features.start),
                    (num_rows, max_rank),
                )
            )
            part = _Part(name, slice(start, ends[product]), rows, features, down, up)
            parts.setdefault(product, []).append(part)
        self.products = {path: ProductSlots(own, num_slots) for path, own in parts.items()}

    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Copy an adapter into a slot; None empties it."""
        for product in self.products.values():
            product.write(slot, adapter)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(product.num_bytes for product in self.products.values()) // self.num_slots
