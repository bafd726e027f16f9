# SPDX-License-Identifier: Apache-2.0
"""`stream_canvas` adds the canvas after every denoising step between the chunks of an answer."""

import http.client
import json
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from openai import OpenAI

from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    GENERATE,
    PUZZLE,
    QUESTION,
    ROUTES,
    Client,
    body_for,
    events,
    without_times,
)
from tests.server.process import MODEL_NAME, ServerProcess

ASKED: dict[str, Any] = {"gen_length": 32, "block_length": 8, "steps": 16, "seed": 4}


def canvas_of(route: str, event: dict[str, Any]) -> dict[str, Any] | None:
    """Return the canvas of an event, which then has no other content, or None."""
    if route == GENERATE:
        actual: dict[str, Any] | None = event.get("canvas")
        assert (actual is not None) == (event["object"] == "text_diffusion.canvas")
        return actual
    actual = event.get("diffusion", {}).get("canvas")
    if actual is not None:
        (choice,) = event["choices"]
        assert choice["finish_reason"] is None
        assert choice.get("text", "") == ""
        assert choice.get("delta", {}) == {}
    return actual


def index_of(event: dict[str, Any]) -> int:
    index: int = event["choices"][0]["index"] if "choices" in event else event["index"]
    return index


def check_canvases(canvases: list[dict[str, Any]], length: int) -> None:
    """Check that steps are numbered, commits are final, and every list covers the whole canvas."""
    for canvas in canvases:
        assert {len(canvas[k]) for k in ("token_ids", "text", "committed", "confidence")} == {
            length
        }
        for committed, confidence in zip(canvas["committed"], canvas["confidence"], strict=True):
            assert confidence is None or 0 <= confidence <= 1
            assert confidence is not None or not committed
    for before, after in pairwise(canvases):
        assert before["step"] < after["step"]
        for position in range(length):
            if before["committed"][position]:
                for key in ("committed", "token_ids", "text", "confidence"):
                    assert after[key][position] == before[key][position]


@pytest.mark.parametrize("route", ROUTES)
def test_canvases_between_the_chunks(client: Client, route: str) -> None:
    body = body_for(route, **ASKED, ignore_eos=True, temperature=1.0)
    watched = client.events(route, {**body, "stream_canvas": True})
    canvases = [actual for event in watched if (actual := canvas_of(route, event))]
    check_canvases(canvases, 32)
    assert canvases[-1]["step"] == 16
    assert all(canvases[-1]["committed"])
    assert len(canvases) >= 2
    token_ids = client.generate(prompt=QUESTION, **ASKED, ignore_eos=True, temperature=1.0)
    if route != CHAT:
        assert canvases[-1]["token_ids"] == token_ids["token_ids"][0]


@pytest.mark.parametrize("route", ROUTES)
def test_the_answer_is_the_same(client: Client, route: str) -> None:
    body = body_for(route, **ASKED, stream_options={"include_usage": True})
    if route == GENERATE:
        del body["stream_options"]
    silent = client.events(route, body)
    assert not any(canvas_of(route, event) for event in silent)
    watched = client.events(route, {**body, "stream_canvas": True})
    rest = [event for event in watched if canvas_of(route, event) is None]
    if route == GENERATE:
        assert without_times(rest[-1]) == without_times(silent[-1])
        assert rest[-2]["text"] == silent[-2]["text"] == rest[-1]["text"][0]
        return

    def streamed(chunks: list[dict[str, Any]]) -> tuple[str, list[str], Any]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
        return "".join(texts), reasons, chunks[-1]["usage"]

    assert streamed(rest) == streamed(silent)
    assert rest[-1]["diffusion"]["num_forwards"] == silent[-1]["diffusion"]["num_forwards"]


def test_mercurys_field_streams_the_canvas(client: Client) -> None:
    streams = [
        client.events(CHAT, body_for(CHAT, gen_length=32, steps=4, **fields))
        for fields in ({"diffusing": True}, {"stream_canvas": True}, {"diffusing": False})
    ]
    ours, own, plain = (
        [chunk["diffusion"]["canvas"] for chunk in stream if "canvas" in chunk.get("diffusion", {})]
        for stream in streams
    )
    assert ours[-1] == own[-1]
    assert plain == []


def test_several_answers_have_a_canvas_each(client: Client) -> None:
    for route in ROUTES:
        parameters = {**ASKED, "n": 2, "temperature": 1.0, "stream_canvas": True}
        watched = client.events(route, body_for(route, **parameters))
        for index in (0, 1):
            own = [e for e in watched if canvas_of(route, e) and index_of(e) == index]
            canvases = [actual for e in own if (actual := canvas_of(route, e))]
            check_canvases(canvases, 32)
            assert canvases


def test_a_canvas_ends_where_the_answer_is_complete(client: Client) -> None:
    body = {"prompt": QUESTION, "apply_chat_template": True, **ASKED, "block_length": 16}
    watched = client.events(GENERATE, {**body, "gen_length": 64, "stream_canvas": True})
    canvas = [event["canvas"] for event in watched if "canvas" in event][-1]
    end = len(watched[-1]["token_ids"][0]) + 1
    assert "".join(canvas["text"][: end - 1]) == ANSWER
    assert all(canvas["committed"][:end])
    assert not any(canvas["committed"][16:])
    assert set(canvas["text"][16:]) == {"<|mdm_mask|>"}  # no token was proposed here


def test_openais_client_takes_them(openai: OpenAI) -> None:
    chunks = list(
        openai.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": QUESTION}],
            stream=True,
            extra_body={**ASKED, "stream_canvas": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
    *chunks_told, last = [
        c.model_extra["diffusion"] for c in chunks if "diffusion" in c.model_extra
    ]
    check_canvases([actual["canvas"] for actual in chunks_told], 32)
    assert chunks_told
    assert last["num_forwards"] > 0


def test_readers_that_stop_reading_hold_up_nobody(client: Client, server: ServerProcess) -> None:
    """Requests of stalled readers end, others are served, and the latest canvases are delivered."""
    long = {"gen_length": 512, "block_length": 8, "steps": 256, "ignore_eos": True}
    ended = client.metric("vllm:request_success_total")
    routes = (GENERATE, CHAT)
    with ExitStack() as open_ones:
        responses = []
        for route in routes:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            open_ones.callback(connection.close)
            body = json.dumps(body_for(route, **long, stream=True, stream_canvas=True))
            connection.request("POST", route, body, {"Content-Type": "application/json"})
            responses.append(connection.getresponse())
        assert client.ask()["text"] == [ANSWER]
        client.wait_for_metric("vllm:request_success_total", ended + 3)
        for route, response in zip(routes, responses, strict=True):
            *actual, done = events(line.decode().rstrip("\n") for line in response)
            assert done == "[DONE]"
            canvases = [c for data in actual if (c := canvas_of(route, json.loads(data)))]
            check_canvases(canvases, 512)
            assert canvases[-1]["step"] == 256
            assert all(canvases[-1]["committed"])


def test_a_reader_that_leaves_ends_the_request(client: Client) -> None:
    """A disconnect ends a request that would take minutes. Its n answers count as one request."""
    long = {"gen_length": 2048, "steps": 2048, "block_length": 4, "ignore_eos": True}
    for route, n in ((CHAT, 1), (CHAT, 3), (COMPLETIONS, 3), (GENERATE, 3)):
        aborted = client.metric("dllm:requests_aborted_total")
        body = body_for(route, **long, stream_canvas=True, stream=True, n=n)
        with client.http.stream("POST", route, json=body) as response:
            stream = events(response.iter_lines())  # the name keeps the connection open
            begun = json.loads(next(stream))
            assert "error" not in begun, begun
            client.wait_for_num_requests(n)
        client.wait_for_num_requests(0)
        assert client.metric("dllm:requests_aborted_total") == aborted + 1


def test_noise_among_neighbours(client: Client) -> None:
    """Sampled tokens of a request with streamed canvases are the same as without them."""
    parameters = {**ASKED, "temperature": 2.0, "ignore_eos": True, "prompt": PUZZLE}
    *_, watched = client.events(GENERATE, {**parameters, "stream_canvas": True})
    assert watched["token_ids"] == client.generate(**parameters)["token_ids"]
