# SPDX-License-Identifier: Apache-2.0
"""From a packed batch to candidates: the layers in one of three ways, then sampling."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion import ops
from vllm.diffusion.engine.division import Division, gathered, rounds_of
from vllm.diffusion.engine.first_forwards import FirstForwards
from vllm.diffusion.engine.forward import (
    run_body,
    run_last_layer,
    run_to_end,
    upload,
    upload_samples,
    upload_share,
)
from vllm.diffusion.engine.head import PooledHead
from vllm.diffusion.engine.streamed import StreamedForward
from vllm.diffusion.memory.footprint import INPUT_BYTES, READ_INPUT_BYTES, RESULT_BYTES
from vllm.diffusion.ranks import Ranks
from vllm.diffusion.sampling import joined, sample

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    import torch

    from vllm.diffusion.engine.batch import SamplePart, StepBatch
    from vllm.diffusion.engine.forward import BodyOutputs, Chunked, Samples
    from vllm.diffusion.engine.graphs import GraphRunner
    from vllm.diffusion.memory import ActivationPool, HostBuffers, PageStore, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import NoiseSource


class Compute:
    """Computes steps within the memory of their plans.

    Args:
        model: the loaded model.
        pool: the memory of steps.
        caches: kept keys and values.
        graphs: of the layers at small row counts, if there are any.
        noise: source of random numbers.
        device: where the model lives.
        ranks: that compute the same steps.

    Attributes:
        first_forwards: that several requests share.
    """

    def __init__(
        self,
        model: DiffusionModel,
        pool: ActivationPool,
        caches: PageStore,
        graphs: GraphRunner | None,
        noise: NoiseSource,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._model, self._pool, self._caches = model, pool, caches
        self._graphs, self._noise, self._device = graphs, noise, device
        self._head = PooledHead(model, pool)
        self._last_sizes: tuple[int, ...] = ()
        self.first_forwards = FirstForwards()

    def whole(self, batch: StepBatch, plan: Plan, host: HostBuffers) -> torch.Tensor:
        """What is sampled of a batch, as `sample` returns it; arguments as for `chunks`."""
        body = None if self._graphs is None else self._graphs.run(batch, plan)
        with nullcontext() if body is not None else self._pool.temporaries():
            return run_to_end(self.chunks(batch, plan, host, body))

    def chunks(
        self, batch: StepBatch, plan: Plan, host: HostBuffers, body: BodyOutputs | None = None
    ) -> Chunked[torch.Tensor]:
        """The same, chunk by chunk.

        Args:
            batch: the step.
            plan: of the step.
            host: host memory for rows that are not on the device.
            body: the layers' results, where a graph has computed them.
        """
        if plan.shards > 1:
            return (yield from self._divided(batch, plan, host))
        pool, model, caches = self._pool, self._model, self._caches
        parts = list(batch.sample_parts(plan.logits_rows))  # while the graph runs
        self._make_room(batch, plan)
        with pool.scope("step"):
            pool.expect("inputs", batch.num_rows * INPUT_BYTES)
            pool.expect("results", batch.shape.sample_rows * (READ_INPUT_BYTES + RESULT_BYTES))
            if body is not None:
                samples = upload_samples(parts, caches)
            else:
                inputs, samples = upload(batch, plan, parts, caches)
                caches.begin_step(batch.slot_mapping, reads=batch.reads_kept)
            if body is None and plan.is_streamed:
                division = Division(Ranks(), batch.num_rows)
                streamed = StreamedForward(model, plan, inputs, division, pool, host, caches)
                yield from streamed.run(_all_rows(parts))
                hidden = self._selected(streamed, samples)
            else:
                body = body or (yield from run_body(model, inputs, plan, pool, pool, caches))
                hidden = run_last_layer(model, body, samples, pool, caches)
            found = []
            with closing(hidden):
                for part in samples:
                    yield plan.chunk_seconds.read
                    groups = batch.row_groups(part.part, part.positions)
                    sample_rows = next(hidden)
                    self.first_forwards.note(batch, part.part, sample_rows)
                    found.append(sample(self._head, [(sample_rows, groups)], self._noise))
            if batch.slot_mapping.size:
                caches.end_step()
            return self._agreed(batch.choose_jointly(joined(found)))

    def _divided(self, batch: StepBatch, plan: Plan, host: HostBuffers) -> Chunked[torch.Tensor]:
        """The same, where every rank has a share of the rows; all of them return the same.

        Nothing is noted for siblings, as no rank has all sample rows.
        """
        pool, model, peers = self._pool, self._model, self._ranks.sequence
        division = Division(self._ranks, batch.num_rows)
        even = -(-batch.shape.sample_rows // peers.size)
        parts = list(batch.sample_parts(max(min(plan.logits_rows, even), 1)))
        rounds = rounds_of(parts, division)
        self._make_room(batch, plan)
        with pool.scope("step"):
            pool.expect("inputs", division.longest * INPUT_BYTES)
            results = READ_INPUT_BYTES + RESULT_BYTES
            pool.expect("results", peers.size * even * results)
            inputs, samples = upload_share(batch, plan, division, rounds, self._caches)
            streamed = StreamedForward(model, plan, inputs, division, pool, host, self._caches)
            yield from streamed.run(_all_rows(parts))
            found = []
            for taken, (given, positions) in zip(rounds, samples, strict=True):
                yield plan.chunk_seconds.read
                with pool.scope("sample rows"):
                    sent = streamed.select("given rows", given, taken.given)
                    shape = (sum(taken.received), model.hidden_size)
                    hidden = pool.take("sample rows", shape, model.dtype)
                    peers.exchange(hidden, sent, taken.received, taken.sent)
                    if taken.part is not None:
                        groups = batch.row_groups(taken.part, positions)
                        found.append(sample(self._head, [(hidden, groups)], self._noise))
            own = joined(found).to(self._device)
            return gathered(own, parts, peers) if parts else own

    def _agreed(self, found: torch.Tensor) -> torch.Tensor:
        """Of a step that every rank has computed by itself, what the first has found."""
        return self._ranks.sequence.follow(found.contiguous()) if found.numel() else found

    def _selected(
        self, streamed: StreamedForward, samples: Iterable[Samples]
    ) -> Generator[torch.Tensor]:
        """The sample rows part by part: [r, D], good until the next ones are asked for."""
        for part, rows, *_ in samples:
            with self._pool.scope("sample rows"):
                yield streamed.select("sample rows", rows, part.rows)

    def known(self, batch: StepBatch, of: str) -> torch.Tensor | None:
        """What is sampled of a request's first forward, where that of a sibling is known.

        Args:
            batch: the forward, of which nothing is computed.
            of: the sibling.
        """
        found = []
        for part, hidden in self.first_forwards.share(batch.canvases[0].req_id, of):
            (positions,) = ops.to_device([part.positions], self._device)
            sample_rows = hidden.wait().to(self._device, non_blocking=True)
            groups = batch.row_groups(part, positions)
            with self._pool.temporaries(), self._pool.scope("step"):
                found.append(sample(self._head, [(sample_rows, groups)], self._noise))
        return self._agreed(batch.choose_jointly(joined(found))) if found else None

    def _make_room(self, batch: StepBatch, plan: Plan) -> None:
        """Give back buffers and PyTorch's temporaries of other sizes, where steps are long."""
        if not plan.is_whole(batch.num_rows) and plan.sizes != self._last_sizes:
            self._pool.trim()
            self._last_sizes = plan.sizes


def _all_rows(parts: Sequence[SamplePart]) -> Array:
    """[R] int64: rows of the step that are sampled, or guide the sampling of others."""
    return np.concatenate([np.empty(0, np.int64), *(part.rows for part in parts)])
