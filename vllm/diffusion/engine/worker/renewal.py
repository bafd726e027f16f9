# SPDX-License-Identifier: Apache-2.0
"""What a runner drops when weights change, or when its memory is lent; what is committed stays.

All of it happens between two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.engine.worker.agreement import OUT_OF_MEMORY

if TYPE_CHECKING:
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes


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
    runner.drop_slices()
    store, pages = runner.caches, runner.pages
    fixed = (store.num_pages, store.most_entries) if pages.fixed_bytes else None
    for req_id, canvas in runner.canvases.items():
        pages.release(req_id)
        canvas.window.assign(None, 0 if canvas.params.cache == "exact" else None)
    store.begin_anew(store.host_layers)
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
