# SPDX-License-Identifier: Apache-2.0
"""Runs requests that arrive and are aborted at given steps, and checks cached pages meanwhile."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests.engine.harness import Engine, Request, Response, start, step
from vllm.diffusion.core.pages import PAGE_SIZE

# Steps before a request arrives, its number, and steps until it is aborted, if it is.
Arrival = tuple[int, int, int | None]


def arrivals(num_requests: int) -> st.SearchStrategy[list[Arrival]]:
    """Return schedules of up to 8 arrivals of the requests with these numbers."""
    ends = st.none() | st.integers(1, 12)
    arrival = st.tuples(st.integers(0, 6), st.integers(0, num_requests - 1), ends)
    return st.lists(arrival, min_size=1, max_size=8)


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


def check_schedule(
    engine: Engine, asks: Sequence[Request], schedule: Sequence[Arrival], *, runs_ahead: bool
) -> list[tuple[int, Response]]:
    """Run a schedule; return the number and the response of each request that was not aborted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loop, "runs_ahead", runs_ahead)
        answers = run_schedule(engine, [(delay, asks[n], end) for delay, n, end in schedule])
    assert all(end is not None or at in answers for at, (*_, end) in enumerate(schedule))
    assert engine.is_idle()
    assert engine.scheduler.make_stats().kv_cache_usage == 0
    return [(schedule[at][1], answer) for at, answer in answers.items()]


def ask_while_pages_are_lost(engine: Engine, one: Request, every: int) -> Response:
    """Return the response to a request whose pages are taken away every few steps."""
    start(engine, "a", one)
    answers: dict[str, Response] = {}
    for count in range(400):
        answers |= step(engine)
        if "a" in answers:
            break
        if count % every == 0:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    return answers["a"]
