# SPDX-License-Identifier: Apache-2.0
"""How long a step takes under a plan, roughly: enough to choose among plans.

Products run at a constant rate once they have many rows; few rows wait for the weights to be read.
A chunk of queries that attends to all keys costs as if it had some more of them: so many are lost
while the last of its tiles finish, but no more than it has. The rates of a GPU are those of one
H200 in bf16; what a choice depends on is their proportion, which differs little between cards of
one kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.memory.footprint import is_streamed
from vllm.diffusion.memory.plan import StageSeconds

if TYPE_CHECKING:
    from vllm.diffusion.memory.drafts import Sizes
    from vllm.diffusion.memory.footprint import Layout, ModelShape, StepShape

LAUNCHES_KEYS_VALUES = 4
LAUNCHES_ATTEND = 3
LAUNCHES_QUERIES = 4
LAUNCHES_FEED_FORWARD = 4
QUERY_TILE = 128


class Rates(NamedTuple):
    """What a device does in a second, and what is lost with every chunk.

    Attributes:
        product_flops: of large products.
        attention_flops: of long sequences.
        weight_bytes: read by products of few rows.
        host_bytes: each way between the device and pinned host memory.
        launch_seconds: of a kernel.
        idle_rows: of a product: part of a tile, on average.
        idle_queries: of all heads of a chunk: a tile for every multiprocessor.
        multiprocessors: that compute a tile of queries of one head each at a time.
        link_bytes: to other ranks, with the copies before and after; out of one, as much in.
        exchange_seconds: of every exchange with other ranks, whatever its size.
    """

    product_flops: float
    attention_flops: float
    weight_bytes: float
    host_bytes: float
    launch_seconds: float
    idle_rows: int
    idle_queries: int
    multiprocessors: int
    link_bytes: float
    exchange_seconds: float


H200 = Rates(796e12, 612e12, 3.3e12, 55e9, 4e-6, 128, 16_384, 132, 200e9, 150e-6)
# One slow core: the scheduler learns what it has (`engine/slicing.py`), and a device that is taken
# for too slow only has its steps cut where they need not be.
CPU = Rates(20e9, 10e9, 5e9, 5e9, 20e-6, 0, 0, 1, 1e9, 500e-6)


class Work(NamedTuple):
    """A stage of one layer: `rows` in all, `chunk` of them at a time."""

    rows: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // max(self.chunk, 1))


class Costs:
    """Seconds of the stages of one model, of a step or of one layer."""

    def __init__(self, shape: ModelShape, rates: Rates = H200) -> None:
        self._shape, self._rates = shape, rates
        width = shape.head_dim * shape.hidden_size
        self._query_weights = shape.num_heads * width
        self._key_value_weights = 2 * shape.num_kv_heads * width
        mlp, stored = 3 * shape.hidden_size * shape.mlp_width, 0
        if shape.experts is not None:
            expert = 3 * shape.hidden_size * shape.experts.width
            mlp = max(mlp, shape.experts.chosen * expert)
            stored = shape.experts.count * expert
        self._mlp_weights, self._stored_mlp_weights = mlp, max(stored, mlp)

    def whole_waves(self, rows: int, groups: int) -> int:
        """The most query rows, up to `rows`, that leave no multiprocessor without a tile.

        Attention takes `QUERY_TILE` rows of one head on each at a time, and all tiles take alike.
        """
        heads, units = self._shape.num_heads // groups, self._rates.multiprocessors
        wave = QUERY_TILE * (units // math.gcd(units, heads))
        return rows - rows % wave if rows > wave else rows

    def step(self, step: StepShape, layout: Layout, sizes: Sizes) -> StageSeconds:
        """Of all layers."""
        rows, layers = step.rows, self._shape.num_layers
        # Of the last layer only the rows that are read are attended to and fed forward.
        is_whole = is_streamed(layout)
        updated = layers if is_whole else layers - 1 + step.sample_rows / max(rows, 1)
        works = (Work(rows, chunk) for chunk in sizes[:3])
        keys_values, attend, feed_forward = self._layer(layout, step.longest, *works)
        logits = self._logits(Work(step.sample_rows, sizes.read))
        return StageSeconds(layers * keys_values, updated * attend, updated * feed_forward, logits)

    def longest_chunks(self, step: StepShape, layout: Layout, sizes: Sizes) -> StageSeconds:
        """Of the longest chunk of each stage, for one group of heads of one layer."""
        groups, keys = layout.head_groups, step.longest
        *works, read = (Work(rows, rows) for rows in sizes)
        keys_values, attend, feed_forward = self._layer(layout, keys, *works)
        read_s = self._logits(read)
        if not is_streamed(layout):  # of these rows the last layer is still to come
            read_s += self._attend(read, keys=keys, with_queries=True, groups=1)
            read_s += self._feed_forward(read)
        return StageSeconds(keys_values / groups, attend / groups, feed_forward, read_s)

    def _layer(
        self, layout: Layout, keys: int, keys_values: Work, attend: Work, feed_forward: Work
    ) -> tuple[float, float, float]:
        """The stages of one layer, for all groups of heads."""
        shape, groups, shards = self._shape, layout.head_groups, layout.shards
        keep = layout.keep_queries
        keys_values_s = self._keys_values(keys_values, with_queries=keep, groups=groups)
        attend_s = self._attend(attend, keys=keys, with_queries=not keep, groups=groups)
        feed_s = self._feed_forward(feed_forward)
        # Keys of all heads, and values; queries, and what comes back of them.
        for_keys, for_queries = shape.key_value_bytes // 2 // groups, shape.query_bytes // groups
        keys_values_s += groups * self._exchange(keys_values, for_keys, shards=shards, count=2)
        attend_s += groups * self._exchange(attend, for_queries, shards=shards, count=2)
        if layout.host_residual:
            # Each group reads the rows twice, and adds to the updated ones; copies both ways and
            # computing overlap.
            keys_values_s = max(keys_values_s, groups * self._visit(keys_values.rows))
            num_stores = 2 if groups > 1 else 1
            attend_s = max(attend_s, groups * self._visit(attend.rows) * num_stores)
            feed_s = max(feed_s, self._visit(feed_forward.rows))
        return keys_values_s, attend_s, feed_s

    def _keys_values(self, work: Work, *, with_queries: bool, groups: int) -> float:
        """Projections of all rows, by groups of heads."""
        weights = self._key_value_weights + with_queries * self._query_weights
        return self._product(work, weights // groups, LAUNCHES_KEYS_VALUES) * groups

    def _attend(self, work: Work, *, keys: int, with_queries: bool, groups: int) -> float:
        """Attention of all rows to `keys` keys each, and the projections around it."""
        shape = self._shape
        weights = self._query_weights * (1 + with_queries)
        heads = shape.num_heads / groups
        idle = min(self._rates.idle_queries, work.chunk * heads)  # of few queries keys are split
        queries = work.rows * heads + idle * work.num_chunks
        attention = 4.0 * keys * shape.head_dim * queries / self._rates.attention_flops
        num_launches = LAUNCHES_ATTEND + with_queries * LAUNCHES_QUERIES
        return groups * (attention + self._product(work, weights // groups, num_launches))

    def _feed_forward(self, work: Work) -> float:
        """The widest MLP for all rows."""
        return self._product(
            work, self._mlp_weights, LAUNCHES_FEED_FORWARD, self._stored_mlp_weights
        )

    def _logits(self, work: Work) -> float:
        """The output head for the rows that are read."""
        return self._product(work, self._shape.num_columns * self._shape.hidden_size, 3)

    def _visit(self, rows: int) -> float:
        """Rows of the residual stream between host and device, one way."""
        return rows * self._shape.row_bytes / self._rates.host_bytes

    def _exchange(self, work: Work, row_bytes: int, *, shards: int, count: int) -> float:
        """So many exchanges of `row_bytes` of each row with other ranks."""
        if shards == 1:
            return 0.0
        given = work.rows * row_bytes * (shards - 1) / shards
        waiting = work.num_chunks * self._rates.exchange_seconds
        return count * (given / self._rates.link_bytes + waiting)

    def _product(
        self, work: Work, weights: int, num_launches: int, stored: int | None = None
    ) -> float:
        """Products of the rows with `weights` numbers, of which `stored` are read at most."""
        if not work.rows:
            return 0.0
        rates, chunks = self._rates, work.num_chunks
        flops = 2.0 * (work.rows + rates.idle_rows * chunks) * weights
        if stored is None:
            stored = weights
        reading = chunks * stored * self._shape.element_bytes / rates.weight_bytes
        launching = chunks * num_launches * rates.launch_seconds
        return max(flops / rates.product_flops, reading) + launching
