# SPDX-License-Identifier: Apache-2.0
"""Bytes that a step takes: every buffer of every stage, by name.

A step has memory that stays from its first to its last stage, and memory of the stage that runs.
The first grows with the rows of the step, the second with the rows of the stage's chunk, so

    peak = kept + resident + max over the stages (rows of a chunk x bytes of a row) + rounding

with what requests keep between steps as `kept`. Letters: D hidden size, H and KV query and
key/value heads of this rank, hd head width, M width of an MLP on this rank, C logit columns of
this rank, e bytes of an element of the model dtype, G head groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import Listed

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.core.buffers import Buffer

ROUNDING_BYTES = 16 * 512  # rounding of a step's buffers: each starts at a multiple of 512 bytes

Phases = tuple[Listed, ...]  # of a stage, one after the other: what ended is given back


@dataclass(frozen=True)
class Experts:
    """A mixture of E experts, k of them for a row, each of this width on this rank.

    Attributes:
        shared_width: width of a separate expert of all rows; one that is stored with the others
            counts in E and in k.
        in_fp32: whether router logits and weights are fp32.
        quantises: whether matrices are fp8, multiplied by rows quantised to fp8.
    """

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    in_fp32: bool = False
    quantises: bool = False


class LinearBuffers(NamedTuple):
    """Scratch buffers of a layer's products for one kind of weights, besides their results.

    `project`, `gated` and `add_to` assume rows in the products' dtype (`rows`).

    Attributes:
        project: for the fused product of queries, keys and values.
        gated: for gate and up, and silu(gate) * up, in the widest MLP.
        add_to: for the products that are added to the residual stream.
        most_gated_rows: rows above which chunks take `gated_beyond` instead; None for no limit.
        quantises: whether they take rows that are quantised already.
        weight_bytes: bytes of a stored weight; None for e, as of an activation.
        speed: rate of large products relative to those of 16-bit weights.
    """

    project: Listed
    gated: Listed
    add_to: Listed
    most_gated_rows: int | None = None
    gated_beyond: Listed = ()
    quantises: bool = False
    weight_bytes: float | None = None
    speed: float = 1.0

    def rows(self, buffer: Buffer) -> Listed:
        """Buffers for rows in the products' dtype: fp8 with a scale each where they quantise."""
        return buffer.quantised if self.quantises else (buffer,)

    def made_of(self, buffer: Buffer) -> Listed:
        """Buffers for quantising rows that arrive in the model dtype; none for plain weights."""
        made = stages.QUANTISED_ROWS.of(buffer.dtype, *buffer.shape)
        return made.quantised if self.quantises else ()


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model on one rank that determine its memory and time.

    Attributes:
        num_layers: L.
        hidden_size: D.
        num_heads, num_kv_heads, head_dim: H, KV, hd.
        mlp_width: M of the widest dense MLP; 0 where every layer has experts.
        experts: the experts of the layers that have them, if any do.
        num_columns: C.
        dtype: dtype of the model, with elements of e bytes.
        rotary_dim, rotary_dtype: numbers, and their dtype, of the cosines and of the sines of one
            position.
        products: for every kind of weight that a layer may have.
        can_group_heads: whether projections can be sliced by heads and no norm spans all heads.
        collects_keys: whether kept keys and values are copied out of their pages to be read.
        num_ranks: tensor-parallel ranks, whose products are summed.
        head: buffers of the output head, besides the logits.
        split_bytes: bytes that attention of few rows takes besides, whatever the rows.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    num_columns: int
    dtype: torch.dtype
    rotary_dim: int
    rotary_dtype: torch.dtype
    products: tuple[LinearBuffers, ...]
    experts: Experts | None = None
    can_group_heads: bool = True
    collects_keys: bool = False
    num_ranks: int = 1
    head: Listed = ()
    split_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        """Bytes e of an element of the model dtype."""
        return self.dtype.itemsize

    @property
    def most_gated_rows(self) -> int | None:
        """Rows above which a chunk never stores gate and up together; None for no limit."""
        most = [products.most_gated_rows for products in self.products]
        return None if None in most else max(filter(None, most), default=0)

    @property
    def weight_bytes(self) -> float:
        """Most bytes of a stored weight of a layer."""
        return max(products.weight_bytes or self.element_bytes for products in self.products)

    @property
    def speed(self) -> float:
        """Least rate of a layer's large products relative to those of 16-bit weights."""
        return min(products.speed for products in self.products)

    @property
    def row_bytes(self) -> int:
        """Bytes D e of one row of the residual stream."""
        return self.hidden_size * self.element_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes H hd e of the queries of one row."""
        return self.num_heads * self.head_dim * self.element_bytes

    @property
    def key_value_bytes(self) -> int:
        """Bytes 2 KV hd e of keys and values of one row in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of one position in all layers."""
        return self.num_layers * self.key_value_bytes

    @property
    def head_groups(self) -> tuple[int, ...]:
        """Possible numbers of head groups: powers of two that divide KV."""
        if not self.can_group_heads:
            return (1,)
        powers = (1 << exponent for exponent in range(self.num_kv_heads.bit_length()))
        return tuple(power for power in powers if self.num_kv_heads % power == 0)


class StepShape(NamedTuple):
    """Sizes of a step.

    Attributes:
        rows: T, rows of all sequences together.
        sample_rows: rows whose hidden states are sampled, or guide the sampling of others.
        longest: keys of the longest sequence.
        num_sequences: sequences.
        kept_keys: keys of the longest sequence whose keys are kept from earlier steps.
        keeps: whether it writes keys and values that are kept.
    """

    rows: int
    sample_rows: int
    longest: int
    num_sequences: int = 1
    kept_keys: int = 0
    keeps: bool = False

    def share(self, count: int) -> StepShape:
        """Return the part of one of `count` ranks: its rows, but all keys of its heads."""
        rows, sample_rows = -(-self.rows // count), -(-self.sample_rows // count)
        return self._replace(rows=rows, sample_rows=sample_rows)

    def with_rows(self, rows: int) -> StepShape:
        """Return this step with so many rows, of which no more are sampled."""
        return self._replace(rows=rows, sample_rows=min(self.sample_rows, rows))

    def scaled(self, rows: int) -> StepShape:
        """Return a step of the same kind with fewer rows."""
        part = rows / self.rows
        return self._replace(
            rows=rows,
            sample_rows=math.ceil(self.sample_rows * part),
            longest=int(self.longest * part),
            kept_keys=int(self.kept_keys * part),
        )


class Residency(NamedTuple):
    """Data that stays on the device for a whole step.

    Attributes:
        keep_queries: queries and rotary tables are computed once for all rows, else by every chunk
            for itself.
        head_groups: G; keys and values of one group of heads exist at a time.
        host_residual: the residual stream lies in host memory and visits the device in chunks.
        shards: N ranks divide the rows, and each has all keys and values of its part of the heads
            of a group. Row counts are then those of one rank.
    """

    keep_queries: bool
    head_groups: int = 1
    host_residual: bool = False
    shards: int = 1

    @property
    def is_streamed(self) -> bool:
        """Whether layers run group by group, share by share or from the host."""
        return self.head_groups > 1 or self.host_residual or self.shards > 1


class Footprint:
    """Buffers of the stages of one model.

    Every stage method returns the buffers of a row of its chunk, phase by phase.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._tables = stages.rotary(shape.rotary_dtype, shape.rotary_dim)

    def resident(self, layout: Residency) -> Listed:
        """Buffers of a row that stay on the device from the first to the last stage."""
        shape = self.shape
        rows = () if layout.host_residual else self._stores(layout)
        if layout.is_streamed:
            num_heads = shape.num_kv_heads // layout.head_groups
            return stages.INPUTS, *rows, *stages.keys_values(*self._heads(num_heads))
        num_heads = shape.num_heads if layout.keep_queries else 0
        fused = stages.fused_heads(shape.dtype, num_heads, shape.num_kv_heads, shape.head_dim)
        return stages.INPUTS, *rows, fused, *(self._tables if layout.keep_queries else ())

    def collected_keys(self, layout: Residency) -> int:
        """Bytes of a key of `StepShape.kept_keys` in the stages that attend."""
        shape = self.shape
        if not shape.collects_keys:
            return 0
        heads = self._heads(shape.num_kv_heads // layout.head_groups)
        return stages.collected_keys(*heads).row_bytes

    def keys_values(self, layout: Residency) -> Phases:
        """Buffers of the keys-values stage: the norm of the rows; projections are resident."""
        shape = self.shape
        visiting = (*self._visiting(layout, 1), *self._rotary(layout))
        normed = stages.normed(shape.dtype, shape.hidden_size)
        phases = tuple((*visiting, *p.rows(normed), *p.project) for p in shape.products)
        if layout.shards == 1:
            return phases
        heads = self._heads(shape.num_kv_heads // layout.head_groups)
        own = stages.keys_values(*heads, is_own=True)
        exchanged = stages.exchanged(*heads)
        return *((*own, *phase) for phase in phases), (*visiting, *own, *exchanged)

    def attend(self, layout: Residency, *, is_packed: bool) -> Phases:
        """Buffers of the attend stage: queries, then attention and its projection.

        Args:
            layout: layout of the step.
            is_packed: a chunk may hold rows of several sequences, whose results are collected.
        """
        visiting = (*self._visiting(layout, 2), *self._rotary(layout))
        phases = self._attending(layout, is_packed, has_queries=layout.keep_queries)
        return tuple((*visiting, *phase) for phase in phases)

    def _attending(self, layout: Residency, is_packed: bool, *, has_queries: bool) -> Phases:
        shape = self.shape
        heads = self._heads(shape.num_heads // layout.head_groups)
        *attending, collected = stages.attending(*heads)
        if is_packed:
            attending.append(collected)
        made = [(*products.made_of(attending[0]), *products.add_to) for products in shape.products]
        phases = tuple((*attending, *phase) for phase in made)
        if has_queries:
            return phases
        exchanged = stages.exchanged(*heads) if layout.shards > 1 else ()
        projecting = [(*self._querying(heads, p), *p.project) for p in shape.products]
        queries = projecting[0][0]
        phases = *projecting, *((queries, *phase) for phase in phases)
        return tuple((*exchanged, *phase) for phase in phases)

    def feed_forward(self, layout: Residency, *, is_long: bool = False) -> Phases:
        """Buffers of the feed-forward stage, for each kind of MLP of the model.

        Args:
            layout: layout of the step.
            is_long: whether chunks have more than `ModelShape.most_gated_rows` rows.
        """
        visiting = self._visiting(layout, 1)
        dense = (self._mlp(products, is_long) for products in self.shape.products)
        return tuple(
            (*visiting, *phase) for phases in (*dense, self._experts()) for phase in phases
        )

    def read(self, layout: Residency, *, is_packed: bool) -> Phases:
        """Buffers of sample rows after the body: the rest of the last layer, then logits.

        In a streamed layout the last layer is over by then.
        """
        shape = self.shape
        sampled, given = stages.read_rows(shape.dtype, shape.hidden_size)
        head = stages.head(shape.dtype, shape.hidden_size, shape.num_columns)
        logits = *head, *shape.head
        if layout.is_streamed:
            of_others = (given,) * layout.shards if layout.shards > 1 else ()
            return ((*of_others, sampled, *logits),)
        phases = (
            *self._attending(layout, is_packed, has_queries=False),
            *self.feed_forward(layout),
            logits,
        )
        return tuple((sampled, *self._tables, *phase) for phase in phases)

    def read_results(self, layout: Residency) -> Listed:
        """Buffers of a sample row for the rest of the step; for those of other ranks, too."""
        return (stages.RESULTS,) * layout.shards

    def _heads(self, count: int) -> tuple[torch.dtype, int, int]:
        """Arguments (dtype, heads, head width) of the functions of `stages`."""
        return self.shape.dtype, count, self.shape.head_dim

    def _querying(self, heads: tuple[torch.dtype, int, int], products: LinearBuffers) -> Listed:
        dtype, *sizes = heads
        queries, normed = stages.querying(
            dtype, self.shape.hidden_size, *sizes, quantises=products.quantises
        )
        return queries, *products.rows(normed)

    def _rotary(self, layout: Residency) -> Listed:
        return () if layout.keep_queries else self._tables

    def _stores(self, layout: Residency) -> Listed:
        return stages.residual(self.shape.dtype, self.shape.hidden_size, layout.head_groups)

    def _visiting(self, layout: Residency, most: int) -> Listed:
        """Buffers of chunks of at most `most` stores, where rows come from the host."""
        if not layout.host_residual:
            return ()
        stores = self._stores(layout)[:most]
        return tuple(chunk for store in stores for chunk in stages.visiting(store))

    def _mlp(self, products: LinearBuffers, is_long: bool) -> Phases:
        """Buffers of a dense MLP; with several kinds of products, the second may get plain rows."""
        shape = self.shape
        if not shape.mlp_width:
            return ()
        activated, normed = stages.gating(shape.dtype, shape.hidden_size, shape.mlp_width)
        gating = products.gated_beyond if is_long else products.gated
        out = products.rows(activated)
        adding = out if len(shape.products) == 1 else (activated, *products.made_of(activated))
        return (*out, *products.rows(normed), *gating), (*adding, *products.add_to)

    def _experts(self) -> Phases:
        experts, shape = self.shape.experts, self.shape
        if experts is None:
            return ()
        dtype, width = shape.dtype, shape.hidden_size
        terms = stages.of_experts(
            *(width, experts.count, experts.chosen, experts.width, dtype),
            in_fp32=experts.in_fp32,
            quantises=experts.quantises,
        )
        if shape.num_ranks > 1:
            terms += (stages.PROJECTED.of(dtype, width),)
        phases: list[Listed] = [terms]
        if experts.shared_width:
            activated, normed = stages.gating(dtype, width, experts.shared_width)
            phases += [(*p.rows(activated), *p.made_of(normed), *p.gated) for p in shape.products]
        beside = stages.beside_experts(dtype, width, has_shared=experts.shared_width > 0)
        return tuple((*beside, *phase) for phase in phases)


def device_layers(num_layers: int, host_layers: int) -> int:
    """Number of layers of kept keys and values that take memory of the device.

    Layers in host memory visit it in turn, `NUM_STREAM_BUFFERS` at a time.
    """
    return num_layers - host_layers + (stages.NUM_STREAM_BUFFERS if host_layers else 0)
