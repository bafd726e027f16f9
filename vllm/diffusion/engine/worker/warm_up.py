# SPDX-License-Identifier: Apache-2.0
"""Warm-up steps before the first request, so that no request waits for kernels or graphs."""

from __future__ import annotations

import gc
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import ceil, gcd
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from vllm.diffusion.core.pages import num_pages
from vllm.diffusion.engine.messages import NewCanvas, NewPages
from vllm.diffusion.engine.worker.step_graphs import ENDED_ROWS, buckets_of
from vllm.diffusion.memory import OUT_OF_MEMORY
from vllm.diffusion.request import decision, fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
    from vllm.diffusion.engine.worker.step_graphs import Buckets
    from vllm.diffusion.request.served_model import ServedModel

# Maximum number of sampled positions of a request. The last layer and the logits are computed for
# these positions alone, and products of other row counts use other kernels.
_CANVAS = 256
_BLOCK = 64  # block length of longer sequences; shorter if blocks must tile them


def warm_up(
    runner: DiffusionModelRunner,
    model: ServedModel,
    *,
    row_budget: int,
    shows_progress: bool,
) -> None:
    """Run steps of one sequence and of several sequences, with and without a cache, of every size.

    The sizes are the graph buckets that some batch of the server can have, and two sizes without a
    graph. Steps with a cache sample tokens and steps without a cache take the most likely ones,
    because these use different kernels. The pages that several requests may keep are allocated
    first, because graphs hold their addresses.

    Args:
        runner: runner with a loaded model and without requests.
        model: facts about the model.
        row_budget: rows that several requests may share in a step.
        shows_progress: whether to draw a progress bar.
    """
    # The server's defaults may not fit these canvases.
    model = replace(model, defaults={})
    buckets = buckets_of(runner.model.config, is_fp8=runner.model.is_fp8)
    positions = runner.planner.cached_positions
    if runner.graphs is not None:
        runner.pages.provide(positions)
    steps = list(_steps(model, buckets, row_budget, positions))
    if model.family.is_block_causal:
        steps = [step for step in steps if _num_pages(step) <= runner.caches.num_whole_pages]
    has_windows = runner.planner.shape.window_layers is not None
    with _garbage_frozen():
        for requests in tqdm(steps, desc="Capturing CUDA graphs", disable=not shows_progress):
            for _ in runner.rehearsals():
                # With a small pool, requests run without graphs, too.
                with suppress(*OUT_OF_MEMORY):
                    run_alone(runner, requests, _pages(requests, has_windows=has_windows))
    if runner.graphs is not None:
        runner.graphs.captures_more = False
        runner.graphs.measure()


def run_alone(
    runner: DiffusionModelRunner, requests: Sequence[NewCanvas], pages: Mapping[str, NewPages]
) -> None:
    """Run a step of requests, then remove them; errors are raised on all ranks.

    If requests begin with a seed of their own, the step that denoises follows.
    """
    failure: Exception | None = None
    try:
        for new in requests:
            runner.start(new)
        runner.assign(pages)
        is_seeded = requests[0].params.has_causal_context and requests[0].params.block_length > 1
        for _ in range(1 + is_seeded):
            with torch.inference_mode():
                runner.collect(runner.launch([new.req_id for new in requests]))
        runner.report_collected()
    except OUT_OF_MEMORY as error:
        failure = error.with_traceback(None)
    finally:
        for new in requests:
            runner.remove(new.req_id)
    if runner.agreement is not None:
        failure = runner.agreement.reach(failure)
    if failure is not None:
        raise failure


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    """Exempt existing objects from the garbage collection before every capture."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _steps(
    model: ServedModel, buckets: Buckets, row_budget: int, positions: int
) -> Iterator[list[NewCanvas]]:
    """Yield the requests of each step; large steps first, so that buffers are allocated once."""
    kept = "exact" if model.family.is_block_causal else "dual"
    sizes = {
        "none": _sizes(buckets.whole, row_budget),
        kept: _sizes(buckets.windows, row_budget),
    }
    for rows in sorted(set().union(*sizes.values()), reverse=True):
        for cache in [cache for cache, sizes_of_cache in sizes.items() if rows in sizes_of_cache]:
            below = max((size for size in sizes[cache] if size < rows), default=0)
            room = rows if cache == "none" else min(rows, positions)
            longest = min(room, model.max_model_len)
            if longest > below:
                yield [_request(model, "warm-up", longest, cache)]
                # Here the last layer runs on sample rows alone.
                if below <= ENDED_ROWS < longest:
                    yield [_request(model, "warm-up", longest, cache, num_sampled=1)]
            shared = min(room, row_budget)
            number = max(2, ceil(shared / model.max_model_len))
            # A single request can also have several sequences, with guidance or drafts.
            if shared > below:
                unit = model.block_unit
                units = shared // unit
                lengths = [unit * ((units + i) // number) for i in range(number)]
                yield [_request(model, f"warm-up-{i}", n, cache) for i, n in enumerate(lengths)]


def _sizes(rows: tuple[int, ...], row_budget: int) -> tuple[int, ...]:
    """Return the row counts of buckets, then twice the largest one, and the row budget."""
    return tuple(
        sorted({*rows, *(n for n in (2 * rows[-1], row_budget) if rows[-1] < n <= row_budget)})
    )


def _num_pages(requests: list[NewCanvas]) -> int:
    """Return the number of pages of a store that holds all keys and values of these requests."""
    page_lists = (pages.page_ids for pages in _pages(requests).values())
    return max((max(page_ids) + 1 for page_ids in page_lists), default=0)


def _pages(requests: list[NewCanvas], *, has_windows: bool = False) -> dict[str, NewPages]:
    """Assign pages, from 0, to the requests whose pages the scheduler would assign.

    With `has_windows` every page has the window page of the same number.
    """
    new_pages, start = {}, 0
    for new in requests:
        if new.params.cache == "exact":
            end = start + num_pages(len(new.prompt_token_ids) + new.params.gen_length)
            page_ids, start = list(range(start, end)), end
            window_ids = page_ids if has_windows else []
            new_pages[new.req_id] = NewPages(page_ids, num_kept=0, window_ids=window_ids)
    return new_pages


def _request(
    model: ServedModel, req_id: str, length: int, cache: str, num_sampled: int = _CANVAS
) -> NewCanvas:
    """Create a request whose first forward computes about `length` positions.

    The forward samples `num_sampled` of them, or fewer if the sequence is shorter.
    """
    canvas = min(num_sampled, length - 1)
    parameters: dict[str, object] = {
        "algorithm": "semi_ar",
        "block_length": canvas,
        "steps": canvas,
    }
    if model.family.is_block_causal:  # the last block is decoded
        unit = model.block_unit
        units = max(length // unit, 1)
        length = block_length = unit * units
        if length > _CANVAS:
            block_length = unit * gcd(units, max(_BLOCK // unit, 1))
        canvas = min(num_sampled, max(block_length - 1, 1))
        parameters = {"block_length": block_length, "block_grid": "start"}
    if model.family.has_causal_context:  # a block after one token, or a prompt to be prefilled
        canvas = length - 1 if 2 < length <= num_sampled else 1
        parameters = {"block_length": canvas}
    if model.family.is_strictly_causal:  # a step of any length looks like that of a prompt
        canvas, parameters = 1, {"algorithm": "autoregressive"}
    prompt = [0 if model.ids.mask else 1] * (length - canvas)
    temperature = 0.0 if cache == "none" else 1.0
    parameters |= {"cache": cache, "gen_length": canvas, "temperature": temperature, "seed": 0}
    return NewCanvas(req_id, prompt, decision.decide(fields.canonical(parameters), model, prompt))
