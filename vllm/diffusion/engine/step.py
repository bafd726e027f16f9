# SPDX-License-Identifier: Apache-2.0
"""A step that the device has been given, and who gives it one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from vllm.diffusion import ops
    from vllm.diffusion.engine.batch import StepBatch
    from vllm.diffusion.engine.canvas import Canvas
    from vllm.diffusion.engine.ledger import StepMemory
    from vllm.diffusion.engine.messages import NewCanvas, Slice
    from vllm.diffusion.engine.turns import Shares
    from vllm.diffusion.memory import ActivationPool, PageStore, Planner

# The requests of a step, and why those failed that did.
Outcomes: TypeAlias = "dict[str, Exception | None]"


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


class StepRunner(Protocol):
    """What the loop over steps and the recovery from their errors need of a model runner."""

    canvases: dict[str, Canvas]
    planner: Planner
    pool: ActivationPool
    caches: PageStore
    shares: Shares

    @property
    def kept_bytes(self) -> int: ...

    def start(self, new: NewCanvas) -> None: ...

    def forget(self, req_id: str) -> None: ...

    def step_known(self, new: NewCanvas) -> Outcomes: ...

    def launch(self, req_ids: list[str]) -> Step: ...

    def launch_slice(self, asked: Slice) -> Step | None: ...

    def drop_slices(self) -> bool: ...

    def collect(self, step: Step) -> Outcomes: ...
