# SPDX-License-Identifier: Apache-2.0
"""Upstream's routes used with the OpenAI client."""

from typing import Any

import pytest
from openai import OpenAI

from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    PUZZLE,
    QUESTION,
    ROUTES,
    Client,
    body_for,
)
from tests.server.process import MODEL_NAME

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SMALL_CANVAS = {"gen_length": 32, "block_length": 8}
SMALL_BLOCKS = {"vllm_xargs": {"gen_length": 64, "block_length": 8, "ignore_eos": 1}}


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_stream_is_the_plain_answer(openai: OpenAI, route: str) -> None:
    parameters: dict[str, Any] = {"model": MODEL_NAME, "extra_body": SMALL_BLOCKS}
    create: Any = openai.chat.completions.create if route == CHAT else openai.completions.create
    parameters |= {"messages": MESSAGES} if route == CHAT else {"prompt": QUESTION}
    (plain,) = (answer := create(**parameters)).choices
    chunks = list(create(**parameters, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = [c.delta.content if route == CHAT else c.text for c in choices]
    assert len(choices) >= 2
    whole = plain.message.content if route == CHAT else plain.text
    assert "".join(text or "" for text in texts) == whole
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage == answer.usage
    assert answer.usage.completion_tokens == 64


def test_completions(openai: OpenAI) -> None:
    answer = openai.completions.create(model=MODEL_NAME, prompt=[QUESTION, "What is 3 plus 4?"])
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == ANSWER
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_diffusion_parameters_mean_the_same_on_every_route(client: Client) -> None:
    diffusion: dict[str, Any] = {"gen_length": 32, "steps": 8, "block_length": 16}
    diffusion |= {"remasking": "random", "cfg_scale": 0.5, "ignore_eos": True}
    noise: dict[str, Any] = {"temperature": 2.0, "seed": 3}
    messages = [{"role": "user", "content": PUZZLE}]
    text = client.ask(PUZZLE, **diffusion, **noise)["text"][0]
    assert text != client.ask(PUZZLE)["text"][0]  # otherwise the comparison proves nothing
    raw = client.generate(prompt=PUZZLE, **diffusion, **noise)["text"][0]
    for fields in ({"vllm_xargs": diffusion}, diffusion, {"vllm_xargs": {**diffusion, **noise}}):
        chat = client.answer(CHAT, {"messages": messages, **noise, **fields})
        assert chat["choices"][0]["message"]["content"] == text
        completion = client.answer(COMPLETIONS, {"prompt": PUZZLE, **noise, **fields})
        assert completion["choices"][0]["text"] == raw


def test_upstream_fields_act(openai: OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **fields)

    cut = ask(max_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("The capital of", "length")
    assert ask(max_completion_tokens=3).choices[0].message.content == "The capital of"
    stopped = ask(stop=["of Fr"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("The capital ", "stop")
    three = ask(n=3, seed=1, temperature=1.0, extra_body={"vllm_xargs": {"gen_length": 32}})
    assert [choice.index for choice in three.choices] == [0, 1, 2]


def test_messages_alone(client: Client, openai: OpenAI) -> None:
    """The canvas has the length in the checkpoint's generation_config, not that of the context."""
    answer: Any = openai.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    plain = client.generate(messages=MESSAGES)["diffusion"]
    assert answer.diffusion.keys() == plain.keys()
    for key in ("steps", "num_forwards", "num_forwards_saved", "tokens_per_forward"):
        assert answer.diffusion[key] == plain[key]
    assert answer.diffusion["steps"] <= 128


def test_limits_of_completions(openai: OpenAI) -> None:
    """OpenAI's default of 16 tokens applies unless the request sets the length of its canvas."""

    def length(**fields: Any) -> int:
        answer = openai.completions.create(
            model=MODEL_NAME, prompt=QUESTION, extra_body={"ignore_eos": True, **fields}
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert length() == 16
    assert length(max_tokens=None) == 16
    assert length(gen_length=64) == 64
    assert length(gen_length=64, max_tokens=16) == 16
    assert length(gen_length=64, max_new_tokens=20) == 20


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers(client: Client, stream: bool) -> None:
    """Each answer has its own seed and equals a request for it alone; the report covers all."""
    noise: dict[str, Any] = {"temperature": 2.0, "gen_length": 32, "ignore_eos": True}
    messages = [{"role": "user", "content": PUZZLE}]
    wanted = client.ask(PUZZLE, n=3, seed=2**64 - 2, **noise)
    body = {"messages": messages, "n": 3, "seed": 2**64 - 2, **noise}
    if stream:
        chunks = client.events(CHAT, {**body, "stream_options": {"include_usage": True}})
        texts = ["", "", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
        answer = chunks[-1]
    else:
        answer = client.answer(CHAT, body)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == wanted["text"]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 96
    assert answer["diffusion"]["seeds"] == [2**64 - 2, 2**64 - 1, 0]
    assert answer["diffusion"]["num_forwards"] == wanted["diffusion"]["num_forwards"] == 96


def test_several_greedy_answers(client: Client) -> None:
    """Greedy answers are equal, unless positions are chosen at random."""
    for fields in ({}, {"temperature": 0, "top_p": 0.5}):
        answer = client.answer(CHAT, {"messages": MESSAGES, "n": 2, **fields})
        assert [c["message"]["content"] for c in answer["choices"]] == [ANSWER, ANSWER]


def test_logprobs_of_chat(client: Client, openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    actual = answer.choices[0].logprobs
    assert actual is not None
    assert actual.content is not None
    *entries, stop = actual.content
    assert stop.token == "<|eot_id|>"
    wanted = client.generate(messages=MESSAGES, logprobs=2)["logprobs"][0]
    assert [e.token for e in entries] == [w["token"] for w in wanted]
    assert [e.logprob for e in entries] == [w["logprob"] for w in wanted]
    for entry, want in zip(entries, wanted, strict=True):
        assert bytes(entry.bytes or []).decode() == entry.token
        assert [t.logprob for t in entry.top_logprobs] == [
            t["logprob"] for t in want["top_logprobs"]
        ]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["of Fr"]}, {"max_tokens": 3}], ids=str)
def test_streamed_logprobs_equal_those_of_the_plain_answer(
    client: Client, fields: dict[str, Any]
) -> None:
    body = {**SMALL_CANVAS, "prompt": QUESTION, "logprobs": 3, **fields}
    plain = client.answer(COMPLETIONS, body)["choices"]
    chunks = client.events(COMPLETIONS, body)
    for choice in plain:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        joined = {
            key: [x for c in own for x in c["logprobs"][key]]
            for key in ("tokens", "token_logprobs", "top_logprobs")
        }
        assert joined["tokens"] == choice["logprobs"]["tokens"]
        # Batches of another size round differently.
        for key in ("token_logprobs", "top_logprobs"):
            for actual, wanted in zip(joined[key], choice["logprobs"][key], strict=True):
                assert actual == pytest.approx(wanted, rel=1e-3)
        assert len(choice["logprobs"]["tokens"]) >= 3


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}, {"n": 3}])
def test_a_streamed_answer_reports_in_its_last_event(
    client: Client, route: str, fields: dict[str, Any]
) -> None:
    parameters = {"gen_length": 64, "block_length": 16, "steps": 32, "algorithm": "semi_ar"}
    *rest, last = client.events(route, body_for(route, **parameters, **fields))
    assert not any("diffusion" in event for event in rest)
    # Reports travel in this field of the engine's outputs, and upstream's last chunks send it.
    assert not any(event.get("kv_transfer_params") for event in [*rest, last])
    report = last["diffusion"]
    assert (last["choices"] == []) == ("stream_options" in fields)
    assert len(report["seeds"]) == fields.get("n", 1)
    per_answer = (report["num_forwards"] + report["num_forwards_saved"]) / len(report["seeds"])
    assert per_answer == report["steps"] == 32
    assert report["ignored"] == []


def test_two_turns(openai: OpenAI) -> None:
    """A conversation with an earlier answer is rendered with the chat template."""
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "What is 3 plus 4?"},
    ]
    answer = openai.chat.completions.create(model=MODEL_NAME, messages=turns)
    assert answer.usage is not None
    one_turn = openai.chat.completions.create(model=MODEL_NAME, messages=turns[-1:])
    assert one_turn.usage is not None
    assert answer.usage.prompt_tokens > one_turn.usage.prompt_tokens
    assert one_turn.choices[0].message.content == "3 plus 4 is 7."


def test_models(openai: OpenAI) -> None:
    (model,) = openai.models.list().data
    assert model.id == MODEL_NAME


def test_metrics_count_prompts_and_answers(client: Client) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [client.metric(name) for name in names]
    usage = client.ask()["usage"]
    after = [client.metric(name) for name in names]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown == [usage["prompt_tokens"], usage["completion_tokens"]]


@pytest.mark.parametrize("path", ROUTES)
def test_routes_are_documented(client: Client, path: str) -> None:
    assert client.http.get("/docs").status_code == 200
    document = client.http.get("/openapi.json").json()
    route = document["paths"][path]["post"]
    assert {"200", "400", "404"} <= route["responses"].keys()
    reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
    wanted = {
        *("max_tokens", "gen_length", "output_length", "steps", "num_denoising_steps", "seed"),
        *("block_length", "temperature", "cfg_scale", "remasking", "algorithm", "threshold"),
        *("mask_id", "ignore_eos", "n", "stop", "stop_token_ids", "stream", "stream_canvas"),
    }
    assert wanted <= fields.keys()
    upstreams = {"n", "stop", "stop_token_ids", "stream"}  # not described by upstream's bodies
    assert all(fields[name].get("description") for name in wanted - upstreams)
    assert fields["steps"]["type"] == "integer"
    assert fields["remasking"]["enum"] == ["low_confidence", "random"]


def test_small_routes(client: Client) -> None:
    assert client.http.get("/health").status_code == 200
    tokens = client.answer("/tokenize", {"prompt": QUESTION})
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert client.answer("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == QUESTION
