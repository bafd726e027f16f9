# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernel that an op runs, by its rows, its shape and the card. Nothing else chooses.

All numbers were measured on an H200; docs/measurements/kernels.md lists them ("Which kernel runs").
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import NamedTuple

import torch

from vllm_add_llada.cuda_kernels.fused_ops import PORTABLE, Tiling, capability_of, is_built


@dataclass(frozen=True)
class _Skinny:
    """A tiling for few rows, with the numbers of rows for which it is the fastest."""

    tiling: Tiling
    max_rows: int
    min_rows: int = 1


_SKINNY = (
    _Skinny(Tiling(96), max_rows=64),
    _Skinny(Tiling(64, split=2), max_rows=128),
    _Skinny(Tiling(64, split=2), min_rows=144, max_rows=192),
    _Skinny(Tiling(96, split=2), max_rows=128),
    _Skinny(Tiling(32, split=2), max_rows=64),
)
_SKINNY_GATED = (_Skinny(Tiling(192), max_rows=128), _Skinny(Tiling(96), max_rows=64))
_SKINNY_FP8 = (
    _Skinny(Tiling(96), max_rows=64),
    _Skinny(Tiling(96), min_rows=129, max_rows=256),
    _Skinny(Tiling(64, split=2), max_rows=256),
    _Skinny(Tiling(96, split=2), max_rows=64),
    _Skinny(Tiling(32, split=2), max_rows=64),
)
_SKINNY_GATED_FP8 = (_Skinny(Tiling(192), max_rows=64), _Skinny(Tiling(96), max_rows=64))
_PACKED_FEW = ((192, 0), (64, 0))  # columns and rows of a tile
_PACKED_FEW_ROWS = 64
# Of more rows, with the microseconds that a tile takes for 4,096 of the depth.
_PACKED_MANY = {(192, 128): 41, (128, 128): 31, (128, 256): 50}
_PACKED_START_US = 8  # and to start and to end, as cuBLAS's products take
_PACKED_SPLITS = (1, 2)  # more blocks of a cluster do not find room on all multiprocessors
_PACKED_DEPTH = 256  # of a stage
_PACKED_SCALES = 16_384  # of a tile
_UNPACKED_PER_US = 1.3e6  # 4-bit numbers
_MULTIPLIED_PER_US = 375e6  # pairs of numbers, by cuBLAS
_SLICE_START_US = 4  # and to start and to end a product of a slice of columns
UNPACKED = Tiling(256, rows=128)  # as cuBLAS mostly has them
_ONE_SCALE_ROWS = 1023  # of gated fp8 products, up to which cuBLAS's without scales is the faster
_ADDED_ROWS = 1024  # of fp8 products, from which cuBLAS's own sum is faster than a pass for it
_GATED = (Tiling(192, rows=256), Tiling(192, rows=128))
AHEAD_BYTES = 4 << 20  # of the next weight that few rows' products bring to the cache
_MIN_BLOCK_SHARE = 0.84  # of the multiprocessors, below which too few bytes are on their way
# Share of the tiles that the card computes at a time, below which cuBLAS's fit better.
_MIN_TILE_USE = 0.9
_STEP_DEPTH = 64
_PORTABLE_ROWS = 256  # of the kernels for every card

_HEAD_COLUMNS = 65_536  # of what counts as an output matrix
_HEAD_ROWS = 64  # Triton's product with one, beyond which cuBLAS's is the faster one
_TOP_ROWS = 128  # the same, sampled tile by tile, beside storing the logits and sampling from them

# Of sums over ranks: as fast as more, and the rest of the card is free for other kernels.
RANKS_BLOCKS = 64

# The compiled router, by the number of experts: elsewhere, and of 256 experts everywhere, Triton's
# is as fast or faster.
_ROUTER_ROWS = {64: range(9, 65), 128: range(8, 33)}
_PARTS_ROWS = 128  # Triton's router, beyond which PyTorch's product is the faster one
_GATED_ROWS = 32  # a group: up to which Triton's gated product is the faster one


class KernelTier(Enum):
    """The compiled products that a card runs."""

    HOPPER = "kernels"
    PORTABLE = "portable kernels"
    NONE = "reference"


class DeviceInfo(NamedTuple):
    """A device as products are chosen for it.

    Attributes:
        tier: what it runs; for the compute capability that `VLLM_DLLM_KERNELS` names.
        multiprocessors: number of them; 0 where no compiled product runs.
    """

    tier: KernelTier
    multiprocessors: int


NO_CARD = DeviceInfo(KernelTier.NONE, 0)


@functools.cache
def card_of(device: torch.device) -> DeviceInfo:
    """Return what a device runs: nothing of ours on a CPU, or before the kernels are built."""
    if device.type != "cuda" or not is_built():
        return NO_CARD
    capability = capability_of(device.index)
    if capability < (8, 0):
        return NO_CARD
    tier = KernelTier.HOPPER if capability == (9, 0) else KernelTier.PORTABLE
    return DeviceInfo(tier, int(torch.cuda.get_device_properties(device).multi_processor_count))


def _portable(num_rows: int, card: DeviceInfo) -> Tiling | None:
    """Tiling where the card has no kernels of its own; None to multiply otherwise."""
    is_few = 0 < num_rows <= _PORTABLE_ROWS
    return PORTABLE if is_few and card.tier is KernelTier.PORTABLE else None


def linear_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, card: DeviceInfo
) -> Tiling | None:
    """Tiling of `fused_linear` that keeps (nearly) every multiprocessor busy; None for cuBLAS.

    Args:
        num_rows, num_columns, depth: sizes of the product.
        gated: whether silu(gate) * up is computed.
        card: the device, as returned by `card_of`.
    """
    skinny = _SKINNY_GATED if gated else _SKINNY
    return _tiling(skinny, num_rows, num_columns, depth, card, gated=gated)


def fp8_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, card: DeviceInfo
) -> Tiling | None:
    """Tiling of `fused_linear_fp8`, whose stages are twice as deep; None for cuBLAS.

    Arguments are those of `linear_tiling`.
    """
    skinny = _SKINNY_GATED_FP8 if gated else _SKINNY_FP8
    return _tiling(skinny, num_rows, num_columns, depth // 2, card, gated=gated)


def _tiling(
    skinny: tuple[_Skinny, ...],
    num_rows: int,
    num_columns: int,
    depth: int,
    card: DeviceInfo,
    *,
    gated: bool,
) -> Tiling | None:
    """Tiling for few rows, or for any number in a gated product; depth counts as in bf16."""
    if card.tier is not KernelTier.HOPPER:
        return _portable(num_rows, card)
    tiling = _skinny_tiling(skinny, num_rows, num_columns, depth, card.multiprocessors)
    if tiling is None and gated:
        return gated_tiling(num_rows, num_columns, depth, card=card)
    return tiling


def gated_tiling(num_rows: int, num_columns: int, depth: int, *, card: DeviceInfo) -> Tiling | None:
    """First tiling of a gated product of any number of rows whose tiles fill the card."""
    multiprocessors = card.multiprocessors
    if card.tier is not KernelTier.HOPPER or num_columns % 16 != 0 or depth % _STEP_DEPTH != 0:
        return None
    for tiling in _GATED:
        tiles = ceil(num_rows / tiling.rows) * ceil(num_columns / tiling.columns)
        computed = ceil(tiles / multiprocessors) * multiprocessors
        wanted = num_rows * num_columns
        if wanted > 0 and wanted >= _MIN_TILE_USE * computed * tiling.rows * tiling.columns:
            return tiling
    return None


def packed_tiling(
    num_rows: int, num_columns: int, depth: int, group: int, *, card: DeviceInfo
) -> Tiling | None:
    """Tiling of `fused_linear_packed`; None to unpack the matrix first.

    For few rows: the fewest blocks that keep (nearly) the whole card busy, or else as much of it as
    possible, independent of their number. For more: the fastest, if a multiprocessor computes one
    tile after the other, or None where unpacking and cuBLAS are faster.

    Args:
        num_rows, num_columns, depth: sizes of the product.
        group: numbers that share a scale.
        card: the device, as returned by `card_of`.
    """
    if num_rows == 0 or card.tier is not KernelTier.HOPPER:
        return _portable(num_rows, card)
    multiprocessors = card.multiprocessors
    is_few = num_rows <= _PACKED_FEW_ROWS
    tilings = [
        Tiling(columns, split, rows)
        for columns, rows in (_PACKED_FEW if is_few else _PACKED_MANY)
        for split in _PACKED_SPLITS
        if num_columns % columns == 0
        and depth % _PACKED_DEPTH == 0
        and depth >= split * _PACKED_DEPTH
        and depth // (split * group) * columns <= _PACKED_SCALES
    ]

    def turns(tiling: Tiling) -> tuple[int, int]:
        """Return the number of blocks, and the most of any multiprocessor."""
        blocks = num_columns // tiling.columns * tiling.split
        blocks *= ceil(num_rows / tiling.rows) if tiling.rows else 1
        return blocks, ceil(blocks / multiprocessors)

    def use(tiling: Tiling) -> tuple[float, int]:
        blocks, deepest = turns(tiling)
        return min(blocks / (deepest * multiprocessors), _MIN_BLOCK_SHARE), -blocks

    def microseconds(tiling: Tiling) -> float:
        tile = _PACKED_MANY[tiling.columns, tiling.rows] * depth / tiling.split / 4096
        return turns(tiling)[1] * (tile + _PACKED_START_US)

    if not tilings:
        return None
    if is_few:
        return max(tilings, key=use)
    fastest = min(tilings, key=microseconds)
    plain = num_columns * depth * (1 / _UNPACKED_PER_US + num_rows / _MULTIPLIED_PER_US)
    return fastest if microseconds(fastest) < plain + _PACKED_START_US else None


@functools.lru_cache(maxsize=1024)
def slice_columns(
    num_rows: int,
    num_columns: int,
    depth: int,
    max_columns: int,
    tiling: Tiling,
    *,
    card: DeviceInfo,
) -> int:
    """Columns of a slice when a product is computed slice by slice.

    It is chosen for the fewest launches that leave no multiprocessor idle.

    Args:
        num_rows, num_columns, depth: sizes of the product.
        most: most columns of a slice.
        tiling: tiling of the kernel that multiplies.
        card: the device, as returned by `card_of`.
    """
    tiles, row_tiles = ceil(num_columns / tiling.columns), ceil(num_rows / tiling.rows)
    multiprocessors = card.multiprocessors
    tile_us = tiling.columns * tiling.rows * depth * multiprocessors / _MULTIPLIED_PER_US

    def microseconds(num_tiles: int) -> float:
        whole, rest = divmod(tiles, num_tiles)
        turns = sum(
            count * ceil(row_tiles * some / max(multiprocessors, 1))
            for count, some in ((whole, num_tiles), (1, rest))
        )
        return turns * tile_us + (whole + (rest > 0)) * _SLICE_START_US

    counts = range(max(max_columns // tiling.columns, 1), 0, -1)
    return min(counts, key=microseconds) * tiling.columns


def should_scale_gate_separately(num_rows: int) -> bool:
    """Whether an fp8 product is faster without its scales, which silu(gate) * up then applies."""
    return num_rows <= _ONE_SCALE_ROWS


def adds_fp8(num_rows: int) -> bool:
    """Whether cuBLAS should add an fp8 product to its target, instead of a pass after it."""
    return num_rows >= _ADDED_ROWS


def _skinny_tiling(
    skinny: tuple[_Skinny, ...], num_rows: int, num_columns: int, depth: int, multiprocessors: int
) -> Tiling | None:
    """First tiling for `num_rows` rows that divides the matrix and keeps the card busy."""
    for candidate in skinny:
        tiling = candidate.tiling
        blocks = num_columns // tiling.columns * tiling.split
        if (
            candidate.min_rows <= num_rows <= candidate.max_rows
            and num_columns % tiling.columns == 0
            and depth % (tiling.split * _STEP_DEPTH) == 0
            and _MIN_BLOCK_SHARE * multiprocessors <= blocks <= multiprocessors
        ):
            return tiling
    return None


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the card is of compute capability 9."""
    return device.type == "cuda" and capability_of(device.index)[0] == 9


def multiplies_head(num_rows: int, num_columns: int, device: torch.device) -> bool:
    """Whether Triton's product of sample rows and an output matrix is as fast as cuBLAS's."""
    return _is_head(num_columns, device) and 0 < num_rows <= _HEAD_ROWS


def samples_in_head(num_rows: int, num_columns: int, device: torch.device) -> bool:
    """Whether sampling within the output product is faster than storing logits and reading them."""
    return _is_head(num_columns, device) and 0 < num_rows <= _TOP_ROWS


def _is_head(num_columns: int, device: torch.device) -> bool:
    """Whether the product is one that was measured: with an output matrix, on such a card."""
    return num_columns >= _HEAD_COLUMNS and is_hopper(device)


def routes_compiled(num_rows: int, num_experts: int) -> bool:
    """Whether the compiled router is the fastest where it takes the tensors."""
    return num_rows in _ROUTER_ROWS.get(num_experts, ())


def routes_in_parts(num_rows: int, card: DeviceInfo) -> bool:
    """Whether Triton's product with the router is faster than PyTorch's."""
    return num_rows <= (_PORTABLE_ROWS if card.tier is KernelTier.PORTABLE else _PARTS_ROWS)


def streams_gated(num_slots: int, num_experts: int) -> bool:
    """Whether the compiled gated product is the fastest where it takes the tensors."""
    return num_slots > _GATED_ROWS * num_experts


def streams_weighted(num_slots: int, num_experts: int) -> bool:
    """Whether the compiled weighted product is the fastest where it takes the tensors."""
    return num_slots >= num_experts
