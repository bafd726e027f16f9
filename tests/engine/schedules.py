# SPDX-License-Identifier: Apache-2.0
"""Runs requests that arrive and are aborted at given steps, and checks cached pages meanwhile."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.engine.harness import Engine, Request, Response, start, step
from vllm.diffusion.core.pages import PAGE_SIZE


class Published:
    """Checks after every step that pages with a hash, which others may use, never change.

    Layers with a window give their pages to others while the page has its hash.
    """

    def __init__(self, engine: Engine) -> None:
        self._pool = engine.scheduler.paging.manager.block_pool
        self._store, layers = engine.runner.caches, range(len(engine.runner.model.layers))
        self._layers = [layer for layer in layers if not self._store.has_window(layer)]
        self._known: dict[Any, torch.Tensor] = {}

    def check(self) -> None:
        pages = [self._pages_of(layer) for layer in self._layers]
        now = {
            (block.block_hash, block.block_id): torch.stack([p[block.block_id] for p in pages])
            for block in self._pool.blocks
            if block.block_hash is not None
        }
        for key, page in now.items():
            if key in self._known:
                assert torch.equal(page, self._known[key])
            assert page.isfinite().all()
        self._known = now

    def _pages_of(self, layer: int) -> torch.Tensor:
        """Return keys and values of each page, [P, 2 * PAGE_SIZE, KV, hd], the keys first."""
        last_values = self._store.values(layer)[-PAGE_SIZE:]
        rows = torch.cat([self._store.keys(layer), last_values])
        return rows.view(self._store.num_pages, 2 * PAGE_SIZE, *rows.shape[1:])


def run_schedule(
    engine: Engine, schedule: Sequence[tuple[int, Request, int | None]]
) -> dict[int, Response]:
    """Run a schedule and return the responses of requests that were not aborted, by their index.

    An entry is (delay, request, abort_after). The delay is a number of steps after the arrival of
    the previous request. The request is aborted `abort_after` steps after its arrival, or never if
    None.
    """
    upstream, published = engine.llm.llm_engine, Published(engine)
    waiting, aborts, answers = list(enumerate(schedule)), dict[str, int](), dict[int, Response]()
    count = next_at = 0
    while waiting or upstream.has_unfinished_requests():
        while waiting and next_at + waiting[0][1][0] <= count:
            place, (delay, one, abort_after) = waiting.pop(0)
            next_at += delay
            req_id = start(engine, str(place), one)
            if abort_after is not None:
                aborts[req_id] = count + abort_after
        upstream.abort_request([r for r, at in aborts.items() if at == count], internal=True)
        answers |= {int(name): answer for name, answer in step(engine).items()}
        published.check()
        count += 1
    return answers
