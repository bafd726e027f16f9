# SPDX-License-Identifier: Apache-2.0
"""The rows of one denoising step, packed without padding, on the host.

Whole sequences come first, one after the other. With guidance a request has two sequences: its own
and the unconditional sequence, whose prompt is masked. The windows of requests with a cache follow.
All rows of a sequence read the same keys, except in block-causal families, where a row reads the
keys of its own block and of earlier blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from vllm.diffusion.core.spans import AttentionLayout, Span, lay_out
from vllm.diffusion.engine.worker.key_copies import copy_slots_of
from vllm.diffusion.memory import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.diffusion.adapters.adapted_rows import StepSlots
    from vllm.diffusion.core.spans import PageTable
    from vllm.diffusion.decoding import ForwardTarget
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.ops import Array, Tiles

A = TypeVar("A")  # an array on the host or a tensor on the device


class StepInputs(NamedTuple, Generic[A]):
    """Inputs of the layers in a step, as host arrays or device tensors.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, from 0 in every sequence.
        slot_mapping: [W] int64, row of the page store for each of the last W rows; negative for
            none.
        layouts: for each attend chunk, the keys that its rows read: keys of this step, and keys of
            the store. Chunks of the last layer follow if they differ.
        is_block: [T] bool, whether a row belongs to a block that is denoised; None if the layers
            treat all rows alike.
        tiles: the slots of the rows with LoRA adapters; only in graphs.
        window_slots: [W] int64, as `slot_mapping`, for layers with a window; None if all layers
            have the same pages.
        copy_slots: [C, W] int64, further rows of the page store for the last W rows; the first
            negative entry of a column ends its copies. None for no copies.
    """

    token_ids: A
    positions: A
    slot_mapping: A
    layouts: tuple[tuple[AttentionLayout[A], ...], ...]
    is_block: A | None = None
    tiles: Tiles[A] | None = None
    window_slots: A | None = None
    copy_slots: A | None = None


@dataclass(frozen=True, eq=False)
class Packing:
    """Layout of the rows of a step; the next step often reuses it.

    A request has one sequence, and with guidance also the unconditional sequence. The rows of S
    sequences follow one another: first sequences without a cache, then windows of all positions,
    then windows of some positions, which read cached keys. A part of a window counts as a sequence
    of its own. Columns are [S] int64.

    Attributes:
        items: the requests, and items of guests, in the order of their rows.
        windows: per item, the positions of each of its sequences that are computed.
        tails: per item, `ForwardTarget.tail_start`. Rows of a tail may have another adapter.
        pages: the page table of the cached keys and values.
        positions: [T] int64, from 0 in every sequence.
        slot_mapping: [W] int64, row of the page store for each of the last W rows, which belong to
            windows.
        ends: column, last row + 1 of each sequence.
        firsts: column, position of the first row of each sequence.
        num_keys: column, number of keys that the rows of each sequence read.
        block_lengths: column, as in `Span`.
        first_keys: column, location of the key of position 0: a row of the batch, or of `pages`.
        first_kept: column, location of position 0 in `pages`; for sequences without a cache, the
            location in the batch.
        num_own: number of sequences that read keys of this step; the later sequences read cached
            keys.
        block_starts: column, as in `Span`.
        is_block: [T] bool, as in `StepInputs`.
        window_slots: [W] int64, as in `StepInputs`.
        sources: per sequence, its item, the index of the item's sequence, and the first position
            and last + 1 that are computed.
    """

    items: tuple[BatchItem, ...]
    windows: tuple[Window, ...]
    tails: tuple[int | None, ...]
    pages: PageTable
    positions: Array
    slot_mapping: Array
    ends: Array
    firsts: Array
    num_keys: Array
    block_lengths: Array
    first_keys: Array
    first_kept: Array
    num_own: int
    block_starts: Array
    is_block: Array | None
    window_slots: Array | None
    sources: tuple[tuple[int, int, int, int], ...]

    @cached_property
    def sequences(self) -> tuple[Span, ...]:
        """All sequences, with queries as rows of the batch; not needed to replay a graph."""
        key_ends = self.first_keys + self.num_keys
        in_pages = np.arange(self.ends.size) >= self.num_own
        keys = (self.first_keys, key_ends, self.block_lengths, self.firsts)
        columns = [c.tolist() for c in (self.ends, *keys, in_pages, self.block_starts)]
        return tuple(map(Span, [0, *columns[0][:-1]], *columns))

    @cached_property
    def of_requests(self) -> tuple[tuple[Span, ...], ...]:
        """Sequences of each request; for a sequence in parts, only the last part."""
        last: list[dict[int, Span]] = [{} for _ in self.items]
        for (item, number, *_), span in zip(self.sources, self.sequences, strict=True):
            last[item][number] = span
        return tuple([tuple(spans.values()) for spans in last])

    @cached_property
    def copy_slots(self) -> Array | None:
        """Slots of copies, as in `StepInputs`; they are the same until something moves."""
        are_alone = all(item.window.context is None for item in self.items)
        return None if are_alone else copy_slots_of(self)

    @cached_property
    def longest(self) -> int:
        """Number of keys of the sequence that reads the most keys."""
        return int(self.num_keys.max())

    @cached_property
    def kept_keys(self) -> int:
        """Number of keys of the longest sequence that reads its cache; 0 if none does."""
        return int(self.num_keys[self.num_own :].max(initial=0))


@dataclass(frozen=True)
class StepBatch:
    """Input of one step.

    Attributes:
        token_ids: [T] int64.
        targets: per request, the target of the forward.
        packing: layout of the rows.
        logit_shift: 1 if the token at a position is predicted by the row before it, else 0.
        slots: the slots of the requests' LoRA adapters; None without any.
    """

    token_ids: Array
    targets: tuple[ForwardTarget, ...]
    packing: Packing
    logit_shift: int
    slots: StepSlots | None = None

    @property
    def items(self) -> tuple[BatchItem, ...]:
        return self.packing.items

    @property
    def positions(self) -> Array:
        return self.packing.positions

    @property
    def slot_mapping(self) -> Array:
        return self.packing.slot_mapping

    @property
    def num_rows(self) -> int:
        return self.token_ids.size

    @property
    def num_whole(self) -> int:
        """Number of rows of sequences without a cache; these rows come first."""
        return self.num_rows - self.slot_mapping.size

    @cached_property
    def shape(self) -> StepShape:
        """The sizes that a plan depends on."""
        return StepShape(
            rows=self.num_rows,
            sample_rows=self.sample_rows,
            longest=self.packing.longest,
            num_sequences=self.packing.ends.size,
            kept_keys=self.packing.kept_keys,
            keeps=self.slot_mapping.size > 0,
            fp8_attention=len(self.items) == 1 and self.items[0].window.has_fp8_attention,
            adapts=self.slots is not None,
        )

    @cached_property
    def sample_rows(self) -> int:
        """Number of rows whose logits are computed; with guidance, two per position."""
        requests = zip(self.targets, self.items, strict=True)
        return sum([target.eligible.size * item.window.num_sequences for target, item in requests])

    @property
    def reads_kept(self) -> bool:
        """Whether some rows read keys that this step does not compute."""
        return self.packing.kept_keys > 0

    @property
    def num_sampled(self) -> int:
        return sum([target.eligible.size for target in self.targets])

    def inputs(
        self, attend_chunks: Iterable[Iterable[slice]], rows: slice = slice(None)
    ) -> StepInputs[Array]:
        """Return the inputs of `rows` for these chunks of the attend stage.

        A chunk consists of ranges of rows of the batch, in ascending order.
        """
        layouts = tuple([self.layouts(*chunk) for chunk in attend_chunks])
        is_block = self.packing.is_block
        return StepInputs(
            self.token_ids[rows],
            self.positions[rows],
            self.slot_mapping,
            layouts,
            None if is_block is None else is_block[rows],
            window_slots=self.packing.window_slots,
            copy_slots=self.packing.copy_slots,
        )

    def layouts(self, *chunk: slice) -> tuple[AttentionLayout[Array], ...]:
        """Return the keys that a chunk of rows reads; a chunk is as in `inputs`."""
        runs: list[Span] = []
        last: Span | None = None
        for rows, sequence in product(chunk, self.packing.sequences):
            start, end = max(sequence.q_start, rows.start), min(sequence.q_end, rows.stop)
            if start >= end:
                continue
            if last is sequence and last.block_length == 0:  # all its rows read the same keys
                runs[-1] = runs[-1]._replace(q_end=runs[-1].q_end + end - start)
                continue
            last, first = sequence, sequence.first
            if sequence.block_length:
                first += start - sequence.q_start
            runs.append(sequence._replace(q_start=start, q_end=end, first=first))
        return lay_out(runs, self.packing.pages)


def build_batch(
    items: Iterable[BatchItem],
    logit_shift: int,
    pages: PageTable,
    before: Packing | None = None,
) -> StepBatch:
    """Pack the rows that the requests compute in this step.

    Args:
        items: the requests of the step, and items of guests.
        logit_shift: as in `StepBatch`.
        pages: the page table of the cached keys and values.
        before: packing of an earlier step, reused if nothing has moved.
    """
    # Rows without a cache come first. Rows that read keys from the cache come last.
    forwards = sorted([(item, *item.next_forward()) for item in items], key=_kind)
    packed, targets, windows = zip(*forwards, strict=True)
    tails = tuple([target.tail_start for target in targets])
    is_alike = before is not None and before.pages is pages and before.items == packed
    if before is None or not is_alike or (before.windows, before.tails) != (windows, tails):
        before = _pack(packed, windows, tails, pages)
    tokens = [item.sequences for item in packed]
    rows = [tokens[item][number][first:stop] for item, number, first, stop in before.sources]
    return StepBatch(np.concatenate(rows), targets, before, logit_shift)


def _kind(forward: tuple[BatchItem, ForwardTarget, Window]) -> int:
    """Sort key of an item's rows: without a cache first, with cached keys to read last."""
    item, _, window = forward
    return (item.window.cache is not None) + window.reads_kept


def _pack(
    items: tuple[BatchItem, ...],
    windows: tuple[Window, ...],
    tails: tuple[int | None, ...],
    pages: PageTable,
) -> Packing:
    """Lay out the rows of these requests one after the other, in this order, without padding."""
    parts = [
        (index, number, part)
        for index, (item, window) in enumerate(zip(items, windows, strict=True))
        for number in range(item.window.num_sequences)
        for part in window.parts
    ]
    sources = tuple([(index, number, *part[:2]) for index, number, part in parts])
    slots, kept_starts, window_slots = [_NO_SLOTS], [], list["Array"]()
    for index, number, first, stop in sources:
        cache, kept_start = items[index].window.cache, items[index].window.kept_starts[number]
        kept_starts.append(_NOT_KEPT if cache is None else cache.start + kept_start)
        if cache is not None:
            kept = slice(kept_start + first, kept_start + stop)
            slots.append(cache.slots[kept])
            if cache.window_slots is not None:
                window_slots.append(cache.window_slots[kept])
    starts = np.array(kept_starts)
    numbers = chain.from_iterable([part for *_, part in parts])
    table = np.fromiter(numbers, np.int64).reshape(starts.size, -1)
    firsts, stops, num_keys, block_lengths, reads_kept, block_starts = table.T
    counts = stops - firsts
    ends = counts.cumsum()
    offsets = ends - counts - firsts
    first_kept = np.where(starts == _NOT_KEPT, offsets, starts)
    return Packing(
        items,
        windows,
        tails,
        pages,
        positions=np.arange(ends[-1]) - np.repeat(offsets, counts),
        slot_mapping=np.concatenate(slots),
        ends=ends,
        firsts=firsts,
        num_keys=num_keys,
        block_lengths=block_lengths,
        first_keys=np.where(reads_kept, first_kept, offsets),
        first_kept=first_kept,
        num_own=starts.size - int(np.count_nonzero(reads_kept)),
        block_starts=block_starts,
        is_block=np.repeat(block_starts >= 0, counts) if items[0].params.is_open else None,
        window_slots=np.concatenate(window_slots) if window_slots else None,
        sources=sources,
    )


_NO_SLOTS, _NOT_KEPT = np.empty(0, dtype=np.int64), -1
