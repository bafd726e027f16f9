# SPDX-License-Identifier: Apache-2.0
"""What a worker is doing, for the server's status page: plain values, asked for between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.diffusion.engine.canvas import Canvas
    from vllm.diffusion.engine.model_runner import DiffusionModelRunner


def status_of(runner: DiffusionModelRunner) -> dict[str, Any]:
    """Who holds what of a rank's activation pool, in bytes, and how far requests have come.

    `pages` are of kept keys and values, `used_pages` those of them that somebody has; `graphs` is
    never given back; `paused` is held by a step between two slices. The rest is for steps.
    """
    caches = runner.caches
    return {
        "pool_bytes": {
            "budget": runner.planner.budget_bytes,
            "graphs": runner.planner.budget_bytes - runner.budget_bytes,
            "pages": caches.reserved_bytes,
            "used_pages": caches.num_bytes,
            "paused": runner.pool.frame_bytes,
        },
        "host_bytes": caches.host_bytes,
        "requests": [_of_request(canvas, caches.page_bytes) for canvas in runner.canvases.values()],
    }


def _of_request(canvas: Canvas, page_bytes: int) -> dict[str, Any]:
    params = canvas.params
    return {
        "id": canvas.req_id,
        "algorithm": params.algorithm,
        "cache": params.cache,
        "prompt_tokens": canvas.prompt_length,
        "canvas_tokens": params.gen_length,
        "committed": canvas.num_committed,
        "forwards": canvas.num_forwards,
        "steps": params.steps,
        "kept_bytes": 0 if canvas.cache is None else len(canvas.cache.pages) * page_bytes,
    }
