# SPDX-License-Identifier: Apache-2.0
"""Products of rows with low-rank matrices: scale * x down^T up^T, added to another product.

Each row has a slot, or none. A slot holds a pair of matrices for each part of the columns, such as
queries, keys and values. Which slots are used, their ranks and their contents are read from device
memory, so that launches depend on shapes alone. Triton kernels run on CUDA, and under Triton's
interpreter. Otherwise the references run, which copy the tables to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from . import reference
from ._ops import _check, _check_exact
from ._triton import can_take, guard, load_kernels
from .launch import MAX_PIECES

if TYPE_CHECKING:
    from torch import Tensor

A = TypeVar("A")  # an array on the host or a tensor on the device

_kernels = load_kernels("low_rank_kernel")


class LowRank(NamedTuple):
    """The matrices of one product in all slots.

    A part is a matrix with its own rank. P is the number of parts, r the maximum rank.

    Attributes:
        down: [slots, P, r, D], D contiguous.
        up: [slots, r, N], N contiguous, the columns of one part after the other.
        ranks: int32 [slots, P], the ranks in use. Numbers of higher ranks are never read.
        scales: fp32 [slots, P], factors of the products.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    scales: Tensor

    @property
    def num_ranks(self) -> int:
        """Numbers of a row between both products."""
        return self.down.shape[1] * self.down.shape[2]


class Tiles(NamedTuple, Generic[A]):
    """Which slot each row uses. All rows of a tile use the same slot.

    Values of the arrays are not checked, because the host would wait for them on a GPU.

    Attributes:
        table: int32 [tiles, 3]: slot, index of the tile's first row in `rows`, number of rows. The
            slot of rows without matrices is negative. Tiles without rows are allowed.
        rows: int32 [n], the numbers of the rows of all tiles, tile after tile.
        size: maximum number of rows of a tile: 16, 32 or 64.
        first_row: the number of the tensors' first row. Rows before it, and behind the tensors'
            end, are left out.
    """

    table: A
    rows: A
    size: int
    first_row: int = 0


class Piece(NamedTuple):
    """Consecutive columns of a part.

    Attributes:
        part: the part.
        source: first of the columns in `LowRank.up`.
        target: first of the columns in the product that is written.
        width: number of columns.
    """

    part: int
    source: int
    target: int
    width: int


def shrink(
    x: Tensor, matrices: LowRank, tiles: Tiles[Tensor], low: Tensor, by_slot: Tensor | None = None
) -> None:
    """Write x down^T of every row with a slot.

    Args:
        x: [T, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        matrices: the matrices, of the same dtype.
        tiles: the slots of the rows.
        low: [S, T, 1, P r] fp32, written where rank and row are in use. The result is low[0]. With
            S > 1, which must be a power of two, S programs share the depth, and the rest of `low`
            holds their sums. If `by_slot` is given, all of `low` is scratch memory.
        by_slot: [T, slots * P r] of the dtype of x; rows may be strided. It then receives the
            result, as factors of the matrices `up` of all slots: the numbers of a row's own slot
            times the scale, rounded once, and zeros for all other slots. Every row must be in a
            tile.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "shrink"
    _check(op, "x", x, x, (-1, -1))
    _check(op, "down", matrices.down, x, (-1, -1, -1, x.shape[1]))
    _check_tables(op, matrices, tiles, x)
    _check_exact(op, "low", low, (len(low), len(x), 1, matrices.num_ranks), x, torch.float32)
    if len(low) < 1 or len(low) & (len(low) - 1):
        raise ValueError(f"{op}: low must have a power of two of parts, got {len(low)}")
    if by_slot is not None:
        num_numbers = len(matrices.down) * matrices.num_ranks
        _check_exact(op, "by_slot", by_slot, (len(x), num_numbers), x, x.dtype, rows_apart=True)
    if not len(x) or not len(tiles.table):
        return
    if _kernels is None or not can_take(x):
        reference.shrink(x, matrices.down, matrices.ranks, tiles, low)
        if by_slot is not None:
            reference.place_by_slot(low[0], matrices, tiles, by_slot)
        return
    with guard(x):
        _kernels.launch_shrink(x, matrices, tiles, low, by_slot)


def expand(
    low: Tensor,
    matrices: LowRank,
    tiles: Tiles[Tensor],
    out: Tensor,
    pieces: tuple[Piece, ...],
    *,
    base: Tensor | None = None,
    adds: bool = True,
) -> None:
    """Add scale * low up^T to some columns of every row with a slot.

    The numbers of `low` are rounded to the dtype, sums are fp32, and the result is rounded once.

    Args:
        low: products with the first matrices; rows may be strided. Either fp32 [T, 1, P r], with
            the matrices of each row's own slot (`shrink`), or [T, slots, P r] in the matrices'
            dtype, with the matrices of all slots.
        matrices: the matrices.
        tiles: the slots of the rows.
        out: [T, columns] of the matrices' dtype; rows may be strided, columns are contiguous.
        pieces: at most 3 pieces of its columns, each of another part.
        base: another addend, shaped like `out`. With it every row must be in a tile, and rows
            without a slot are written, too.
        adds: whether the previous numbers of `out` are an addend; False requires `base`.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "expand"
    _check(op, "out", out, matrices.up, (-1, -1))
    if base is not None:
        _check(op, "base", base, out, out.shape)
    elif not adds:
        raise ValueError(f"{op}: base must be given without adds, got None")
    _check_tables(op, matrices, tiles, out)
    _check_low(op, low, matrices, out)
    if len(pieces) > MAX_PIECES:
        raise ValueError(f"{op}: pieces must be at most {MAX_PIECES}, got {len(pieces)}")
    num_sources, num_targets = matrices.up.shape[2], out.shape[1]
    for _, source, target, width in pieces:
        if min(source, target) < 0 or source + width > num_sources or target + width > num_targets:
            raise ValueError(
                f"{op}: pieces must be within {num_sources} columns of up and {num_targets} of "
                f"out, got {pieces}"
            )
    if not len(out) or not len(tiles.table) or not any(piece.width for piece in pieces):
        return
    if _kernels is None or not can_take(out):
        reference.expand(low, matrices, tiles, out, pieces, base, adds=adds)
        return
    with guard(out):
        _kernels.launch_expand(low, matrices, tiles, out, pieces, base, adds)


def gated_expand(
    low: Tensor,
    matrices: LowRank,
    tiles: Tiles[Tensor],
    gate_up: Tensor,
    out: Tensor,
    *,
    has_gate: bool = True,
    has_up: bool = True,
) -> None:
    """Write silu(gate) * up, after adding scale * low up^T to both in every row with a slot.

    Gate and up are rounded to the dtype, then silu, then the result. Every row must be in a tile,
    also rows without a slot.

    Args:
        low, matrices, tiles: as for `expand`. The first part is the gate's, if it has one.
        gate_up: [T, 2 I] of the matrices' dtype, the gate's columns first; rows may be strided.
        out: [T, I] of the same dtype, written.
        has_gate, has_up: whether the half has a part.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "gated_expand"
    _check(op, "gate_up", gate_up, matrices.up, (-1, -1))
    _check(op, "out", out, gate_up, (len(gate_up), gate_up.shape[1] // 2))
    _check_tables(op, matrices, tiles, out)
    _check_low(op, low, matrices, out)
    num_columns = (has_gate + has_up) * out.shape[1]
    if matrices.up.shape[2] != num_columns or matrices.down.shape[1] != has_gate + has_up:
        raise ValueError(
            f"{op}: up must be [slots, r, {num_columns}] in {has_gate + has_up} parts, got "
            f"{list(matrices.up.shape)} in {matrices.down.shape[1]}"
        )
    if not out.numel():
        return
    if _kernels is None or not can_take(out):
        width = out.shape[1]
        pieces = [Piece(0, 0, 0, width)] * has_gate
        pieces += [Piece(int(has_gate), has_gate * width, width, width)] * has_up
        reference.gated_expand(low, matrices, tiles, gate_up, out, pieces)
        return
    with guard(out):
        _kernels.launch_gated_expand(low, matrices, tiles, gate_up, out, has_gate, has_up)


def _check_tables(op: str, matrices: LowRank, tiles: Tiles[Tensor], x: Tensor) -> None:
    """Check the matrices against each other, and the table."""
    num_slots, num_parts, max_rank, _ = matrices.down.shape
    _check(op, "up", matrices.up, x, (num_slots, max_rank, -1))
    shape = (num_slots, num_parts)
    _check_exact(op, "ranks", matrices.ranks, shape, x, torch.int32, rows_apart=True)
    _check_exact(op, "scales", matrices.scales, shape, x, torch.float32, rows_apart=True)
    _check_exact(op, "tiles", tiles.table, (len(tiles.table), 3), x, torch.int32)
    _check_exact(op, "rows of tiles", tiles.rows, (len(tiles.rows),), x, torch.int32)
    if tiles.size not in (16, 32, 64):
        raise ValueError(f"{op}: tiles must have 16, 32 or 64 rows, got {tiles.size}")


def _check_low(op: str, low: Tensor, matrices: LowRank, out: Tensor) -> None:
    """Check the products with the first matrices that are expanded."""
    num_slots = len(matrices.up) if low.dim() == 3 and low.shape[1] != 1 else 1
    dtype = out.dtype if low.dtype == out.dtype else torch.float32
    shape = (len(out), num_slots, matrices.num_ranks)
    _check_exact(op, "low", low, shape, out, dtype, rows_apart=True)
