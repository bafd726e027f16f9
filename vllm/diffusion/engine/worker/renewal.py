# SPDX-License-Identifier: Apache-2.0
"""What happens between two steps where weights change, or where memory is lent.

What was computed is dropped; what is committed stays.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.diffusion.engine.worker.agreement import OUT_OF_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.engine.messages import (
        DiffusionRunnerOutput,
        DiffusionSchedulerOutput,
        NewCanvas,
        StepResult,
    )
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes

_HELD_S = 1e-3  # between two messages while no step is taken


class Standstill:
    """Messages that are answered without a step.

    The scheduler gets the results of all steps that were collected before, then hears of new
    weights, if there are some; it is over once the scheduler knows of them and nobody holds it.

    Args:
        runner: owner of the requests.
        results: makes the clients' results of a step.

    Attributes:
        held: why no step is taken until that is lifted; None where nobody has asked for it.
    """

    def __init__(
        self, runner: DiffusionModelRunner, results: Callable[[Outcomes], dict[str, StepResult]]
    ) -> None:
        self._runner, self._results = runner, results
        self._settled: list[dict[str, StepResult]] = []  # for the next messages
        self.held: str | None = None

    def add(self, outcomes: Outcomes) -> None:
        """Take in a step that was collected, or requests that have failed."""
        if outcomes:
            self._settled.append(self._results(outcomes))

    def renew(self) -> None:
        """Take in new weights."""
        self.add(renew(self._runner))

    def is_over(self, message: DiffusionSchedulerOutput) -> bool:
        """Whether steps may go on: the scheduler knows all, and nobody holds it."""
        return not self._settled and self.held is None and self._is_known(message)

    def admitted(self, message: DiffusionSchedulerOutput) -> list[NewCanvas]:
        """Return requests that start, without what others had computed with other weights."""
        if self._is_known(message):
            return message.admitted
        return [replace(new, prompt_of=None) for new in message.admitted]

    def take_results(self) -> dict[str, StepResult]:
        """Return the results of a step that was collected before; if none, wait a little."""
        if self._settled:
            running = self._runner.canvases
            return {r: found for r, found in self._settled.pop(0).items() if r in running}
        if self.held is not None:
            time.sleep(_HELD_S)  # a core is better used by who lifts it
        return {}

    def tell(
        self, output: DiffusionRunnerOutput, message: DiffusionSchedulerOutput
    ) -> DiffusionRunnerOutput:
        """Add to an answer what is still to be told, and news of weights once that is all told."""
        if self._settled:
            launched = [*map(list, self._settled), *output.launched]
            return replace(output, launched=launched, generation=message.generation)
        if not self._is_known(message):
            canvases = self._runner.canvases.items()
            output.renewed |= {r: c.next_rows for r, c in canvases if not c.is_complete}
        return output

    def _is_known(self, message: DiffusionSchedulerOutput) -> bool:
        return self._runner.generation == message.generation


def renew(runner: DiffusionModelRunner) -> Outcomes:
    """Drop what was computed: the weights have changed, or keys and values are gone.

    Returns:
        why requests cannot go on, by request: that read another one's prompt, and for whose own
        there is no memory.
    """
    failures: Outcomes = {}
    runner.generation += 1
    runner.weights = runner.model.weight_generation
    runner.forget_computed()
    for req_id, canvas in runner.canvases.items():
        window = canvas.window
        try:
            if window.reads_prompt or (window.cache is None and canvas.keeps_approximately):
                layers = runner.caches.host_layers
                window.cache = runner.pages.allocate(req_id, window.num_places, layers)
        except OUT_OF_MEMORY as error:
            failures[req_id] = error.with_traceback(None)
        canvas.forget()
        canvas.use_weights(runner.weights)
    return failures


def rest(runner: DiffusionModelRunner) -> tuple[int, int] | None:
    """Give back kept keys and values, and the pool's memory, while nothing runs.

    Returns:
        what `wake` needs.
    """
    runner.forget_computed()  # drafts hold pages, too
    store, pages = runner.caches, runner.pages
    fixed = (store.num_pages, store.most_entries) if pages.fixed_bytes else None
    for req_id, canvas in runner.canvases.items():
        pages.release(req_id)
        canvas.window.assign(None, 0 if canvas.params.cache == "exact" else None)
    store.reset(store.host_layers)
    runner.pool.trim()
    return fixed


def wake(runner: DiffusionModelRunner, fixed: tuple[int, int] | None) -> Outcomes:
    """Take the memory again; requests begin their next forwards without kept keys and values.

    Returns:
        as `renew`.
    """
    if fixed is not None:
        runner.pages.fix(*fixed)
    return renew(runner)
