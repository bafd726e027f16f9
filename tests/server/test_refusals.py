# SPDX-License-Identifier: Apache-2.0
"""Bad requests get status 400 in OpenAI's error shape, with the expected value."""

import json
from typing import Any

import pytest

from tests.server.client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    QUESTION,
    RESPONSES,
    ROUTES,
    Client,
    body_for,
    refusal,
)
from tests.server.process import MODEL_NAME

JSON = {"Content-Type": "application/json"}
MASK = "<|mdm_mask|>"
CANVAS = {"gen_length": 32}

# (fields, the refused field, the expected value in the message)
DIFFUSION_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"gen_length": 0}, "gen_length", "at least 1"),
    ({"gen_length": -5}, "gen_length", "at least 1"),
    ({"gen_length": 32.5}, "gen_length", "whole number"),
    ({"gen_length": "32"}, "gen_length", "number"),
    ({"gen_length": [32]}, "gen_length", "number"),
    ({"gen_length": 2**62}, "gen_length", "max_model_len 4096"),
    ({"output_length": 0}, "output_length", "at least 1"),
    ({**CANVAS, "output_length": 64}, "output_length", "contradicts"),
    ({**CANVAS, "max_tokens": 33}, "max_tokens", "at most the canvas, gen_length: 32"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({**CANVAS, "steps": 0}, "steps", "at least 1"),
    ({**CANVAS, "steps": 1e300}, "steps", "whole number"),
    ({**CANVAS, "steps": 10**12, "algorithm": "dream"}, "steps", "at most 1000000"),
    ({**CANVAS, "num_denoising_steps": -1}, "num_denoising_steps", "at least 1"),
    ({**CANVAS, "steps": 8, "num_denoising_steps": 9}, "num_denoising_steps", "contradicts"),
    ({**CANVAS, "block_length": 8, "steps": 6}, "steps", "4 or 8"),
    ({**CANVAS, "block_length": 8, "threshold": 0.9, "steps": 3}, "steps", "4 or more"),
    ({**CANVAS, "block_length": 5}, "block_length", "4, 8, 16"),
    ({**CANVAS, "block_length": 64}, "block_length", "divisor of the canvas, 32"),
    ({**CANVAS, "block_size": 0}, "block_size", "at least 1"),
    ({"cfg_scale": -0.5}, "cfg_scale", "at least 0"),
    ({"cfg_scale": "high"}, "cfg_scale", "number"),
    ({"cfg_scale": 1e38}, "cfg_scale", "at most 1000000"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "at least 1e-06"),
    ({"repetition_penalty": 1e39}, "repetition_penalty", "at most 1000000"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"remasking": "topk"}, "remasking", "low_confidence, random"),
    ({"remasking": 1}, "remasking", "low_confidence, random"),
    ({"algorithm": "beam"}, "algorithm", "semi_ar, threshold"),
    ({"algorithm": "low_confidence", "remasking": "random"}, "remasking", "contradicts"),
    ({"algorithm": "semi_ar", "threshold": 0.9}, "threshold", "wanted algorithm: threshold"),
    ({"cache": "everything"}, "cache", "none"),
    ({"threshold": "high"}, "threshold", "number"),
    ({"confidence_dtype": "float16"}, "confidence_dtype", "float32, float64"),
    ({"mask_id": 3}, "mask_id", "the model's"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 33, "gen_length": 32}, "min_tokens", "max_tokens, 32"),
    ({"ignore_eos": 2}, "ignore_eos", "true or false"),
    ({"allow_infill": "yes"}, "allow_infill", "true or false"),
    ({"stream_canvas": True}, "stream_canvas", "stream: true"),
    ({"stream_canvas": "yes"}, "stream_canvas", "true or false"),
    ({"stepz": 8}, "stepz", "unknown parameter; did you mean steps?"),
    ({"gen-length": 8}, "gen-length", "did you mean gen_length?"),
    ({"algoritm": "semi_ar"}, "algoritm", "did you mean algorithm?"),
]

# Fields of the body itself, on /generate.
GENERATE_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "1 to 128"),
    ({"n": -1}, "n", "1 to 128"),
    ({"n": 10**30}, "n", "1 to 128"),
    ({"logprobs": -1}, "logprobs", "0 to 20"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"seed": 10**400}, "seed", "finite number"),
    ({"gen_length": 10**400}, "gen_length", "finite number"),
    ({"steps": True}, "steps", "number"),
    ({"steps": {"a": 1}}, "steps", "number"),
    ({"temperature": [0]}, "temperature", "number"),
    ({"algorithm": None, "remasking": {}}, "remasking", "low_confidence"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "prompt", "either prompt or messages"),
    ({"prompt": None}, "prompt", "given nothing; wanted either prompt or messages"),
    ({"prompt": ["a", "b"], "apply_chat_template": True}, "apply_chat_template", "string prompt"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": ["hello", ""]}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "none of them empty"),
    ({"prompt": [[]]}, "prompt", "none of them empty"),
    ({"prompt": 7}, "prompt", "a string, token ids"),
    ({"prompt": {"text": "a"}}, "prompt", "a string, token ids"),
    ({"prompt": [1, "a"]}, "prompt", "a string, token ids"),
    ({"prompt": ["a", [1]]}, "prompt", "a string, token ids"),
    ({"prompt": [1.5]}, "prompt", "a string, token ids"),
    ({"prompt": [True]}, "prompt", "a string, token ids"),
    ({"prompt": [-1]}, "prompt", "token ids from 0"),
    ({"prompt": [10**30]}, "prompt", "token ids from 0"),
    ({"vllm_xargs": {"steps": 8}}, "vllm_xargs", "unknown parameter"),
]

# Parameters that OpenAI's bodies also have, with upstream's types and rules.
UPSTREAMS = {"temperature", "ignore_eos", "min_tokens"}

# Fields of the OpenAI routes that cannot be supported.
UNSUPPORTED: list[dict[str, Any]] = [
    {"response_format": {"type": "xml"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"uniqueItems": True}},
        }
    },
    {"structured_outputs": {"grammar": "a"}},
    {"structured_outputs": 5},
    {"response_format": "json"},
    {"stream_interval": 2**64},
    {"use_beam_search": True},
    {"return_weight_versions": True},
    {"prompt_logprobs": 1},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [10**9]},
    {"bad_words": [" "]},
    {"logit_bias": {"x": 1}},
    {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}},
    {"watermarking": True},
    {"kv_transfer_params": {"do_remote_prefill": True}},
    {"n": 0},
    {"n": 129},
]

# Fields that clients send to every model, with values that affect other models.
INERT: dict[str, Any] = {"reasoning_effort": "low"}
# Fields of other servers and of older versions of upstream.
FOREIGN: dict[str, Any] = {
    "cache_prompt": True,
    "timings_per_token": True,
    "guided_json": {"type": "object"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "verbosity": "low",
    "best_of": 2,
    "length_penalty": 2.0,
}


def label(value: Any) -> str | None:
    return json.dumps(value)[:60] if isinstance(value, dict) else None


def check_message(error: dict[str, Any], fields: dict[str, Any], name: str, wanted: str) -> None:
    """Check that the message has field, given and expected value, and that `param` is the field."""
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: given "), error
    assert wanted in error["message"]
    if name != "prompt":
        assert repr(fields[name])[:30] in error["message"]


@pytest.mark.parametrize("route", [*ROUTES, f"{CHAT} vllm_xargs", f"{COMPLETIONS} vllm_xargs"])
@pytest.mark.parametrize(("fields", "name", "wanted"), DIFFUSION_REFUSALS, ids=label)
def test_diffusion_parameters(
    client: Client, route: str, fields: dict[str, Any], name: str, wanted: str
) -> None:
    route, _, xargs = route.partition(" ")
    body = body_for(route, **({xargs: fields} if xargs else fields))
    error = refusal(client.http.post(route, json=body))
    if name in UPSTREAMS and not xargs and route != GENERATE:
        assert name in error["message"]
    else:
        check_message(error, fields, name, wanted)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", UNSUPPORTED, ids=label)
def test_what_cannot_be_had_is_refused_by_name(
    client: Client, route: str, fields: dict[str, Any]
) -> None:
    error = refusal(client.http.post(route, json=body_for(route, **fields)))
    (name,) = fields
    assert name in error["message"]
    assert name in (error["param"] or name)


def test_tools_that_cannot_be_called(client: Client) -> None:
    named = {"type": "function", "function": {"name": "no name", "parameters": {}}}
    for fields in ({"tools": [named]}, {"tool_choice": "auto"}):
        error = refusal(client.http.post(CHAT, json=body_for(CHAT, **fields)))
        assert error["param"] in fields


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_stream_is_refused_before_it_starts(client: Client, route: str) -> None:
    for fields in ({"gen_length": 32, "steps": 0}, {"gen_length": 32, "block_length": 5}):
        body = body_for(route, stream=True, **fields)
        assert refusal(client.http.post(route, json=body))["param"] in fields


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_contradictions_of_an_openai_body(client: Client, route: str) -> None:
    twice = body_for(route, steps=8, vllm_xargs={"num_denoising_steps": 16})
    error = refusal(client.http.post(route, json=twice))
    assert error["message"] == "steps: given 8; it contradicts vllm_xargs, steps: 16"
    agreeing = body_for(route, steps=8, vllm_xargs={"num_denoising_steps": 8})
    assert client.http.post(route, json=agreeing).status_code == 200
    hot = body_for(route, temperature=1.0, vllm_xargs={"temperature": 0.5})
    assert refusal(client.http.post(route, json=hot))["param"] == "temperature"
    limits = body_for(CHAT, max_tokens=5, max_completion_tokens=6)
    assert refusal(client.http.post(CHAT, json=limits))["param"] == "max_completion_tokens"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_bookkeeping_is_accepted(client: Client, route: str) -> None:
    """Fields that do not affect the answer are accepted."""
    report: dict[str, Any] = {"user": "u", "metadata": {"a": "b"}, "store": False, "n": 1}
    report |= {"service_tier": "auto", "response_format": {"type": "text"}, "logit_bias": {}}
    assert client.http.post(route, json=body_for(route, **report)).status_code == 200


@pytest.mark.parametrize(("fields", "name", "wanted"), GENERATE_REFUSALS, ids=label)
def test_fields_of_generate(client: Client, fields: dict[str, Any], name: str, wanted: str) -> None:
    error = refusal(client.http.post(GENERATE, json={"prompt": "hello", **fields}))
    check_message(error, fields, name, wanted)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("route", [*ROUTES, MESSAGES, RESPONSES])
def test_fields_that_do_not_act_are_taken_and_named(
    client: Client, route: str, temperature: int
) -> None:
    plain = {**body_for(route), "temperature": temperature, "seed": 5}
    if route == RESPONSES:
        plain = {"input": QUESTION, "temperature": temperature, "seed": 5}
    given = INERT if route == GENERATE else {**INERT, **FOREIGN}
    answer = client.answer(route, {**plain, **given})
    assert sorted(answer["diffusion"]["ignored"]) == sorted(given)
    if route != GENERATE:
        replaced = {"guided_json": "structured_outputs.json", "functions": "tools"}
        assert answer["diffusion"]["replaced_by"] == replaced
    same = client.answer(route, plain)
    assert same["diffusion"]["ignored"] == []
    for key in ("text", "choices", "content"):
        assert answer.get(key) == same.get(key)


def test_fields_that_nobody_knows_are_counted(client: Client) -> None:
    many = {f"field_{i}": i for i in range(65)}
    error = refusal(client.http.post(CHAT, json=body_for(CHAT, **many)))
    assert error["param"] in many
    assert "at most 64 fields" in error["message"]


def test_generate_refuses_fields_that_nobody_knows(client: Client) -> None:
    for name, value in FOREIGN.items():
        error = refusal(client.http.post(GENERATE, json={"prompt": "hello", name: value}))
        assert error["param"] == name
        assert "; the nearest are " in error["message"] and "/docs" in error["message"]
        assert error["message"].count(", ") <= 3 and len(error["message"]) < 300


@pytest.mark.parametrize("route", ROUTES)
def test_logprobs(client: Client, route: str) -> None:
    """More alternatives than the server allows are refused, as are logprobs of a chat's prompt."""
    flag, name = ({"logprobs": True}, "top_logprobs") if route == CHAT else ({}, "logprobs")
    for number in (-1, 21):
        body = body_for(route, **flag, **{name: number})
        assert refusal(client.http.post(route, json=body))["param"] == name
    if route == CHAT:
        body = body_for(route, echo=True, **flag)
        assert refusal(client.http.post(route, json=body))["param"] == "echo"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": "many"}, "n"),
        ({"stream": 3}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"apply_chat_template": "maybe"}, "apply_chat_template"),
        ({"model": 3}, "model"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": None, "messages": "hello"}, "messages"),
        ({"prompt": None, "messages": ["hello"]}, "messages"),
        ({"prompt": None, "messages": [{"content": "hello"}]}, "messages"),
    ],
    ids=label,
)
def test_wrong_types(client: Client, fields: dict[str, Any], name: str) -> None:
    error = refusal(client.http.post(GENERATE, json={"prompt": "hello", **fields}))
    assert name in error["param"]
    assert name in error["message"]


def test_empty_conversation(client: Client) -> None:
    for route in (GENERATE, CHAT):
        for wrong in (5, "hello", {"role": "user"}):
            response = client.http.post(route, json={"messages": wrong})
            assert "messages" in refusal(response)["message"]
        assert "message" in refusal(client.http.post(route, json={"messages": []}))["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["temperature", "cfg_scale", "threshold", "steps"])
def test_literals_that_are_no_numbers(client: Client, name: str, literal: str) -> None:
    """Python's JSON parser accepts these, but no denoising step can use them."""
    content = f'{{"prompt": "hello", "{name}": {literal}}}'
    error = refusal(client.http.post(GENERATE, content=content, headers=JSON))
    assert error["param"] == name
    assert "wanted a finite number" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "content", [b'{"prompt": "a",', b"", b"[1]", b'"a"', b"null", b"\xff\xfe"], ids=repr
)
def test_bodies_that_are_no_json_object(client: Client, route: str, content: bytes) -> None:
    error = refusal(client.http.post(route, content=content, headers=JSON))
    assert "body" in error["param"]


@pytest.mark.parametrize("route", [*ROUTES, "/invocations"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a",', "given 'no JSON'; wanted JSON: Expecting property name"),
        (
            b'{"prompt": "a" 5',
            "given 'no JSON'; wanted JSON: Expecting ',' delimiter after 15 char",
        ),
        (b'{"prompt": "\xc3"}', "given 'byte 0xc3 at 12'; wanted UTF-8"),
        (b"[" * 5000, "given 'JSON that is nested too deeply'; wanted less depth"),
    ],
)
def test_what_is_wrong_with_a_body(
    client: Client, route: str, content: bytes, message: str
) -> None:
    error = refusal(client.http.post(route, content=content, headers=JSON))
    assert error["message"].startswith(f"body: {message}")
    assert (error["param"], error["type"]) == ("body", "BadRequestError")


@pytest.mark.parametrize("route", ROUTES)
def test_a_number_too_long_to_read(client: Client, route: str) -> None:
    """Python refuses to parse an integer with 5000 digits."""
    content = json.dumps(body_for(route))[:-1] + ', "seed": ' + "9" * 5000 + "}"
    assert client.http.post(route, content=content, headers=JSON).status_code == 400


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/xml"])
def test_content_type(client: Client, route: str, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    content = json.dumps(body_for(route)).encode()
    error = refusal(client.http.post(route, content=content, headers=headers))
    assert "application/json" in error["message"]


@pytest.mark.parametrize("route", [*ROUTES, MESSAGES, f"{MESSAGES}/count_tokens", RESPONSES])
def test_a_model_that_is_not_served(client: Client, route: str) -> None:
    fields = body_for(MESSAGES if route.startswith(MESSAGES) else route)
    body = {**fields, "input": "hi"} if route == RESPONSES else fields
    error = refusal(client.http.post(route, json={**body, "model": "llada\n500b"}), status=404)
    assert error["message"] == f"model: given 'llada\\n500b'; wanted one of: {MODEL_NAME}"
    assert error["param"] == "model"


def test_paths_are_repeated_as_given(client: Client) -> None:
    """Names of models are often paths, which upstream's messages replace by `<path>`."""
    path = "/tmp/models/llada.bin"
    error = refusal(client.http.post(GENERATE, json=body_for(GENERATE, model=path)), 404)
    assert error["message"] == f"model: given '{path}'; wanted one of: {MODEL_NAME}"
    error = refusal(client.http.post(CHAT, json=body_for(CHAT, algorithm=path)), 400)
    assert error["message"].startswith(f"algorithm: given '{path}'; ")
    error = refusal(client.http.get(path), 404)
    assert error["message"] == f"path: given '{path}'; wanted one of those that /docs lists"


def test_models_are_listed_and_found(client: Client) -> None:
    (listed,) = client.http.get("/v1/models").json()["data"]
    content = client.http.get(f"/v1/models/{MODEL_NAME}").json()
    for card in (listed, content):
        del card["created"], card["permission"]
    assert content == listed
    error = refusal(client.http.get("/v1/models/a/other"), 404)
    assert error["message"] == f"model: given 'a/other'; wanted one of: {MODEL_NAME}"
    assert error["type"] == "NotFoundError"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_methods(client: Client, method: str) -> None:
    error = refusal(client.http.request(method, GENERATE), 405)
    assert error["message"] == f"method: given '{method}'; /generate accepts POST"


def test_paths(client: Client) -> None:
    """A path without /v1, which a client with a wrong base URL sends, gets the right one."""
    for method, path in (("GET", "/nope"), ("POST", "/v1/nope"), ("POST", "/chat/completions")):
        error = refusal(client.http.request(method, path), 404)
        assert error["message"].startswith(f"path: given '{path}'; wanted ")
        assert error["type"] == "NotFoundError"
    assert "wanted /v1/chat/completions" in error["message"]


MESSAGE_FAULTS: list[tuple[Any, str, str]] = [
    ({"content": "hi"}, "[0].role", "wanted one of: system"),
    ({"role": "usr", "content": "hi"}, "[0].role", "user"),
    ({"role": 5, "content": "hi"}, "[0].role", "wanted one of"),
    (None, "[0]", "an object"),
    ("hello", "[0]", "an object"),
    ({"role": "user"}, "[0].content", "given nothing"),
    ({"role": "user", "content": None}, "[0].content", "a string or a list of parts"),
    ({"role": "user", "content": 5}, "[0].content", "given 5"),
    ({"role": "user", "content": [5]}, "[0].content[0]", "an object with a type"),
    ({"role": "user", "content": [{"type": "text"}]}, "[0].content[0].text", "a string"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "[0].content[0].type", "wanted text"),
    ({"role": "user", "content": [{"type": "txt", "text": "hi"}]}, "[0].content[0].type", "'txt'"),
]


@pytest.mark.parametrize("route", [GENERATE, CHAT, MESSAGES])
def test_messages_that_are_none(client: Client, route: str) -> None:
    for message, place, wanted in MESSAGE_FAULTS:
        body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 32}
        error = refusal(client.http.post(route, json=body))
        assert error["param"] == f"messages{place}"
        assert error["message"].startswith(f"messages{place}: given ")
        assert wanted in error["message"]


EDIT = [{"role": "user", "content": "<|code_to_edit|>\na<|cursor|>\n<|/code_to_edit|>"}]
TYPE_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": "two"}, "n: given 'two'; wanted a valid integer"),
    (CHAT, {"stop": 5}, "stop: given 5; wanted a valid string or a valid list"),
    (CHAT, {"stop": [5]}, "stop[0]: given 5; wanted a valid string"),
    (CHAT, {"stream": "maybe"}, "stream: given 'maybe'; wanted a valid boolean"),
    (
        CHAT,
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice.function.name: given 'g'; wanted one of: f",
    ),
    (CHAT, {"tools": [{}]}, "tools[0].function: given nothing; wanted a value"),
    (CHAT, {"temperature": 3}, "temperature: given 3.0; wanted in [0, 2]"),
    (CHAT, {"max_tokens": 10**6}, "max_tokens: given 1000000; wanted at most 4096, the max_model"),
    (CHAT, {"stop": ["a"] * 2000}, "stop: given ['a', 'a', 'a'"),
    (GENERATE, {"seed": "abc"}, "seed: given 'abc'; wanted a whole number"),
    (COMPLETIONS, {"prompt": ""}, "prompt: given ''; wanted a string, token ids"),
    (COMPLETIONS, {"prompt": None}, "prompt: given nothing; wanted a string, token ids"),
    ("/v1/systemone", {}, "state, questions: given nothing; wanted a value"),
    ("/v1/loglikelihood", {}, "continuation: given nothing; wanted a value"),
    ("/tokenize", {}, "prompt, messages: given nothing; wanted a value"),
    (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs: given 5; wanted an object"),
    (CHAT, {"stream_options": []}, "stream_options: given []; wanted an object"),
    (CHAT, {"tools": [5]}, "tools[0]: given 5; wanted an object"),
    (MESSAGES, {**body_for(MESSAGES), "max_tokens": 0}, "max_tokens: given 0; wanted positive"),
    (CHAT, {"priority": 1e308}, "priority: given 1e+308; wanted a number of 64 bits"),
    (
        "/v1/edit/completions",
        {"messages": EDIT, "algorithm": [[]]},
        "algorithm: given [[]]; wanted one",
    ),
    (GENERATE, {"pinned": [[0, 3]]}, "pinned: given [[0, 3]]; wanted canvas_text or"),
]


@pytest.mark.parametrize(("route", "fields", "message"), TYPE_FAULTS)
def test_types_are_told_in_one_line(
    client: Client, route: str, fields: dict[str, Any], message: str
) -> None:
    body = body_for(route, **fields) if route in ROUTES else {"model": MODEL_NAME, **fields}
    error = refusal(client.http.post(route, json=body))
    assert error["message"].startswith(message)
    assert "\n" not in error["message"]
    assert error["param"] == message.partition(":")[0]


@pytest.mark.parametrize("route", ROUTES)
def test_mask_token_as_text(client: Client, route: str) -> None:
    prompt: dict[str, Any] = {"prompt": f"What is {MASK}?"}
    if route == CHAT:
        prompt = {"messages": [{"role": "user", "content": prompt["prompt"]}]}
    error = refusal(client.http.post(route, json=prompt))
    assert error["param"] == "prompt"
    assert "mask token" in error["message"]
    assert "allow_infill" in error["message"]


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_mask_token_as_id(client: Client, route: str) -> None:
    (mask,) = client.answer("/tokenize", {"prompt": MASK, "add_special_tokens": False})["tokens"]
    error = refusal(client.http.post(route, json={"prompt": [5, mask, 6]}))
    assert error["param"] == "prompt"
    assert f"given {mask}" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_prompt_and_canvas_too_long(client: Client, route: str) -> None:
    """The message has three numbers: prompt, canvas, and the maximum of the model."""
    num_prompt = 17 if route == CHAT else 7
    canvas = 4096 - num_prompt + 1
    fields = {"gen_length": canvas}
    error = refusal(client.http.post(route, json=body_for(route, **fields)))
    check_message(error, fields, "gen_length", f"prompt of {num_prompt} tokens")
    assert f"canvas of {canvas}" in error["message"]
    assert "max_model_len 4096" in error["message"]


def test_prompt_alone_too_long(client: Client) -> None:
    error = refusal(client.http.post(GENERATE, json={"prompt": [5] * 5000}))
    assert "4096" in error["message"]


def test_one_bad_prompt_of_several(client: Client) -> None:
    """No prompt runs if one of several prompts is refused."""
    before = client.metric("vllm:prompt_tokens_total")
    refusal(client.http.post(GENERATE, json={"prompt": [QUESTION, MASK]}))
    assert client.num_requests() == 0
    assert client.metric("vllm:prompt_tokens_total") == before


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "value", [None, {"a": 1}, 10**30], ids=["null", "object", "more than 64 bits"]
)
def test_xargs_that_upstream_refuses(client: Client, route: str, value: Any) -> None:
    """The message is upstream's."""
    body = body_for(route, vllm_xargs={"gen_length": value})
    assert refusal(client.http.post(route, json=body))["param"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_xargs_of_connectors(client: Client, route: str, name: str) -> None:
    """Keys that upstream reserves for key-value connectors do not break a server without one."""
    body = body_for(route, vllm_xargs={name: 3})
    assert name in refusal(client.http.post(route, json=body))["message"]


def test_a_good_request_after_all(client: Client) -> None:
    assert client.ask()["finish_reason"] == ["stop"]
