# SPDX-License-Identifier: Apache-2.0
"""Two servers behind `vllm-router`: the routes that it forwards, and a server that dies."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.programs import wait_for
from tests.server.client import ANSWER, CHAT, COMPLETIONS, PUZZLE, Client, body_for, refusal
from tests.server.process import (
    MODEL_NAME,
    SERVER,
    ServerProcess,
    free_port,
    healthy,
)

ROUTER = (
    *("vllm-router", "--policy", "round_robin", "--worker-startup-check-interval", "1"),
    *("--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "1", "--retry-max-retries", "8"),
    *("--retry-initial-backoff-ms", "100"),  # in total longer than until the next health check
)
ALIAS = "/v1/generate"


class Fleet:
    """Servers on fixed ports, and a router in front of them."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self._command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
        self._folder = folder
        self.servers = [self.start(free_port()) for _ in range(2)]
        urls = [server.url for server in self.servers]
        command = [*ROUTER, "--prometheus-port", str(free_port()), "--worker-urls", *urls]
        self.router = ServerProcess(command, folder / "router.log")

    def start(self, port: int) -> ServerProcess:
        log = self._folder / f"server_{port}_{time.monotonic_ns()}.log"
        return ServerProcess([*self._command, "--port", str(port)], log, port=port)


@pytest.fixture(scope="module")
def fleet(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    actual = Fleet(model_dir, tmp_path_factory.mktemp("fleet"))
    with healthy(*actual.servers, actual.router):
        yield actual


@pytest.fixture
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    with fleet.router.client() as actual:
        yield actual


def committed(server: ServerProcess) -> float:
    with server.client() as http:
        return Client(http).metric("dllm:committed_tokens_total")


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, ALIAS])
def test_fields_and_reports_pass_and_requests_are_shared(
    fleet: Fleet, http: httpx.Client, route: str
) -> None:
    client, before = Client(http), [committed(server) for server in fleet.servers]
    body = body_for(route, max_tokens=32, block_length=32, steps=4, apply_chat_template=True)
    if route != ALIAS:
        del body["apply_chat_template"]
    answers = [client.answer(route, body) for _ in range(2)]
    assert {answer["diffusion"]["num_forwards"] for answer in answers} == {4}
    assert client.events(route, body)
    wait_for(lambda: all(committed(s) > b for s, b in zip(fleet.servers, before, strict=True)))


def test_ids_and_refusals_pass(http: httpx.Client) -> None:
    named = http.post(CHAT, json=body_for(CHAT, max_tokens=8), headers={"X-Request-Id": "mine"})
    assert named.headers["X-Request-Id"] == "mine"
    assert named.json()["id"] == "chatcmpl-mine"
    late = {"prompt": PUZZLE, "gen_length": 2048, "ignore_eos": True, "timeout_s": 0.01}
    assert "timeout" in refusal(http.post(ALIAS, json=late), 504)["message"]
    assert http.get("/v1/models").json()["data"][0]["id"] == MODEL_NAME
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_body_of_generate_that_lost_its_fields_is_refused(http: httpx.Client) -> None:
    """The router rewrites the body in another program's form, which would lose parameters."""
    response = http.post("/generate", json={"prompt": PUZZLE, "steps": 4})
    assert refusal(response)["message"].endswith("wanted POST /v1/generate")


def test_the_router_answers_unreadable_bodies(http: httpx.Client) -> None:
    content = {"Content-Type": "application/json"}
    assert http.post(CHAT, content="x", headers=content).status_code == 400
    assert http.post(CHAT, content="x").status_code == 415
    assert http.post(CHAT, json={}).status_code == 422


def test_an_abort_reaches_the_server(fleet: Fleet, http: httpx.Client) -> None:
    body = body_for(CHAT, max_tokens=2048, steps=2048, ignore_eos=True, stream=True)
    first, second = fleet.servers
    with first.client() as one, second.client() as other:

        def num_requests() -> float:
            return Client(one).num_requests() + Client(other).num_requests()

        with http.stream("POST", CHAT, json=body):
            wait_for(lambda: num_requests() == 1)
        wait_for(lambda: num_requests() == 0)


def test_a_dead_engine_is_not_felt_and_its_server_comes_back(
    fleet: Fleet, http: httpx.Client
) -> None:
    """Open requests go to the other server; the dead engine's server exits with status 1."""
    first, second = fleet.servers
    body = body_for(CHAT, max_tokens=64, steps=64, block_length=64, ignore_eos=True)

    def ask(_: int) -> int:
        with fleet.router.client() as own:
            return own.post(CHAT, json=body).status_code

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(ask, range(24))
        with first.client() as direct:
            Client(direct).wait_for_num_requests(1)
        first.engine().kill()
        assert list(answers) == [200] * 24
    assert first.wait() == 1
    assert http.post(CHAT, json=body_for(CHAT, max_tokens=8)).status_code == 200
    again = fleet.start(first.port)
    with healthy(again):
        before = committed(again)
        wait_for(
            lambda: (
                http.post(CHAT, json=body_for(CHAT, max_tokens=8)).status_code == 200
                and committed(again) > before
            )
        )
        answer = Client(http).answer(CHAT, body_for(CHAT, max_tokens=32))
        assert answer["choices"][0]["message"]["content"] == ANSWER
    assert second.has_ended() is False
