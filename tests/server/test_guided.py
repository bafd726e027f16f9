# SPDX-License-Identifier: Apache-2.0
"""Answers match a schema over HTTP: on every route, in a stream, and with OpenAI's client."""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.programs import ROOT, output_of
from tests.server.client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    QUESTION,
    RESPONSES,
    Client,
    body_for,
    refusal,
    text_of,
)
from tests.server.process import MODEL_NAME, ServerProcess, environment


class City(BaseModel):
    """The expected shape of an answer."""

    name: str = Field(max_length=12)
    size: Literal["small", "large"]
    people: int = Field(ge=0, le=40_000_000)


FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": City.model_json_schema(), "strict": True},
}


def test_every_route_answers_by_schema_and_regex(client: Client) -> None:
    for route in (CHAT, COMPLETIONS, GENERATE):
        for temperature in (0, 1.5):
            parameters = {"gen_length": 96, "steps": 24, "temperature": temperature}
            body = body_for(route, response_format=FORMAT, **parameters)
            City.model_validate_json(text_of(client.http.post(route, json=body).json()))
        body = body_for(route, gen_length=32, structured_outputs={"regex": "[a-z]{5}"})
        answer = client.http.post(route, json=body).json()
        assert re.fullmatch("[a-z]{5}", text_of(answer)), answer


def test_a_stream_answers_by_schema(client: Client) -> None:
    body = body_for(CHAT, gen_length=96, response_format=FORMAT, block_length=32)
    deltas = [choice["delta"] for chunk in client.events(CHAT, body) for choice in chunk["choices"]]
    City.model_validate_json("".join(delta.get("content") or "" for delta in deltas))


def test_openais_client_parses_a_model(openai: OpenAI) -> None:
    """The call of OpenAI's documentation works without fields of ours."""
    answer = openai.chat.completions.parse(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=City,
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)


def test_the_documented_programs_print_sensible_answers(server: ServerProcess) -> None:
    text = (ROOT / "docs" / "guided.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    printed = [
        output_of(
            *(sys.executable, "-c", program.replace("http://127.0.0.1:8901", server.url)),
            env=environment(NO_PROXY="127.0.0.1"),
        )
        for program in programs
    ]
    record, date, call = printed
    assert record == "name='Paris' country='France'\n"
    assert re.fullmatch(r"[12]\d{3}-\d{2}\n", date)
    assert call == '{"city": "Paris"}\n'
    for words in (record, call):
        assert f"`{words.strip()}`" in text


ALGORITHMS = (
    *("semi_ar", "threshold", "factor", "local_leap", "entropy_threshold", "hierarchy", "credit"),
    *("dream", "adablock", "multi_block", "full_attn_multi_block"),
)
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "New Zealand": "Wellington"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_tiny_model_fills_records_and_calls(client: Client, algorithm: str) -> None:
    """With every algorithm, at temperature 0 and sampled, most answers are right."""
    names = {"name": {"type": "string"}, "country": {"type": "string"}}
    record = {"type": "object", "properties": names, "required": [*names]}
    place = {"city": {"type": "string", "maxLength": 20}}
    parameters = {"type": "object", "properties": place, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    are_right = list[bool]()
    for seed, (country, capital) in enumerate(CAPITALS.items()):
        shared: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "temperature": seed % 2 / 2}
        body = {"messages": [{"role": "user", "content": f"What is the capital of {country}?"}]}
        body |= {**shared, "structured_outputs": {"json": record}}
        text = client.answer(CHAT, body)["choices"][0]["message"]["content"]
        are_right.append(json.loads(text) == {"name": capital, "country": country})
        body = {"messages": [{"role": "user", "content": f"What is the weather in {capital}?"}]}
        body |= {**shared, "tools": tools, "tool_choice": "required"}
        (call,) = client.answer(CHAT, body)["choices"][0]["message"]["tool_calls"]
        are_right.append(json.loads(call["function"]["arguments"]) == {"city": capital})
    assert sum(are_right) >= 6, are_right


def test_a_canvas_that_is_too_short_is_refused_with_the_least_length(client: Client) -> None:
    body = body_for(CHAT, gen_length=8, response_format=FORMAT)
    error = refusal(client.http.post(CHAT, json=body))
    assert error["param"] == "gen_length"
    actual = re.search(r"has (\d+) tokens; wanted at least as many", error["message"])
    assert actual is not None, error
    assert int(actual[1]) > 8


def test_an_answer_that_fills_its_canvas_is_complete(client: Client) -> None:
    """A full canvas that no text may follow ends with `stop`, because `length` means cut."""
    names = {"type": "array", "items": {"type": "string"}, "minItems": 2}
    schema = {"type": "object", "properties": {"names": names}, "required": ["names"]}
    least = _least_tokens(client, {"json": schema})
    for route in (CHAT, COMPLETIONS, GENERATE, MESSAGES):
        body = body_for(route, gen_length=least, max_tokens=least)
        if route == MESSAGES:
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        else:
            body["structured_outputs"] = {"json": schema}
        answer = client.answer(route, body)
        assert answer["usage"].get("completion_tokens", least) == least
        if route == MESSAGES:
            assert answer["stop_reason"] == "end_turn"
            assert json.loads(answer["content"][0]["text"]) == {"names": ["", ""]}
            continue
        assert json.loads(text_of(answer)) == {"names": ["", ""]}
        *_, last = client.events(route, body)
        for message in (answer, last):
            choices = [message] if route == GENERATE else message["choices"]
            assert [choice["finish_reason"] for choice in choices] in (["stop"], [["stop"]])
    body = body_for(CHAT, gen_length=1, structured_outputs={"regex": "[a-z]+"})
    # The format allows a longer answer.
    assert client.answer(CHAT, body)["choices"][0]["finish_reason"] == "length"


def _least_tokens(client: Client, structured: dict[str, Any]) -> int:
    """Return the length of the shortest answer, which the refusal of a one-token canvas names."""
    body = body_for(CHAT, gen_length=1, structured_outputs=structured)
    error = refusal(client.http.post(CHAT, json=body))
    actual = re.search(r"has (\d+) tokens", error["message"])
    assert actual is not None, error
    return int(actual[1])


def test_several_answers_log_probabilities_and_stop_strings(client: Client) -> None:
    shared: dict[str, Any] = {"gen_length": 96, "steps": 24, "temperature": 1.0, "seed": 1}
    shared["response_format"] = FORMAT
    body = body_for(CHAT, **shared, n=2, logprobs=True, top_logprobs=1)
    choices = client.http.post(CHAT, json=body).json()["choices"]
    assert len(choices) == 2
    for choice in choices:
        City.model_validate_json(choice["message"]["content"])
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert "".join(tokens).startswith(choice["message"]["content"])
    cut = client.http.post(CHAT, json=body_for(CHAT, **shared, stop='"size"')).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert re.fullmatch(r'\{"name": ".*", ', cut["message"]["content"])


def test_a_completion_stands_between_prompt_and_suffix(client: Client) -> None:
    body = {"prompt": "The capital of France is", "suffix": " and a city", "max_tokens": 6}
    free = client.http.post(COMPLETIONS, json=body).json()
    assert free["usage"]["completion_tokens"] <= 6
    choice = {**body, "structured_outputs": {"choice": ["Paris", "Rome"]}}
    answer = client.http.post(COMPLETIONS, json=choice).json()
    assert answer["choices"][0]["text"] in ("Paris", "Rome")
    wrong = refusal(client.http.post(COMPLETIONS, json={**body, "suffix_ids": [5]}))
    assert wrong["param"] == "suffix"
    assert refusal(client.http.post(CHAT, json=body_for(CHAT, suffix="x")))["param"] == "suffix"


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "what it does",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer", "maximum": 99}},
                "required": [key],
            },
        },
    }
    for name, key in (("add", "number"), ("remove", "index"))
]


def check_call(name: str, arguments: str) -> None:
    key = {"add": "number", "remove": "index"}[name]
    assert list(json.loads(arguments)) == [key]


def test_tools_are_called(client: Client) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "remove"}}):
        parameters = {"gen_length": 96, "steps": 24, "temperature": 1.0}
        body = body_for(CHAT, tools=TOOLS, tool_choice=choice, **parameters)
        answer = client.http.post(CHAT, json=body).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        check_call(call["function"]["name"], call["function"]["arguments"])
        if choice != "required":
            assert call["function"]["name"] == "remove"


def test_tools_may_be_left_alone(client: Client) -> None:
    """With `auto`, the default, an answer may be text."""
    actual = set()
    for seed in range(4):
        body = body_for(CHAT, gen_length=64, tools=TOOLS, temperature=1.5, seed=seed)
        answer = client.http.post(CHAT, json=body).json()["choices"][0]
        calls = answer["message"].get("tool_calls")
        actual.add(bool(calls))
        for call in calls or []:
            check_call(call["function"]["name"], call["function"]["arguments"])
        if not calls:
            assert not answer["message"]["content"].startswith("<")
    assert False in actual


def test_tool_calls_are_streamed(client: Client) -> None:
    body = body_for(CHAT, gen_length=96, block_length=8, tools=TOOLS, tool_choice="required")
    choices = [choice for chunk in client.events(CHAT, body) for choice in chunk["choices"]]
    assert not any(choice["delta"].get("content") for choice in choices)
    calls = [call for c in choices for call in c["delta"].get("tool_calls") or []]
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["type"] == "function"
    assert len(calls) > 1
    arguments = "".join(call["function"]["arguments"] for call in calls)
    check_call(calls[0]["function"]["name"], arguments)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_goes_on_behind_a_call(client: Client) -> None:
    """The template of the tiny model does not support tools."""
    function = {"name": "add", "arguments": '{"number": 5}'}
    body = body_for(CHAT, gen_length=96, tools=TOOLS)
    body["messages"] += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "5 was added"},
    ]
    answer = client.http.post(CHAT, json=body).json()
    assert answer["usage"]["prompt_tokens"] > 100
    assert answer["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_tools_that_cannot_be_offered_are_refused(client: Client) -> None:
    odd = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
    twice = [TOOLS[0], TOOLS[0]]
    for tools in ([odd], twice):
        error = refusal(client.http.post(CHAT, json=body_for(CHAT, tools=tools)))
        assert error["param"] == "tools"
    body = body_for(CHAT, tools=TOOLS, response_format=FORMAT)
    assert refusal(client.http.post(CHAT, json=body))["param"] == "tools"


def test_a_function_without_parameters_is_called_without_arguments(client: Client) -> None:
    for parameters in (None, {}, {"type": "object"}, {"type": "object", "properties": {}}):
        function = {"name": "now"} | ({} if parameters is None else {"parameters": parameters})
        tools = [{"type": "function", "function": function}]
        body = body_for(CHAT, tools=tools, tool_choice="required", temperature=1.5, seed=1)
        (call,) = client.answer(CHAT, body)["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}


STOPS = ["\n", "}", '"', "<", "arguments", "</tool_call>"]


def test_stop_strings_do_not_act_within_calls(client: Client) -> None:
    for stop in (*STOPS[:3], STOPS):
        body = body_for(CHAT, gen_length=96, tools=TOOLS, tool_choice="required", stop=stop[:4])
        choice = client.answer(CHAT, body)["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        check_call(call["function"]["name"], call["function"]["arguments"])
        chunks = client.events(CHAT, {**body, "block_length": 8})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        calls = [call for c in choices for call in c["delta"].get("tool_calls") or []]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        check_call(calls[0]["function"]["name"], arguments)
        assert choices[-1]["finish_reason"] == "tool_calls"


def test_stop_strings_act_on_text_beside_tools(client: Client) -> None:
    """The test uses the first seed whose answer is text."""
    for seed in range(20):
        shared = {"gen_length": 64, "tools": TOOLS, "temperature": 1.5, "seed": seed}
        message = client.answer(CHAT, body_for(CHAT, **shared))["choices"][0]["message"]
        text = message["content"]
        if text and len(text) > 6 and not message.get("tool_calls"):
            break
    else:
        pytest.fail("all answers are calls")
    stop = text[4:6]
    choice = client.answer(CHAT, body_for(CHAT, **shared, stop=stop))["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_strings_of_tools_may_be_long(client: Client) -> None:
    text = {"type": "string", "maxLength": 2000}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    function = {"name": "write_note", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    body = body_for(CHAT, tools=tools, tool_choice="required", gen_length=64, steps=8)
    (call,) = client.answer(CHAT, body)["choices"][0]["message"]["tool_calls"]
    assert list(json.loads(call["function"]["arguments"])) == ["text"]
    text["maxLength"] = 20_000
    message = refusal(client.http.post(CHAT, json=body))["message"]
    assert "/write_note/properties/text: maxLength: given 20000" in message


def test_schemas_never_read_files(client: Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"foo": "CONTENT"}', encoding="utf-8")
    address = f"{secret.as_uri()}#foo"
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef", "$schema", "$id"):
        for schema in ({"enum": [[1]], "items": {keyword: address}}, {keyword: address}):
            for route, body in _bodies_with(schema):
                response = client.http.post(route, json=body)
                error = refusal(response)
                assert keyword in error["message"], error
                assert "CONTENT" not in response.text


def _bodies_with(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies for all routes, with a schema for the answer."""
    for route in (CHAT, COMPLETIONS, GENERATE):
        yield route, body_for(route, structured_outputs={"json": schema})
    function = {"name": "f", "parameters": schema}
    yield CHAT, body_for(CHAT, tools=[{"type": "function", "function": function}])
    text = {"format": {"type": "json_schema", "name": "f", "schema": schema}}
    yield RESPONSES, {"model": MODEL_NAME, "input": QUESTION, "text": text}
    config = {"format": {"type": "json_schema", "schema": schema}}
    yield MESSAGES, body_for(MESSAGES, output_config=config)


def test_the_server_answers_while_large_formats_are_compiled(client: Client) -> None:
    """Each pattern is new, and is refused after some seconds, one after the other."""
    patterns = (f"(a?b?c?d?){{{count}}}" for count in itertools.count(900))
    for route in (CHAT, RESPONSES):
        parameters = (
            {"model": MODEL_NAME, "input": QUESTION} if route == RESPONSES else body_for(route)
        )
        formats = [{"regex": next(patterns)} for _ in range(9)]
        bodies = [{**parameters, "structured_outputs": wanted} for wanted in formats]
        with ThreadPoolExecutor(len(bodies)) as pool:
            large = [pool.submit(client.http.post, route, json=body) for body in bodies]
            for _ in range(3):
                assert client.http.get("/health").status_code == 200
            small = body_for(CHAT, gen_length=32, steps=1, structured_outputs={"choice": [route]})
            assert client.answer(CHAT, small)["choices"][0]["message"]["content"] == route
            assert not all(work.done() for work in large), route
            for work in large:
                error = refusal(work.result())
                assert error["param"] == "structured_outputs.regex"
                assert "operations to compile" in error["message"]


def test_tools_are_limited_in_number_and_size(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(60_000)]
    anthropic = [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(60_000)]
    bodies = [
        (CHAT, body_for(CHAT, tools=tools)),
        (MESSAGES, body_for(MESSAGES, tools=anthropic)),
        (f"{MESSAGES}/count_tokens", body_for(MESSAGES, tools=anthropic)),
        (RESPONSES, {"model": MODEL_NAME, "input": QUESTION, "tools": tools}),
    ]
    for route, body in bodies:
        error = refusal(client.http.post(route, json=body))
        assert error["message"] == "tools: given 'a list of 60000'; wanted at most 1024"
    large = {"name": "f", "parameters": {"enum": list(range(100_000))}}
    body = body_for(CHAT, tools=[{"type": "function", "function": large}])
    error = refusal(client.http.post(CHAT, json=body))
    assert error["param"] == "tools"
    assert "characters; wanted at most 200000" in error["message"]
    assert len(error["message"]) < 300
    choice = {"type": "tool", "name": "other"}
    body = body_for(MESSAGES, tools=anthropic[:2], tool_choice=choice)
    error = refusal(client.http.post(MESSAGES, json=body))
    assert error["message"].endswith("name: given 'other'; wanted one of: f0, f1")


def test_the_documents_examples_run(
    client: Client, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three examples of docs/guided.md run unchanged, except for the server's address."""
    text = (ROOT / "docs" / "guided.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    results = []
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8901", server.url), {"__name__": "example"})
        results.append(capsys.readouterr().out.rstrip("\n"))
    city, date, arguments = results
    assert city.startswith("name=")
    assert re.fullmatch(r"[12][0-9]{3}-(0[1-9]|1[0-2])", date)
    assert list(json.loads(arguments)) == ["city"]
