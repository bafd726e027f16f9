# SPDX-License-Identifier: Apache-2.0
"""A step that the device has been given."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.diffusion import ops
    from vllm.diffusion.engine.batch import StepBatch
    from vllm.diffusion.engine.ledger import StepMemory


class Step(NamedTuple):
    """What is waited for and committed.

    Attributes:
        started: time.perf_counter() before its first instruction.
        batch: what is computed.
        sampled: what is found.
        memory: what it took.
    """

    started: float
    batch: StepBatch
    sampled: ops.HostCopy
    memory: StepMemory

    @property
    def req_ids(self) -> list[str]:
        return [canvas.req_id for canvas in self.batch.canvases]
