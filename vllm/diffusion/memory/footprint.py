# SPDX-License-Identifier: Apache-2.0
"""Bytes of a step: every buffer of every stage, by name.

A step has resident memory, from its first to its last stage, and memory of the current stage.
Resident memory grows with the rows of the step, and memory of a stage with the rows of its chunk:

    peak = kept + resident + max over the stages (rows of a chunk x bytes of a row) + rounding

`kept` is the memory that requests keep between steps. Letters: D hidden size, H and KV query and
key/value heads of this rank, hd head width, M width of an MLP on this rank, C logit columns of this
rank, e bytes of an element of the model dtype, G head groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core import fp8_stages, stages
from vllm.diffusion.core.stages import Listed, row_bytes
from vllm.diffusion.memory.plan import PerStage

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.core.stages import Buffer
    from vllm.diffusion.memory.plan import Residency
    from vllm.diffusion.memory.shapes import LinearBuffers, ModelShape

# Rounding of a step's buffers: each starts at a multiple of 512 bytes.
ROUNDING_BYTES = 16 * 512

# Phases of a stage run one after the other; each ended phase releases its buffers.
Phases = tuple[Listed, ...]


class Footprint:
    """Buffers of the stages of one model.

    Every stage method returns the buffers for one row of its chunk, phase by phase.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        of_rows = shape.rotary_dtype, shape.rotary_dim
        self._tables = stages.rotary(*of_rows, scales=shape.scales_queries)

    def resident(self, layout: Residency) -> Listed:
        """Return the buffers per row that stay on the device from the first to the last stage."""
        shape = self.shape
        rows = () if layout.host_residual else self._stores(layout)
        if layout.is_streamed:
            num_heads = shape.num_kv_heads // layout.head_groups
            dtype, *heads = self._heads(num_heads)
            dtype = fp8_stages.FP8 if layout.fp8_attention else dtype
            return stages.INPUTS, *rows, *stages.keys_values(dtype, *heads)
        num_heads = shape.num_heads if layout.keep_queries else 0
        fused = stages.fused_heads(shape.dtype, num_heads, shape.num_kv_heads, shape.head_dim)
        return stages.INPUTS, *rows, fused, *(self._tables if layout.keep_queries else ())

    def collected_keys(self, layout: Residency) -> int:
        """Return the bytes per key of `StepShape.kept_keys` in the stages that attend."""
        shape = self.shape
        if not shape.collects_keys:
            return 0
        heads = self._heads(shape.num_kv_heads // layout.head_groups)
        return stages.collected_keys(*heads).row_bytes

    def keys_values(self, layout: Residency) -> Phases:
        """Return buffers of the keys-values stage for the norm; projections are resident."""
        shape = self.shape
        visiting = (*self._visiting(layout, 1), *self._rotary(layout))
        normed = stages.normed(shape.dtype, shape.hidden_size)
        if layout.fp8_attention:
            return self._fp8_keys_values(layout, visiting, normed)
        phases = tuple((*visiting, *p.rows(normed), *p.project) for p in shape.products)
        if layout.shards == 1:
            return phases
        heads = self._heads(shape.num_kv_heads // layout.head_groups)
        kv_buffers = stages.keys_values(*heads, is_own=True)
        exchanged = stages.exchanged(*heads)
        return *((*kv_buffers, *phase) for phase in phases), (*visiting, *kv_buffers, *exchanged)

    def _fp8_keys_values(self, layout: Residency, visiting: Listed, normed: Buffer) -> Phases:
        """Return buffers of the keys-values stage and its survey, with fp8 attention."""
        shape, groups = self.shape, layout.head_groups
        heads, queries = (self._heads(n // groups) for n in (shape.num_kv_heads, shape.num_heads))
        wide, copies = stages.keys_values(*heads, is_own=True), fp8_stages.keys_values(*heads[1:])
        rows = fp8_stages.surveyed(shape.dtype, shape.hidden_size), *self._rotary(layout)
        phases: list[Listed] = []
        for products in shape.products:
            projection = *wide, *products.rows(normed), *products.project
            phases += [
                (*visiting, *projection),
                (*rows, self._querying(queries, products)[0], *projection),
            ]
        if layout.shards == 1:
            return tuple(phases)
        exchanged = stages.exchanged(fp8_stages.FP8, *heads[1:])
        return *((*copies, *phase) for phase in phases), (*visiting, *copies, *exchanged)

    def attend(self, layout: Residency, *, is_packed: bool) -> Phases:
        """Return buffers of the attend stage: queries, then attention and its projection.

        Args:
            layout: layout of the step.
            is_packed: whether a chunk may hold rows of several sequences, whose results are
                collected.
        """
        visiting = (*self._visiting(layout, 2), *self._rotary(layout))
        if layout.fp8_attention:
            return tuple((*visiting, *phase) for phase in self._fp8_attending(layout))
        phases = self._attending(layout, is_packed, has_queries=layout.keep_queries)
        return tuple((*visiting, *phase) for phase in phases)

    def _fp8_attending(self, layout: Residency) -> Phases:
        heads = self._heads(self.shape.num_heads // layout.head_groups)
        resident = fp8_stages.attending(*heads[1:])
        if layout.shards > 1:
            resident += stages.exchanged(fp8_stages.FP8, *heads[1:])
        results = fp8_stages.results(heads[1] * heads[2])
        phases: list[Listed] = []
        for products in self.shape.products:
            queries, *normed = self._querying(heads, products)
            scales = products.rows(results)[1:]
            phases.append((*resident, queries, *normed, *products.project))
            phases.append((*resident, queries, *scales, *products.add_to))
        return tuple(phases)

    def _attending(self, layout: Residency, is_packed: bool, *, has_queries: bool) -> Phases:
        shape = self.shape
        heads = self._heads(shape.num_heads // layout.head_groups)
        *attending, collected = stages.attending(*heads)
        if is_packed:
            attending.append(collected)
        outputs = [
            (*products.quant_buffers(attending[0]), *products.add_to) for products in shape.products
        ]
        phases = tuple((*attending, *phase) for phase in outputs)
        if has_queries:
            return phases
        exchanged = stages.exchanged(*heads) if layout.shards > 1 else ()
        projecting = [(*self._querying(heads, p), *p.project) for p in shape.products]
        queries = projecting[0][0]
        phases = *projecting, *((queries, *phase) for phase in phases)
        return tuple((*exchanged, *phase) for phase in phases)

    def feed_forward(self, layout: Residency, *, is_long: bool = False) -> Phases:
        """Return buffers of the feed-forward stage, for each kind of MLP of the model.

        Args:
            layout: layout of the step.
            is_long: whether chunks have more than `ModelShape.most_gated_rows` rows.
        """
        visiting = self._visiting(layout, 1)
        dense = (self._mlp(products, is_long) for products in self.shape.products)
        return tuple(
            (*visiting, *phase) for phases in (*dense, self._experts()) for phase in phases
        )

    def logits(self, layout: Residency, *, is_packed: bool) -> Phases:
        """Return buffers of sample rows: the rest of the last layer, then logits.

        In a streamed layout the last layer has ended before.
        """
        shape = self.shape
        sampled, others = stages.read_rows(shape.dtype, shape.hidden_size)
        head = stages.head(shape.dtype, shape.hidden_size, shape.num_columns)
        logits = *head, *shape.head
        if layout.is_streamed:
            of_others = (others,) * layout.shards if layout.shards > 1 else ()
            return ((*of_others, sampled, *logits),)
        phases = (
            *self._attending(layout, is_packed, has_queries=False),
            *self.feed_forward(layout),
            logits,
        )
        return tuple((sampled, *self._tables, *phase) for phase in phases)

    def read_results(self, layout: Residency) -> Listed:
        """Return buffers per sample row for the rest of the step, including rows of other ranks."""
        return (stages.RESULTS,) * layout.shards

    def _heads(self, count: int) -> tuple[torch.dtype, int, int]:
        """Return the arguments (dtype, heads, head width) of the functions of `stages`."""
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

    def _visiting(self, layout: Residency, max_stores: int) -> Listed:
        """Return buffers for chunks of at most `max_stores` residual streams in host memory."""
        if not layout.host_residual:
            return ()
        stores = self._stores(layout)[:max_stores]
        return tuple(chunk for store in stores for chunk in stages.visiting(store))

    def _mlp(self, products: LinearBuffers, is_long: bool) -> Phases:
        """Return buffers of a dense MLP; with several products, the second may get plain rows."""
        shape = self.shape
        if not shape.mlp_width:
            return ()
        activated, normed = stages.gating(shape.dtype, shape.hidden_size, shape.mlp_width)
        gating = products.gated_limit if is_long else products.gated
        out = products.rows(activated)
        adding = (
            out if len(shape.products) == 1 else (activated, *products.quant_buffers(activated))
        )
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
            terms += (stages.projected(dtype, width),)
        phases: list[Listed] = [terms]
        if experts.shared_width:
            activated, normed = stages.gating(dtype, width, experts.shared_width)
            phases += [
                (*p.rows(activated), *p.quant_buffers(normed), *p.gated) for p in shape.products
            ]
        beside = stages.beside_experts(dtype, width, has_shared=experts.shared_width > 0)
        return tuple((*beside, *phase) for phase in phases)


class StageBytes(NamedTuple):
    """Bytes of a row in a stage's chunk.

    Attributes:
        buffers: bytes of the pool; all bytes if the pool is not split.
        temporaries: bytes that PyTorch allocates, if the pool is split.
        few_buffers, few_rows: bytes of the pool in a chunk of at most `few_rows` rows, if larger.
    """

    buffers: int
    temporaries: int
    few_buffers: int = 0
    few_rows: int = 0

    @classmethod
    def of(cls, phases: Phases, is_split: bool) -> StageBytes:
        if not is_split:
            return cls(max(map(row_bytes, phases)), 0)
        return cls(
            max(row_bytes(phase, is_temporary=False) for phase in phases),
            max(row_bytes(phase, is_temporary=True) for phase in phases),
        )

    @classmethod
    def of_feed_forward(cls, footprint: Footprint, layout: Residency, is_split: bool) -> StageBytes:
        few = cls.of(footprint.feed_forward(layout), is_split)
        few_rows = footprint.shape.most_gated_rows
        if few_rows is None:
            return few
        many = cls.of(footprint.feed_forward(layout, is_long=True), is_split)
        return many._replace(few_buffers=few.buffers, few_rows=few_rows)

    def buffers_in(self, rows: int) -> int:
        """Return pool bytes of a chunk of `rows` rows, or of a shorter chunk if it needs more."""
        return max(rows * self.buffers, min(rows, self.few_rows) * self.few_buffers)

    def rows_in(self, buffers: int, temporaries: int) -> int:
        """Return the number of rows that fit into these bytes of the pool and of temporaries."""
        is_few = buffers < self.few_rows * self.few_buffers
        rows = buffers // (self.few_buffers if is_few else self.buffers)
        return min(rows, temporaries // self.temporaries) if self.temporaries else rows


class RowBytes(NamedTuple):
    """Bytes of a row: for the step, for a sample row, and for a chunk of every stage.

    `collected` counts per cached key; `split` is the total for attention with split keys.
    """

    resident: int
    results: int
    collected: int
    split: int
    stages: PerStage[StageBytes]

    @classmethod
    def of(
        cls, footprint: Footprint, layout: Residency, is_packed: bool, *, is_split: bool
    ) -> RowBytes:
        return cls(
            row_bytes(footprint.resident(layout)),
            row_bytes(footprint.read_results(layout)),
            footprint.collected_keys(layout),
            footprint.shape.split_bytes,
            PerStage(
                StageBytes.of(footprint.keys_values(layout), is_split),
                StageBytes.of(footprint.attend(layout, is_packed=is_packed), is_split),
                StageBytes.of_feed_forward(footprint, layout, is_split),
                StageBytes.of(footprint.logits(layout, is_packed=is_packed), is_split),
            ),
        )
