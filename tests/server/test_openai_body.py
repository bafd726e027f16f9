# SPDX-License-Identifier: Apache-2.0
"""Bodies of the OpenAI routes before they reach upstream's handlers, without a server."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from tests.programs import ROOT
from vllm.diffusion.api.openai.openai_protocol import (
    ChatCompletionBody,
    CompletionBody,
    extra_args,
    prepare,
)
from vllm.diffusion.api.openai.responses import ResponsesBody
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.fields import SPELLINGS
from vllm.diffusion.request.upstream_fields import UPSTREAM_FIELDS

MESSAGES = [{"role": "user", "content": "hello"}]


GREEDY = {"temperature": 0.0}  # the server's default


def model_config() -> Any:
    return SimpleNamespace(max_logprobs=20)


def chat(kind: Any = ChatCompletionBody, **fields: Any) -> Any:
    request = kind(messages=MESSAGES, **fields)
    prepare(request, model_config(), defaults=GREEDY)
    return request


def test_fields_of_the_top_level_become_extra_arguments() -> None:
    request = chat(num_denoising_steps=8, gen_length=32, seed=7, temperature=1.0, top_k=3)
    parameters = {"steps": 8, "gen_length": 32, "top_k": 3, "dllm_ignored": []}
    assert request.vllm_xargs == parameters
    sampling = request.to_sampling_params(100, {})
    assert sampling.extra_args == parameters
    assert (sampling.seed, sampling.temperature, sampling.top_k) == (7, 1.0, 3)


def test_upstreams_own_body_means_the_same() -> None:
    """Other upstream routes pass upstream's body, which has unknown fields as extras."""
    parameters: dict[str, Any] = {"steps": 8, "gen_length": 32, "vllm_xargs": {"cfg_scale": 1}}
    assert chat(ChatCompletionRequest, **parameters).vllm_xargs == chat(**parameters).vllm_xargs
    with pytest.raises(InvalidParameterError, match="did you mean steps"):
        chat(ChatCompletionRequest, stepz=8)


def test_no_client_says_what_is_ignored() -> None:
    assert chat(dllm_ignored=["steps"]).vllm_xargs["dllm_ignored"] == ["dllm_ignored"]
    with pytest.raises(InvalidParameterError, match="unknown parameter"):
        chat(vllm_xargs={"dllm_ignored": "steps"})


@pytest.mark.parametrize("kind", [ChatCompletionBody, ChatCompletionRequest])
def test_what_is_left_out_is_named(kind: Any) -> None:
    """Unknown fields and fields without effect are listed, unless their values request nothing."""
    parameters = {"best_of": 2, "cache_prompt": True, "guided_json": {}, "reasoning_effort": "low"}
    nothing: dict[str, Any] = {"modalities": ["text"], "store": True}
    nothing |= {"min_p": 0.1, "presence_penalty": 1.0, "logit_bias": {"5": 1.0}}  # have an effect
    named = chat(kind, **parameters, **nothing).vllm_xargs["dllm_ignored"]
    assert sorted(named) == sorted(parameters)
    request = kind(messages=MESSAGES, **parameters)
    prepare(request, model_config(), "{% if enable_thinking %}")  # the template reads the field
    assert "reasoning_effort" not in request.vllm_xargs["dllm_ignored"]


def test_the_names_of_mercurys_api_are_read() -> None:
    """`instant` turns thinking off, and `diffusing` asks for the canvas of every step."""
    instant = chat(reasoning_effort="instant")
    assert instant.reasoning_effort == "none"
    assert instant.vllm_xargs["dllm_ignored"] == []
    assert chat(diffusing=True, stream=True).vllm_xargs["stream_canvas"] is True
    for fields in ({"diffusing": False, "stream": True}, {"diffusing": False}):
        assert chat(**fields).vllm_xargs == {"dllm_ignored": []}
    others: dict[str, Any] = {"realtime": True, "reasoning_summary": True}
    others |= {"reasoning_summary_wait": False, "diffusing": True}
    assert sorted(chat(**others).vllm_xargs["dllm_ignored"]) == sorted(others)
    with pytest.raises(ValidationError, match="contradicts stream_canvas"):
        chat(diffusing=True, stream=True, stream_canvas=False)
    with pytest.raises(ValidationError, match="wanted true or false"):
        chat(diffusing="yes")


def test_fields_that_edit_logits_are_handed_on_as_upstream_has_them() -> None:
    own: dict[str, Any] = {
        "min_p": 0.1,
        "min_tokens": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "allowed_token_ids": [4, 5],
        "bad_words": ["word"],
    }
    request = chat(**own, logit_bias={"5": 150}, temperature=1.0)
    sampling = request.to_sampling_params(16, {})
    assert {name: getattr(sampling, name) for name in own} == own
    assert sampling.logit_bias == {5: 100.0}
    assert sampling.extra_args == {"dllm_ignored": []}
    with pytest.raises(InvalidParameterError, match="logit_bias: given"):
        chat(logit_bias={"word": 1.0})


def test_a_default_limit_is_told_from_one_that_was_given() -> None:
    for fields, limit, given in (
        ({}, 16, None),
        ({"max_tokens": None}, 16, None),
        ({"max_tokens": 16}, 16, 16),
        ({"max_tokens": 7}, 7, 7),
    ):
        request = CompletionBody(prompt="hello", **fields)
        assert request.max_tokens == limit  # upstream requires a number
        prepare(request, model_config())
        assert request.vllm_xargs.get("max_tokens") == given


@pytest.mark.parametrize(("seed", "wanted"), [(0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_have_64_bits(seed: int, wanted: int) -> None:
    assert chat(seed=seed).to_sampling_params(16, {}).seed == wanted
    assert chat(vllm_xargs={"seed": seed}).to_sampling_params(16, {}).seed == wanted


def test_several_greedy_answers_pass_upstreams_check() -> None:
    sampling = chat(n=2, top_p=0.5).to_sampling_params(16, {"temperature": 0.0})
    assert sampling.n == 2
    assert sampling.extra_args == {"temperature": 0.0, "top_p": 0.5, "dllm_ignored": []}
    drawn = chat(n=2, vllm_xargs={"temperature": 0.7}).to_sampling_params(16, {"temperature": 0.0})
    assert (drawn.n, drawn.extra_args) == (2, {"temperature": 0.7, "dllm_ignored": []})
    warm = chat(n=2, temperature=0.7).to_sampling_params(16, {})
    assert (warm.temperature, warm.extra_args) == (0.7, {"dllm_ignored": []})


def test_bodies_type_and_describe_every_parameter() -> None:
    for body, upstreams in (
        (ChatCompletionBody, ChatCompletionRequest),
        (CompletionBody, CompletionRequest),
    ):
        properties = body.model_json_schema()["properties"]
        assert properties.keys() >= SPELLINGS.keys() | upstreams.model_fields.keys()
        for name in SPELLINGS:
            assert properties[name].get("type") or properties[name].get("anyOf"), name
            assert properties[name]["description"], name


def test_what_is_refused_or_has_no_effect_is_documented() -> None:
    _, *sections = (ROOT / "docs" / "openai_deviations.md").read_text().split("\n## ")
    text_of = {heading: text for heading, _, text in (s.partition("\n") for s in sections)}
    ignored, unlisted = text_of["Accepted but ignored"].split("does not list these fields")
    documented = {
        "renamed": "".join(sections),
        "thinking": ignored,
        "ignored": ignored,
        "unlisted": unlisted,
        "refused": text_of["Refused"],
    }
    for name, field in UPSTREAM_FIELDS.items():
        if field.effect in documented:
            assert f"`{name}`" in documented[field.effect], name


@pytest.mark.parametrize(
    "body",
    [
        *(ChatCompletionRequest, BatchChatCompletionRequest, CompletionRequest, ResponsesRequest),
        *(AnthropicMessagesRequest, AnthropicCountTokensRequest),
    ],
)
def test_every_field_of_upstreams_bodies_has_an_effect(body: type[BaseModel]) -> None:
    """A field that a new version of upstream adds belongs in the table."""
    assert body.model_fields.keys() <= SPELLINGS.keys() | UPSTREAM_FIELDS.keys()


def test_fields_are_replaced_by_fields_that_act() -> None:
    known = SPELLINGS.keys() | UPSTREAM_FIELDS.keys()
    for field in UPSTREAM_FIELDS.values():
        assert field.name not in SPELLINGS
        assert field.replaced_by is None or field.replaced_by.partition(".")[0] in known


@pytest.mark.parametrize(
    ("name", "value"), [("min_tokens", 3), ("bad_words", ["a"]), ("allowed_token_ids", [4, 5])]
)
def test_a_parameter_that_upstreams_body_lacks_is_passed_on(name: str, value: Any) -> None:
    """Upstream's body of /v1/responses declares fewer parameters than that of completions."""
    body = ResponsesBody(input="hello", **{name: value})
    actual = extra_args(body, "")[name]
    assert (actual if isinstance(value, int) else list(actual)) == value
    assert name not in extra_args(CompletionBody(prompt="hello", **{name: value}), "")


@pytest.mark.parametrize(
    "content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
def test_a_prediction_becomes_a_predicted_text(content: Any) -> None:
    request = chat(prediction={"type": "content", "content": content})
    assert request.vllm_xargs == {"predicted_text": "ab", "dllm_ignored": []}
    assert chat(prediction={"type": "content", "content": ""}).vllm_xargs == {"dllm_ignored": []}


@pytest.mark.parametrize(
    "prediction", ["ab", {"type": "other", "content": "a"}, {"content": [1]}, {"content": 1}]
)
def test_other_predictions_are_refused(prediction: Any) -> None:
    with pytest.raises((InvalidParameterError, ValidationError), match="prediction: given"):
        chat(prediction=prediction)
