# SPDX-License-Identifier: Apache-2.0
"""Log lines of steps and of their plans."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.diffusion.core import envs
from vllm.diffusion.memory.plan import readable
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.diffusion.engine.messages import StepUsage
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.memory import PageStore, Plan

logger = init_logger(__name__)

SLOW_STEP_MS = 10_000.0  # Slower steps are logged at INFO: at most six lines a minute.


class StepLog:
    """Writes the log lines of one rank."""

    def __init__(self) -> None:
        self._logs_every_step = envs.log_diffusion_steps()
        self._last_plan: tuple[int, tuple[object, ...]] | None = None
        # End of the last step. The next step may have been launched earlier.
        self._last_end = 0.0

    def plan(self, num_rows: int, plan: Plan, free_bytes: int) -> None:
        """Log a new plan; steps that differ only in their sample rows share a plan."""
        key = (num_rows, plan.sizes)
        is_known = key == self._last_plan
        self._last_plan = key
        level = logging.DEBUG if is_known or plan.is_whole(num_rows) else logging.INFO
        logger.log(level, "plan for T = %d with %s: %s", num_rows, readable(free_bytes), plan)

    def host_layers(self, req_id: str, caches: PageStore) -> None:
        """Log that the keys and values of a request do not fit on the device."""
        logger.info(
            "request %s: keys and values of %d layers are in host memory: %s; on the device: %s",
            req_id,
            caches.host_layers,
            readable(caches.host_bytes),
            readable(caches.reserved_bytes),
        )

    def step(
        self, started: float, ended: float, batch: StepBatch, usage: StepUsage, plan: Plan
    ) -> None:
        """Log a step that ran from `started` to `ended`, times of `time.perf_counter()`."""
        elapsed_ms = 1000 * (ended - max(started, self._last_end))
        self._last_end = ended
        at_info = self._logs_every_step or elapsed_ms >= SLOW_STEP_MS
        (logger.info if at_info else logger.debug)(
            "execute_diffusion_once time = %.3f ms, requests = %d, rows = %d, sampled = %d, "
            "predicted = %.3f ms",
            elapsed_ms,
            len(batch.items),
            batch.num_rows,
            batch.num_sampled,
            1000 * plan.predicted_seconds,
        )
        if not logger.isEnabledFor(logging.DEBUG):
            return
        logger.debug(
            "memory of the step: peak = %d bytes, average = %d, peak/average = %.3f, budget = %d, "
            "plan in %.0f us",
            usage.peak_bytes,
            usage.average_bytes,
            usage.peak_bytes / max(usage.average_bytes, 1),
            usage.budget_bytes,
            usage.planner_us,
        )
