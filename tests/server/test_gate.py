# SPDX-License-Identifier: Apache-2.0
"""Gate, access log and drain around a small application, without an engine or sockets."""

import asyncio
import logging
import signal
import subprocess
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import GracefulHTTPError

from tests.server.client import MESSAGES, refusal
from vllm.diffusion.api.server import endpoint, gate, lifecycle, refusals

WORK = "/generate"
BREAKS = 7  # length in bytes of a body at which the application fails


class Engine:
    """The part of upstream's client that `Lifecycle` uses."""

    def __init__(self) -> None:
        self.errored = self.paused = self.holds_steps = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.stopped: list[float | None] = []
        self.aborted: list[str] = []
        self.errors: list[Exception] = []
        self.request_states = {"left": object()}
        self.output_processor = self
        self.output_handler = asyncio.ensure_future(asyncio.sleep(60))

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped.append(timeout)

    async def is_paused(self) -> bool:
        await self.answers.wait()
        return self.paused

    def propagate_error(self, error: Exception) -> None:
        self.errors.append(error)

    async def collective_rpc(self, method: str, **named: Any) -> list[bool]:
        if method == "holds_steps":
            return [False, self.holds_steps]
        raise NotImplementedError(method)

    async def abort(self, request_ids: list[str], internal: bool) -> None:
        self.aborted += request_ids


class Site:
    """An application behind the gate, whose `work` answers with the size of the request's body."""

    def __init__(self, num_engines: int = 0, **args: Any) -> None:
        self.engine = Engine()
        self.has_ended = asyncio.Event()
        self.processes = [subprocess.Popen(["sleep", "600"]) for _ in range(num_engines)]
        engines = {process.pid: f"EngineCore_DP{i}" for i, process in enumerate(self.processes)}
        self.lifecycle = lifecycle.Lifecycle(self.engine, self.has_ended.set, engines)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_working = asyncio.Event()
        self.app = FastAPI()
        self.app.add_api_route(WORK, self.work, methods=["POST"])
        for path in ("/health", "/v1/models"):
            self.app.add_api_route(path, lambda: "fine")
        init_exception_handler(self.app)
        self.args = Namespace(
            **{
                "api_key": [],
                "allowed_origins": [],
                "disable_access_log_for_endpoints": "/health",
                "disable_uvicorn_access_log": False,
                "log_error_stack": False,
                **args,
            }
        )
        self.app.state.args = self.args
        gate.install(self.app, self.lifecycle, self.args)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://site")

    async def work(self, request: Request) -> int:
        self.is_working.set()
        size = len(await request.body())
        await self.may_answer.wait()
        if size == BREAKS:
            raise RuntimeError("nobody expected this")
        if self.engine.errors:
            raise self.engine.errors[0]
        return size


def on_site(**args: Any) -> Callable[[Callable[[Site], Awaitable[None]]], Callable[[], None]]:
    """Run a test in an event loop with a new site."""

    def decorated(test: Callable[[Site], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            await test(Site(**args))

        def wrapper() -> None:
            asyncio.run(run())

        wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
        return wrapper

    return decorated


# ---- API keys ----------------------------------------------------------------------------------


@on_site(api_key=["first", "second"])
async def test_every_route_but_probes_wants_a_key(site: Site) -> None:
    wanted = (("POST", WORK), ("GET", "/v1/models"), ("POST", "/invocations"))
    for method, path in (*wanted, ("GET", "/page/options.json")):
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}):
            response = await site.http.request(method, path, headers=headers)
            assert "API key" in refusal(response, 401)["message"]
        keyed = await site.http.request(method, path, headers={"Authorization": "Bearer second"})
        is_known = path in (WORK, "/v1/models")
        assert keyed.status_code == (200 if is_known else 404)
    assert (await site.http.get("/health")).status_code == 200
    assert (await site.http.get("/")).status_code == 404  # reaches the application, without a page
    assert (await site.http.options(WORK)).status_code == 405  # the application's own answer


@on_site(api_key=["first"])
async def test_anthropics_clients_send_their_key_in_a_header_of_its_own(site: Site) -> None:
    for headers, status in (
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "second"}, 401),
        ({"x-api-key": "second", "Authorization": "Bearer first"}, 200),
        ({"x-api-key": "first", "Authorization": "Bearer second"}, 401),
    ):
        assert (await site.http.post(WORK, headers=headers)).status_code == status
    error = refusal(await site.http.post(MESSAGES), 401)
    assert error["type"] == "authentication_error"


@on_site()
async def test_without_keys_none_is_asked_for(site: Site) -> None:
    assert (await site.http.post(WORK)).json() == 0


# ---- size of bodies ----------------------------------------------------------------------------


@pytest.fixture
def small_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_MAX_REQUEST_BYTES", "1000")


async def pieces(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, 300):
        yield b" " * min(300, size - start)


@pytest.mark.usefixtures("small_bodies")
@on_site()
async def test_a_body_above_the_limit_is_refused(site: Site) -> None:
    """The length may be announced, or the body may come in chunks."""
    for size, status in ((999, 200), (1000, 200), (1001, 413), (5000, 413)):
        for body in (b" " * size, pieces(size)):
            response = await site.http.post(WORK, content=body)
            assert response.status_code == status, size
            if status == 200:
                assert response.json() == size
            else:
                message = refusal(response, 413)["message"]
                assert "at most 1000 bytes" in message
                assert "DLLM_MAX_REQUEST_BYTES" in message
    headers = {"Content-Length": "5000"}
    error = refusal(await site.http.post(MESSAGES, headers=headers), 413)
    assert error["type"] == "request_too_large"


@on_site()
async def test_failures_of_anthropics_routes_have_their_shape(site: Site) -> None:
    """Upstream's handlers answer these: an unexpected error, and a dead engine."""

    async def fail(request: Request) -> None:
        gone = GracefulHTTPError("gone", HTTPStatus.SERVICE_UNAVAILABLE)
        raise gone if await request.body() else RuntimeError("no")

    app = FastAPI()
    app.add_api_route(MESSAGES, fail, methods=["POST"])
    app.add_api_route(WORK, fail, methods=["POST"])
    init_exception_handler(app)
    refusals.install(app)
    app.state.args = site.args
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://site") as http:
        for content, status, kind in ((b"", 500, "api_error"), (b"a", 503, "overloaded_error")):
            error = refusal(await http.post(MESSAGES, content=content), status)
            assert error["type"] == kind
            assert refusal(await http.post(WORK, content=content), status)["type"] != kind


# ---- ids and the log ---------------------------------------------------------------------------


@on_site()
async def test_every_answer_carries_an_id(site: Site) -> None:
    kept = await site.http.post(WORK, headers={"X-Request-Id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    given = {(await site.http.get("/nowhere")).headers["x-request-id"] for _ in range(3)}
    assert len(given) == 3
    too_long = await site.http.post(WORK, headers={"X-Request-Id": "x" * 200})
    assert len(too_long.headers["x-request-id"]) == 32
    failed = await site.http.post(WORK, content=b"1" * BREAKS, headers={"X-Request-Id": "mine-1"})
    refusal(failed, 500)
    assert failed.headers["x-request-id"] == "mine-1"


def test_the_log_names_request_status_and_id(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(gate.logger, "isEnabledFor", lambda level: level == logging.INFO)
    monkeypatch.setattr(gate.logger, "info", lambda text, *values: lines.append(text % values))

    async def run(**args: Any) -> None:
        site = Site(**args)
        uvicorns = logging.makeLogRecord({"name": "uvicorn.access", "msg": "GET /"})
        assert not logging.getLogger("uvicorn.access").filter(uvicorns)  # our line replaces it
        await site.http.post(f"{WORK}?key=secret", headers={"X-Request-Id": "mine-2"})
        await site.http.get("/forged%0aline")
        await site.http.get("/health")
        await site.http.post(WORK, content=b"1" * BREAKS)

    asyncio.run(run())
    assert len(lines) == 3, lines  # /health is not logged
    assert '"POST /generate" 200 ' in lines[0]
    assert lines[0].endswith("id=mine-2")
    assert '"GET /forged%0aline" 404 ' in lines[1]
    assert '"POST /generate" 500 ' in lines[2]
    asyncio.run(run(disable_uvicorn_access_log=True))
    assert len(lines) == 3


# ---- /ready and the end ------------------------------------------------------------------------


@on_site()
async def test_states(site: Site) -> None:
    assert await site.lifecycle.state() == "ready"
    site.engine.paused = True
    assert await site.lifecycle.state() == "paused"
    site.engine.paused = False
    assert await site.lifecycle.state() == "ready"
    site.engine.holds_steps = True
    assert await site.lifecycle.state() == "paused"
    site.engine.errored = True
    assert await site.lifecycle.state() == "dead"
    site.engine.shutdown(timeout=60)
    assert await site.lifecycle.state() == "draining"
    assert lifecycle.take_status() == 1


@on_site()
async def test_states_where_upstream_serves_the_model(site: Site) -> None:
    """A server of another model has an engine and no lifecycle."""
    site.app.include_router(endpoint.router)
    site.app.state.diffusion_lifecycle = None
    for attribute, status, state in (
        ("", 200, "ready"),
        ("paused", 503, "paused"),
        ("errored", 503, "dead"),
    ):
        if attribute:
            setattr(site.engine, attribute, True)
        site.app.state.engine_client = site.engine
        response = await site.http.get("/ready")
        assert (response.status_code, response.json()) == (status, {"status": state})
    site.app.state.engine_client = None
    assert (await site.http.get("/ready")).status_code == 200


@on_site()
async def test_probes_that_come_together_have_one_answer(site: Site) -> None:
    assert await asyncio.gather(*(site.lifecycle.state() for _ in range(3))) == ["ready"] * 3


def test_an_engine_inside_a_long_step_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.diffusion.api.server.lifecycle._ANSWER_S", 0.01)

    async def run() -> None:
        site = Site()
        site.engine.paused = True
        assert await site.lifecycle.state() == "paused"
        site.engine.paused = False
        site.engine.answers.clear()
        assert await site.lifecycle.state() == "paused"
        site.engine.answers.set()
        assert await site.lifecycle.state() == "ready"

    asyncio.run(run())


def stop(site: Site, timeout: float) -> asyncio.Task[None]:
    """Shut down as upstream does at a signal: in a thread, while the event loop runs."""
    return asyncio.ensure_future(asyncio.to_thread(site.engine.shutdown, timeout=timeout))


@on_site()
async def test_a_drain_waits_for_open_requests_and_takes_no_new_ones(site: Site) -> None:
    site.may_answer.clear()
    working = asyncio.ensure_future(site.http.post(WORK, content=b"12345"))
    await site.is_working.wait()
    stopping = stop(site, timeout=60)
    while site.lifecycle.refusal is None:
        await asyncio.sleep(0.001)
    refused = await site.http.post(WORK)
    assert "shutting down" in refusal(refused, 503)["message"]
    assert refused.headers["retry-after"]
    assert (await site.http.get("/health")).status_code == 200
    assert not site.engine.stopped
    site.may_answer.set()
    assert (await working).json() == 5
    await stopping
    assert site.engine.stopped == [60]
    assert not site.engine.aborted
    assert site.engine.output_handler.cancelled()
    site.engine.shutdown(timeout=60)  # upstream's second call, in the event loop
    assert len(site.engine.stopped) == 2


def test_the_loss_of_an_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all engines fail at once, other engines end, and the exit status is not 0."""
    lines: list[str] = []
    monkeypatch.setattr(
        "vllm.diffusion.api.server.lifecycle.logger.error",
        lambda text, *values: lines.append(text % values),
    )

    async def run() -> None:
        site = Site(num_engines=2)
        first, second = site.processes
        site.may_answer.clear()
        working = asyncio.ensure_future(site.http.post(WORK))
        await site.is_working.wait()
        first.kill()
        while site.lifecycle.refusal is None:
            await asyncio.sleep(0.001)
        assert await site.lifecycle.state() == "dead"
        site.may_answer.set()
        for refused in (await working, await site.http.post(WORK)):
            assert "an engine of the server is gone" in refusal(refused, 503)["message"]
        await site.has_ended.wait()
        assert second.wait(10) == -signal.SIGKILL
        assert site.engine.stopped == []
        site.engine.shutdown(timeout=60)  # upstream's call after its server has ended
        assert lifecycle.take_status() == 1
        message = f"EngineCore_DP0 (process {first.pid}) has ended: the server exits with status 1"
        assert lines == [message]

    asyncio.run(run())


@on_site()
async def test_a_drain_ends_what_takes_too_long(site: Site) -> None:
    site.may_answer.clear()
    working = asyncio.ensure_future(site.http.post(WORK))
    await site.is_working.wait()
    stopping = stop(site, timeout=0.01)
    while not site.engine.errors:
        await asyncio.sleep(0.001)
    site.may_answer.set()
    assert isinstance(site.engine.errors[0], GracefulHTTPError)
    assert "shutting down" in refusal(await working, 503)["message"]
    await stopping
    assert site.engine.aborted == ["left"]
    assert site.engine.stopped == [0.01]


@on_site()
async def test_an_engine_that_dies_stops_without_a_drain(site: Site) -> None:
    site.engine.shutdown(timeout=5)
    assert site.engine.stopped == [5]
