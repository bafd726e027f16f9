# SPDX-License-Identifier: Apache-2.0
"""Bodies and answers of the OpenAI and Anthropic routes: upstream's, with diffusion's additions.

Unsupported fields are refused. Fields without effect and unknown fields are listed in the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, model_validator

from vllm.diffusion.api.bodies import (
    check_chosen_tool,
    check_text_length,
    ignored_fields,
    refuse_fields,
)
from vllm.diffusion.api.conversations import read_chat
from vllm.diffusion.api.openai.tool_calls import requested_tools
from vllm.diffusion.api.report import DiffusionReport
from vllm.diffusion.api.schema import MAX_CHOICES, check_logprobs, with_diffusion_fields
from vllm.diffusion.api.tool_prompts import reads_tools
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.editing.fim_template import in_template
from vllm.diffusion.guided.guides import SPEC, packed, requested_spec, spec_of_tools
from vllm.diffusion.request.decision import IGNORED, RESERVED_EXTRA_ARGS
from vllm.diffusion.request.fields import BY_NAME, SPELLINGS, canonical
from vllm.diffusion.request.params import SEED_BITS
from vllm.diffusion.request.upstream_fields import UPSTREAM_FIELDS
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.tokenizers import cached_tokenizer_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables of chat templates that are set from the fields with the effect "thinking".
_THINKING = ("enable_thinking", "reasoning_effort")
_DEFAULT_MAX_TOKENS = 16  # default of OpenAI's completions

# Parameters that upstream's bodies declare, but whose values are not left to upstream. Upstream's
# seeds have 63 bits; ours, which answers report, have 64. Upstream drops `top_p` and `top_k` at
# temperature 0, where they have an effect in some families.
OURS = frozenset({"seed", "top_p", "top_k"})


class _CompletionBase(CompletionRequest):
    max_tokens: int | None = Field(
        None,
        description="most tokens of the answer; cuts the answer, not the canvas "
        "(default: gen_length if given, else 16)",
    )

    @model_validator(mode="after")
    def _default_max_tokens(self) -> _CompletionBase:
        """Set the default limit, but mark the field as not sent by the client."""
        # Upstream requires a number.
        if self.max_tokens is None:
            self.max_tokens = _DEFAULT_MAX_TOKENS
            self.model_fields_set.discard("max_tokens")
        return self


def _read_chat(body: dict[str, Any]) -> dict[str, Any]:
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        check_chosen_tool(name, body.get("tools"), "tool_choice.function.name")
    read = _read_prediction(_read_mercury(body))
    return {**read, "messages": read_chat(body.get("messages"))}


def _read_prediction(body: dict[str, Any]) -> dict[str, Any]:
    """Replace OpenAI's `prediction` by the field that has its effect here."""
    prediction = body.get("prediction")
    if prediction is None:
        return body
    content = prediction.get("content") if isinstance(prediction, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [text for text in parts if isinstance(text, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str) or prediction.get("type", "content") != "content":
        wanted = 'wanted {"type": "content", "content": a text or a list of texts}'
        raise InvalidParameterError("prediction", prediction, wanted)
    if body.get("predicted_text") is not None:
        raise InvalidParameterError("prediction", prediction, "wanted either it or predicted_text")
    body = {name: value for name, value in body.items() if name != "prediction"}
    return {**body, "predicted_text": content} if content else body


def _read_mercury(body: dict[str, Any]) -> dict[str, Any]:
    """Replace the fields of Mercury's API by the fields that have their effect here."""
    if body.get("reasoning_effort") == "instant":
        body = {**body, "reasoning_effort": "none"}
    diffusing = body.get("diffusing", False)
    if not isinstance(diffusing, bool):
        raise InvalidParameterError("diffusing", diffusing, "wanted true or false")
    # It describes a stream, so other answers list it as ignored.
    if diffusing and not body.get("stream"):
        return body
    body = {name: value for name, value in body.items() if name != "diffusing"}
    if not diffusing:
        return body
    if body.setdefault("stream_canvas", True) is not True:
        wanted = f"it contradicts stream_canvas: {body['stream_canvas']!r}"
        raise InvalidParameterError("diffusing", diffusing, wanted)
    return body


def _read_batch(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("tools") and body.get("tool_choice") != "none":
        wanted = "wanted none here; POST /v1/chat/completions calls functions"
        raise InvalidParameterError("tools", body["tools"], wanted)
    conversations = body.get("messages")
    if not isinstance(conversations, list) or not conversations:
        raise InvalidParameterError("messages", conversations, "wanted a list of conversations")
    read = [read_chat(messages, f"messages[{i}]") for i, messages in enumerate(conversations)]
    return {**body, "messages": read}


ChatCompletionBody = with_diffusion_fields(
    ChatCompletionRequest,
    "ChatCompletionBody",
    "Body of POST /v1/chat/completions.",
    _read_chat,
    OURS,
)
ChatBatchBody = with_diffusion_fields(
    BatchChatCompletionRequest,
    "ChatBatchBody",
    "Body of POST /v1/chat/completions/batch.",
    _read_batch,
    OURS,
)
CompletionBody = with_diffusion_fields(
    _CompletionBase, "CompletionBody", "Body of POST /v1/completions.", ours=OURS
)


class _Reporting(BaseModel):
    diffusion: DiffusionReport


class ChatAnswer(ChatCompletionResponse, _Reporting):
    """Answer of POST /v1/chat/completions."""


class CompletionAnswer(CompletionResponse, _Reporting):
    """Answer of POST /v1/completions."""


def prepare(
    request: Any, model_config: Any, template: str = "", defaults: Mapping[str, Any] | None = None
) -> None:
    """Convert a body to the form that upstream passes on to the engine.

    Args:
        request: ChatCompletionRequest or CompletionRequest, or one of the bodies above; changed.
        model_config: upstream's config of the served model.
        template: the chat template.
        defaults: upstream's default sampling parameters, as read when the server started.

    Raises:
        InvalidParameterError: naming the field, the given and the expected value.
    """
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        raise InvalidParameterError("n", request.n, f"wanted 1 to {MAX_CHOICES}")
    _check_logprobs(request, model_config)
    extra = extra_args(request, template)
    if isinstance(request, CompletionRequest):
        _place_suffix(request, extra, model_config)
    if extra.get("stream_canvas") and not request.stream:
        raise InvalidParameterError("stream_canvas", True, "wanted false, or stream: true")
    spec = requested_spec(plain(request.response_format), plain(request.structured_outputs))
    tools = requested_tools(request) if isinstance(request, ChatCompletionRequest) else None
    if tools is not None:
        if spec is not None:
            raise InvalidParameterError(
                "tools", list(tools.parameters), f"wanted none with {spec.field}"
            )
        spec = spec_of_tools(tools)
        # Upstream then parses no calls, but still passes the tools to the template.
        request.tool_choice = "none"
    elif getattr(request, "tools", None) and not reads_tools(template):
        request.tools = None
    # Our grammars replace upstream's.
    request.response_format = request.structured_outputs = None
    request.vllm_xargs = extra if spec is None else {**extra, SPEC: packed(spec)}
    _allow_several_greedy_answers(request, defaults or {})


def _place_suffix(request: Any, extra: dict[str, Any], model_config: Any) -> None:
    """Put the text that follows an answer on the canvas, or into the prompt."""
    has_template, text = extra.pop("fim_template", False), request.suffix
    if not text:
        return
    request.suffix = None  # upstream refuses it
    if has_template:
        tokenizer = cached_tokenizer_from_config(model_config)
        request.prompt = in_template(request.prompt, text, tokenizer)
    else:
        extra["suffix_ids"] = _suffix_ids(text, extra, model_config)


def _suffix_ids(text: str, extra: Mapping[str, Any], model_config: Any) -> list[int]:
    """Encode the text that follows an answer."""
    if "suffix_ids" in extra:
        raise InvalidParameterError("suffix", text, "wanted either it or suffix_ids")
    tokenizer = cached_tokenizer_from_config(model_config)
    check_text_length("suffix", text, tokenizer, model_config.max_model_len)
    return list(tokenizer.encode(text, add_special_tokens=False))


def plain(given: Any) -> Any:
    """Return the value of an upstream field as it was sent."""
    if isinstance(given, BaseModel):
        return given.model_dump(by_alias=True, exclude_none=True)
    return given if given is None or isinstance(given, dict) else dict(vars(given))


def extra_args(request: Any, template: str) -> dict[str, Any]:
    """Return the parameters of a body as `vllm_xargs`, which becomes `SamplingParams.extra_args`.

    They include the diffusion parameters at top level and the names of fields without effect.
    Parameters that upstream's body declares remain in the body.

    Args:
        request: a body of one of upstream's routes; its seed is changed.
        template: the chat template, which may support levels of thinking.

    Raises:
        InvalidParameterError: naming the field, the given and the expected value.
    """
    fields = {**vars(request), **(request.model_extra or {})}
    sent = {name: value for name, value in fields.items() if name in request.model_fields_set}
    # A route that converts its body passes on a tuple, which cannot come from JSON.
    elsewhere = sent.pop(IGNORED) if isinstance(sent.get(IGNORED), tuple) else ()
    refuse_fields(sent)
    ignored = ignored_fields(sent, type(request).model_fields.keys() | SPELLINGS.keys())
    given = _given(request)
    xargs = getattr(request, "vllm_xargs", None) or {}
    extra = canonical({k: v for k, v in xargs.items() if k not in RESERVED_EXTRA_ARGS})
    for name, value in given.items():
        if extra.get(name, value) != value:
            raise InvalidParameterError(
                name, value, f"it contradicts vllm_xargs, {name}: {extra[name]!r}"
            )
    upstreams = _upstreams_parameters(type(request)) - {"max_tokens"}
    extra |= {name: value for name, value in given.items() if name not in upstreams}
    # Upstream handles the seed, and answer i uses seed + i.
    if "seed" in extra:
        request.seed = extra.pop("seed") % 2**SEED_BITS
    if any(word in template for word in _THINKING):
        ignored = [name for name in ignored if not _controls_thinking(name)]
    variables = getattr(request, "chat_template_kwargs", None) or {}
    unread = [f"chat_template_kwargs.{name}" for name in variables if name not in template]
    extra[IGNORED] = [*ignored, *unread, *elsewhere]
    return extra


def _upstreams_parameters(body: type[BaseModel]) -> frozenset[str]:
    """Return the parameters that upstream's class of a body declares and passes on."""
    upstreams: Any = next(base for base in body.__mro__ if OpenAIBaseModel in base.__bases__)
    return frozenset(SPELLINGS.keys() & upstreams.model_fields.keys()) - OURS


def _controls_thinking(name: str) -> bool:
    return name in UPSTREAM_FIELDS and UPSTREAM_FIELDS[name].effect == "thinking"


def _given(request: Any) -> dict[str, Any]:
    """Return the diffusion parameters of a body under canonical names."""
    given = {name: getattr(request, name) for name in SPELLINGS if name in request.model_fields_set}
    for name, field in UPSTREAM_FIELDS.items():
        value = getattr(request, name, None) if field.replaced_by == "max_tokens" else None
        if value is not None:
            if given.get("max_tokens") not in (None, value):
                contradicts = f"it contradicts max_tokens: {given['max_tokens']!r}"
                raise InvalidParameterError(name, value, contradicts)
            given["max_tokens"] = value
    if isinstance(request, CompletionRequest) and reads_prompt(request):
        _shortest_canvas(given)
    return canonical(given)


def _check_logprobs(request: Any, model_config: Any) -> None:
    """Check the number of log probabilities.

    The field is `top_logprobs` for chat, where `logprobs` is a flag, and `logprobs` for
    completions.
    """
    is_chat = isinstance(request, ChatCompletionRequest)
    name = "top_logprobs" if is_chat else "logprobs"
    check_logprobs(name, getattr(request, name), model_config)
    if not request.echo or not is_chat:
        return
    if request.logprobs:
        raise InvalidParameterError(
            "echo", True, "wanted false with logprobs, or POST /v1/completions"
        )
    # With echo, upstream would request the log probabilities of the prompt.
    request.top_logprobs = None


def reads_prompt(request: Any) -> bool:
    """Return whether a body of completions requests the log probabilities of its prompt."""
    return bool(request.echo) and request.logprobs is not None


def _shortest_canvas(given: dict[str, Any]) -> None:
    """Use a canvas of one token if an answer of at most one token follows a scored prompt.

    Evaluation harnesses request that answer and discard it. Upstream uses 0 for no answer.
    """
    if given.get("max_tokens") not in (0, 1):
        return
    if given["max_tokens"] == 0:
        del given["max_tokens"]
    if not given.keys() & {"gen_length", *BY_NAME["gen_length"].aliases}:
        given["gen_length"] = 1


def _allow_several_greedy_answers(request: Any, defaults: Mapping[str, Any]) -> None:
    """Make upstream accept several greedy answers, since random remasking may make them differ."""
    default = defaults.get("temperature", 1.0)
    given = request.temperature if request.temperature is not None else default
    if (request.n or 1) > 1 and given == 0:
        request.vllm_xargs.setdefault("temperature", 0.0)  # temperature that the engine uses
        request.temperature = 1.0
        request.top_p, request.top_k, request.min_p = 1.0, 0, 0.0
