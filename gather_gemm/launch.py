# SPDX-License-Identifier: Apache-2.0
"""Launch configurations of the products, as data."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LaunchConfig:
    """Tile of one program, and its launch resources."""

    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int


def choose_config(num_rows: int, element_bytes: int) -> LaunchConfig:
    """Choose the tile for a number of gathered rows of 2-byte or 4-byte elements.

    With few rows, reading the weight decides the time, so tiles are narrow and many programs share
    the reading. With many rows, arithmetic decides, so tiles are wide and operands are reused. The
    pipeline's stages take at most 96 KiB, which every target has.
    """
    depth = 128 // element_bytes
    if num_rows <= 16:
        return LaunchConfig(16, 64, 2 * depth, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return LaunchConfig(32, 64, 2 * depth, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return LaunchConfig(64, 128, depth, num_warps=4, num_stages=4)
    return LaunchConfig(128, 128, depth, num_warps=8, num_stages=3)


@dataclass(frozen=True)
class TopConfig:
    """Tile of one program of the product with its sampling, and its launch resources."""

    block_rows: int
    block_columns: int
    block_depth: int
    transposed: bool  # rows are the narrow side of the product on the tensor cores
    num_warps: int
    num_stages: int


_TOP_CONFIGS = (
    (16, TopConfig(16, 128, 128, True, num_warps=4, num_stages=5)),
    (32, TopConfig(32, 128, 128, True, num_warps=4, num_stages=5)),
    (64, TopConfig(64, 128, 64, False, num_warps=4, num_stages=6)),
    (None, TopConfig(128, 256, 64, False, num_warps=8, num_stages=4)),
)


def choose_top_config(num_rows: int) -> TopConfig:
    """Choose the tile for a number of 2-byte rows."""
    return next(config for most, config in _TOP_CONFIGS if most is None or num_rows <= most)


@dataclass(frozen=True)
class GroupedConfig:
    """Tile of one program of the products of groups of rows, and its launch resources.

    Attributes:
        rows: rows of a group.
        columns: columns of the result; a gated product computes the gates' columns in addition.
        depth: depth of one step of the sum.
        num_warps, num_stages: Triton's launch options.
        ahead: cache lines of each row of the weight that a program prefetches once it has found its
            tile, on GPUs where kernels overlap: a power of two, or 0.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    ahead: int = 0

    def stage_bytes(self, element_bytes: int, num_weights: int) -> int:
        """Return the bytes of shared memory per stage of the pipeline."""
        return (self.rows + num_weights * self.columns) * self.depth * element_bytes


# The maximum number of rows of an average group, and the tile for it. With few rows the weights are
# streamed; with many rows the tiles are bound by arithmetic. Measured on an H200 with 64 groups of
# [2048, 2048] and [2048, 1024] matrices in bf16.
_GATED = (
    (8, GroupedConfig(16, 64, 128, num_warps=4, num_stages=3)),
    (16, GroupedConfig(32, 64, 64, num_warps=4, num_stages=3)),
    (64, GroupedConfig(64, 64, 64, num_warps=4, num_stages=3)),
    (None, GroupedConfig(128, 128, 64, num_warps=8, num_stages=4)),
)
_PRODUCT = (
    (8, GroupedConfig(16, 64, 128, num_warps=4, num_stages=3, ahead=4)),
    (16, GroupedConfig(32, 128, 64, num_warps=4, num_stages=3, ahead=4)),
    (64, GroupedConfig(64, 128, 64, num_warps=4, num_stages=3)),
    (None, GroupedConfig(128, 128, 64, num_warps=8, num_stages=3)),
)
# fp32 products run on the ordinary units, from registers, so their tiles are small.
_WIDE = GroupedConfig(16, 64, 32, num_warps=4, num_stages=2)


def choose_gated(
    num_rows: int, num_groups: int, element_bytes: int, shared_bytes: int
) -> GroupedConfig:
    """Choose the tile of the gated product of `num_rows` rows in total, within `shared_bytes`."""
    return _choose(_GATED, 2, num_rows, num_groups, element_bytes, shared_bytes)


def choose_product(
    num_rows: int, num_groups: int, element_bytes: int, shared_bytes: int
) -> GroupedConfig:
    """Choose the tile of the plain product of `num_rows` rows in total, within `shared_bytes`."""
    return _choose(_PRODUCT, 1, num_rows, num_groups, element_bytes, shared_bytes)


def max_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Return the maximum number of tiles over all divisions of the rows into groups.

    Every group with rows has one tile, and one more for each further whole tile.
    """
    started = min(num_rows, num_groups)
    return started + (num_rows - started) // tile_rows


def _choose(
    table: tuple[tuple[int | None, GroupedConfig], ...],
    num_weights: int,
    num_rows: int,
    num_groups: int,
    element_bytes: int,
    shared_bytes: int,
) -> GroupedConfig:
    config = next(config for most, config in table if most is None or num_rows <= most * num_groups)
    if element_bytes > 2:
        config = _WIDE
    stages = shared_bytes // config.stage_bytes(element_bytes, num_weights)
    return replace(config, num_stages=min(config.num_stages, stages))


@dataclass(frozen=True)
class ShrinkConfig:
    """Tile of one program of the product with the first low-rank matrix: rows, ranks and depth."""

    rows: int
    ranks: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpandConfig:
    """Tile of one program of the product with the second low-rank matrix: rows, columns, ranks."""

    rows: int
    columns: int
    ranks: int
    num_warps: int
    # One stage: in a pipelined loop whose left operand is in registers, ptxas before 13.3 places
    # writes of these registers wrongly on GPUs of capability 9.0 (triton issue 9433).
    num_stages: int = 1


MAX_PIECES = 3  # pieces of the columns of an expansion
_FEW_ROWS = 128  # rows of a step up to which tiles are small
_SMALL_TILE, _LARGE_TILE = 16, 64  # maximum rows of a tile
# Maximum rows of a step, and the rows of a program for it.
_SHRINK_ROWS = ((512, 16), (2048, 32), (None, 64))
_SHRINK_RANKS = 64  # maximum ranks of a program; half of it for few rows
_MIN_SPLIT_DEPTH = 512
MAX_SPLIT_ROWS = 2048  # limit of rows times splits
# Maximum splits, and rows times splits, of sums with few ranks, and with many, of which more
# programs share a row anyway.
_SPLITS, _SPLITS_OF_MANY_RANKS = (8, MAX_SPLIT_ROWS), (4, 512)
_EXPAND_PROGRAMS = 256  # programs that large tiles must leave


def low_rank_tile(num_rows: int) -> int:
    """Return the rows of a tile of low-rank products, for a step of `num_rows` rows."""
    return _SMALL_TILE if num_rows <= _FEW_ROWS else _LARGE_TILE


def low_rank_splits(num_rows: int, depth: int, num_ranks: int) -> int:
    """Return in how many parts `shrink` computes its sums, each by its own programs.

    Rows times parts are at most `MAX_SPLIT_ROWS`, unless there is only one part.
    """
    splits, most_rows = _SPLITS if num_ranks <= _SHRINK_RANKS else _SPLITS_OF_MANY_RANKS
    limit = min(splits, depth // _MIN_SPLIT_DEPTH, most_rows // max(num_rows, 1))
    return 1 << max(limit, 1).bit_length() - 1


def choose_shrink(
    num_rows: int, num_ranks: int, split_depth: int, element_bytes: int
) -> ShrinkConfig:
    """Choose the tile for the ranks of all parts together, and the depth of a part of the sum."""
    rows = _shrink_rows(num_rows)
    most = _SHRINK_RANKS // 2 if num_rows <= _FEW_ROWS < num_ranks else _SHRINK_RANKS
    ranks = min(max(power_of_two(num_ranks), 16), most)
    if element_bytes > 2:
        return ShrinkConfig(rows, ranks, 32, num_warps=4, num_stages=2)
    # A short loop has no time to use more stages.
    return ShrinkConfig(rows, ranks, 128, num_warps=4, num_stages=2 if split_depth <= 1024 else 4)


def choose_expand(
    num_rows: int, num_columns: int, max_rank: int, element_bytes: int
) -> ExpandConfig:
    """Choose the tile for a step of `num_rows` rows."""
    ranks = min(max(power_of_two(max_rank), 16), 64)
    if element_bytes > 2:
        return ExpandConfig(32, 64, min(ranks, 32), num_warps=4)
    columns = 128
    num_programs = num_rows // _LARGE_TILE * (num_columns // columns)
    rows = _LARGE_TILE if num_programs >= _EXPAND_PROGRAMS else 32
    return ExpandConfig(rows, columns, ranks, num_warps=4)


def choose_gated_expand(max_rank: int, element_bytes: int) -> ExpandConfig:
    """Choose the tile of gate and up, each of which has the columns of the tile."""
    ranks = min(max(power_of_two(max_rank), 16), 64)
    if element_bytes > 2:
        return ExpandConfig(32, 32, min(ranks, 32), num_warps=4)
    return ExpandConfig(32, 128, ranks, num_warps=4)


def _shrink_rows(num_rows: int) -> int:
    return next(rows for limit, rows in _SHRINK_ROWS if limit is None or num_rows <= limit)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`; faster than Triton's own."""
    return 1 << max(number - 1, 0).bit_length()
