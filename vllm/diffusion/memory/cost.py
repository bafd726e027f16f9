# SPDX-License-Identifier: Apache-2.0
"""How long a step takes under a plan, roughly: enough to choose among plans.

Products run at a constant rate once they have many rows; few rows wait for the weights to be read.
A chunk of queries that attends to all keys costs as if it had `IDLE_QUERIES` more of them: so many
are lost while the last of its tiles finish. Rates are those of one H200 in bf16; what a choice
depends on is their proportion, which differs little between cards of one kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.diffusion.memory.footprint import ModelShape

PRODUCT_FLOPS = 796e12  # per second, large products
ATTENTION_FLOPS = 612e12  # per second, long sequences
WEIGHT_BYTES = 3.3e12  # per second, read by products of few rows
HOST_BYTES = 55e9  # per second each way, pinned host memory
LAUNCH_SECONDS = 4e-6
IDLE_ROWS = 128  # of a product: part of a tile, on average
IDLE_QUERIES = 16_384  # of all heads of a chunk: a tile for every multiprocessor

LAUNCHES_KEYS_VALUES = 4
LAUNCHES_ATTEND = 3
LAUNCHES_QUERIES = 4
LAUNCHES_FEED_FORWARD = 4


class Work(NamedTuple):
    """A stage of one layer: `rows` in all, `chunk` of them at a time."""

    rows: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        return -(-self.rows // max(self.chunk, 1))


class Costs:
    """Seconds of the stages of one model; every method is about one layer, but for `logits`."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        width = shape.head_dim * shape.hidden_size
        self._query_weights = shape.num_heads * width
        self._key_value_weights = 2 * shape.num_kv_heads * width
        mlp, stored = 3 * shape.hidden_size * shape.mlp_width, 0
        if shape.experts is not None:
            expert = 3 * shape.hidden_size * shape.experts.width
            mlp = max(mlp, shape.experts.chosen * expert)
            stored = shape.experts.count * expert
        self._mlp_weights, self._stored_mlp_weights = mlp, max(stored, mlp)

    def keys_values(self, work: Work, *, with_queries: bool, groups: int) -> float:
        """Projections of all rows, by groups of heads."""
        weights = self._key_value_weights + with_queries * self._query_weights
        return self._product(work, weights // groups, LAUNCHES_KEYS_VALUES) * groups

    def attend(self, work: Work, *, keys: int, with_queries: bool, groups: int) -> float:
        """Attention of all rows to `keys` keys each, and the projections around it."""
        shape = self._shape
        weights = self._query_weights * (1 + with_queries)
        queries = work.rows * shape.num_heads / groups + IDLE_QUERIES * work.num_chunks
        attention = 4.0 * keys * shape.head_dim * queries / ATTENTION_FLOPS
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
        return rows * self._shape.row_bytes / HOST_BYTES

    def _product(
        self, work: Work, weights: int, num_launches: int, stored: int | None = None
    ) -> float:
        """Products of the rows with `weights` numbers, of which `stored` are read at most."""
        if not work.rows:
            return 0.0
        chunks = work.num_chunks
        flops = 2.0 * (work.rows + IDLE_ROWS * chunks) * weights
        if stored is None:
            stored = weights
        reading = chunks * stored * self._shape.element_bytes / WEIGHT_BYTES
        return max(flops / PRODUCT_FLOPS, reading) + chunks * num_launches * LAUNCH_SECONDS
