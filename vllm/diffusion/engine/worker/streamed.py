# SPDX-License-Identifier: Apache-2.0
"""Runs steps whose layers are computed by groups of heads, divided between ranks, or with fp8 keys.

The layers are in `streamed_layers.py`, and with fp8 attention in `fp8_step.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion import ops
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.core.stages import INPUTS, RESULTS
from vllm.diffusion.engine.worker.fp8_step import Fp8Forward
from vllm.diffusion.engine.worker.row_shares import (
    RowPartition,
    StageChunks,
    gathered,
    rounds_of,
    to_first,
)
from vllm.diffusion.engine.worker.sample_rows import EMPTY_PART
from vllm.diffusion.engine.worker.streamed_layers import StreamedForward
from vllm.diffusion.parallel.groups import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.engine.worker.forward import Chunked, ForwardPass
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.memory import HostBuffers, Plan


def run_streamed(
    forward: ForwardPass,
    rows: SampleRows,
    plan: Plan,
    host: HostBuffers,
) -> Chunked[Tensor]:
    """Compute a step by groups of heads, with rows on the host or divided between ranks.

    With several ranks, the parts of the sample rows are dealt to them, and all ranks return the
    same samples. If a request chooses several rows together, the first rank samples all parts.
    Arguments and result are those of `ForwardPass.run`. `host` provides memory for rows that are
    not on the device.
    """
    batch, pool, caches = rows.batch, forward.pool, forward.caches
    ranks = forward.ranks if plan.layout.shards > 1 else Ranks()
    division, peers = RowPartition(ranks, batch.num_rows), ranks.sequence
    even = -(-batch.shape.sample_rows // peers.size)
    parts = list(rows.parts(max(min(plan.rows.logits, even), 1)))
    is_joint = any(rows.joints)
    if is_joint:
        parts = to_first(parts, peers.size)
    in_windows = forward.model.routes_windows
    rounds = rounds_of(parts, division)
    cuts = StageChunks.of(division, plan, parts, in_windows=in_windows)
    if forward.model.adapting is not None:
        announcing = forward.model.adapting.announcing
        cuts = StageChunks(*(announcing(chunks, peers.rank) for chunks in cuts))
    with pool.scope("step"):
        INPUTS.expect(pool, division.longest)
        RESULTS.expect(pool, peers.size * even)
        attend_chunks = [chunk.places for chunk in (*cuts.attend, *cuts.last_attend)]
        round_arrays = tuple((r.given, r.positions) for r in rounds)
        host_inputs = batch.inputs(attend_chunks, division.local), round_arrays
        inputs, samples = ops.to_device(host_inputs, caches.device)
        if batch.slot_mapping.size:
            caches.begin_step(batch.slot_mapping, reads=batch.reads_kept)
        layers = Fp8Forward if plan.layout.fp8_attention else StreamedForward
        streamed = layers(forward.model, plan, inputs, division, cuts, pool, host, caches)
        yield from streamed.run()
        sampled = []
        for exchange, (given_rows, positions) in zip(rounds, samples, strict=True):
            yield plan.chunk_seconds.logits
            with pool.scope("sample rows"):
                hidden = streamed.hidden(exchange, given_rows)
                if exchange.part is None or exchange.part is EMPTY_PART:
                    continue
                if plan.layout.shards == 1 and forward.note_first is not None:
                    forward.note_first(batch, exchange.part, hidden)
                sampled.append(forward.sampled(rows, exchange.part, positions, hidden))
        if batch.slot_mapping.size:
            caches.end_step()
        joined = Samples.joined(sampled)
        if is_joint and peers.rank == 0:
            joined = rows.choose_jointly(joined)
        if plan.layout.shards == 1 or not parts:
            return forward.broadcast_samples(joined)
        return gathered(joined.table.to(caches.device), parts, peers)
