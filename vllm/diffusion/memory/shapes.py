# SPDX-License-Identifier: Apache-2.0
"""Sizes that plans follow from: of the model on one rank, of a step, and of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core import stages
from vllm.diffusion.core.pages import in_whole_pages

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.core.buffers import Buffer
    from vllm.diffusion.core.stages import Listed


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
        most_gated_rows: rows above which chunks take `gated_limit` instead; None for no limit.
        quantises: whether they take rows that are quantised already.
        weight_bytes: bytes of a stored weight; None for e, as of an activation.
        speed: rate of large products relative to those of 16-bit weights.
    """

    project: Listed
    gated: Listed
    add_to: Listed
    most_gated_rows: int | None = None
    gated_limit: Listed = ()
    quantises: bool = False
    weight_bytes: float | None = None
    speed: float = 1.0

    def rows(self, buffer: Buffer) -> Listed:
        """Buffers for rows in the products' dtype: fp8 with a scale each where they quantise."""
        return buffer.quantised if self.quantises else (buffer,)

    def quant_buffers(self, buffer: Buffer) -> Listed:
        """Buffers for quantising rows that arrive in the model dtype; none for plain weights."""
        made = stages.quantised_rows(buffer.dtype, *buffer.shape)
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
        scales_queries: whether each position has a factor of its queries.
        products: for every kind of weight that a layer may have.
        can_group_heads: whether projections can be sliced by heads and no norm spans all heads.
        collects_keys: whether kept keys and values are copied out of their pages to be read.
        num_ranks: tensor-parallel ranks, whose products are summed.
        row_unit: rows of a chunk of the feed-forward stage are a multiple of it.
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
    row_unit: int = 1
    scales_queries: bool = False
    head: Listed = ()
    split_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        """Bytes e of an element of the model dtype."""
        return self.dtype.itemsize

    @property
    def most_gated_rows(self) -> int | None:
        """Rows above which a chunk never stores gate and up together; None for no limit."""
        rows = [products.most_gated_rows for products in self.products]
        return None if None in rows else max(filter(None, rows), default=0)

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
        fp8_attention: whether its attention is fp8.
    """

    rows: int
    sample_rows: int
    longest: int
    num_sequences: int = 1
    kept_keys: int = 0
    keeps: bool = False
    fp8_attention: bool = False

    def share(self, count: int) -> StepShape:
        """Return the part of one of `count` ranks: its rows, but all keys of its heads."""
        rows, sample_rows = -(-self.rows // count), -(-self.sample_rows // count)
        return self._replace(rows=rows, sample_rows=sample_rows)

    def with_rows(self, rows: int) -> StepShape:
        """Return this step with so many rows, of which no more are sampled."""
        is_whole = self.fp8_attention and rows >= self.rows
        sample_rows = min(self.sample_rows, rows)
        return self._replace(rows=rows, sample_rows=sample_rows, fp8_attention=is_whole)

    def scaled(self, rows: int) -> StepShape:
        """Return a step of the same kind with fewer rows."""
        part = rows / self.rows
        return self._replace(
            rows=rows,
            sample_rows=math.ceil(self.sample_rows * part),
            longest=int(self.longest * part),
            kept_keys=int(self.kept_keys * part),
        )


@dataclass(frozen=True)
class Demand:
    """Rows and memory that a request takes while it runs.

    Attributes:
        length: positions of its sequence.
        sample_positions: most positions sampled in one step.
        num_sequences: 2 with guidance, which runs the sequence twice.
        keeps_cache: whether the keys and values of all positions are kept, in every sequence.
        window: most positions that most of its forwards compute, as keys and values of the others
            are kept; None where every forward may compute all.
        first: positions of its first forward; None for all.
        host_layers: number of layers whose kept keys and values lie in host memory.
        spare: positions, besides its own, for requests that read its prompt's keys and values.
        reads_prompt: whether it reads the prompt of another request, which counts what both keep.
        unit: granularity, in positions, at which a forward can be cut; None if forwards cannot be
            cut. With a unit, pages are not counted here.
        once: whether it has only one forward.
        fp8_attention: whether attention is fp8 in forwards of all positions.
    """

    length: int
    sample_positions: int
    num_sequences: int = 1
    keeps_cache: bool = False
    window: int | None = None
    first: int | None = None
    unit: int | None = None
    host_layers: int = 0
    spare: int = 0
    reads_prompt: bool = False
    once: bool = False
    fp8_attention: bool = False

    @property
    def first_rows(self) -> int:
        """Rows of the first forward."""
        if self.reads_prompt:
            return self.steady_rows
        return (self.first or self.length) * self.num_sequences

    def largest_rows(self, row_budget: int) -> int:
        """Rows of the largest forward; one that can be cut has at most `row_budget`."""
        rows = self.steady_rows if self.reads_prompt else self.length * self.num_sequences
        return rows if self.unit is None else min(rows, max(row_budget // self.unit, 1) * self.unit)

    @property
    def steady_rows(self) -> int:
        """Most rows in most steps."""
        return (self.window or self.length) * self.num_sequences

    @property
    def shared_rows(self) -> int:
        """Most rows in every step shared with others.

        Half of them for a request with a single forward: while it takes part in a step, another one
        may wait for the step behind, so that a device need not wait for whoever comes next.
        """
        return -(-self.steady_rows // 2) if self.once else self.steady_rows

    @property
    def sample_rows(self) -> int:
        return self.sample_positions * self.num_sequences

    @property
    def cached_positions(self) -> int:
        """Positions of the pages that it takes of the store; 0 if these are counted elsewhere."""
        if not self.keeps_cache or self.unit is not None or self.reads_prompt:
            return 0
        return in_whole_pages(self.length) * self.num_sequences + self.spare
