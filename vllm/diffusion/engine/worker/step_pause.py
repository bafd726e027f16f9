# SPDX-License-Identifier: Apache-2.0
"""Pausing steps during a weight update or while the KV cache is released (sleep mode).

Cached results are dropped; committed tokens stay.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.diffusion.memory import OUT_OF_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.engine.messages import (
        DiffusionRunnerOutput,
        DiffusionSchedulerOutput,
        NewCanvas,
        StepResult,
    )
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes

_PAUSED_S = 1e-3  # seconds between two messages during a pause


class StepPause:
    """A pause in which messages are answered without a step.

    The scheduler first receives the results of steps already collected, then the new epoch.
    The pause ends when the scheduler has acknowledged that epoch and no caller still holds it.

    Args:
        runner: owner of the requests.
        results: makes the clients' results of a step.

    Attributes:
        reason: why a caller holds the pause; None if no caller holds it.
    """

    def __init__(
        self, runner: DiffusionModelRunner, results: Callable[[Outcomes], dict[str, StepResult]]
    ) -> None:
        self._runner, self._results = runner, results
        self._settled: list[dict[str, StepResult]] = []  # results for the next messages
        self.reason: str | None = None

    def add(self, outcomes: Outcomes) -> None:
        """Keep the outcomes of a collected step, or of failed requests, for the next messages."""
        if outcomes:
            self._settled.append(self._results(outcomes))

    def invalidate(self) -> None:
        """Drop cached results, after a change of the weights."""
        self.add(invalidate_results(self._runner))

    def can_resume(self, message: DiffusionSchedulerOutput) -> bool:
        """Whether the pause ends: the scheduler is up to date, and no caller holds the pause."""
        return not self._settled and self.reason is None and self._is_known(message)

    def admitted(self, message: DiffusionSchedulerOutput) -> list[NewCanvas]:
        """Return the requests to start, without prompts that were computed with other weights."""
        if self._is_known(message):
            return message.admitted
        return [replace(new, prompt_of=None) for new in message.admitted]

    def take_results(self) -> dict[str, StepResult]:
        """Return the results of an already collected step; if there are none, wait a little."""
        if self._settled:
            running = self._runner.canvases
            return {r: result for r, result in self._settled.pop(0).items() if r in running}
        if self.reason is not None:
            # Do not spin: the caller that resumes needs this core.
            time.sleep(_PAUSED_S)
        return {}

    def add_results_to(
        self, output: DiffusionRunnerOutput, message: DiffusionSchedulerOutput
    ) -> DiffusionRunnerOutput:
        """Attach pending results; when none are left, attach the new epoch."""
        if self._settled:
            launched = [*map(list, self._settled), *output.launched]
            return replace(output, launched=launched, epoch=message.epoch)
        if not self._is_known(message):
            canvases = self._runner.canvases.items()
            output.invalidated |= {r: c.count_next_rows() for r, c in canvases if not c.is_complete}
        return output

    def _is_known(self, message: DiffusionSchedulerOutput) -> bool:
        return self._runner.epoch == message.epoch


def invalidate_results(runner: DiffusionModelRunner) -> Outcomes:
    """Drop cached results: the weights have changed, or keys and values were released.

    Returns:
        failures by request: a request that read another request's prompt had no memory for its own
        cache.
    """
    failures: Outcomes = {}
    runner.epoch += 1
    runner.weight_generation = runner.model.weight_generation
    runner.invalidate()
    for req_id, canvas in runner.canvases.items():
        window = canvas.window
        try:
            if window.reads_prompt or (window.cache is None and canvas.keeps_approximately):
                layers = runner.caches.host_layers
                window.cache = runner.pages.allocate(req_id, window.num_places, layers)
        except OUT_OF_MEMORY as error:
            failures[req_id] = error.with_traceback(None)
        canvas.invalidate()
        canvas.use_weights(runner.weight_generation)
    return failures


def release_kv_cache(runner: DiffusionModelRunner) -> tuple[int, int] | None:
    """Release cached keys and values, and the pool's memory, while nothing runs.

    Returns:
        the sizes that `restore_kv_cache` requires.
    """
    runner.invalidate()  # drafts hold pages, too
    store, pages = runner.caches, runner.pages
    fixed = (store.num_pages, store.most_entries) if pages.fixed_bytes else None
    for req_id, canvas in runner.canvases.items():
        pages.release(req_id)
        canvas.window.assign(None, 0 if canvas.params.cache == "exact" else None)
    store.reset(store.host_layers)
    runner.pool.trim()
    return fixed


def restore_kv_cache(runner: DiffusionModelRunner, fixed: tuple[int, int] | None) -> Outcomes:
    """Allocate the memory again; requests start their next forwards without cached keys.

    Returns:
        failures, as `invalidate_results`.
    """
    if fixed is not None:
        runner.pages.fix(*fixed)
    return invalidate_results(runner)
