# SPDX-License-Identifier: Apache-2.0
"""Sizes on which plans depend: of the model on one rank, of a step, and of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core import stages
from vllm.diffusion.core.pages import in_whole_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from vllm.diffusion.core.pages import WindowLayers
    from vllm.diffusion.core.stages import Buffer, Listed


@dataclass(frozen=True)
class Experts:
    """A mixture of E experts, k of them per row; `width` is an expert's width on this rank.

    Attributes:
        shared_width: width of a separate expert for all rows; a shared expert that is stored with
            the others counts in E and in k instead.
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
    """Scratch buffers of a layer's products for one kind of weights, without their results.

    `project`, `gated` and `add_to` assume rows in the products' dtype (`rows`).

    Attributes:
        project: buffers for the fused product of queries, keys and values.
        gated: buffers for gate and up, and silu(gate) * up, in the widest MLP.
        add_to: buffers for the products that are added to the residual stream.
        most_gated_rows: number of rows above which chunks use `gated_limit` instead; None for no
            limit.
        quantises: whether the products accept rows that are already quantised.
        weight_bytes: bytes of a stored weight; None for e, the bytes of an activation.
        speed: rate of large products relative to products of 16-bit weights.
        keeps_plain: whether rows are stored in the model dtype, and quantised in `project`, `gated`
            and `add_to`.
    """

    project: Listed
    gated: Listed
    add_to: Listed
    most_gated_rows: int | None = None
    gated_limit: Listed = ()
    quantises: bool = False
    weight_bytes: float | None = None
    speed: float = 1.0
    keeps_plain: bool = False

    def rows(self, buffer: Buffer) -> Listed:
        """Return buffers for rows in the products' dtype: fp8 with scales if they quantise."""
        return buffer.quantised if self.quantises and not self.keeps_plain else (buffer,)

    def quant_buffers(self, buffer: Buffer) -> Listed:
        """Return buffers for quantising rows in the model dtype; none for plain weights."""
        rows = stages.quantised_rows(buffer.dtype, *buffer.shape)
        return rows.quantised if self.quantises else ()


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model on one rank that determine its memory and time.

    Attributes:
        num_layers: L.
        hidden_size: D.
        num_heads, num_kv_heads, head_dim: H, KV, hd.
        mlp_width: M of the widest dense MLP; 0 if every layer has experts.
        experts: the experts of the layers that have them, if any do.
        num_columns: C.
        dtype: dtype of the model, with elements of e bytes.
        rotary_dim, rotary_dtype: number of cosines (and of sines) of one position, and their dtype.
        scales_queries: whether each position has a factor of its queries.
        products: buffers for every kind of weight that a layer may have.
        can_group_heads: whether projections can be sliced by heads and no norm spans all heads.
        collects_keys: whether attention copies cached keys and values out of their pages.
        num_ranks: number of tensor-parallel ranks, whose products are summed.
        row_unit: chunks of the feed-forward stage have a multiple of this many rows.
        head: buffers of the output head, without the logits.
        split_bytes: additional bytes of attention with split keys, independent of the number of
            rows.
        adapted: the sizes of steps in which some rows have a LoRA adapter; None without adapters.
        window_layers: layers with pages of their own; None if all layers have the same pages.
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
    adapted: ModelShape | None = None
    window_layers: WindowLayers | None = None

    def with_split_bytes(self, num_bytes: int) -> ModelShape:
        """Return these sizes with additional bytes of attention with split keys."""
        adapted = self.adapted and self.adapted.with_split_bytes(num_bytes)
        return replace(self, split_bytes=self.split_bytes + num_bytes, adapted=adapted)

    def for_step(self, *, adapts: bool) -> ModelShape:
        """Return the sizes of a step whose rows have LoRA adapters, or have none."""
        return self.adapted if adapts and self.adapted is not None else self

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
        """Maximum bytes of a stored weight of a layer."""
        return max(products.weight_bytes or self.element_bytes for products in self.products)

    @property
    def speed(self) -> float:
        """Minimum rate of a layer's large products relative to products of 16-bit weights."""
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
        """Bytes of keys and values of one position in all layers without a window."""
        layers = self.window_layers
        if layers is None:
            return self.num_layers * self.key_value_bytes
        num_layers = self.num_layers - len(layers.indices)
        return num_layers * 2 * math.prod(layers.other_heads) * self.element_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of keys and values of one position in all layers with a window."""
        layers = self.window_layers
        if layers is None:
            return 0
        return len(layers.indices) * 2 * math.prod(layers.heads) * self.element_bytes

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
        sample_rows: rows whose logits are computed; with guidance, two for each sampled position.
        longest: number of keys of the longest sequence.
        num_sequences: number of sequences.
        kept_keys: number of keys of the longest sequence with cached keys.
        keeps: whether the step writes keys and values to the cache.
        fp8_attention: whether attention is fp8.
        adapts: whether some rows have a LoRA adapter.
    """

    rows: int
    sample_rows: int
    longest: int
    num_sequences: int = 1
    kept_keys: int = 0
    keeps: bool = False
    fp8_attention: bool = False
    adapts: bool = False

    def share(self, count: int) -> StepShape:
        """Return the part of one of `count` ranks: its rows, but all keys of its heads."""
        rows, sample_rows = -(-self.rows // count), -(-self.sample_rows // count)
        return self._replace(rows=rows, sample_rows=sample_rows)

    def with_rows(self, rows: int) -> StepShape:
        """Return this step with `rows` rows, of which at most `rows` are sampled."""
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


class RuleMemory(NamedTuple):
    """Bytes of device memory that the decoding rule of a request takes.

    Attributes:
        kept: bytes between steps.
        drawing: further bytes while the rule draws tokens; one request draws at a time.
    """

    kept: int = 0
    drawing: int = 0

    @staticmethod
    def of_all(requests: Iterable[RuleMemory]) -> int:
        """Return the bytes that the rules of some requests take together."""
        together = [*requests]
        return sum(one.kept for one in together) + max((one.drawing for one in together), default=0)


NO_MEMORY = RuleMemory()


@dataclass(frozen=True)
class Demand:
    """Rows and memory that a request uses while it runs.

    Attributes:
        length: number of positions of its sequence.
        sample_positions: maximum positions sampled in one step.
        num_sequences: 2 with guidance, which runs the sequence twice.
        keeps_cache: whether the keys and values of all positions are cached, in every sequence.
        window: maximum positions of most of its forwards, if the keys and values of other positions
            are cached; None if every forward may compute all positions.
        first: positions of its first forward; None for all.
        host_layers: number of layers whose cached keys and values are in host memory.
        spare: further positions, for requests that read the keys and values of its prompt.
        reads_prompt: whether it reads the prompt of another request, whose demand includes both
            caches.
        unit: granularity, in positions, at which a forward can be cut; None if forwards cannot be
            cut. With a unit, pages are not counted here.
        once: whether it has only one forward.
        fp8_attention: whether attention is fp8 in forwards of all positions.
        adapts: whether its rows have a LoRA adapter.
        of_rule: memory of its decoding rule.
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
    adapts: bool = False
    of_rule: RuleMemory = NO_MEMORY

    @property
    def first_rows(self) -> int:
        """Rows of the first forward."""
        if self.reads_prompt:
            return self.steady_rows
        return (self.first or self.length) * self.num_sequences

    def largest_rows(self, row_budget: int) -> int:
        """Return the rows of the largest forward, at most `row_budget` if it can be cut."""
        rows = self.steady_rows if self.reads_prompt else self.length * self.num_sequences
        return rows if self.unit is None else min(rows, max(row_budget // self.unit, 1) * self.unit)

    @property
    def steady_rows(self) -> int:
        """Maximum rows in most steps."""
        return (self.window or self.length) * self.num_sequences

    @property
    def shared_rows(self) -> int:
        """Rows by which the request counts towards the rows of a shared step.

        A request with a single forward counts half: while it takes part in a step, another request
        may wait for the next step, so that the device does not wait for new requests.
        """
        return -(-self.steady_rows // 2) if self.once else self.steady_rows

    @property
    def sample_rows(self) -> int:
        return self.sample_positions * self.num_sequences

    @property
    def cached_positions(self) -> int:
        """Positions of the pages that it takes of the store; 0 if they are counted elsewhere."""
        if not self.keeps_cache or self.unit is not None or self.reads_prompt:
            return 0
        return in_whole_pages(self.length) * self.num_sequences + self.spare
