# SPDX-License-Identifier: Apache-2.0
"""A projection that also multiplies by the adapters of its rows."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import FreshBuffers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vllm.diffusion.adapters.adapted_rows import AdaptedRows
    from vllm.diffusion.adapters.slot_memory import ProductSlots
    from vllm.diffusion.core.stages import Buffer, Buffers

ALL = slice(None)


class AdaptedProjection(ops.Projection):
    """A projection, and the products of the adapters that its current rows use.

    Rows without an adapter get the numbers of the projection alone.

    Args:
        base: the projection of the checkpoint's weight.
        slots: the adapters' matrices.
        adapted: the current rows.
        columns: number of columns of the product.
    """

    can_slice = True

    def __init__(
        self, base: ops.Projection, slots: ProductSlots, adapted: AdaptedRows, columns: int
    ) -> None:
        self._base, self._slots, self._adapted = base, slots, adapted
        self._columns, self._extended = columns, slots.extended
        self._pieces = slots.pieces(slice(0, columns))

    @property
    def stored(self) -> Tensor | None:
        return self._base.stored

    def precedes(self, following: ops.Projection) -> None:
        self._base.precedes(following)

    def matrix(self, columns: slice) -> Tensor | None:
        return None if self.is_used else self._base.matrix(columns)

    @classmethod
    def workspace(cls, use: Any, matrix: Any) -> Any:
        """Refuse the call: plans ask the class of the checkpoint's projection instead."""
        raise NotImplementedError("wanted the workspace of the checkpoint's projection")

    @property
    def quantises(self) -> bool:  # type: ignore[override]
        return self._base.quantises

    def rows(self, buffer: Buffer, num_rows: int, scratch: Buffers) -> Any:
        """Take memory for rows; adapters multiply rows of the model dtype.

        A projection that multiplies rows of fp8 then quantises them itself, to the same numbers.
        """
        if self.is_used:
            return buffer.take(scratch, num_rows)
        return self._base.rows(buffer, num_rows, scratch)

    def project(self, x: Any, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        if self._multiplies_once(x, out, scratch, columns):
            return
        with self._shrinking(x, len(out), scratch) as low:
            self._base.project(x, out, scratch, columns)
        self._expand(low, out, columns)

    def gated(self, x: Any, out: Any, scratch: Buffers) -> None:
        if not self.is_used:
            self._base.gated(x, out, scratch)
            return
        if self._gated_with_tail(x, out, self._adapted.tiles, scratch):
            return
        # The adapters change gate and up before silu(gate) * up, so both must be stored.
        if self._extended is not None:
            gate_up, low = self._joined(x, len(x), scratch)
        else:
            gate_up = stages.gate_up(x.dtype, self._columns).take(scratch, len(x))
            with self._shrinking(x, len(x), scratch) as own:
                self._base.project(x, gate_up, scratch)
            assert own is not None
            low = own
        plain = out
        if isinstance(out, ops.QuantisedRows):
            plain = stages.plain_rows(x.dtype, self._columns // 2).take(scratch, len(x))
        self._expand_gated(low, self._adapted.tiles, gate_up, plain)
        if isinstance(out, ops.QuantisedRows):
            ops.quantise_rows(plain, out)

    def multiply(self, h: Any, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if features == ALL and self._multiplies_once(h, out, scratch):
            return
        with self._shrinking(h, len(out), scratch, features) as low:
            self._base.multiply(h, out, scratch, features)
        self._expand(low, out)

    def add_to(self, x: Tensor, h: Any, scratch: Buffers, features: slice = ALL) -> None:
        if not (self._base.is_summed and self.is_used):
            if features == ALL and self._multiplies_once(h, x, scratch, adds=True):
                return
            with self._shrinking(h, len(x), scratch, features) as low:
                self._base.add_to(x, h, scratch, features)
            self._expand(low, x)
            return

        def write(rows: slice, out: Tensor) -> None:
            """Write this rank's part of the sum, with its part of the adapters."""
            with self._adapted.within(rows):
                self.multiply(ops.rows_of(h, rows), out, scratch, features)

        ops.tensor_parallel().add_sum(x, write, scratch)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the adapters' matrices, which determine the kernels."""
        extends = (self._extended is not None, self._slots.tail is not None)
        return (extends, *(tuple(matrix.shape) for matrix in self._slots.matrices[:2]))

    def rehearse(self, num_rows: int, *, is_gated: bool) -> None:
        """Run the kernels of `num_rows` rows of zeros, or of gate and up, with an empty slot."""
        matrices = self._slots.matrices
        _, _, _, depth = matrices.down.shape
        scratch = FreshBuffers(matrices.down.device)
        x, out = (matrices.down.new_zeros(num_rows, width) for width in (depth, self._columns))
        tiles = ops.tiles_of([(0, 0, num_rows)], num_rows, ops.low_rank_tile(num_rows))
        tiles = ops.to_device(tiles, x.device)
        parts = ops.take_low(matrices, num_rows, scratch)
        ops.shrink(x, matrices, tiles, parts)
        low = parts[0]
        if is_gated:
            gated = out.new_empty(num_rows, self._columns // 2)
            self._expand_gated(low, tiles, out, gated)
            self._gated_with_tail(x, gated, tiles, scratch)
            if self._extended is not None:
                gate_up, low = self._joined(x, num_rows, scratch)
                self._expand_gated(low, tiles, gate_up, gated)
            return
        ops.expand(low, matrices, tiles, out, self._pieces)
        if self._extended is not None:
            for adds in (False, True):
                self._write(x, out, tiles, scratch, adds=adds)

    @property
    def is_used(self) -> bool:
        """Whether an adapter of the current rows may change this product."""
        return self._adapted.use(self._slots)

    def _multiplies_once(
        self, x: Any, out: Tensor, scratch: Buffers, columns: slice = ALL, *, adds: bool = False
    ) -> bool:
        """Multiply by the weight and by first matrices at once; False if they are not joined."""
        if not (len(out) and self._extended is not None and self.is_used):
            return False
        # A slice of all columns may have numbers as its bounds.
        if columns.indices(self._columns)[:2] != (0, self._columns):
            return False
        self._write(x, out, self._adapted.tiles, scratch, adds=adds)
        return True

    def _gated_with_tail(
        self, x: Any, out: Any, tiles: ops.Tiles[Tensor], scratch: Buffers
    ) -> bool:
        """Write silu(gate) * up with the adapters' products; False if no kernel should."""
        base, matrices, tail = self._base, self._slots.matrices, self._slots.tail
        if tail is None:
            return False
        assert isinstance(base, ops.PlainProjection)
        tiling = ops.tail_tiling(base, x)
        if tiling is None:
            return False
        parts = ops.take_low(matrices, len(x), scratch)
        by_slot = stages.low_rank_by_slot(x.dtype, tail.shape[1]).take(scratch, len(x))
        ops.shrink(x, matrices, tiles, parts, by_slot)
        ops.gated_with_tail(base, x, out, (by_slot, tail), tiling)
        return True

    def _joined(self, x: Tensor, num_rows: int, scratch: Buffers) -> tuple[Tensor, Tensor]:
        """Return the product, and the rows' products with the first matrices of all slots."""
        assert self._extended is not None
        num_slots, num_parts, max_rank, _ = self._slots.matrices.down.shape
        width = len(self._extended.weight)
        both = stages.joined_product(x.dtype, width).take(scratch, num_rows)
        self._extended.project(x, both, scratch)
        num_ranks = num_parts * max_rank
        low = both[:, self._columns : self._columns + num_slots * num_ranks]
        return both[:, : self._columns], low.view(num_rows, num_slots, num_ranks)

    def _write(
        self, x: Tensor, out: Tensor, tiles: ops.Tiles[Tensor], scratch: Buffers, *, adds: bool
    ) -> None:
        """Write the product with the adapters' products to `out`, or add it if `adds`."""
        base, low = self._joined(x, len(out), scratch)
        ops.expand(low, self._slots.matrices, tiles, out, self._pieces, base=base, adds=adds)

    def _expand(self, low: Tensor | None, out: Tensor, columns: slice = ALL) -> None:
        """Add the products of the adapters to `out`, which has some columns of the product."""
        if low is not None:
            pieces = self._slots.pieces(slice(*columns.indices(self._columns)[:2]))
            ops.expand(low, self._slots.matrices, self._adapted.tiles, out, pieces)

    def _expand_gated(
        self, low: Tensor, tiles: ops.Tiles[Tensor], gate_up: Tensor, out: Tensor
    ) -> None:
        """Write silu(gate) * up with the adapters' products."""
        has_gate, has_up = (self._slots.has_part_at(start) for start in (0, self._columns // 2))
        halves = {"has_gate": has_gate, "has_up": has_up}
        ops.gated_expand(low, self._slots.matrices, tiles, gate_up, out, **halves)

    @contextmanager
    def _shrinking(
        self, x: Any, num_rows: int, scratch: Buffers, features: slice = ALL
    ) -> Iterator[Tensor | None]:
        """Multiply the current rows by the first matrices, next to the checkpoint's product.

        The block enqueues the checkpoint's product. A graph computes both at the same time.
        Otherwise this product follows, because the host would need longer to divide the work.

        Args:
            x: [R, features].
            num_rows: R.
            scratch: memory for the result.
            features: features that x has.

        Yields:
            The result, complete when the block has ended; None if no adapter changes the product.
        """
        if not (num_rows and self.is_used):
            yield None
            return
        matrices = self._slots.matrices
        # Attention in fp8 writes quantised rows.
        if isinstance(x, ops.QuantisedRows):
            plain = stages.plain_rows(matrices.down.dtype, x.values.shape[1]).take(
                scratch, num_rows
            )
            x = plain.copy_(x.values).mul_(x.scales[:, None])
        if features != ALL:
            matrices = matrices._replace(down=matrices.down[..., features])
        parts = ops.take_low(matrices, num_rows, scratch)
        low, side = parts[0], self._adapted.side_stream
        if side is None:
            yield low
            ops.shrink(x, matrices, self._adapted.tiles, parts)
            return
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            ops.shrink(x, matrices, self._adapted.tiles, parts)
        yield low
        main.wait_stream(side)
