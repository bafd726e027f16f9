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
    from collections.abc import Callable, Collection

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
        # Replacements of adapters that the scheduler does not know yet, and their requests.
        self._renewed_adapters: dict[int, int] = {}
        self._renewed: set[str] = set()
        self.reason: str | None = None

    def add(self, outcomes: Outcomes) -> None:
        """Keep the outcomes of a collected step, or of failed requests, for the next messages."""
        if outcomes:
            self._settled.append(self._results(outcomes))

    def invalidate(self) -> None:
        """Drop cached results, after a change of the weights."""
        self.add(invalidate_results(self._runner))

    def renew(self, number: int, generation: int, req_ids: Collection[str]) -> None:
        """Drop the results of requests whose adapter was replaced for the `generation`-th time."""
        self.add(forget_results(self._runner, req_ids))
        self._renewed_adapters[number] = generation
        self._renewed.update(req_ids)

    def can_resume(self, message: DiffusionSchedulerOutput) -> bool:
        """Whether the pause ends: the scheduler is up to date, and no caller holds the pause."""
        is_told = not self._settled and not self._renewed_adapters
        return is_told and self.reason is None and self._is_known(message)

    def admitted(self, message: DiffusionSchedulerOutput) -> list[NewCanvas]:
        """Return the requests to start, without prompts that were computed with other weights."""
        if self._is_known(message) and not self._renewed_adapters:
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
            output.invalidated |= {r: c.count_next_rows() for r, c in canvases if c.has_next}
        if self._renewed_adapters:
            canvases = self._runner.canvases.items()
            renewed = {r: c for r, c in canvases if r in self._renewed and c.has_next}
            output.invalidated |= {r: c.count_next_rows() for r, c in renewed.items()}
            output.renewed_adapters |= self._renewed_adapters
            self._renewed_adapters = {}
            self._renewed.clear()
        return output

    def _is_known(self, message: DiffusionSchedulerOutput) -> bool:
        return self._runner.epoch == message.epoch


def invalidate_results(runner: DiffusionModelRunner) -> Outcomes:
    """Drop cached results: the weights have changed, or keys and values were released.

    Returns:
        failures by request: a request that read another request's prompt had no memory for its own
        cache.
    """
    runner.epoch += 1
    runner.weight_generation = runner.model.weight_generation
    runner.invalidate()
    failures = _begin_again(runner, list(runner.canvases))
    for canvas in runner.canvases.values():
        canvas.use_weights(runner.weight_generation)
    return failures


def forget_results(runner: DiffusionModelRunner, req_ids: Collection[str]) -> Outcomes:
    """Drop the cached results of some requests; return failures, as `invalidate_results`."""
    for guest in runner.guests:
        for req_id in req_ids:
            guest.forget(req_id)
    return _begin_again(runner, req_ids)


def _begin_again(runner: DiffusionModelRunner, req_ids: Collection[str]) -> Outcomes:
    """Make requests compute all positions in their next forward; return failures."""
    failures: Outcomes = {}
    for req_id in req_ids:
        canvas = runner.canvases[req_id]
        window = canvas.window
        try:
            has_none = window.cache is None and canvas.keeps_approximately and canvas.has_next
            if window.reads_prompt or has_none:
                layers = runner.caches.host_layers
                window.cache = runner.pages.allocate(req_id, window.num_places, layers)
        except OUT_OF_MEMORY as error:
            failures[req_id] = error.with_traceback(None)
        canvas.invalidate()
    return failures


def release_kv_cache(runner: DiffusionModelRunner) -> tuple[int, ...] | None:
    """Release cached keys and values, and the pool's memory, while nothing runs.

    Returns:
        the sizes that `restore_kv_cache` requires.
    """
    runner.invalidate()  # drafts hold pages, too
    store, pages = runner.caches, runner.pages
    fixed = pages.fixed_sizes
    for req_id, canvas in runner.canvases.items():
        pages.release(req_id)
        canvas.window.assign(None, 0 if canvas.params.cache == "exact" else None)
    store.reset(store.host_layers)
    runner.pool.trim()
    return fixed


def restore_kv_cache(runner: DiffusionModelRunner, fixed: tuple[int, ...] | None) -> Outcomes:
    """Allocate the memory again; requests start their next forwards without cached keys.

    Returns:
        failures, as `invalidate_results`.
    """
    if fixed is not None:
        runner.pages.fix(*fixed)
    return invalidate_results(runner)
