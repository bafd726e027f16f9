# SPDX-License-Identifier: Apache-2.0
"""The rows of a step whose logits are computed: their parts, sampling settings and requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from vllm.diffusion.core.samples import Samples
from vllm.diffusion.core.spans import Span, lay_out
from vllm.diffusion.decoding import BatchedChoice, Candidates
from vllm.diffusion.guided.joint import choose_all, gather
from vllm.diffusion.sampling import RowGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from vllm.diffusion import ops
    from vllm.diffusion.core.spans import AttentionLayout
    from vllm.diffusion.decoding import BatchedCommit
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.ops import Array

A = TypeVar("A")  # an array on the host or a tensor on the device


class SamplePart(NamedTuple, Generic[A]):
    """Sample rows whose logits are computed at a time, on the host or on the device.

    Attributes:
        rows: [r] int64, rows of the batch.
        positions: [r] int64, relative to the canvas.
        layouts: keys that the rows read in the last layer.
        pieces: one per request: its index in the batch, the range of `rows` of its own sequence,
            and the range of its unconditional sequence, or None without guidance.
        num_drafts: one per request: number of its last rows that only draft.
    """

    rows: A
    positions: A
    layouts: tuple[AttentionLayout[A], ...]
    pieces: list[tuple[int, slice, slice | None]]
    num_drafts: Sequence[int] = ()

    @property
    def num_sampled(self) -> int:
        """Number of rows that are sampled; unconditional rows are not."""
        return sum(rows.stop - rows.start for _, rows, _ in self.pieces)


EMPTY_PART = SamplePart(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), (), [])


@dataclass(frozen=True)
class SampleRows:
    """Sample rows of a step: the eligible positions of every request, in the order of the batch.

    With guidance a position has two rows: one of its own sequence and one of the unconditional
    sequence.
    """

    batch: StepBatch

    def parts(self, rows_per_part: int) -> Iterator[SamplePart[Array]]:
        """Yield the sample rows in parts of at most `rows_per_part`, but at least one position.

        The rows of a request are in the same part if they fit.
        """
        part = _PartBuilder(self.batch)
        for number, target in enumerate(self.batch.targets):
            done, weight = 0, self.batch.items[number].window.num_sequences
            while done < target.eligible.size:
                room = (rows_per_part - part.num_rows) // weight
                left = target.eligible.size - done
                is_cut = room < left and left * weight <= rows_per_part
                if (room < 1 or is_cut) and part.num_rows:
                    yield part.finish()
                    part = _PartBuilder(self.batch)
                    continue
                piece = slice(done, min(done + max(room, 1), target.eligible.size))
                part.add(number, target.eligible[piece])
                done = piece.stop
        if part.num_rows:
            yield part.finish()

    def row_groups(self, part: SamplePart[Array], positions: torch.Tensor) -> tuple[RowGroup, ...]:
        """Return how the rows of a part are sampled; its `positions` [r] are on the device."""
        groups = []
        for number, rows, unconditional in part.pieces:
            canvas, on_canvas = self.batch.items[number], part.positions[rows]
            joints = self.joints[number]
            groups.append(
                RowGroup(
                    params=canvas.params,
                    scoring=canvas.rule.scoring,
                    step=canvas.rule.noise_step(canvas.num_steps),
                    forbid_mask=canvas.rule.forbid_mask,
                    rows=rows,
                    unconditional_rows=unconditional,
                    positions=positions[rows],
                    adjust=canvas.adjust_logits,
                    token_ids=canvas.token_ids(on_canvas),
                    joints=tuple([(joint, joint.rows_among(on_canvas)) for joint in joints]),
                    edits=canvas.edits(on_canvas),
                    num_extra_draws=canvas.num_extra_draws,
                )
            )
        return tuple(groups)

    @cached_property
    def joints(self) -> tuple[list[Joint], ...]:
        """Joint choices of each request; empty for independent candidates."""
        joints = [
            c.joints(target) for c, target in zip(self.batch.items, self.batch.targets, strict=True)
        ]
        if not any(joints):
            return tuple(joints)
        ends, start = [], 0
        for canvas, target, own_joints in zip(
            self.batch.items, self.batch.targets, joints, strict=True
        ):
            stops = [canvas.prompt_length + joint.window.stop for joint in own_joints]
            ends += [start + int(end) for end in np.searchsorted(target.eligible, stops)]
            start += target.eligible.size
        gather([joint for own_joints in joints for joint in own_joints], ends)
        return tuple(joints)

    def choose_jointly(self, samples: Samples[torch.Tensor]) -> Samples[torch.Tensor]:
        """Replace, in place, the candidates of requests that choose several tokens together."""
        joints = [joint for own_joints in self.joints for joint in own_joints]
        if joints:
            choose_all(samples, joints)
        return samples

    def candidates_of(self, table: ops.HostCopy) -> list[Candidates | BatchedCommit]:
        """Split the samples of a step by request, into its candidates or its finished choice.

        `table` holds all samples of the step; this call waits for it.
        """
        picks = [canvas.pick for canvas in self.batch.items]
        together = None
        if len(picks) - picks.count(None) > 1:  # a single request decides faster by itself
            together = BatchedChoice(picks, self.batch.targets, self.batch.items[0].params.mask_id)
        samples: Samples[Array] = Samples(table.host.numpy())
        scores, extras = samples.scores, samples.extras
        awaited, end = [], 0
        for canvas, target in zip(self.batch.items, self.batch.targets, strict=True):
            start, end = end, end + target.eligible.size
            logprobs = extras[:, start:end] if canvas.wants_logprobs else None
            fields = scores[start:end], canvas.draws(target.eligible), logprobs
            awaited.append((target.eligible, slice(start, end), *fields))
        table.wait()  # from here on the device waits
        tokens, greedy = (x.astype(np.int64) for x in (samples.tokens, samples.greedy))
        choices: list[BatchedCommit | None] = [None] * len(self.batch.targets)
        if together is not None:
            choices = together.decide(tokens, scores)
        # A batched choice would hide NaN scores, so these requests receive their candidates.
        if np.isnan(scores).any():
            choices = [
                None if np.isnan(scores[columns]).any() else choice
                for choice, (_, columns, *_) in zip(choices, awaited, strict=True)
            ]
        return [
            _with_logprobs(choice, eligible, logprobs)
            or Candidates(eligible, tokens[columns], certain, greedy[columns], draws, logprobs)
            for choice, (eligible, columns, certain, draws, logprobs) in zip(
                choices, awaited, strict=True
            )
        ]

    @cached_property
    def ends(self) -> Array:
        """For each request, the end of its columns in the table."""
        return np.cumsum([target.eligible.size for target in self.batch.targets])


def _with_logprobs(
    choice: BatchedCommit | None, eligible: Array, logprobs: Array | None
) -> BatchedCommit | None:
    """Add the log probabilities of all candidates to a choice, if the request needs them."""
    if choice is None or logprobs is None:
        return choice
    return choice._replace(eligible=eligible, logprobs=logprobs)


class _PartBuilder:
    """Collects sample rows, in the order of the batch, into a part."""

    def __init__(self, batch: StepBatch) -> None:
        self.num_rows = 0
        self._batch = batch
        # Each entry: positions, sequence, prompt length, logit shift.
        self._rows: list[tuple[Array, Span, int, int]] = []
        self._pieces: list[tuple[int, slice, slice | None]] = []
        self._num_drafts: list[int] = []

    def add(self, number: int, positions: Array) -> None:
        """Add the rows that predict `positions` [r] of the request at this index of the batch."""
        prompt_length, places = self._batch.items[number].prompt_length, []
        target = self._batch.targets[number]
        shift = 1 if target.is_causal else self._batch.logit_shift
        for sequence in self._batch.packing.of_requests[number]:
            self._rows.append((positions, sequence, prompt_length, shift))
            places.append(slice(self.num_rows, self.num_rows + positions.size))
            self.num_rows += positions.size
        tail = target.tail_start
        self._num_drafts.append(
            0 if tail is None else int(np.count_nonzero(positions - shift >= tail))
        )
        self._pieces.append((number, places[0], places[1] if len(places) > 1 else None))

    def finish(self) -> SamplePart[Array]:
        row_positions, sequences, prompt_lengths, shifts = zip(*self._rows, strict=True)
        counts = [positions.size for positions in row_positions]
        positions = np.concatenate(row_positions)
        shift = shifts[0] if len(set(shifts)) == 1 else np.repeat(shifts, counts)
        read = np.maximum(positions - shift, 0)
        first_rows = [sequence.q_start - sequence.first for sequence in sequences]
        runs, end = list[Span](), 0
        for sequence, count in zip(sequences, counts, strict=True):
            runs += _runs(sequence, read[end : end + count])
            end += count
        return SamplePart(
            read + np.repeat(first_rows, counts),
            positions - np.repeat(prompt_lengths, counts),
            lay_out(runs, self._batch.packing.pages),
            self._pieces,
            self._num_drafts,
        )


def _runs(sequence: Span, positions: Array) -> list[Span]:
    """Split the rows of a sequence at `positions` [r], ascending, by the keys that they read.

    Only the number of queries of each run is meaningful.
    """
    start, stop, block_length, in_pages = *sequence[2:5], sequence.in_pages
    if not block_length:
        return [sequence._replace(q_start=0, q_end=positions.size)]
    runs = []
    while positions.size:
        end = (int(positions[0]) // block_length + 1) * block_length
        is_last = positions[-1] < end  # usually all positions are in one block
        count = positions.size if is_last else int(np.searchsorted(positions, end))
        runs.append(Span(0, count, start, min(start + end, stop), in_pages=in_pages))
        positions = positions[count:]
    return runs
