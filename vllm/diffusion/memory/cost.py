# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a step under a plan: accurate enough to choose plans and to cut slices.

Products compute and read weights at the same time. If both take about as long, each slows the other
down (`_together`). In attention, each multiprocessor computes a tile of queries of one head at a
time, so chunks of attention have whole waves of tiles. The rates belong to the
current device (`rates.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.memory.plan import StageSeconds

if TYPE_CHECKING:
    from vllm.diffusion.memory.plan import ChunkRows, Residency
    from vllm.diffusion.memory.shapes import ModelShape, StepShape

LAUNCHES_KEYS_VALUES = 4
LAUNCHES_ATTEND = 3
LAUNCHES_QUERIES = 4
LAUNCHES_FEED_FORWARD = 4
LAUNCHES_EXPERTS = 9
LAUNCHES_LOGITS = 3
TILE_ROWS = 128  # rows of a tile of a product; chunks are whole tiles if possible
QUERY_TILE = 128
FP8_ATTENTION_SPEED = 1.55  # speed of cuDNN on an H200 with long sequences, relative to 16 bits
EXPERTS_SHARE = 0.65  # share of the rate of large products that products of experts reach
PACKED_SHARE = 0.65  # share of the memory's rate that products reach when they unpack 4-bit weights


class Rates(NamedTuple):
    """Rates of a device, per second, and fixed costs of launches and exchanges.

    Attributes:
        product_flops: operations of large products.
        attention_flops: operations of attention on long sequences.
        memory_bytes: bytes of the device's memory, read and written.
        host_bytes: bytes in each direction between the device and pinned host memory.
        launch_seconds: seconds of a kernel launch, without its work.
        multiprocessors: number of multiprocessors; each computes a tile of queries of one head at a
            time.
        link_bytes: bytes to other ranks, including the copies before and after; the same number
            arrives.
        exchange_seconds: seconds of every exchange with other ranks, regardless of its size.
    """

    product_flops: float
    attention_flops: float
    memory_bytes: float
    host_bytes: float
    launch_seconds: float
    multiprocessors: int
    link_bytes: float
    exchange_seconds: float


H200 = Rates(720e12, 620e12, 4.2e12, 55e9, 2e-6, 132, 200e9, 150e-6)
# One slow core. The scheduler learns the real speed (`engine/scheduler/long_step_policy.py`), and
# if a device is assumed too slow, the only effect is that its steps are cut unnecessarily.
CPU = Rates(20e9, 10e9, 5e9, 5e9, 20e-6, 1, 1e9, 500e-6)


class StageRows(NamedTuple):
    """Rows of a stage of one layer: `rows` in total, `chunk` of them at a time."""

    rows: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // max(self.chunk, 1))


class Costs:
    """Predicted seconds of one model's stages, for a step or for one layer."""

    def __init__(self, shape: ModelShape, rates: Rates) -> None:
        self._shape, self._rates = shape, rates
        width = shape.head_dim * shape.hidden_size
        self._query_weights = shape.num_heads * width
        self._key_value_weights = 2 * shape.num_kv_heads * width

    def attend_chunk(self, rows: int, max_rows: int, groups: int) -> int:
        """Return the rows of a chunk, up to `max_rows`, for which attention takes the fewest waves.

        All tiles take equally long, so the fewest idle multiprocessors are best. Of equally good
        chunks the longest is used. Either all chunks have one size, or the chunk is the longest
        that fits a number of waves.
        """
        heads, units = self._shape.num_heads // groups, self._rates.multiprocessors
        even = even_chunk(rows, max_rows)
        last = self._waves(even, heads)
        tiles = (waves * units // heads for waves in range(max(last - heads, 1), last + 1))
        wave_chunks = {QUERY_TILE * min(count, max_rows // QUERY_TILE) for count in tiles} - {0}

        def total(chunk: int) -> tuple[int, int]:
            whole, rest = divmod(rows, chunk)
            return whole * self._waves(chunk, heads) + self._waves(rest, heads), -chunk

        return min({even} | wave_chunks, key=total)

    def _waves(self, rows: int, heads: int) -> int:
        """Return the tiles that the busiest multiprocessor computes for `rows` query rows."""
        return -(-(-(-rows // QUERY_TILE) * heads) // self._rates.multiprocessors)

    def step(self, step: StepShape, layout: Residency, sizes: ChunkRows) -> StageSeconds:
        """Return the seconds of a step's stages, summed over all layers.

        In a streamed step the sample rows may be in any chunk, so the last layer counts in full.
        """
        works = (StageRows(step.rows, chunk) for chunk in sizes[:3])
        keys_values, attend, feed_forward = self._layer(step, layout, *works)
        layers = self._shape.num_layers
        updated = layers if layout.is_streamed else layers - 1
        return StageSeconds(
            layers * keys_values,
            updated * attend,
            updated * feed_forward,
            self._logits(step, layout, StageRows(step.sample_rows, sizes.logits)),
        )

    def longest_chunks(self, step: StepShape, layout: Residency, sizes: ChunkRows) -> StageSeconds:
        """Return the seconds of each stage's longest chunk, for one group of heads of one layer."""
        groups = layout.head_groups
        *works, logits = (StageRows(rows, rows) for rows in sizes)
        keys_values, attend, feed_forward = self._layer(step, layout, *works)
        logits_s = self._logits(step, layout, logits)
        return StageSeconds(keys_values / groups, attend / groups, feed_forward, logits_s)

    def _layer(
        self,
        step: StepShape,
        layout: Residency,
        keys_values: StageRows,
        attend: StageRows,
        feed_forward: StageRows,
    ) -> tuple[float, float, float]:
        """Return the seconds of the stages of one layer, for all groups of heads."""
        shape, groups, shards = self._shape, layout.head_groups, layout.shards
        keep = layout.keep_queries
        keys_values_s = self._keys_values(keys_values, with_queries=keep, groups=groups)
        attend_s = self._attend(attend, step, with_queries=not keep, groups=groups)
        feed_s = self._feed_forward(feed_forward)
        # Bytes of the exchanges: keys of all heads, and values; queries, and their results.
        for_keys, for_queries = shape.key_value_bytes // 2 // groups, shape.query_bytes // groups
        if layout.fp8_attention:
            for_keys, for_queries = (n // shape.element_bytes for n in (for_keys, for_queries))
        keys_values_s += groups * self._exchange(keys_values, for_keys, shards=shards)
        attend_s += groups * self._exchange(attend, for_queries, shards=shards)
        if layout.host_residual:
            # Each group reads the rows twice, and adds to the updated rows. Copies in both
            # directions and computation overlap.
            keys_values_s = max(keys_values_s, groups * self._visit(keys_values.rows))
            num_stores = 2 if groups > 1 else 1
            attend_s = max(attend_s, groups * self._visit(attend.rows) * num_stores)
            feed_s = max(feed_s, self._visit(feed_forward.rows))
        return keys_values_s, attend_s, feed_s

    def _keys_values(self, work: StageRows, *, with_queries: bool, groups: int) -> float:
        """Return the seconds of the projections of all rows, by groups of heads."""
        weights = self._key_value_weights + with_queries * self._query_weights
        return self._product(work, weights // groups, LAUNCHES_KEYS_VALUES) * groups

    def _attend(
        self, work: StageRows, step: StepShape, *, with_queries: bool, groups: int
    ) -> float:
        """Return the seconds of attention to the longest sequence's keys, with its projections."""
        if not work.rows:
            return 0.0
        shape, rates = self._shape, self._rates
        flops = 4.0 * step.longest * shape.head_dim * self._queries(work, groups)
        reads = max(work.num_chunks, min(step.num_sequences, work.rows))
        reading = reads * step.longest * shape.key_value_bytes / groups / rates.memory_bytes
        computing = flops / rates.attention_flops
        if step.fp8_attention:
            computing, reading = computing / FP8_ATTENTION_SPEED, reading / shape.element_bytes
        attention = _together(computing, reading)
        weights = self._query_weights * (1 + with_queries)
        num_launches = LAUNCHES_ATTEND + with_queries * LAUNCHES_QUERIES
        return groups * (attention + self._product(work, weights // groups, num_launches))

    def _queries(self, work: StageRows, groups: int) -> int:
        """Return the number of queries in the tiles of all chunks and heads, with idle ones."""
        whole, remainder = divmod(work.rows, work.chunk)
        heads, wave = self._shape.num_heads // groups, QUERY_TILE * self._rates.multiprocessors

        def computed(rows: int) -> int:
            few = 2 * rows * heads  # few rows share their keys
            return min(self._waves(rows, heads) * wave, few)

        return whole * computed(work.chunk) + computed(remainder)

    def _feed_forward(self, work: StageRows) -> float:
        """Return the seconds of the slowest MLP of the model, for all rows."""
        shape, experts = self._shape, self._shape.experts
        dense = 3 * shape.hidden_size * shape.mlp_width
        seconds = self._product(work, dense, LAUNCHES_FEED_FORWARD)
        if experts is None:
            return seconds
        expert = 3 * shape.hidden_size * experts.width
        shared = 3 * shape.hidden_size * experts.shared_width
        missed = (1 - experts.chosen / experts.count) ** min(work.chunk, work.rows)
        mixed = self._product(
            work,
            experts.chosen * expert / EXPERTS_SHARE + shared,
            LAUNCHES_EXPERTS,
            experts.count * (1 - missed) * expert + shared,
        )
        return max(seconds, mixed)

    def _logits(self, step: StepShape, layout: Residency, work: StageRows) -> float:
        """Return the seconds of the sample rows: the output head, and the rest of the last layer.

        In a streamed step the last layer has already ended.
        """
        weights = self._shape.num_columns * self._shape.hidden_size
        seconds = self._product(work, weights, LAUNCHES_LOGITS, is_head=True)
        if not layout.is_streamed:
            seconds += self._attend(work, step, with_queries=True, groups=1)
            seconds += self._feed_forward(work)
        return seconds

    def _visit(self, rows: int) -> float:
        """Return the seconds of moving residual rows between host and device, in one direction."""
        return rows * self._shape.row_bytes / self._rates.host_bytes

    def _exchange(self, work: StageRows, row_bytes: int, *, shards: int) -> float:
        """Return the seconds of two exchanges of `row_bytes` of each row with other ranks."""
        if shards == 1:
            return 0.0
        sent_bytes = work.rows * row_bytes * (shards - 1) / shards
        waiting = work.num_chunks * self._rates.exchange_seconds
        return 2 * (sent_bytes / self._rates.link_bytes + waiting)

    def _product(
        self,
        work: StageRows,
        weights: float,
        num_launches: int,
        stored: float | None = None,
        *,
        is_head: bool = False,
    ) -> float:
        """Return the seconds of products of the rows with `weights` numbers each.

        Every chunk reads `stored` numbers, by default `weights`.
        """
        if not work.rows or not weights:
            return 0.0
        shape, rates, stored = self._shape, self._rates, weights if stored is None else stored
        number_bytes, speed = shape.weight_bytes, shape.speed
        # The output head is not quantised unless requested.
        if is_head:
            number_bytes, speed = shape.element_bytes, 1.0
        elif number_bytes < 1:
            number_bytes /= PACKED_SHARE
        reading = work.num_chunks * stored * number_bytes / rates.memory_bytes
        launching = work.num_chunks * num_launches * rates.launch_seconds
        computing = 2.0 * work.rows * weights / (speed * rates.product_flops)
        return _together(computing, reading) + launching


def _together(one: float, other: float) -> float:
    """Return the seconds of two overlapping activities, which slow each other if equally long."""
    return math.hypot(one, other)


def even_chunk(num_rows: int, max_rows: int) -> int:
    """Return the rows of a chunk for the fewest equal chunks, in whole tiles if they fit."""
    if max_rows >= num_rows:
        return max(num_rows, 1)
    max_rows = max(max_rows, 1)
    max_rows -= max_rows % TILE_ROWS if max_rows > TILE_ROWS else 0
    even = -(-num_rows // -(-num_rows // max_rows))
    return min(-(-even // TILE_ROWS) * TILE_ROWS, max_rows)
