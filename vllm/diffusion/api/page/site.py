# SPDX-License-Identifier: Apache-2.0
"""Routes of the web pages, and the data of the status page.

Files require no API key. Data about the server's work requires one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from vllm.diffusion.api import prometheus as metrics
from vllm.diffusion.api.files import WebFile

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm.engine.protocol import EngineClient

STATIC = Path(__file__).parent / "static"
_PATIENCE_S = 2.0  # seconds to wait for an engine that is inside a step
_PAGES = {"/": "index.html", "/status": "status.html"}

router = APIRouter(include_in_schema=False)


_FILES = {
    path.relative_to(STATIC).as_posix(): WebFile.read(path) for path in sorted(STATIC.rglob("*.*"))
}

# Paths that are served without an API key; their content is the same on every server.
OPEN_PATHS = frozenset({*_PAGES, *(f"/page/{name}" for name in _FILES)})


class Status:
    """Queries the engine's status, one query at a time; a busy engine's last answer is used."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine: Any = engine
        scheduling = engine.vllm_config.scheduler_config
        self._row_budget = scheduling.max_num_batched_tokens
        self._max_requests = scheduling.max_num_seqs
        self._question: asyncio.Task[list[dict[str, Any]]] | None = None
        self._answer: dict[str, Any] = {}
        self._answered_at = time.time()

    async def now(self) -> dict[str, Any]:
        """Return the requests in order of arrival, and the memory pool of rank 0.

        All ranks have the same pool.
        """
        if self._question is None:
            self._question = asyncio.ensure_future(self._engine.collective_rpc("status"))
        question = self._question
        done, _ = await asyncio.wait([question], timeout=_PATIENCE_S)
        if done and question is self._question:  # other callers may wait for the same query
            self._question = None
            self._answer, *_ = question.result()
            self._answered_at = time.time()
        waiting = metrics.waiting()
        running = {entry["id"]: entry for entry in self._answer.get("requests", [])}
        states = dict(self._engine.output_processor.request_states)
        awaited = Counter(state.lora_name for key, state in states.items() if key not in running)
        answer = dict(self._answer)
        if "adapters" in answer:  # with --enable-lora
            known = answer["adapters"]
            answer["adapters"] = [{**one, "waiting": awaited[one["name"]]} for one in known]
        return {
            "pool_bytes": None,
            "host_bytes": None,
            "products": None,
            **answer,
            "age_s": time.time() - self._answered_at,
            "row_budget": self._row_budget,
            "max_requests": self._max_requests,
            "requests": [
                _request(state, running.get(key), waiting.get(key)) for key, state in states.items()
            ],
        }


def _request(state: Any, running: dict[str, Any] | None, waits_for: str | None) -> dict[str, Any]:
    """Return the entry of a request on the status page.

    Args:
        state: upstream's state of the request.
        running: the engine's status of the request, if it is running.
        waits_for: reason why it waits, if the engine has reported one.
    """
    since = None if state.stats is None else time.time() - state.stats.arrival_time
    known = {"prompt_tokens": state.prompt_len} if running is None else running
    name = state.external_req_id or state.request_id
    row = {"id": name, "state": "running" if running else "waiting", "seconds": since}
    row["adapter"] = state.lora_name
    return {**known, **row, "waits_for": None if running else waits_for}


@router.get("/")
async def page(raw_request: Request) -> Response:
    """Return the page that sends requests and displays the canvas."""
    return _FILES[_PAGES["/"]].response(raw_request)


@router.get("/status")
async def status_page(raw_request: Request) -> Response:
    """Return the page that shows what the server is doing."""
    return _FILES[_PAGES["/status"]].response(raw_request)


@router.get("/status.json")
async def status(raw_request: Request) -> JSONResponse:
    """Return the data of the status page, except the metrics."""
    page_status: Status = raw_request.app.state.diffusion_status
    return JSONResponse(await page_status.now())


@router.get("/page/options.json")
async def options(raw_request: Request) -> JSONResponse:
    """Return the algorithms and parameters of the served model, and the names of adapters."""
    state = raw_request.app.state
    page_options: dict[str, Any] = state.diffusion_page_options
    return JSONResponse({**page_options, "adapters": [*state.openai_serving_models.lora_requests]})


@router.get("/page/{name:path}")
async def file(name: str, raw_request: Request) -> Response:
    """Return a file of the pages."""
    if name not in _FILES:
        raise HTTPException(404)
    return _FILES[name].response(raw_request)


def install(app: FastAPI, options: dict[str, Any], status: Status) -> None:
    """Add the pages to the application, with the controls that `options.page_options` returns."""
    app.state.diffusion_page_options = options
    app.state.diffusion_status = status
    app.include_router(router)
