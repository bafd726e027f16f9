# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the layers, for steps of few rows, which take longer to launch than to compute.

A graph is captured for a bucket, a maximum number of rows and of sequences, and replayed for every
batch that fits. Rows are padded to the bucket's size with one extra sequence that nothing reads,
and sequences are padded with empty sequences.

The graph does not compute the end of the last layer. While the graph runs, the host launches this
part and the sampler, for the sample rows only. The graph of a small bucket would end before this
launch, so it computes the whole last layer, for all rows.
"""

from __future__ import annotations

import math
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.spans import AttentionLayout, PageTable
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.engine.step_times import ROW_BUCKETS, StepTimes
from vllm.diffusion.engine.worker.batch import StepInputs
from vllm.diffusion.engine.worker.forward import run_body, run_to_end

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from vllm.diffusion.engine.worker.agreement import Agreement
    from vllm.diffusion.engine.worker.batch import Packing, StepBatch
    from vllm.diffusion.engine.worker.forward import BodyOutputs
    from vllm.diffusion.memory import ActivationPool, GraphMemory, PageStore, Plan, Planner
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.models.config import DiffusionConfig
    from vllm.diffusion.ops import Array

# Limits for models without experts. With more rows, layers take longer than their launch, and the
# attention of a graph is slower for long sequences (docs/measurements/steps.md). Models with
# experts need no such limits: their layers take less time than their launch even with many rows,
# and several smaller steps would read the same experts several times.
MAX_WHOLE_ROWS = 1536
MAX_WHOLE_ROWS_FP8 = 3072
MAX_WINDOW_ROWS = 1024
ENDED_ROWS = 128  # maximum rows of buckets in which all rows go through the last layer
# Maximum rows of timed steps. More rows take longer on any card, so drafts save nothing.
MAX_TIMED_ROWS = 512
# Numbers of blocks of the buckets in open families (DiffusionGemma), whose steps compute whole
# blocks.
_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16)
_TIMED_BLOCKS = 4  # maximum blocks of timed steps in open families; a draft has two blocks
# Maximum sequences of a bucket. Every program of attention loops over them.
MAX_SEQUENCES = 256
# Maximum further slots of a row in a bucket. A step with all branches (`draft_branches`) that needs
# more of them has more than `ENDED_ROWS` rows.
MAX_COPIES = 10


class Bucket(NamedTuple):
    """Sizes of the batches that one graph serves.

    Attributes:
        rows: maximum number of rows.
        sequences: maximum number of sequences, without the padding sequence.
        is_cached: whether all rows belong to windows with cached keys; otherwise no row does.
        tiles: maximum number of tiles of rows with LoRA adapters; 0 for a graph without adapters.
        copies: maximum number of further slots to which a row's keys and values are copied.
    """

    rows: int
    sequences: int
    is_cached: bool
    tiles: int = 0
    copies: int = 0

    @property
    def is_ended(self) -> bool:
        """Whether all rows go through the last layer, too."""
        return self.rows <= ENDED_ROWS

    def inputs(
        self,
        pages: PageTable | None,
        max_keys: int,
        *,
        has_blocks: bool,
        marks_blocks: bool = False,
        has_windows: bool = False,
    ) -> StepInputs[Array]:
        """Return empty inputs of the bucket's sizes, in one chunk, to be filled by `fill`.

        Args:
            pages: page table of the cached keys that the rows read; None if they read none.
            max_keys: maximum number of keys of a sequence.
            has_blocks: whether sequences may consist of blocks (block-causal attention).
            marks_blocks: whether the inputs mark the rows that belong to denoised blocks.
            has_windows: whether layers with a window have pages of their own.
        """

        def numbers(size: int, dtype: type = np.int32) -> Array:
            return np.zeros(size, dtype)

        num_sequences = self.sequences + 1
        layout = AttentionLayout(
            query_ends=numbers(num_sequences + 1),
            key_starts=numbers(num_sequences + 1),
            key_counts=numbers(num_sequences),
            max_queries=self.rows,
            max_keys=max_keys,
            spans=None,
            pages=pages,
            block_lengths=numbers(num_sequences) if has_blocks else None,
            firsts=numbers(num_sequences) if has_blocks else None,
        )
        slot_mapping = numbers(self.rows if self.is_cached else 0, np.int64)
        ids, positions = numbers(self.rows, np.int64), numbers(self.rows, np.int64)
        is_block = numbers(self.rows, np.bool_) if marks_blocks else None
        tiles = None
        if self.tiles:
            table = np.zeros((self.tiles, 3), np.int32)
            tiles = ops.Tiles(table, numbers(self.rows), ops.low_rank_tile(self.rows))
        copy_slots = np.zeros((self.copies, self.rows), np.int64) if self.copies else None
        return StepInputs(
            *(ids, positions, slot_mapping, ((layout,),)),
            is_block=is_block,
            tiles=tiles,
            window_slots=slot_mapping.copy() if has_windows else None,
            copy_slots=copy_slots,
        )


def fill(inputs: StepInputs[Array], batch: StepBatch, before: Packing | None = None) -> None:
    """Write a batch and its padding into inputs of a bucket that holds it.

    Unused rows form one extra sequence that nothing reads. In buckets of whole sequences it attends
    to itself, so that no row holds NaN. In buckets of windows it has no keys, and attention without
    keys is zero.

    Args:
        inputs: arrays to write to.
        batch: the step.
        before: packing of the batch that the inputs hold, if any. If it is also the packing of this
            batch, only tokens are written.
    """
    packing, num_rows, size = batch.packing, batch.num_rows, inputs.token_ids.size
    if packing is before:
        inputs.token_ids[:num_rows] = batch.token_ids
        return
    _fill(inputs.token_ids, batch.token_ids, 0)
    _fill(inputs.positions, batch.positions, 0)
    _fill(inputs.slot_mapping, batch.slot_mapping, -1)
    if inputs.window_slots is not None and packing.window_slots is not None:
        _fill(inputs.window_slots, packing.window_slots, -1)
    if inputs.copy_slots is not None:
        inputs.copy_slots.fill(-1)
        if packing.copy_slots is not None:
            num_copies, num_slots = packing.copy_slots.shape
            inputs.copy_slots[:num_copies, :num_slots] = packing.copy_slots
    if inputs.is_block is not None and packing.is_block is not None:
        _fill(inputs.is_block, packing.is_block, 0)
    ((layout,),) = inputs.layouts
    num_sequences = packing.ends.size
    layout.query_ends[0] = 0
    _fill(layout.query_ends[1:], packing.ends, size)
    _fill(layout.key_starts, packing.first_kept, 0)
    layout.key_starts[num_sequences] = num_rows
    _fill(layout.key_counts, packing.num_keys, 0)
    layout.key_counts[num_sequences] = 0 if inputs.slot_mapping.size else size - num_rows
    if layout.block_lengths is not None and layout.firsts is not None:
        _fill(layout.block_lengths, packing.block_lengths, 0)
        _fill(layout.firsts, packing.firsts, 0)
    if inputs.tiles is not None and batch.slots is not None:
        # Rows of the padding belong to tiles without a slot, too.
        tiles = batch.slots.rows._replace(num_rows=size).tiles(inputs.tiles.size)
        inputs.tiles.rows[:] = tiles.rows
        inputs.tiles.table[: len(tiles.table)] = tiles.table
        inputs.tiles.table[len(tiles.table) :] = ops.NO_TILE


def _fill(array: Array, values: Array, padding: int) -> None:
    array[: values.size] = values
    array[values.size :] = padding


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: ops.GraphInputs
    outputs: BodyOutputs
    # Version of the page store's layout whose addresses the graph holds.
    layout_version: int
    # Packing of the inputs, as a weak reference: it refers to requests, which must not outlive
    # their end.
    packing: Callable[[], Packing | None] = lambda: None


class GraphRunner:
    """Captures the layers once per bucket, and replays them.

    Args:
        model: the loaded model, 16-bit, on its own GPU.
        pool: memory of the layers' results. They belong to no scope of the pool, because graphs
            contain their addresses.
        caches: cached keys and values.
        planner: plans of the steps.
        memory: memory for graphs; batches run without a graph when it is used up.
        agreement: agreement with the ranks whose graphs synchronise with this rank's graphs.
        max_keys: number of keys of the longest sequence.

    Attributes:
        times: times of the layers, of windows (True) and of whole sequences (False), see `measure`.
        captures_more: whether buckets get their first graph on demand. A server clears it before it
            accepts requests; batches of buckets without a graph then run without a graph. A graph
            whose keys and values have moved is still captured again. This takes only the time of a
            launch without a graph, because its kernels are loaded.
    """

    def __init__(
        self,
        model: DiffusionModel,
        pool: ActivationPool,
        caches: PageStore,
        planner: Planner,
        memory: GraphMemory,
        agreement: Agreement,
        max_keys: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._scratch = FreshBuffers(torch.device("cuda"))
        self._caches = caches
        self._planner, self._memory, self._agreement = planner, memory, agreement
        self._max_keys = max_keys
        self._reads_pages = model.reads_pages(caches.device)
        self._has_blocks = model.family.is_block_causal
        self._table = caches.table  # at the address that graphs read
        self._copied: PageTable | None = None  # table whose contents were copied last
        self._captured: dict[Bucket, _Captured] = {}
        self.captures_more = True
        adapting = model.adapting
        self.buckets = replace(
            buckets_of(model.config, is_fp8=model.is_fp8),
            num_slots=0 if adapting is None else adapting.num_slots,
            has_drafts=adapting is not None and adapting.draft_slot is not None,
        )
        self.times = {False: StepTimes.of({}), True: StepTimes.of({})}

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes

    def run(self, batch: StepBatch, plan: Plan) -> BodyOutputs | None:
        """Run the layers of a batch with the graph of its bucket; None if no graph serves it."""
        if not plan.is_whole(batch.num_rows):
            return None
        bucket = self.buckets.find(batch)
        if bucket is None or (batch.slot_mapping.size and self._caches.host_layers):
            return None
        if (bucket.is_cached or self._has_blocks) and not self._reads_pages:
            return None  # other kernels need the spans on the host
        if bucket.is_cached:
            self._copy_table()
        captured = self._captured.get(bucket)
        version = self._caches.layout_version * bucket.is_cached
        if captured is None or captured.layout_version != version:
            captured = self._capture(bucket, batch, plan)
        if captured is None:
            return None
        fill(captured.inputs.to_write(), batch, captured.packing())
        captured.packing = weakref.ref(batch.packing)
        ops.align_ranks()
        captured.graph.replay()
        return captured.outputs

    def serves(self, batch: StepBatch) -> bool:
        """Whether a graph serves a batch that is computed as a whole."""
        bucket = self.buckets.find(batch)
        return bucket is not None and (self.captures_more or bucket in self._captured)

    def measure(self) -> None:
        """Time short steps of several sequences: the best of two replays, on the slowest rank."""
        seconds: dict[bool, dict[int, float]] = {False: {}, True: {}}
        for bucket, captured in self._captured.items():
            is_stale = captured.layout_version != self._caches.layout_version * bucket.is_cached
            is_alone = bucket.sequences == 1
            if is_stale or is_alone or bucket.tiles or bucket.rows > self.buckets.max_timed_rows:
                continue  # a stale graph still writes to the previous page addresses
            took_us = self._agreement.all_reduce_max(
                round(1e6 * min(_replayed(captured.graph) for _ in "12"))
            )
            times = seconds[bucket.is_cached]
            times[bucket.rows] = min(times.get(bucket.rows, math.inf), took_us / 1e6)
        self.times = {is_cached: StepTimes.of(times) for is_cached, times in seconds.items()}

    def _copy_table(self) -> None:
        """Copy the store's page table to the address that graphs read."""
        table = self._caches.table
        if table is self._copied:
            return
        tensors = [rows for rows in (table.rows, table.window_rows) if rows is not None]
        if len(self._table.rows) != self._caches.most_entries:
            larger = [rows.new_empty(self._caches.most_entries) for rows in tensors]
            self._table = PageTable(larger[0], table.size, *larger[1:])
        for kept, rows in zip((self._table.rows, self._table.window_rows), tensors, strict=False):
            assert kept is not None
            kept[: len(rows)].copy_(rows)
        self._copied = table

    def _capture(self, bucket: Bucket, batch: StepBatch, plan: Plan) -> _Captured | None:
        """Capture the graph of a bucket, or capture it again; return None if it gets no graph."""
        if self._pool.has_frame:
            return None  # the graph's outputs must precede the buffers of all steps
        stale = self._captured.pop(bucket, None)
        if stale is None and not self.captures_more:
            return None
        has_room = stale is not None or self._memory.has_room_for(self._bytes_of(batch))
        # No rank captures a graph if any rank lacks the memory.
        if self._agreement.all_reduce_max(int(not has_room)):
            return None
        if stale is not None:
            stale.inputs.wait()  # before their memory is reused
        pages, max_keys = (self._table, self._max_keys) if bucket.is_cached else (None, bucket.rows)
        marks_blocks = batch.packing.is_block is not None
        inputs = bucket.inputs(
            *(pages, max_keys),
            has_blocks=self._has_blocks,
            marks_blocks=marks_blocks,
            has_windows=batch.packing.window_slots is not None,
        )
        graph_inputs = ops.GraphInputs(inputs, self._caches.device)
        fill(graph_inputs.to_write(), batch)
        plan = plan.resized(bucket.rows)
        memory = (self._pool, self._scratch, self._caches)

        def run() -> BodyOutputs:
            graph_inputs.upload()
            inputs: StepInputs[torch.Tensor] = graph_inputs.tensors
            # Rows of marked blocks are all sample rows.
            runs_all_rows = bucket.is_ended or marks_blocks or self._model.routes_windows
            with self._adapting(inputs):
                return run_to_end(
                    run_body(self._model, inputs, plan, *memory, to_the_end=runs_all_rows)
                )

        if stale is None:
            # Libraries choose kernels and allocate workspaces outside of the capture.
            run()
        graph = torch.cuda.CUDAGraph()
        ops.align_ranks()
        with self._memory.capture(graph):
            outputs = run()
            ops.align_ranks()
        self._memory.settle(self._agreement.all_reduce_max(self._memory.used_bytes))
        version = self._caches.layout_version * bucket.is_cached
        self._captured[bucket] = _Captured(graph, graph_inputs, outputs, version)
        return self._captured[bucket]

    def _adapting(self, inputs: StepInputs[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context in which products read the slots of their rows from the inputs."""
        if self._model.adapting is None:
            return nullcontext()
        return self._model.adapting.capturing(inputs.tiles)

    def _bytes_of(self, batch: StepBatch) -> int:
        """Return the planned peak memory of the layers; no graph computes sample rows."""
        shape = batch.shape._replace(sample_rows=1)
        return self._planner.plan(shape).predicted_peak_bytes


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Replay a graph, wait for it, and return its seconds."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ops.align_ranks()
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


@dataclass(frozen=True)
class Buckets:
    """Row counts of the buckets of one model.

    Attributes:
        whole: row counts for sequences that are computed as a whole, ascending.
        windows: row counts for windows, ascending.
        rows_per_sequence: a bucket for several sequences has at most `rows / rows_per_sequence`.
        num_slots: number of slots of LoRA adapters.
        has_drafts: whether one of these slots is for rows that only draft.
        max_timed_rows: maximum rows of timed steps.
        max_copies: maximum number of further slots of a row, in buckets of at most `ENDED_ROWS`.
    """

    whole: tuple[int, ...]
    windows: tuple[int, ...]
    rows_per_sequence: int
    num_slots: int = 0
    max_timed_rows: int = MAX_TIMED_ROWS
    has_drafts: bool = False
    max_copies: int = 0

    def find(self, batch: StepBatch) -> Bucket | None:
        """Return the smallest bucket that holds a batch, or None."""
        num_sequences = batch.packing.ends.size
        is_cached = batch.num_whole == 0
        if not is_cached and batch.num_whole < batch.num_rows:
            return None
        copy_slots = batch.packing.copy_slots
        num_copies = 0 if copy_slots is None else len(copy_slots)
        for rows in self.windows if is_cached else self.whole:
            max_copies = self.max_copies if is_cached and rows <= ENDED_ROWS else 0
            max_sequences = min(rows // self.rows_per_sequence, MAX_SEQUENCES)
            if num_sequences == 1:
                max_sequences = 1
            is_enough = rows >= batch.num_rows and max_sequences >= num_sequences
            if is_enough and max_copies >= num_copies:
                tiles = 0
                if batch.slots is not None:
                    tiles = self._max_tiles(rows, max_sequences)
                return Bucket(rows, max_sequences, is_cached, tiles, max_copies)
        return None

    def _max_tiles(self, rows: int, sequences: int) -> int:
        """Return the maximum number of tiles of a batch."""
        # All slots, and rows without a slot, such as the padding.
        num_slots = min(self.num_slots, sequences + self.has_drafts) + 1
        return ops.max_tiles(rows, num_slots, ops.low_rank_tile(rows))


def buckets_of(config: DiffusionConfig, *, is_fp8: bool = False, num_slots: int = 0) -> Buckets:
    """Return the buckets that serve a model.

    Blocks of block-causal families may be short, and strictly causal windows may have one row.
    """
    if config.family.is_open:  # nearly all steps consist of whole blocks
        rows = tuple(config.block_length * count for count in _BLOCKS)
        max_timed_rows = max(MAX_TIMED_ROWS, _TIMED_BLOCKS * config.block_length)
        return Buckets(rows, rows, config.block_length // 2, max_timed_rows=max_timed_rows)
    rows_per_sequence, max_copies = 4 if config.family.is_block_causal else 16, 0
    if config.family.is_strictly_causal:
        rows_per_sequence, max_copies = 1, MAX_COPIES
    if config.architecture.expert_layers:
        return Buckets(
            ROW_BUCKETS, ROW_BUCKETS, rows_per_sequence, num_slots, max_copies=max_copies
        )
    max_rows = MAX_WHOLE_ROWS_FP8 if is_fp8 else MAX_WHOLE_ROWS
    whole = tuple(rows for rows in ROW_BUCKETS if rows <= max_rows)
    windows = tuple(rows for rows in ROW_BUCKETS if rows <= MAX_WINDOW_ROWS)
    return Buckets(whole, windows, rows_per_sequence, num_slots, max_copies=max_copies)
