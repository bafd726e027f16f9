# SPDX-License-Identifier: Apache-2.0
"""Upstream's routes for typed decisions score labels at masks as the reference model does."""

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from reference import likelihood

from tests.server.client import Client, refusal
from tests.server.process import MODEL_NAME
from tests.server.reference import CLOSE, mask_id, model, tokenizer

ROUTE = "/v1/systemone"
SCORING = "/generative_scoring"
ATTEMPTS = 20
STATE = {"country": "France", "capital": "Paris"}
QUESTIONS: dict[str, Any] = {
    "city": {"type": "choice", "instructions": "Which?", "criteria": {"Paris": None, "Rome": "it"}},
    "sure": {"type": "noul", "instructions": "Is Paris a capital?"},
    "size": {"type": "score", "instructions": "Large?", "criteria": ["low", "big", "top"]},
}
# The texts of the questions in the prompt, and the labels of their answers.
SHOWN = (
    ("Question: Which?\nA: Paris\nB: Rome - it\nAnswer with the letter of one option only.", "AB"),
    ("Question: Is Paris a capital?\nyes\nno\nAnswer with yes or no only.", "yn"),
    (
        "Question: Large?\n0: low\n1: big\n2: top\nAnswer with the number of one level only.",
        "012",
    ),
)


def decide(client: Client, **body: Any) -> dict[str, Any]:
    return client.answer(ROUTE, {"model": MODEL_NAME, "state": STATE, **body})


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def prompt(content: str) -> list[int]:
    messages = [{"role": "user", "content": content}]
    actual = tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return list(actual)


def decision_prompt() -> tuple[list[int], list[int]]:
    """Return the prompt of all questions, and the positions of its masks."""
    numbered = [f"Question {n}:\n{text}" for n, (text, _) in enumerate(SHOWN, start=1)]
    tokens = prompt("\n\n".join([json.dumps(STATE), *numbered]))
    slots = []
    for number in range(1, 4):
        tokens += encode(("\n" if number > 1 else "") + f"Question {number}:\n")
        slots.append(len(tokens))
        tokens.append(mask_id())
    return [*tokens, tokenizer().convert_tokens_to_ids("<|eot_id|>")], slots


def row(tokens: list[int], position: int) -> torch.Tensor:
    return likelihood.log_probabilities(model(), tokens, 0, 0.0, mask_id())[position]


def probabilities(tokens: list[int], slots: list[int]) -> list[list[float]]:
    """Return the probabilities of each question's labels, relative to each other."""
    results = []
    for position, (_, labels) in zip(slots, SHOWN, strict=True):
        values = row(tokens, position)[[encode(label)[0] for label in labels]]
        results.append(torch.softmax(values, dim=0).tolist())
    return results


def probabilities_in(answer: dict[str, Any]) -> list[list[float]]:
    return [list(actual["probabilities"].values()) for actual in answer["answers"].values()]


def assert_alike(actual: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(f) for f in actual] == [len(w) for w in wanted]
    assert [*chain(*actual)] == pytest.approx([*chain(*wanted)], **CLOSE)


def test_all_questions_are_read_in_one_forward(client: Client) -> None:
    before = client.metric("dllm:forwards_total")
    answer = decide(client, questions=QUESTIONS)
    assert client.metric("dllm:forwards_total") == before + 1
    tokens, slots = decision_prompt()
    assert_alike(probabilities_in(answer), probabilities(tokens, slots))
    assert answer["usage"] == {"input_tokens": len(tokens), "output_tokens": 0}
    for position, (_, labels), diagnostics in zip(
        slots, SHOWN, answer["diagnostics"].values(), strict=True
    ):
        values = row(tokens, position)
        ids = [encode(label)[0] for label in labels]
        assert diagnostics["label_mass"] == pytest.approx(values.exp()[ids].sum().item(), **CLOSE)
        assert diagnostics["argmax_is_label"] is (int(values.argmax()) in ids)
    assert decide(client, questions=QUESTIONS)["answers"] == answer["answers"]


def test_a_joint_call_names_the_places_of_its_questions(client: Client) -> None:
    """Upstream's field `joint` requests what this model does in any case."""
    tokens, slots = decision_prompt()
    joint = decide(client, questions=QUESTIONS, joint=True)
    canvas = {"questions": list(QUESTIONS), "width": len(tokens), "slots": slots}
    assert joint["joint"] == {"canvases": [canvas]}
    plain = decide(client, questions=QUESTIONS)
    assert plain["joint"] is None
    assert plain["answers"] == joint["answers"]


def test_a_lone_question_is_the_first_token_of_a_reply(client: Client) -> None:
    (text, _), *_ = SHOWN
    tokens = prompt(json.dumps(STATE) + "\n\n" + text)
    end = tokenizer().convert_tokens_to_ids("<|eot_id|>")
    values = row([*tokens, mask_id(), end], len(tokens))
    wanted = torch.softmax(values[[encode(label)[0] for label in "AB"]], dim=0).tolist()
    answer = decide(client, questions={"city": QUESTIONS["city"]})
    assert_alike(probabilities_in(answer), [wanted])
    assert (
        decide(client, questions={"city": QUESTIONS["city"]}, passes=2)["answers"]
        == (answer["answers"])
    )


def in_steps(
    client: Client, ask: Callable[[], dict[str, Any]], *, num_steps: int, num_forwards: int
) -> dict[str, Any]:
    """Repeat a request until its forward passes share `num_steps` steps, and return its answer.

    On a busy machine, some of the forward passes may arrive late.
    """
    names = ("dllm:denoise_steps_total", "dllm:forwards_total")
    for _ in range(ATTEMPTS):
        before = [client.metric(name) for name in names]
        answer = ask()
        steps, forwards = (client.metric(n) - b for n, b in zip(names, before, strict=True))
        assert forwards == num_forwards
        if steps == num_steps:
            return answer
    raise AssertionError(f"never in {num_steps} steps")


def test_a_second_pass_sees_the_other_answers(client: Client) -> None:
    tokens, slots = decision_prompt()
    first = probabilities(tokens, slots)
    answered = list(tokens)
    for position, (_, labels), actual in zip(slots, SHOWN, first, strict=True):
        answered[position] = encode(labels[actual.index(max(actual))])[0]
    wanted = []
    for number, position in enumerate(slots):
        again = [*answered[:position], mask_id(), *answered[position + 1 :]]
        wanted.append(probabilities(again, slots)[number])
    answer = in_steps(
        client, lambda: decide(client, questions=QUESTIONS, passes=2), num_steps=2, num_forwards=4
    )
    assert_alike(probabilities_in(answer), wanted)
    assert answer["usage"]["input_tokens"] == 4 * len(tokens)


@pytest.mark.parametrize("apply_softmax", [True, False])
def test_scores_of_items_are_read_in_one_step(client: Client, apply_softmax: bool) -> None:
    items = ["Paris", "Rome.", "Berlin is", "7"]
    labels = [5, 300, 17]
    body = {
        "query": "What is the capital of France? ",
        "items": items,
        "label_token_ids": labels,
        "apply_softmax": apply_softmax,
    }
    answer = in_steps(
        client, lambda: client.answer(SCORING, body), num_steps=1, num_forwards=len(items)
    )
    for item, actual in zip(items, answer["data"], strict=True):
        tokens = tokenizer().encode("What is the capital of France? ")
        tokens = [*tokens, *encode(item)]
        values = row([*tokens, mask_id()], len(tokens))[labels]
        chosen = torch.softmax(values, dim=0) if apply_softmax else values.exp()
        assert actual["score"] == pytest.approx(chosen[0].item(), **CLOSE)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"timeout_s": 0.001}, 504, "timeout: not complete 0.001 s after arrival"),
        ({"timeout_s": 0}, 400, "timeout_s: given 0; wanted at least 0.001"),
        ({"steps": 3}, 400, "steps: given 3; unknown parameter; the nearest are "),
        ({"label_token_ids": [1, 99999]}, 400, "label_token_id 99999 is out of vocabulary range"),
    ],
)
def test_scores_that_are_refused_or_late(
    client: Client, body: dict[str, Any], status: int, message: str
) -> None:
    parameters = {"query": "x" * 2000, "items": ["a", "b"], "label_token_ids": [5], **body}
    assert message in refusal(client.http.post(SCORING, json=parameters), status)["message"]
    client.wait_for_num_requests(0)


def test_labels_on_the_routes_that_write(client: Client) -> None:
    """Logprobs of labels in a canvas of one token are those of a mask, on all text routes."""
    tokens, labels = encode("What is the capital of France?"), [5, 300, 17]
    values = row([*tokens, mask_id()], len(tokens))
    wanted = pytest.approx(values[labels].tolist(), **CLOSE)
    body = {"prompt": tokens, "gen_length": 1, "logprob_token_ids": labels, "temperature": 0}
    (logprob,) = client.generate(**body)["logprobs"][0]
    assert [other["token_id"] for other in logprob["top_logprobs"]] == labels
    assert [other["logprob"] for other in logprob["top_logprobs"]] == wanted
    assert logprob["logprob"] == pytest.approx(values.max().item(), **CLOSE)
    ids = {"logprobs": 1, "return_tokens_as_token_ids": True, "model": MODEL_NAME}
    answer = client.answer("/v1/completions", {**body, **ids, "max_tokens": 1})
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert [top[f"token_id:{label}"] for label in labels] == wanted
    chat = {"messages": [{"role": "user", "content": "7"}], "max_tokens": 1, "gen_length": 1}
    del body["prompt"]
    answer = client.answer("/v1/chat/completions", {**body, **chat, **ids, "logprobs": True})
    (logprob,) = answer["choices"][0]["logprobs"]["content"]
    assert len(logprob["top_logprobs"]) in (3, 4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 1], "logprob_token_ids: given [1, 1]; wanted at most 128 token ids, each once"),
        ([99999], "logprob_token_ids: given [99999]; wanted token ids from 0 to"),
        ([*range(129)], "wanted at most 128 token ids"),
    ],
)
def test_labels_that_are_refused(client: Client, ids: list[int], message: str) -> None:
    body = {"prompt": "7", "logprob_token_ids": ids, "logprobs": 1}
    assert message in refusal(client.http.post("/generate", json=body))["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"passes": 3}, "passes: given 3; wanted at most 2"),
        ({"passes": "x"}, "passes: given 'x'; wanted a whole number"),
        ({"temperature": 1}, "temperature: given 1; unknown parameter; the nearest are "),
        ({"timeout_s": -1}, "timeout_s: given -1; wanted at least 0.001"),
        ({"state": "a <|mdm_mask|> b"}, "wanted them without mask tokens"),
        ({"questions": {}}, "questions: needs at least one question"),
        ({"state": "x" * 5000}, "4096"),
    ],
)
def test_what_is_refused(client: Client, body: dict[str, Any], message: str) -> None:
    parameters = {"state": STATE, "questions": QUESTIONS, **body}
    assert message in refusal(client.http.post(ROUTE, json=parameters))["message"]


def test_a_time_ends_it(client: Client) -> None:
    parameters = {"state": "x" * 3000, "questions": QUESTIONS, "timeout_s": 0.001}
    assert "timeout" in refusal(client.http.post(ROUTE, json=parameters), 504)["message"]
    client.wait_for_num_requests(0)
