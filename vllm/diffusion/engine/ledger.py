# SPDX-License-Identifier: Apache-2.0
"""What of the activation pool is taken: for good, between steps, and by a step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.memory import UsageMeter

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from vllm.diffusion.engine.messages import StepUsage
    from vllm.diffusion.memory import ActivationPool, GraphMemory, PageStore, Plan


class StepMemory(NamedTuple):
    """What a step took of the pool, as far as the host knows it when the step is launched."""

    plan: Plan
    planner_us: float
    peak_bytes: int
    unseen_bytes: int  # of the budget, taken by what the pool does not see
    meter: UsageMeter | None  # where the average is measured; else it is as planned

    def usage(self, idle: StepUsage) -> StepUsage:
        """To be asked when the step is over, with what is so without one."""
        plan, peak = self.plan, self.unseen_bytes + self.peak_bytes
        if self.meter is not None:
            average = self.unseen_bytes + self.meter.usage().average_bytes
        else:
            average = peak * plan.predicted_average_bytes / max(plan.predicted_peak_bytes, 1)
        return replace(
            idle,
            peak_bytes=peak,
            average_bytes=round(average),
            planner_us=self.planner_us,
        )


class Ledger:
    """Bytes of the pool that a step cannot have, asked of those who hold them.

    Args:
        pool: of steps and of what is kept between them.
        caches: kept keys and values, in the pool.
        graphs: memory of captured graphs, if there are any.
        device: where the pool is.
    """

    def __init__(
        self,
        pool: ActivationPool,
        caches: PageStore,
        graphs: GraphMemory | None,
        device: torch.device,
    ) -> None:
        self._pool, self._caches, self._graphs = pool, caches, graphs
        self._device = device

    @property
    def fixed_bytes(self) -> int:
        """What is never given back: graphs, and what they write into."""
        graphs = 0 if self._graphs is None else self._graphs.used_bytes
        return graphs + self._pool.outermost_bytes

    @property
    def unseen_bytes(self) -> int:
        """Of what is fixed, what the pool does not count itself."""
        if self._graphs is None or self._pool.graph_bytes is not None:
            return 0
        return self._graphs.used_bytes

    @property
    def kept_bytes(self) -> int:
        """What outlives a step, or is held by one that waits for its next slice."""
        return self.fixed_bytes + self._caches.reserved_bytes + self._pool.frame_bytes

    @contextmanager
    def measuring(self, plan: Plan, num_rows: int) -> Iterator[UsageMeter | None]:
        """Measure what the block takes of the pool, over time where that costs little.

        Times cost a GPU's host two events a stage: small steps do without.
        """
        self._pool.reset_peak()
        if self._device.type == "cuda" and plan.is_whole(num_rows):
            yield None
            return
        meter = UsageMeter(self._device)
        self._pool.measure(meter)
        try:
            yield meter
        finally:
            self._pool.measure(None)

    def memory(
        self,
        plan: Plan,
        planner_us: float,
        meter: UsageMeter | None = None,
        peak_bytes: int | None = None,
    ) -> StepMemory:
        """What a step took whose peak is the pool's, where it is not given."""
        peak = self._pool.peak_bytes if peak_bytes is None else peak_bytes
        return StepMemory(plan, planner_us, peak, self.unseen_bytes, meter)
