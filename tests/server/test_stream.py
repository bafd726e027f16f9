# SPDX-License-Identifier: Apache-2.0
"""POST /generate with `stream: true`: growing prefixes, the whole answer, then [DONE]."""

import http.client
import json
from itertools import pairwise
from typing import Any

import pytest

from tests.server.client import ANSWER, GENERATE, PUZZLE, QUESTION, Client, events, without_times
from tests.server.process import ServerProcess

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"gen_length": 64, "block_length": 8, "ignore_eos": True},
    "noisy": {"gen_length": 32, "block_length": 8, "temperature": 2.0, "ignore_eos": True},
    "stops": {"gen_length": 32},
    "stop string": {"gen_length": 32, "block_length": 4, "stop": ["of Fr"]},
    "stop token": {"gen_length": 32, "block_length": 4, "stop_token_ids": [257]},
    "cut": {"gen_length": 32, "block_length": 4, "max_tokens": 5},
    "three": {"gen_length": 32, "block_length": 8, "temperature": 1.0, "n": 3},
    "threshold": {"gen_length": 32, "block_length": 8, "threshold": 0.95},
    "special tokens": {"gen_length": 32, "block_length": 8, "skip_special_tokens": False},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_events_grow_to_the_plain_answer(client: Client, fields: dict[str, Any]) -> None:
    prompt = PUZZLE if "temperature" in fields else QUESTION
    body = {"prompt": prompt, "apply_chat_template": True, "seed": 21, **fields}
    *chunks, last = client.events(GENERATE, body)
    assert without_times(last) == without_times(client.generate(**body))
    assert chunks
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    for index, (text, token_ids) in enumerate(zip(last["text"], last["token_ids"], strict=True)):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert all(chunk["object"] == "text_diffusion.chunk" for chunk in own)
        for before, after in pairwise(own):
            assert after["text"].startswith(before["text"])
            assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
            assert len(after["token_ids"]) >= len(before["token_ids"])
        assert own[-1]["text"] == text
        assert own[-1]["token_ids"] == token_ids


def test_an_event_for_every_new_prefix(client: Client) -> None:
    """Blocks are filled in order, so that each block adds at least one prefix."""
    body = {"prompt": QUESTION, "apply_chat_template": True, **CASES["greedy"]}
    *chunks, _ = client.events(GENERATE, body)
    lengths = [len(chunk["token_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) >= 8
    assert lengths[-1] == 64


def test_events_arrive_while_the_request_runs(client: Client) -> None:
    """The request would run for long, and ends when its reader disconnects."""
    long = {"gen_length": 2048, "block_length": 4, "steps": 2048, "ignore_eos": True}
    body = {"prompt": "hello", **long}
    with client.http.stream("POST", GENERATE, json={**body, "stream": True}) as response:
        actual = events(response.iter_lines())
        first = json.loads(next(actual))
        assert 0 < len(first["token_ids"]) < 2048
        client.wait_for_num_requests(1)  # the gauges are updated shortly after the events
    client.wait_for_num_requests(0)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_any_read_size(client: Client, server: ServerProcess, size: int) -> None:
    """A client may read the socket in pieces of any size, as curl does."""
    body = json.dumps(
        {"prompt": QUESTION, "apply_chat_template": True, "stream": True, **CASES["greedy"]}
    )
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", GENERATE, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        pieces = []
        while piece := response.read(size):
            pieces.append(piece)
    finally:
        connection.close()
    text = b"".join(pieces).decode()
    assert text.endswith("data: [DONE]\n\n")
    *_, answer, end = events(text.splitlines())
    assert end == "[DONE]"
    assert json.loads(answer)["text"] == [ANSWER]


def test_a_refusal_is_no_stream(client: Client) -> None:
    response = client.http.post(GENERATE, json={"prompt": "hello", "stream": True, "stepz": 1})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == "stepz"
