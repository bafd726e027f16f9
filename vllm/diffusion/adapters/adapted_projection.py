# SPDX-License-Identifier: Apache-2.0
"""A projection that also multiplies by the adapters of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion import ops
from vllm.diffusion.core import stages

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.adapters.adapted_rows import AdaptedRows
    from vllm.diffusion.adapters.slot_memory import ProductSlots
    from vllm.diffusion.core.buffers import Buffer, Buffers

ALL = slice(None)


class AdaptedProjection(ops.Projection):
    """A projection, and the products of the adapters that its current rows use.

    Rows without an adapter get exactly the numbers of the projection alone.

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
        self._columns = columns

    @property
    def stored(self) -> Tensor | None:
        return self._base.stored

    def precedes(self, following: ops.Projection) -> None:
        self._base.precedes(following)

    def matrix(self, columns: slice) -> Tensor | None:
        return None if self._is_used else self._base.matrix(columns)

    @classmethod
    def workspace(cls, use: Any, matrix: Any) -> Any:
        """Refuse the call: plans ask the class of the checkpoint's projection instead."""
        raise NotImplementedError("wanted the workspace of the checkpoint's projection")

    def rows(self, buffer: Buffer, num_rows: int, scratch: Buffers) -> Any:
        return self._base.rows(buffer, num_rows, scratch)

    def project(self, x: Tensor, out: Tensor, scratch: Buffers, columns: slice = ALL) -> None:
        self._base.project(x, out, scratch, columns)
        self._add(x, out, scratch, columns=columns)

    def gated(self, x: Tensor, out: Tensor, scratch: Buffers) -> None:
        if not self._is_used:
            self._base.gated(x, out, scratch)
            return
        # The adapters change gate and up before silu(gate) * up, so both must be stored.
        gate_up = stages.gate_up(x.dtype, self._columns).take(scratch, len(x))
        self._base.project(x, gate_up, scratch)
        low, matrices, tiles = self._shrunk(x, scratch)
        has_gate, has_up = (self._slots.has_part_at(start) for start in (0, self._columns // 2))
        ops.gated_expand(low, matrices, tiles, gate_up, out, has_gate=has_gate, has_up=has_up)

    def multiply(self, h: Tensor, out: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        self._base.multiply(h, out, scratch, features)
        self._add(h, out, scratch, features=features)

    def add_to(self, x: Tensor, h: Tensor, scratch: Buffers, features: slice = ALL) -> None:
        if not (self._base.is_summed and self._is_used):
            self._base.add_to(x, h, scratch, features)
            self._add(h, x, scratch, features=features)
            return

        def write(rows: slice, out: Tensor) -> None:
            """Write this rank's part of the sum, with its part of the adapters."""
            self._base.multiply(h[rows], out, scratch, features)
            with self._adapted.within(rows):
                self._add(h[rows], out, scratch, features=features)

        ops.tensor_parallel().add_sum(x, write, scratch)

    @property
    def _is_used(self) -> bool:
        """Whether an adapter of the current rows may change this product."""
        return self._adapted.use(self._slots)

    def _add(
        self,
        x: Tensor,
        out: Tensor,
        scratch: Buffers,
        columns: slice = ALL,
        features: slice = ALL,
    ) -> None:
        """Add the products of the adapters to `out`.

        Args:
            x: [R, features], the current rows.
            out: [R, columns], written.
            scratch: memory for the computation.
            columns: columns of the product that `out` has.
            features: features that x has.
        """
        if len(x) and self._is_used:
            pieces = self._slots.pieces(slice(*columns.indices(self._columns)[:2]))
            low, matrices, tiles = self._shrunk(x, scratch, features)
            ops.expand(low, matrices, tiles, out, pieces)

    def _shrunk(
        self, x: Tensor, scratch: Buffers, features: slice = ALL
    ) -> tuple[Tensor, ops.LowRank, ops.Tiles]:
        """Multiply by the first matrices; return the products, the matrices and the tiles."""
        matrices, tiles = self._slots.matrices, self._adapted.tiles
        if features != ALL:
            matrices = matrices._replace(down=matrices.down[..., features])
        low = ops.take_low(matrices, len(x), scratch)
        ops.shrink(x, matrices, tiles, low)
        return low, matrices, tiles
