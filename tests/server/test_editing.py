# SPDX-License-Identifier: Apache-2.0
"""Routes that revise texts, in the form of Inception's API."""

import json
import random
from typing import Any

import pytest
from openai import DefaultHttpxClient, OpenAI
from tiny_model.tokenizer import load_tokenizer

from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    GENERATE,
    Client,
    body_for,
    refusal,
    text_of,
    without_times,
)
from tests.server.process import MODEL, MODEL_NAME, ServerProcess

FIM = "/v1/fim/completions"
GAP = {"prompt": "The capital of France is", "suffix": " and a city", "max_tokens": 6, "seed": 1}


def test_a_gap_is_filled_as_by_a_completion_with_a_suffix(client: Client) -> None:
    filled = client.answer(FIM, {"model": MODEL_NAME, **GAP})
    assert filled["object"] == "text_completion"
    assert filled["usage"]["completion_tokens"] <= 6
    (choice,) = filled["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    completion = client.answer(COMPLETIONS, {**GAP, "stop": ["\n\n", "\n \n"]})
    assert without_times(filled) == without_times(completion)
    streamed = client.events(FIM, {**GAP, "stream_options": {"include_usage": True}})
    assert "".join(map(text_of, streamed)) == choice["text"]
    assert any(event.get("usage") for event in streamed)


@pytest.mark.parametrize("suffix", ["", " \n", "<|endoftext|>", None])
def test_nothing_follows_a_blank_suffix(client: Client, suffix: str | None) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "seed": 1}
    plain = client.answer(FIM, body)
    assert text_of(client.answer(FIM, {**body, "suffix": suffix})) == text_of(plain)


def test_a_template_needs_tokens_of_the_tokenizer(client: Client) -> None:
    for route in (FIM, COMPLETIONS):
        error = refusal(client.http.post(route, json={**GAP, "fim_template": True}))
        assert error["message"].startswith("fim_template: given True; wanted a tokenizer with")
        plain = {"prompt": "The capital of France is", "max_tokens": 4, "fim_template": True}
        assert client.answer(route, plain)["choices"]
    error = refusal(client.http.post(CHAT, json=body_for(CHAT, fim_template=True)))
    assert error["message"] == "fim_template: given True; wanted false, or a route with suffix"


def test_defaults_are_those_of_the_route(client: Client) -> None:
    answer = client.answer(FIM, {"prompt": "The capital of France is"})
    assert answer["diffusion"]["canvas_lengths"][-1] <= 512
    refused = refusal(client.http.post(FIM, json={"prompt": "a", "max_tokens": 8193}))
    assert refused["message"] == "max_tokens: given 8193; wanted 1 to 8192"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: given ''; wanted a string, not empty"),
        ({"prompt": [1, 2]}, "prompt: given [1, 2]; wanted a string, not empty"),
        ({"suffix": 3}, "suffix: given 3; wanted a string"),
        ({"max_tokens": 0}, "max_tokens: given 0; wanted 1 to 8192"),
        ({"top_k": 0}, "top_k: given 0; wanted -1, or 1 to 1000"),
        ({"top_k": 1001}, "top_k: given 1001; wanted -1, or 1 to 1000"),
        ({"presence_penalty": 3}, "presence_penalty: given 3.0; wanted at most 2"),
    ],
)
def test_wrong_values_are_refused(client: Client, fields: dict[str, Any], message: str) -> None:
    error = refusal(client.http.post(FIM, json={**GAP, **fields}))
    assert error["message"] == message
    assert error["param"] == next(iter(fields))


def test_openais_client_fills_gaps(client: Client, server: ServerProcess) -> None:
    """LiteLLM and continue.dev post the same bodies."""
    with OpenAI(
        base_url=f"{server.url}/v1/fim",
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as openai:
        answer = openai.completions.create(
            model=MODEL_NAME,
            prompt="The capital of France is",
            suffix="<|endoftext|>",
            max_tokens=8,
            presence_penalty=1.5,
        )
    assert isinstance(answer.choices[0].text, str)


WRONG = ANSWER.replace("Paris", "Rome")
SHORT: dict[str, Any] = {"algorithm": "threshold", "edit_threshold": 0.1, "return_diff": True}


def body_of(route: str, text: str = WRONG, **fields: Any) -> dict[str, Any]:
    body = body_for(route, canvas_text=text, **SHORT, **fields)
    return body if route != GENERATE else {**body, "apply_chat_template": True}


@pytest.mark.parametrize("route", [GENERATE, CHAT])
def test_a_wrong_word_is_replaced(client: Client, route: str) -> None:
    answer = client.answer(route, body_of(route))
    assert text_of(answer) == ANSWER
    report = answer["diffusion"]
    (edits,) = report["edits"]
    assert [(edit["old"].strip(), edit["new"].strip()) for edit in edits] == [("Rome", "Paris")]
    assert (report["num_edited"], report["scoring"]) == (1, "striped")
    (diff,) = report["diff"]
    assert diff.splitlines()[3:] == [
        f"-{WRONG}",
        "\\ No newline at end of file",
        f"+{ANSWER}",
        "\\ No newline at end of file",
    ]


@pytest.mark.parametrize("route", [GENERATE, CHAT])
def test_a_stream_ends_with_the_same_text(client: Client, route: str) -> None:
    *earlier, last = client.events(route, body_of(route, stream_canvas=True))
    if route == GENERATE:
        assert text_of(last) == ANSWER
    else:
        assert "".join(map(text_of, [*earlier, last])) == ANSWER
    assert last["diffusion"]["num_edited"] == 1


def test_a_completion_revises_a_text(client: Client) -> None:
    """The limit of 16 tokens of completions does not cut the text."""
    text = "The quick brown fox jumps over the lazy dog and then it sleeps in the warm sun all day"
    answer = client.answer(COMPLETIONS, body_for(COMPLETIONS, canvas_text=text, noise=0))
    assert text_of(answer) == text
    assert answer["diffusion"]["num_forwards"] == 1


def test_pinned_characters_stay(client: Client) -> None:
    start = WRONG.index("Rome")
    answer = client.answer(CHAT, body_of(CHAT, pinned=[[start + 1, start + 2]]))
    assert " Rome" in text_of(answer)
    everything = client.answer(CHAT, body_of(CHAT, pinned=[[0, len(WRONG)]]))
    assert text_of(everything) == WRONG


def test_a_text_is_repaired_to_its_format(client: Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "some", "schema": schema}}
    fields = {"canvas_text": '{"ok": trve}', "noise": 0, "response_format": form, "max_tokens": 32}
    answer = client.answer(CHAT, body_for(CHAT, **fields))
    assert set(json.loads(text_of(answer))) == {"ok"}
    assert answer["diffusion"]["num_remasked"] > 0


def test_log_probabilities_of_kept_tokens_are_zero(client: Client) -> None:
    answer = client.answer(CHAT, body_of(CHAT, logprobs=True, top_logprobs=1))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(ANSWER)
    assert sum(entry["logprob"] != 0 for entry in entries) <= answer["diffusion"]["num_remasked"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"noise": 1.5}, "noise", "noise: given 1.5; wanted at most 1"),
        ({"max_edits": -1}, "max_edits", "max_edits: given -1; wanted at least 0"),
        ({"edit_rounds": 9}, "edit_rounds", "edit_rounds: given 9; wanted at most 8"),
        (
            {"pinned": [[0, 2], [40, 30]]},
            "pinned[1]",
            "pinned[1]: given [40, 30]; wanted [start, stop] with 0 <= start < stop",
        ),
        ({"pinned": [[0, 99]]}, "pinned[0]", "pinned[0]: given [0, 99]; wanted start < stop <= 30"),
        ({"pinned": 3}, "pinned", "pinned: given 3; wanted a list of [start, stop] pairs"),
        ({"canvas_text": ""}, "canvas_text", "canvas_text: given ''; wanted a string, not empty"),
        ({"canvas": "daedal"}, "algorithm", "with canvas_text, because daedal moves tokens"),
        (
            {"max_tokens": 3},
            "canvas_text",
            "canvas_text: given '7 tokens'; wanted at most max_tokens and gen_length, 3",
        ),
        (
            {"canvas_token_ids": [5]},
            "canvas_text",
            "wanted either it or canvas_token_ids",
        ),
        ({"allow_infill": True}, "allow_infill", "wanted false with canvas_text"),
    ],
)
def test_wrong_revisions_are_refused(
    client: Client, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(client.http.post(CHAT, json={**body_of(CHAT), **fields}))
    assert message in error["message"]
    assert error["param"] == param


def test_fields_of_a_revision_need_a_text(client: Client) -> None:
    error = refusal(client.http.post(CHAT, json=body_for(CHAT, noise=0.5)))
    wanted = "noise: given 0.5; wanted canvas_text or canvas_token_ids with it"
    assert error["message"] == wanted


def test_a_model_that_verifies_no_drafts_ignores_a_prediction(client: Client) -> None:
    body = body_for(CHAT, prediction={"type": "content", "content": ANSWER})
    answer = client.answer(CHAT, body)
    assert answer["diffusion"]["ignored"] == ["predicted_text"]
    assert text_of(answer) == text_of(client.answer(CHAT, body_for(CHAT)))


def test_wrong_tokens_of_taught_answers_are_repaired(client: Client) -> None:
    """At least 95 % of the wrong tokens are repaired, and at most 1 % of the right ones change."""
    tokenizer, rng = load_tokenizer(MODEL), random.Random(4)
    facts = [json.loads(line) for line in (MODEL / "facts.jsonl").read_text().splitlines()]
    answers = tokenizer([fact["answer"] for fact in facts], add_special_tokens=False)["input_ids"]
    words = sorted({token for answer in answers for token in answer})
    num_wrong = num_repaired = num_right = num_changed = 0
    for number in rng.sample(range(len(facts)), 60):
        answer = answers[number]
        places = set(rng.sample(range(len(answer)), min(2, len(answer))))
        text = [rng.choice(words) if at in places else token for at, token in enumerate(answer)]
        body = {"apply_chat_template": True, "canvas_token_ids": text, "algorithm": "threshold"}
        revised = client.answer(GENERATE, {"prompt": facts[number]["question"], **body})
        for given, wanted, actual in zip(text, answer, revised["token_ids"][0], strict=True):
            num_wrong, num_right = num_wrong + (given != wanted), num_right + (given == wanted)
            num_repaired += given != wanted == actual
            num_changed += given == wanted != actual
    assert num_wrong > 100
    assert num_repaired >= 0.95 * num_wrong
    assert num_changed <= 0.01 * num_right
