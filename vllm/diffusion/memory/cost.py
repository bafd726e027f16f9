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

if TYPE_CHECKING:
    from vllm.diffusion.memory.footprint import ModelShape

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
    """Seconds of the stages of one model; every method is about one layer, but for `logits`."""

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

    def keys_values(self, work: Work, *, with_queries: bool, groups: int) -> float:
        """Projections of all rows, by groups of heads."""
        weights = self._key_value_weights + with_queries * self._query_weights
        return self._product(work, weights // groups, LAUNCHES_KEYS_VALUES) * groups

    def attend(self, work: Work, *, keys: int, with_queries: bool, groups: int) -> float:
        """Attention of all rows to `keys` keys each, and the projections around it."""
        shape = self._shape
        weights = self._query_weights * (1 + with_queries)
        heads = shape.num_heads / groups
        idle = min(self._rates.idle_queries, work.chunk * heads)  # of few queries keys are split
        queries = work.rows * heads + idle * work.num_chunks
        attention = 4.0 * keys * shape.head_dim * queries / self._rates.attention_flops
        num_launches = LAUNCHES_ATTEND + with_queries * LAUNCHES_QUERIES
        return groups * (attention + self._product(work, weights // groups, num_launches))

    def feed_forward(self, work: Work) -> float:
        """The widest MLP for all rows."""
        return self._product(
            work, self._mlp_weights, LAUNCHES_FEED_FORWARD, self._stored_mlp_weights
        )

    def logits(self, work: Work) -> float:
        """The output head for the rows that are read."""
        return self._product(work, self._shape.num_columns * self._shape.hidden_size, 3)

    def visit(self, rows: int) -> float:
        """Rows of the residual stream between host and device, one way."""
        return rows * self._shape.row_bytes / self._rates.host_bytes

    def exchange(self, work: Work, row_bytes: int, *, shards: int, count: int) -> float:
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
