# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernel that an op runs, by rows, shape and GPU. No other module chooses kernels.

All numbers were measured on an H200; docs/measurements/kernels.md lists them ("Which kernel
runs").
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
    _Skinny(Tiling(32, split=4), max_rows=64),
    _Skinny(Tiling(192), max_rows=128),
)
_SKINNY_GATED = (
    _Skinny(Tiling(192), max_rows=128),
    _Skinny(Tiling(96), max_rows=64),
    _Skinny(Tiling(48), max_rows=64),
)
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
# Tiles for more rows, with the microseconds that each takes for 4,096 of the depth.
_PACKED_MANY = {(192, 128): 41, (128, 128): 31, (128, 256): 50}
# Microseconds to start and end a product, for these kernels and for cuBLAS.
_PACKED_START_US = 8
# Clusters of more blocks do not fit on all multiprocessors.
_PACKED_SPLITS = (1, 2)
_PACKED_DEPTH = 256  # depth of a stage
_PACKED_SCALES = 16_384  # scales of a tile
_UNPACKED_PER_US = 1.3e6  # 4-bit numbers per microsecond
_MULTIPLIED_PER_US = 375e6  # products of two numbers per microsecond with cuBLAS
_SLICE_START_US = 4  # microseconds to start and end the product of a slice of columns
UNPACKED = Tiling(256, rows=128)  # usual tile of cuBLAS
# Rows of gated fp8 products up to which cuBLAS is faster without scales.
_ONE_SCALE_ROWS = 1023
# Rows of fp8 products from which cuBLAS's own sum is faster than a separate pass.
_ADDED_ROWS = 1024
_GATED = (Tiling(192, rows=256), Tiling(192, rows=128))
AHEAD_BYTES = 4 << 20  # bytes of the next weight that products of few rows prefetch into the cache
# Share of busy multiprocessors below which too few bytes are in flight.
_MIN_BLOCK_SHARE = 0.84
# Share of used elements in the tiles that the GPU computes at a time, below which cuBLAS's tiles
# fit better.
_MIN_TILE_USE = 0.9
# Rows of a gated product below which storing gate and up is faster than a tail.
_MIN_TAIL_ROWS = 65
_STEP_DEPTH = 64
_PORTABLE_ROWS = 256  # rows of the kernels for every GPU

_HEAD_COLUMNS = 65_536  # minimum columns of an output matrix
_HEAD_ROWS = 64  # rows of an output product above which cuBLAS is faster than Triton
# Rows of an output product above which storing the logits and then sampling is faster.
_TOP_ROWS = 128

# Blocks of a sum over ranks. More are not faster, and the rest of the GPU is free for other
# kernels.
RANKS_BLOCKS = 64

# Rows for which the compiled router is the fastest, by number of experts. Otherwise, and always
# with 256 experts, Triton's router is as fast or faster.
_ROUTER_ROWS = {64: range(9, 65), 128: range(8, 33)}
_PARTS_ROWS = 128  # rows of Triton's router above which PyTorch's product is faster
_GATED_ROWS = 32  # rows per group up to which Triton's gated product is faster


class KernelTier(Enum):
    """The compiled products that a GPU can run."""

    HOPPER = "kernels"
    PORTABLE = "portable kernels"
    NONE = "reference"


class DeviceInfo(NamedTuple):
    """Properties of a device that determine which products it runs.

    Attributes:
        tier: the products that it runs, for the compute capability of `VLLM_DLLM_KERNELS`, if set.
        multiprocessors: number of multiprocessors; 0 if no compiled product runs.
    """

    tier: KernelTier
    multiprocessors: int


NO_CARD = DeviceInfo(KernelTier.NONE, 0)


@functools.cache
def card_of(device: torch.device) -> DeviceInfo:
    """Return the properties of a device; CPUs, and GPUs without built kernels, run no products."""
    if device.type != "cuda" or not is_built():
        return NO_CARD
    capability = capability_of(device.index)
    if capability < (8, 0):
        return NO_CARD
    tier = KernelTier.HOPPER if capability == (9, 0) else KernelTier.PORTABLE
    return DeviceInfo(tier, int(torch.cuda.get_device_properties(device).multi_processor_count))


def _portable(num_rows: int, card: DeviceInfo) -> Tiling | None:
    """Return the portable tiling for a GPU without its own kernels, or None if it is unsuitable."""
    is_few = 0 < num_rows <= _PORTABLE_ROWS
    return PORTABLE if is_few and card.tier is KernelTier.PORTABLE else None


def linear_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, card: DeviceInfo
) -> Tiling | None:
    """Return a tiling of `fused_linear` that keeps nearly all multiprocessors busy, or None.

    None selects cuBLAS. A gated product computes silu(gate) * up.
    """
    skinny = _SKINNY_GATED if gated else _SKINNY
    return _tiling(skinny, num_rows, num_columns, depth, card, gated=gated)


def extended_columns(num_columns: int, depth: int, *, card: DeviceInfo) -> int:
    """Return the columns of a product that is extended to at least `num_columns`.

    Tilings for few rows divide this number, if there is one close to `num_columns`.
    """
    units = {candidate.tiling.columns for candidate in _SKINNY}
    wholes = sorted({ceil(num_columns / unit) * unit for unit in units})
    for whole in wholes:
        if _skinny_tiling(_SKINNY, 1, whole, depth, card.multiprocessors) is not None:
            return whole
    return wholes[0]


def fp8_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, card: DeviceInfo
) -> Tiling | None:
    """Return a tiling of `fused_linear_fp8`, whose stages are twice as deep; None for cuBLAS."""
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
    """Return a tiling for few rows, or for any gated product; depth counts as in bf16."""
    if card.tier is not KernelTier.HOPPER:
        return _portable(num_rows, card)
    tiling = _skinny_tiling(skinny, num_rows, num_columns, depth, card.multiprocessors)
    if tiling is None and gated:
        return gated_tiling(num_rows, num_columns, depth, card=card)
    return tiling


def has_gated_tiles(num_columns: int, depth: int, *, card: DeviceInfo) -> bool:
    """Return whether a gated product can be computed in tiles of rows."""
    return card.tier is KernelTier.HOPPER and num_columns % 16 == 0 and depth % _STEP_DEPTH == 0


def unsplit_gated_tiling(
    num_rows: int, num_columns: int, depth: int, *, card: DeviceInfo, is_fp8: bool = False
) -> Tiling | None:
    """Return a tiling of a gated product, which no tiling splits; None if no tiling fits the shape.

    Separate kernels for product and silu would round a few values differently, so either tilings
    serve any number of rows, or none does.
    """
    if not has_gated_tiles(num_columns, depth // 2 if is_fp8 else depth, card=card):
        return None
    tiling_of = fp8_tiling if is_fp8 else linear_tiling
    tiling = tiling_of(num_rows, num_columns, depth, gated=True, card=card)
    return _GATED[-1] if tiling is None else tiling


def gated_tiling(num_rows: int, num_columns: int, depth: int, *, card: DeviceInfo) -> Tiling | None:
    """Return the first tiling of a gated product whose tiles fill the GPU, for any row count."""
    multiprocessors = card.multiprocessors
    if not has_gated_tiles(num_columns, depth, card=card):
        return None
    for tiling in _GATED:
        tiles = ceil(num_rows / tiling.rows) * ceil(num_columns / tiling.columns)
        computed = ceil(tiles / multiprocessors) * multiprocessors
        wanted = num_rows * num_columns
        if wanted > 0 and wanted >= _MIN_TILE_USE * computed * tiling.rows * tiling.columns:
            return tiling
    return None


def tail_tiling(num_rows: int, num_columns: int, depth: int, *, card: DeviceInfo) -> Tiling | None:
    """Return a tiling of a gated product to which another product is added; None if it is slow.

    Only tiles of rows support this. If one tile has all rows, reading the weight determines the
    time, so that unused rows of the tile cost little.
    """
    if num_rows < _MIN_TAIL_ROWS:
        return None
    tiling = gated_tiling(num_rows, num_columns, depth, card=card)
    if tiling is not None or not has_gated_tiles(num_columns, depth, card=card):
        return tiling
    low = _GATED[-1]
    blocks = ceil(num_columns / low.columns)
    is_busy = _MIN_BLOCK_SHARE * card.multiprocessors <= blocks <= card.multiprocessors
    return low if num_rows <= low.rows and is_busy else None


def packed_tiling(
    num_rows: int, num_columns: int, depth: int, group: int, *, card: DeviceInfo
) -> Tiling | None:
    """Return a tiling of `fused_linear_packed`, or None to unpack the matrix first.

    For few rows, it has the fewest blocks that keep nearly the whole GPU busy, or else as much of
    it as possible, independent of the number of rows. For more rows, it is the fastest if a
    multiprocessor computes one tile after the other, or None if unpacking and cuBLAS are faster.

    Args:
        group: numbers that share a scale.
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
        """Return the number of blocks, and the maximum number per multiprocessor."""
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
    """Return the columns of a slice when a product is computed slice by slice.

    The number minimises the time of all launches, whose last wave may leave multiprocessors idle.
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
    """Return whether an fp8 product is faster if silu(gate) * up applies its scales afterwards."""
    return num_rows <= _ONE_SCALE_ROWS


def adds_fp8(num_rows: int) -> bool:
    """Return whether cuBLAS should add an fp8 product to its target, instead of a separate pass."""
    return num_rows >= _ADDED_ROWS


def _skinny_tiling(
    skinny: tuple[_Skinny, ...], num_rows: int, num_columns: int, depth: int, multiprocessors: int
) -> Tiling | None:
    """Return the first tiling for these rows that divides the matrix and keeps the GPU busy."""
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
    """Return whether the GPU has compute capability 9."""
    return device.type == "cuda" and capability_of(device.index)[0] == 9


def multiplies_head(num_rows: int, num_columns: int, device: torch.device) -> bool:
    """Return whether Triton's product of sample rows and an output matrix is as fast as cuBLAS."""
    return _is_head(num_columns, device) and 0 < num_rows <= _HEAD_ROWS


def samples_in_head(num_rows: int, num_columns: int, device: torch.device) -> bool:
    """Return whether sampling within the output product is faster than reading stored logits."""
    return _is_head(num_columns, device) and 0 < num_rows <= _TOP_ROWS


def _is_head(num_columns: int, device: torch.device) -> bool:
    """Return whether the product was measured: with an output matrix, on such a GPU."""
    return num_columns >= _HEAD_COLUMNS and is_hopper(device)


def routes_compiled(num_rows: int, num_experts: int) -> bool:
    """Return whether the compiled router is the fastest, if it supports the tensors."""
    return num_rows in _ROUTER_ROWS.get(num_experts, ())


def routes_in_parts(num_rows: int, card: DeviceInfo) -> bool:
    """Return whether Triton's product with the router is faster than PyTorch's."""
    return num_rows <= (_PORTABLE_ROWS if card.tier is KernelTier.PORTABLE else _PARTS_ROWS)


def streams_gated(num_slots: int, num_experts: int) -> bool:
    """Return whether the compiled gated product is the fastest, if it supports the tensors."""
    return num_slots > _GATED_ROWS * num_experts


def streams_weighted(num_slots: int, num_experts: int) -> bool:
    """Return whether the compiled weighted product is the fastest, if it supports the tensors."""
    return num_slots >= num_experts
