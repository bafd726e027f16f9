# SPDX-License-Identifier: Apache-2.0
"""POST /v1/loglikelihood gives the numbers of the published estimator on the reference model."""

import json
import socket
from typing import Any

import pytest
from reference import likelihood

from tests.programs import wait_for
from tests.server.client import Client, refusal
from tests.server.process import MODEL_NAME
from tests.server.reference import CLOSE, mask_id, model, tokenizer

ROUTE = "/v1/loglikelihood"
CONTEXT = "What is the capital of France?"
TARGET = " The capital is Paris."


def pair(context: str = CONTEXT, target: str = TARGET) -> tuple[list[int], list[int]]:
    before = tokenizer().encode(context)
    return before, tokenizer().encode(context + target)[len(before) :]


def ask(client: Client, **body: Any) -> dict[str, Any]:
    parameters = {"context": CONTEXT, "continuation": TARGET, **body}
    return client.answer(ROUTE, {"model": MODEL_NAME, **parameters})


@pytest.mark.parametrize("cfg", [0.0, 1.5])
def test_a_single_token_is_exact(client: Client, cfg: float) -> None:
    context, target = pair()
    actual = ask(client, context=context, continuation=target[:1], cfg=cfg)
    exact = likelihood.expectation(model(), context, target[:1], mask_id(), cfg)
    assert actual["loglikelihood"] == pytest.approx(exact, **CLOSE)
    assert (actual["stderr"], actual["forwards"], actual["num_tokens"]) == (0.0, 1, 1)


@pytest.mark.parametrize("cfg", [0.0, 0.7])
def test_the_published_script_gives_the_same_number(client: Client, cfg: float) -> None:
    """A seed gives the same maskings, and guidance keeps the target in the second sequence."""
    settings = {"mc_num": 16, "batch_size": 8, "seed": 5}
    actual = ask(client, cfg=cfg, **settings)
    expected = likelihood.estimate(model(), *pair(), mask_id(), cfg=cfg, **settings)
    assert actual["loglikelihood"] == pytest.approx(expected, **CLOSE)
    again = ask(client, cfg=cfg, **settings)["loglikelihood"]
    assert again == pytest.approx(actual["loglikelihood"], abs=1.5e-5), "the last digit may differ"
    assert actual["seed"] == 5
    assert actual["forwards"] <= 16


def test_an_estimate_is_within_four_errors_of_what_it_estimates(client: Client) -> None:
    context, target = pair(target=" Paris is the")
    exact = likelihood.expectation(model(), context, target, mask_id())
    for seed in range(4):
        actual = ask(client, context=context, continuation=target, seed=seed)
        assert abs(actual["loglikelihood"] - exact) <= 4 * actual["stderr"]
        assert actual["forwards"] <= 2 ** len(target) - 1, "samples that are alike share a forward"


def test_given_masks_are_exact(client: Client) -> None:
    context, target = pair()
    masks = [[0], [2, 1], list(range(len(target)))]
    actual = ask(client, masks=masks)
    losses = [likelihood.cross_entropy(model(), context, target, m, mask_id()) for m in masks]
    assert actual["loglikelihood"] == pytest.approx(-sum(losses) / len(losses), **CLOSE)
    assert actual["stderr"] == 0.0
    assert [len(row) for row in actual["logprobs"]] == [1, 2, len(target)]
    assert "seed" not in actual


def test_text_is_encoded_together_and_spaces_go_to_the_continuation(client: Client) -> None:
    ids = dict(zip(("context", "continuation"), pair(), strict=True))
    spaced = {"context": CONTEXT + " ", "continuation": TARGET[1:]}
    actual = [ask(client, mc_num=8, **parameters) for parameters in ({}, ids, spaced)]
    numbers = [answer["loglikelihood"] for answer in actual]
    assert numbers == pytest.approx([numbers[0]] * 3, **CLOSE)


@pytest.mark.parametrize("target", [" The capital of", TARGET])
@pytest.mark.parametrize("cfg", [0.0, 1.0])
def test_whether_the_model_would_write_it(client: Client, target: str, cfg: float) -> None:
    context, tokens = pair(target=target)
    actual = ask(client, context=context, continuation=tokens, cfg=cfg, check_greedy=True, mc_num=1)
    assert actual["is_greedy"] is likelihood.is_greedy(model(), context, tokens, mask_id(), cfg)
    assert actual["forwards"] == 1 + len(tokens)


def test_what_the_model_writes_is_greedy(client: Client) -> None:
    context = tokenizer().encode(CONTEXT)
    written = client.generate(
        prompt=context, gen_length=6, steps=6, block_length=6, ignore_eos=True, temperature=0
    )["token_ids"][0]
    assert ask(client, context=context, continuation=written, is_greedy=True)["is_greedy"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"mc_num": 0}, "mc_num: given 0; wanted at least 1"),
        ({"mc_num": 10, "batch_size": 4}, "batch_size: given 4; wanted a divisor of 10"),
        ({"cfg": -1}, "cfg: given -1; wanted at least 0"),
        ({"cfg": 1e38}, "cfg: given 1e+38; wanted at most 1000000"),
        ({"cfg": "high"}, "cfg: given 'high'; wanted a finite number"),
        ({"cfg": 1, "cfg_scale": 2}, "cfg_scale: given 2; it contradicts another spelling of cfg"),
        ({"continuation": ""}, "continuation: given ''; wanted at least one token"),
        ({"continuation": [1]}, "context: given"),
        ({"context": [1], "continuation": [0.5]}, "continuation: given [0.5]; wanted text or"),
        ({"context": [9999], "continuation": [1]}, "prompt: given 9999; wanted token ids from 0"),
        ({"masks": []}, "masks: given []; wanted 1 to 4096 lists"),
        ({"masks": [[99]]}, "masks: given [99]; wanted positions of the continuation, 0 to"),
        ({"masks": [[1, 1]]}, "masks: given [1, 1]; wanted every position once"),
        ({"masks": [[0]], "mc_num": 4}, "mc_num: given 4; wanted masks without it"),
        ({"context": "", "is_greedy": True}, "check_greedy: given True; wanted false without"),
        ({"steps": 4}, "steps: given 4; unknown parameter; the nearest are "),
        ({"timeout_s": 0}, "timeout_s: given 0; wanted at least 0.001"),
    ],
)
def test_bad_bodies_are_refused(client: Client, body: dict[str, Any], message: str) -> None:
    parameters = {"context": CONTEXT, "continuation": TARGET, **body}
    error = refusal(client.http.post(ROUTE, json=parameters))
    assert message in error["message"]
    assert error["param"] == message.split(":")[0]


def test_a_context_with_masks_is_refused(client: Client) -> None:
    response = client.http.post(ROUTE, json={"context": [mask_id()], "continuation": [1]})
    message = f"context: given {mask_id()}; it holds the mask token"
    assert message in refusal(response)["message"]


def test_a_model_that_is_not_served(client: Client) -> None:
    response = client.http.post(ROUTE, json={"context": "a", "continuation": "b", "model": "x"})
    assert "model: given 'x'" in refusal(response, 404)["message"]


def test_a_time_ends_it_and_nothing_stays_in_the_engine(client: Client) -> None:
    body = {"context": CONTEXT * 40, "continuation": TARGET * 20, "timeout_s": 0.02}
    response = client.http.post(ROUTE, json={**body, "mc_num": 2048})
    assert "timeout" in refusal(response, 504)["message"]
    client.wait_for_num_requests(0)


def test_who_hangs_up_leaves_nothing_in_the_engine(client: Client) -> None:
    parameters = {"context": CONTEXT * 40, "continuation": TARGET * 20, "mc_num": 4096}
    body = json.dumps(parameters).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    url = client.http.base_url
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: client.num_requests() > 0)
    client.wait_for_num_requests(0)
