# SPDX-License-Identifier: Apache-2.0
"""From a packed batch to candidates: layers (graph, chunked or streamed), then sampling."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion import ops
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.core.stages import INPUTS, RESULTS, head, read_rows
from vllm.diffusion.engine.worker.forward import (
    run_body,
    run_last_layer,
    run_to_end,
)
from vllm.diffusion.engine.worker.row_shares import Cuts, Division, gathered, rounds_of, to_first
from vllm.diffusion.engine.worker.sample_rows import EMPTY_PART
from vllm.diffusion.engine.worker.streamed import StreamedForward
from vllm.diffusion.memory import chunks
from vllm.diffusion.parallel.groups import Ranks
from vllm.diffusion.sampling import sample

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.core.buffers import Buffers
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.first_forwards import FirstForwards
    from vllm.diffusion.engine.worker.forward import BodyOutputs, Chunked
    from vllm.diffusion.engine.worker.row_shares import Round
    from vllm.diffusion.engine.worker.sample_rows import SamplePart, SampleRows
    from vllm.diffusion.engine.worker.step_graphs import GraphRunner
    from vllm.diffusion.engine.worker.step_memory import StepMemory
    from vllm.diffusion.memory import ActivationPool, HostBuffers, PageStore, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array
    from vllm.diffusion.parallel.groups import RankGroup


SHORT_ROWS = 4_096  # of a step; memory that PyTorch keeps of a shorter one is not worth a wait


class Step(NamedTuple):
    """A launched step, to be waited for and committed.

    Attributes:
        started: time.perf_counter() before its first instruction.
        rows: its sample rows.
        samples: the table of their samples.
        memory: memory that it took.
    """

    started: float
    rows: SampleRows
    samples: ops.HostCopy
    memory: StepMemory

    @property
    def batch(self) -> StepBatch:
        return self.rows.batch

    @property
    def req_ids(self) -> list[str]:
        return [canvas.req_id for canvas in self.batch.canvases]


class Compute:
    """Computes steps within the memory of their plans.

    Args:
        model: the loaded model.
        pool: memory of steps.
        caches: kept keys and values.
        graphs: CUDA graphs of the layers for small row counts, if there are any.
        device: device of the model.
        ranks: ranks that compute the same steps.

    Attributes:
        first_forwards: results for requests that share a prompt; None until the first of them.
    """

    def __init__(
        self,
        model: DiffusionModel,
        pool: ActivationPool,
        caches: PageStore,
        graphs: GraphRunner | None,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._model, self._pool, self._caches = model, pool, caches
        self._graphs, self._device = graphs, device
        self._head = PooledHead(model, pool)
        self._last_sizes: tuple[object, ...] = ()
        self._most_rows = SHORT_ROWS
        self.first_forwards: FirstForwards | None = None

    def whole(self, rows: SampleRows, plan: Plan, host: HostBuffers) -> torch.Tensor:
        """Compute a step at once; arguments and result as for `chunks`."""
        batch = rows.batch
        body = None if self._graphs is None else self._graphs.run(batch, plan)
        self.make_room(batch, plan)
        with nullcontext() if body is not None else self._pool.temporaries():
            return run_to_end(self.chunks(rows, plan, host, body))

    def chunks(
        self, rows: SampleRows, plan: Plan, host: HostBuffers, body: BodyOutputs | None = None
    ) -> Chunked[torch.Tensor]:
        """Compute a step chunk by chunk and return the table of its samples.

        Args:
            rows: the step's sample rows.
            plan: plan of the step.
            host: host memory for rows that are not on the device.
            body: the layers' results, where a graph has computed them.
        """
        if plan.layout.is_streamed and body is None:
            return (yield from self._streamed(rows, plan, host))
        batch = rows.batch
        pool, model, caches = self._pool, self._model, self._caches
        parts = tuple(rows.parts(plan.rows.read))  # while the graph runs
        with pool.scope("step"):
            INPUTS.expect(pool, batch.num_rows)
            RESULTS.expect(pool, batch.shape.sample_rows)
            if body is not None:
                samples = ops.to_device(parts, self._device)
            else:
                attend_chunks = [[rows] for rows in chunks(batch.num_rows, plan.rows.attend)]
                given = batch.inputs(attend_chunks), parts
                inputs, samples = ops.to_device(given, self._device)
                caches.begin_step(batch.slot_mapping, reads=batch.reads_kept)
                body = yield from run_body(model, inputs, plan, pool, pool, caches)
            found = []
            with closing(run_last_layer(model, body, samples, pool, caches)) as hidden:
                for part, on_device in zip(parts, samples, strict=True):
                    yield plan.chunk_seconds.read
                    sample_rows = next(hidden)
                    if self.first_forwards is not None:
                        self.first_forwards.note(batch, part, sample_rows)
                    found.append(self._sampled(rows, part, on_device.positions, sample_rows))
            if batch.slot_mapping.size:
                caches.end_step()
            return self._agreed(rows.choose_jointly(Samples.joined(found)))

    def _streamed(self, rows: SampleRows, plan: Plan, host: HostBuffers) -> Chunked[torch.Tensor]:
        """Compute a step by groups of heads, with rows on the host or divided between ranks.

        Ranks then deal out the parts of the sample rows, and all return the same samples. Where a
        request chooses several rows together, the first rank takes all of them.
        """
        batch = rows.batch
        pool, caches = self._pool, self._caches
        ranks = self._ranks if plan.layout.shards > 1 else Ranks()
        division, peers = Division(ranks, batch.num_rows), ranks.sequence
        even = -(-batch.shape.sample_rows // peers.size)
        parts = list(rows.parts(max(min(plan.rows.read, even), 1)))
        is_joint = any(rows.joints)
        if is_joint:
            parts = to_first(parts, peers.size)
        rounds, cuts = rounds_of(parts, division), Cuts.of(division, plan, parts)
        with pool.scope("step"):
            INPUTS.expect(pool, division.longest)
            RESULTS.expect(pool, peers.size * even)
            attend_chunks = [chunk.places for chunk in (*cuts.attend, *cuts.last_attend)]
            given = (
                batch.inputs(attend_chunks, division.own),
                tuple((r.given, r.positions) for r in rounds),
            )
            inputs, samples = ops.to_device(given, self._device)
            caches.begin_step(batch.slot_mapping, reads=batch.reads_kept)
            streamed = StreamedForward(
                self._model, plan, inputs, division, cuts, pool, host, caches
            )
            yield from streamed.run()
            found = []
            for taken, (given, positions) in zip(rounds, samples, strict=True):
                yield plan.chunk_seconds.read
                with pool.scope("sample rows"):
                    hidden = self._dealt(streamed, taken, given, peers)
                    if taken.part is None or taken.part is EMPTY_PART:
                        continue
                    if plan.layout.shards == 1 and self.first_forwards is not None:
                        self.first_forwards.note(batch, taken.part, hidden)
                    found.append(self._sampled(rows, taken.part, positions, hidden))
            if batch.slot_mapping.size:
                caches.end_step()
            own = Samples.joined(found)
            if is_joint and peers.rank == 0:
                own = rows.choose_jointly(own)
            if plan.layout.shards == 1 or not parts:
                return self._agreed(own)
            return gathered(own.table.to(self._device), parts, peers)

    def _dealt(
        self, streamed: StreamedForward, taken: Round, given: torch.Tensor, peers: RankGroup
    ) -> torch.Tensor:
        """Return the hidden states [r, D] of this rank's part of a round, after all layers."""
        own, others = read_rows(self._model.dtype, self._model.hidden_size)
        if peers.size == 1:
            return streamed.select(own, given, taken.given)
        sent = streamed.select(others, given, taken.given)
        hidden = own.take(self._pool, sum(taken.received))
        peers.exchange(hidden, sent, taken.received, taken.sent)
        return hidden

    def _sampled(
        self,
        rows: SampleRows,
        part: SamplePart[Array],
        positions: torch.Tensor,
        hidden: torch.Tensor,
    ) -> Samples[torch.Tensor]:
        """Sample a part, given its `positions` [r] and `hidden` states [r, D]."""
        groups = rows.row_groups(part, positions)
        return sample(self._head, [(hidden, groups)])

    def _agreed(self, samples: Samples[torch.Tensor]) -> torch.Tensor:
        """All ranks computed this step; return rank 0's samples.

        So all of them commit the same tokens.
        """
        table: torch.Tensor = samples.table
        if self._ranks.sequence.size == 1 or not table.numel():
            return table
        return self._ranks.sequence.follow(table.contiguous())

    def known(self, rows: SampleRows, of: str) -> torch.Tensor | None:
        """Sample a first forward from hidden states that another request left; None if unknown.

        Args:
            rows: sample rows of the forward, whose layers are not computed.
            of: id of the request that shares its prompt.
        """
        if self.first_forwards is None:
            return None
        found = []
        for part, hidden in self.first_forwards.share(rows.batch.canvases[0].req_id, of):
            (positions,) = ops.to_device((part.positions,), self._device)
            sample_rows = hidden.wait().to(self._device, non_blocking=True)
            with self._pool.temporaries(), self._pool.scope("step"):
                found.append(self._sampled(rows, part, positions, sample_rows))
        return self._agreed(rows.choose_jointly(Samples.joined(found))) if found else None

    def make_room(self, batch: StepBatch, plan: Plan) -> None:
        """Release memory of other sizes before a long step: buffers and PyTorch's temporaries.

        For a whole step longer than those before, release PyTorch's alone, which would else take
        more beside what it has cached. Not to be called within `temporaries`, whose memory stays to
        the end.
        """
        num_rows = batch.num_rows
        if plan.is_whole(num_rows):
            if num_rows > self._most_rows:
                self._pool.drop_unused()
                self._most_rows = num_rows
        elif plan.sizes != self._last_sizes:
            self._pool.trim()
            self._last_sizes, self._most_rows = plan.sizes, SHORT_ROWS


class PooledHead:
    """Final norm and output head; results are valid until the scope of `buffers` ends."""

    def __init__(self, model: DiffusionModel, buffers: Buffers) -> None:
        self.vocab_start = model.vocab_start
        self.vocab_size = model.vocab_size
        self._model = model
        self._buffers = buffers
        self._normed, self._logits = head(model.dtype, model.hidden_size, model.num_columns)

    @property
    def head_matrix(self) -> torch.Tensor | None:
        """Output matrix, see `DiffusionModel.head_matrix`."""
        return self._model.head_matrix

    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the last norm to x [R, D]."""
        return self._model.final_norm(x, out=self._normed.take(self._buffers, len(x)))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [R, columns of this rank] of normed hidden states [R, D]."""
        logits = self._logits.take(self._buffers, len(hidden_states))
        return self._model.compute_logits(hidden_states, out=logits, scratch=self._buffers)
