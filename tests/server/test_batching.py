# SPDX-License-Identifier: Apache-2.0
"""Requests beside each other: answers do not depend on neighbours, and leaving ends the work."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.client import CHAT, GENERATE, PUZZLE, body_for

if TYPE_CHECKING:
    from tests.server.client import Client
    from tests.server.process import ServerProcess

QUESTIONS = ("What is 3 plus 4?", PUZZLE, "hello", "What is the capital of Japan? " * 12)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"gen_length": 32},
    {"gen_length": 64, "steps": 16, "temperature": 1.5},
    {"gen_length": 96, "block_length": 8, "cfg_scale": 1.0},
    {"gen_length": 48, "remasking": "random", "temperature": 0.7, "block_length": 16},
    {"gen_length": 64, "threshold": 0.8, "temperature": 1.0, "logits_eos_inf": True},
)


def mixed_bodies() -> list[dict[str, Any]]:
    """20 requests: every question with every variant, raw and through the template in turn."""
    return [
        {
            "prompt": question,
            "apply_chat_template": (i + j) % 2 == 0,
            "seed": 100 * i + j,
            "ignore_eos": True,
            **variant,
        }
        for i, question in enumerate(QUESTIONS)
        for j, variant in enumerate(VARIANTS)
    ]


def kept(answer: dict[str, Any]) -> tuple[Any, ...]:
    report = answer["diffusion"]
    return answer["token_ids"], answer["text"], answer["usage"], report["num_forwards"]


def test_20_requests_together_equal_each_alone(client: Client) -> None:
    bodies = mixed_bodies()
    assert len(bodies) == 20
    alone = [client.generate(**body) for body in bodies]
    ready = threading.Barrier(len(bodies) + 1)

    def send(body: dict[str, Any]) -> dict[str, Any]:
        ready.wait(30)
        return client.generate(**body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(send, body) for body in bodies]
        ready.wait(30)
        num_together = peak_num_running(client, futures)
        together = [future.result() for future in futures]
    assert num_together > 1  # else this compares each alone with itself
    assert [kept(answer) for answer in together] == [kept(answer) for answer in alone]


def peak_num_running(client: Client, futures: list[Future[Any]]) -> float:
    """The most requests that /metrics saw in one step before all were done."""
    peak = 0.0
    while not all(future.done() for future in futures):
        peak = max(peak, client.metric("vllm:num_requests_running"))
    return peak


def test_a_request_that_runs_alone(client: Client) -> None:
    """`force_single_batch` changes when a request runs, not what it answers."""
    body = {"prompt": [PUZZLE] * 4, "seed": 3, "temperature": 1.0, "gen_length": 32}
    together = client.generate(**body, ignore_eos=True)
    alone = client.generate(**body, ignore_eos=True, force_single_batch=True)
    assert alone["token_ids"] == together["token_ids"]


def test_the_same_request_id_twice(client: Client) -> None:
    """The id belongs to the client: two of its requests may carry the same."""

    def send() -> dict[str, Any]:
        body = {"prompt": PUZZLE, "gen_length": 64, "seed": 1}
        response = client.http.post(GENERATE, json=body, headers={"X-Request-Id": "twin"})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(send) for _ in range(2)])
    assert first["id"] == second["id"] == "twin"
    assert first["token_ids"] == second["token_ids"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("route", [GENERATE, CHAT])
def test_a_client_that_goes_away_ends_its_request(
    client: Client, server: ServerProcess, route: str, stream: bool
) -> None:
    """A canvas of 2048 tokens in as many steps would take minutes."""
    long = {"gen_length": 2048, "steps": 2048, "block_length": 2048, "ignore_eos": 1}
    finished = client.metric("vllm:generation_tokens_total")
    aborted = client.metric("dllm:requests_aborted_total")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(
            "POST",
            route,
            json.dumps({**body_for(route, **long), "stream": stream}),
            {"Content-Type": "application/json"},
        )
        client.wait_for_num_requests(1)
    finally:
        connection.close()
    client.wait_for_num_requests(0)
    assert client.metric("vllm:generation_tokens_total") - finished < 2048
    assert client.metric("dllm:requests_aborted_total") == aborted + 1
    assert client.ask("What is 3 plus 4?")["text"] == ["3 plus 4 is 7."]


def test_going_away_ends_all_choices_and_no_others(client: Client, server: ServerProcess) -> None:
    """Three answers of one request are left; a neighbour's request goes on."""
    body = {"prompt": PUZZLE, "gen_length": 1024, "steps": 1024, "block_length": 1024, "n": 3}
    neighbour = {"prompt": PUZZLE, "gen_length": 64, "seed": 2, "ignore_eos": True}
    alone = client.generate(**neighbour)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", GENERATE, json.dumps(body), headers)
            client.wait_for_num_requests(3)
            beside = pool.submit(client.generate, **neighbour)
        finally:
            connection.close()
        assert kept(beside.result()) == kept(alone)
    client.wait_for_num_requests(0)
