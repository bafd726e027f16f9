# SPDX-License-Identifier: Apache-2.0
"""What a step takes, in bytes: every buffer of every stage, by name.

A step has memory that stays from its first to its last stage, and memory of the stage that runs.
The first grows with the rows of the step, the second with the rows of the stage's chunk, so

    peak = kept + resident + max over the stages (rows of a chunk x bytes of a row) + rounding

with what requests keep between steps as `kept`. Letters: D hidden size, H and KV query and
key/value heads of this rank, hd head width, M width of an MLP on this rank, C logit columns of
this rank, e bytes of an element of the model dtype, G head groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

FP32_BYTES = 4
STATISTICS_BYTES = 4  # log-sum-exp that attention kernels store for each query and head, fp32
INPUT_BYTES = 3 * 8  # token, position and slot of a row, int64
READ_INPUT_BYTES = 2 * 8  # row and position of a row that is read, int64
RESULT_BYTES = 3 * 8  # what sampling finds for a row, float64
ROUNDING_BYTES = 16 * 512  # of a step's buffers, each of which starts at a multiple of 512 bytes
NUM_STREAM_BUFFERS = 2  # chunks of rows on the device at a time when they come from the host

Terms = dict[str, int]  # bytes, by what they are for
Phases = tuple[Terms, ...]  # of a stage, one after the other: what has ended is given back


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: E of them, k for a row, each of this width on this rank.

    Attributes:
        shared_width: of an expert of all rows that is apart; one that is stored with the others is
            one of E, and of k.
        in_fp32: logits of the router, and weights, are fp32.
    """

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    in_fp32: bool = False


class Products(NamedTuple):
    """What the products of a layer take besides their results, where weights are of one kind.

    Attributes:
        project: bytes a row of the fused product of queries, keys and values, by name.
        gated: of gate and up, and silu(gate) * up, in the widest MLP.
        add_to: of the products that are added to the residual stream.
        most_gated_rows: chunks of more rows take nothing of `gated`; None for no end.
        quantises: they take rows that are quantised already.
        weight_bytes: of a stored number of a weight; None: e, as of one of a row.
        speed: of large products, over those of 16-bit weights.
    """

    project: Terms
    gated: Terms
    add_to: Terms
    most_gated_rows: int | None = None
    quantises: bool = False
    weight_bytes: float | None = None
    speed: float = 1.0


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model on one rank that its memory and its time follow from.

    Attributes:
        num_layers: L.
        hidden_size: D.
        num_heads, num_kv_heads, head_dim: H, KV, hd.
        mlp_width: M of the widest dense MLP; 0 where every layer has experts.
        experts: of the layers that have them, if any do.
        num_columns: C.
        element_bytes: e.
        rotary_bytes: of the cosines and sines of one position.
        products: of every kind of weight that a layer may have.
        can_group_heads: they can be sliced, and no norm spans all heads.
        collects_keys: kept keys and values of a sequence are copied out of their pages to be read.
        num_ranks: tensor-parallel ranks, whose products are summed.
        head: bytes a row of the logits' product, by name, besides the logits.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    num_columns: int
    element_bytes: int
    rotary_bytes: int
    products: tuple[Products, ...]
    experts: Experts | None = None
    can_group_heads: bool = True
    collects_keys: bool = False
    num_ranks: int = 1
    head: Terms = field(default_factory=dict)

    @property
    def most_gated_rows(self) -> int | None:
        """Chunks of more rows store no gate and up; None where any may."""
        most = [products.most_gated_rows for products in self.products]
        return None if None in most else max(filter(None, most), default=0)

    @property
    def weight_bytes(self) -> float:
        """Of a stored number of a layer's weights, at most."""
        return max(products.weight_bytes or self.element_bytes for products in self.products)

    @property
    def speed(self) -> float:
        """Of a layer's large products, at least, over those of 16-bit weights."""
        return min(products.speed for products in self.products)

    @property
    def row_bytes(self) -> int:
        """D e: one row of the residual stream."""
        return self.hidden_size * self.element_bytes

    @property
    def query_bytes(self) -> int:
        """H hd e: the queries of one row."""
        return self.num_heads * self.head_dim * self.element_bytes

    @property
    def key_value_bytes(self) -> int:
        """2 KV hd e: keys and values of one row in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one position in all layers."""
        return self.num_layers * self.key_value_bytes

    @property
    def head_groups(self) -> tuple[int, ...]:
        """Into how many groups the heads can be cut: powers of two that divide KV."""
        if not self.can_group_heads:
            return (1,)
        powers = (1 << exponent for exponent in range(self.num_kv_heads.bit_length()))
        return tuple(power for power in powers if self.num_kv_heads % power == 0)


# What PyTorch allocates itself, while the other terms are buffers of the pool.
TEMPORARIES = frozenset(
    {
        *("normed rows", "attention", "statistics", "collected attention"),
        *("quantised product", "routing", "activated of experts", "terms of experts"),
    }
)


class StepShape(NamedTuple):
    """The sizes of a step.

    Attributes:
        rows: T of all sequences together.
        sample_rows: rows whose hidden states are sampled, or guide the sampling of others.
        longest: keys of the longest sequence.
        num_sequences: sequences.
        kept_keys: keys of the longest sequence whose keys are kept from earlier steps.
        keeps: it writes keys and values that are kept.
    """

    rows: int
    sample_rows: int
    longest: int
    num_sequences: int = 1
    kept_keys: int = 0
    keeps: bool = False

    def share(self, count: int) -> StepShape:
        """What one of so many ranks has of it: rows, but all keys of its heads."""
        rows, sample_rows = -(-self.rows // count), -(-self.sample_rows // count)
        return self._replace(rows=rows, sample_rows=sample_rows)

    def scaled(self, rows: int) -> StepShape:
        """A step of fewer rows of the same kind."""
        part = rows / self.rows
        return self._replace(
            rows=rows,
            sample_rows=math.ceil(self.sample_rows * part),
            longest=int(self.longest * part),
            kept_keys=int(self.kept_keys * part),
        )


class Layout(NamedTuple):
    """What stays on the device for a whole step.

    Attributes:
        keep_queries: queries, and tables of the rotary embedding, are computed once for all rows,
            else by every chunk for itself.
        head_groups: G; keys and values of one group of heads exist at a time.
        host_residual: the residual stream lies in host memory and visits the device in chunks.
        shards: N; so many ranks divide the rows, and each has all keys and values of its part of
            the heads of a group. Rows are those of a rank.
    """

    keep_queries: bool
    head_groups: int = 1
    host_residual: bool = False
    shards: int = 1


class Footprint:
    """Bytes of the stages of one model.

    Every stage method gives the bytes that one row of its chunk takes, phase by phase.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def resident(self, layout: Layout) -> Terms:
        """Bytes a row of the step takes on the device from its first to its last stage."""
        shape = self.shape
        terms = {
            "inputs": INPUT_BYTES,
            "keys and values": shape.key_value_bytes // layout.head_groups,
        }
        if not layout.host_residual:
            terms["residual"] = shape.row_bytes
            if layout.head_groups > 1:
                terms["updated residual"] = shape.row_bytes
        if layout.keep_queries:
            terms["queries"] = shape.query_bytes
            terms["rotary tables"] = shape.rotary_bytes
        return terms

    def collected_keys(self, layout: Layout) -> int:
        """Bytes that a key of `StepShape.kept_keys` takes, in the stages that attend."""
        shape = self.shape
        return shape.key_value_bytes // layout.head_groups if shape.collects_keys else 0

    def keys_values(self, layout: Layout) -> Phases:
        """The norm of the rows; their projections are resident."""
        terms = self._visiting(layout) | self._rotary(layout)
        normed = {"normed": self.shape.row_bytes}
        phases = tuple(terms | normed | products.project for products in self.shape.products)
        if layout.shards == 1:
            return phases
        key_bytes = self.shape.key_value_bytes // 2 // layout.head_groups
        own = {"k": key_bytes, "v": key_bytes}
        exchanging = {"given": key_bytes, "received": key_bytes}
        return *(own | phase for phase in phases), terms | own | exchanging

    def attend(self, layout: Layout, *, is_packed: bool) -> Phases:
        """Queries, then attention and its projection.

        Args:
            layout: of the step.
            is_packed: a chunk may hold rows of several sequences, whose results are collected.
        """
        terms = self._visiting(layout, num_streams=2 if layout.head_groups > 1 else 1)
        terms |= self._rotary(layout)
        phases = self._attending(layout, is_packed, has_queries=layout.keep_queries)
        return tuple(terms | phase for phase in phases)

    def _attending(self, layout: Layout, is_packed: bool, *, has_queries: bool) -> Phases:
        shape, groups = self.shape, layout.head_groups
        attending = {
            "attention": shape.query_bytes // groups,
            "statistics": STATISTICS_BYTES * shape.num_heads // groups,
        }
        if is_packed:
            attending["collected attention"] = shape.query_bytes // groups
        phases = tuple(attending | products.add_to for products in shape.products)
        if has_queries:
            return phases
        queries = {"queries": shape.query_bytes // groups}
        if layout.shards > 1:
            queries |= dict.fromkeys(("given", "received"), shape.query_bytes // groups)
        projecting = tuple(
            {self._normed_for_queries(products, groups): shape.row_bytes} | products.project
            for products in shape.products
        )
        return tuple(queries | phase for phase in (*projecting, *phases))

    def _normed_for_queries(self, products: Products, groups: int) -> str:
        """What the rows are called: where attention can have their memory, PyTorch's."""
        is_replaced = self.shape.query_bytes // groups <= self.shape.row_bytes
        return "normed rows" if is_replaced and not products.quantises else "normed"

    def feed_forward(self, layout: Layout, *, is_long: bool = False) -> Phases:
        """Each kind of MLP of the model.

        Args:
            layout: of the step.
            is_long: in chunks of more than `ModelShape.most_gated_rows` rows.
        """
        visiting = self._visiting(layout)
        dense = (self._mlp(products, is_long) for products in self.shape.products)
        return tuple(visiting | phase for phases in (*dense, self._experts()) for phase in phases)

    def read(self, layout: Layout, *, is_packed: bool) -> Phases:
        """Rows that are read after the last layer: the rest of that layer, then their logits.

        With head groups or a host residual the last layer is over by then.
        """
        shape = self.shape
        logits = {"normed": shape.row_bytes, "logits": shape.num_columns * shape.element_bytes}
        logits |= shape.head
        if is_streamed(layout):
            given = {"given rows": layout.shards * shape.row_bytes} if layout.shards > 1 else {}
            return (given | {"read rows": shape.row_bytes} | logits,)
        phases = (
            *self._attending(layout, is_packed, has_queries=False),
            *self.feed_forward(layout),
            logits,
        )
        rows = {"read rows": shape.row_bytes + shape.rotary_bytes}
        return tuple(rows | phase for phase in phases)

    def read_results(self, layout: Layout) -> Terms:
        """Bytes that a row that is read takes for the rest of the step; of other ranks', too."""
        shards = layout.shards
        return {"read inputs": shards * READ_INPUT_BYTES, "results": shards * RESULT_BYTES}

    def _rotary(self, layout: Layout) -> Terms:
        if layout.keep_queries:
            return {}
        return {"rotary tables": self.shape.rotary_bytes}

    def _visiting(self, layout: Layout, num_streams: int = 1) -> Terms:
        """Rows that come from the host, the next ones on their way while these are worked on."""
        if not layout.host_residual:
            return {}
        return {"visiting rows": num_streams * NUM_STREAM_BUFFERS * self.shape.row_bytes}

    def _mlp(self, products: Products, is_long: bool) -> Phases:
        shape = self.shape
        if not shape.mlp_width:
            return ()
        activated = {"activated": shape.mlp_width * shape.element_bytes}
        gating = {"normed rows": shape.row_bytes} | ({} if is_long else products.gated)
        return activated | gating, activated | products.add_to

    def _experts(self) -> Phases:
        experts, element = self.shape.experts, self.shape.element_bytes
        if experts is None:
            return ()
        rows, row_bytes = experts.chosen, self.shape.row_bytes
        scores = FP32_BYTES if experts.in_fp32 else element
        resident = {"normed": row_bytes}
        if experts.shared_width:
            resident["shared expert"] = row_bytes
        terms = resident | {
            # scores; weights, slots int32, choices int16
            "routing": experts.count * scores + rows * (scores + 6),
            "activated of experts": rows * experts.width * element,
            "terms of experts": rows * row_bytes,
        }
        if self.shape.num_ranks > 1:
            terms["projected"] = row_bytes
        if not experts.shared_width:
            return (terms,)
        activated = resident | {"activated": experts.shared_width * element}
        return *(activated | products.gated for products in self.shape.products), terms


def device_layers(num_layers: int, host_layers: int) -> int:
    """Layers of kept keys and values that the device has room for.

    Layers in host memory visit it in turn, so many at a time.
    """
    return num_layers - host_layers + (NUM_STREAM_BUFFERS if host_layers else 0)


def is_streamed(layout: Layout) -> bool:
    """Whether layers run group by group, share by share or from the host, see `Layout`."""
    return layout.head_groups > 1 or layout.host_residual or layout.shards > 1


def total(terms: Terms) -> int:
    """The sum of the terms."""
    return sum(terms.values())


def temporary(terms: Terms) -> int:
    """The sum of those terms that PyTorch allocates itself."""
    return sum(num_bytes for name, num_bytes in terms.items() if name in TEMPORARIES)


def buffered(terms: Terms) -> int:
    """The sum of those terms that are buffers of the pool."""
    return total(terms) - temporary(terms)
