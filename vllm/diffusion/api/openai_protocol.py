# SPDX-License-Identifier: Apache-2.0
"""Bodies and answers of the OpenAI routes: upstream's, and what diffusion adds at top level.

What cannot work is refused, and so is what nobody knows: nothing that might change an answer is
ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, model_validator

from vllm.diffusion.api.report import DiffusionReport
from vllm.diffusion.api.schema import MAX_CHOICES, check_logprobs, with_diffusion_fields
from vllm.diffusion.api.tools import asked_tools
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.decision import AUTOREGRESSIVE, RESERVED_EXTRA_ARGS
from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.fields import BY_NAME, SPELLINGS, canonical
from vllm.diffusion.guided.guides import SPEC, STRUCTURED, asked_spec, packed, spec_of_tools
from vllm.diffusion.params import SEED_BITS
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.tokenizers import cached_tokenizer_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT_MAX_TOKENS = 16  # of OpenAI's completions

# Fields that upstream's body does not declare and that change no answer.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

# Fields that cannot work, beside those of SamplingParams, with the values that ask for nothing.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "reasoning_effort": (None, "none"),
    "use_beam_search": (False, None),
    "length_penalty": (1.0, None),
    "best_of": (None, 1),
    "prompt_embeds": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}

# Parameters that upstream's bodies declare and hand on. Its seeds have 63 bits; ours, which answers
# report, have 64.
_UPSTREAMS = (SPELLINGS.keys() & CompletionRequest.model_fields.keys()) - {"seed"}


class _CompletionBase(CompletionRequest):
    max_tokens: int | None = Field(
        None,
        description="longest answer in tokens; cuts the answer, never the canvas "
        "(default: the canvas beside gen_length, else 16)",
    )

    @model_validator(mode="after")
    def _default_max_tokens(self) -> _CompletionBase:
        """A default limit can be told from one that was given."""
        if self.max_tokens is None:  # upstream counts on a number
            self.max_tokens = _DEFAULT_MAX_TOKENS
            self.model_fields_set.discard("max_tokens")
        return self


ChatCompletionBody = with_diffusion_fields(
    ChatCompletionRequest, "ChatCompletionBody", "Body of POST /v1/chat/completions.", _UPSTREAMS
)
CompletionBody = with_diffusion_fields(
    _CompletionBase, "CompletionBody", "Body of POST /v1/completions.", _UPSTREAMS
)


class _Reporting(BaseModel):
    diffusion: DiffusionReport


class ChatAnswer(ChatCompletionResponse, _Reporting):
    """Answer of POST /v1/chat/completions."""


class CompletionAnswer(CompletionResponse, _Reporting):
    """Answer of POST /v1/completions."""


def prepare(request: Any, model_config: Any) -> None:
    """Bring a body into the form that upstream hands on to the engine.

    Diffusion parameters at top level become those of `vllm_xargs`, which upstream makes
    `SamplingParams.extra_args` of. Parameters that upstream's body declares stay where they are.

    Args:
        request: ChatCompletionRequest or CompletionRequest, or one of the bodies above; changed.
        model_config: upstream's, of the served model.

    Raises:
        InvalidParameterError: naming the field, the given and the wanted value.
    """
    _refuse_unsupported({**vars(request), **request.model_extra})
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        raise InvalidParameterError("n", request.n, f"wanted 1 to {MAX_CHOICES}")
    _check_logprobs(request, model_config)
    given = _given(request)
    xargs = request.vllm_xargs or {}
    extra = canonical({k: v for k, v in xargs.items() if k not in RESERVED_EXTRA_ARGS})
    for name, value in given.items():
        if extra.get(name, value) != value:
            raise InvalidParameterError(
                name, value, f"it contradicts vllm_xargs, {name}: {extra[name]!r}"
            )
    extra |= {k: v for k, v in given.items() if k not in _UPSTREAMS or k == "max_tokens"}
    if "seed" in extra:  # upstream knows it, and that answer i uses seed + i
        request.seed = extra.pop("seed") % 2**SEED_BITS
    if isinstance(request, CompletionRequest) and request.suffix:
        extra["suffix_ids"] = _suffix_ids(request.suffix, extra, model_config)
        request.suffix = None  # upstream refuses it
    if extra.get("stream_canvas") and not request.stream:
        raise InvalidParameterError("stream_canvas", True, "wanted false, or stream: true")
    spec = asked_spec(_plain(request.response_format), _plain(request.structured_outputs))
    tools = asked_tools(request) if isinstance(request, ChatCompletionRequest) else None
    if tools is not None:
        if spec is not None:
            raise InvalidParameterError("tools", list(tools.parameters), f"not beside {spec.field}")
        spec = spec_of_tools(tools)
        request.tool_choice = "none"  # upstream parses no calls, but tells the template of tools
    request.response_format = request.structured_outputs = None  # upstream has its own grammars
    request.vllm_xargs = extra if spec is None else {**extra, SPEC: packed(spec)}
    _allow_several_greedy_answers(request, model_config)


def _suffix_ids(text: str, extra: Mapping[str, Any], model_config: Any) -> list[int]:
    """Tokens of the text that follows an answer."""
    if "suffix_ids" in extra:
        raise InvalidParameterError("suffix", text, "wanted either it or suffix_ids")
    tokenizer = cached_tokenizer_from_config(model_config)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _plain(given: Any) -> Any:
    """A field of upstream's as it was sent."""
    if isinstance(given, BaseModel):
        return given.model_dump(by_alias=True, exclude_none=True)
    return given if given is None or isinstance(given, dict) else dict(vars(given))


def _given(request: Any) -> dict[str, Any]:
    """The diffusion parameters of a body under canonical names."""
    unknown = request.model_extra.keys() - _WITHOUT_EFFECT - _NOT_SUPPORTED.keys()
    names = [*SPELLINGS, *sorted(unknown)]
    given = {name: getattr(request, name) for name in names if name in request.model_fields_set}
    most = getattr(request, "max_completion_tokens", None)
    if most is not None:
        if given.get("max_tokens") not in (None, most):
            raise InvalidParameterError(
                "max_completion_tokens", most, f"it contradicts max_tokens: {given['max_tokens']!r}"
            )
        given["max_tokens"] = most
    if isinstance(request, CompletionRequest) and reads_prompt(request):
        _shortest_canvas(given)
    return canonical(given, also_known=type(request).model_fields)


def check_body(body: Any) -> None:
    """Look at a body as it was sent, before upstream's validators, which have other words.

    Raises:
        RequestRefused: HTTP 400, naming the field.
    """
    if not isinstance(body, dict):
        return
    try:
        _refuse_unsupported(body)
        asked_spec(body.get("response_format"), body.get(STRUCTURED))
        if not isinstance(body.get("messages", []), list):
            raise InvalidParameterError("messages", body["messages"], "wanted a list of messages")
        for name in sorted(body.keys() - SPELLINGS.keys()):
            if isinstance(body[name], int) and not -(2**63) <= body[name] < 2**63:
                raise InvalidParameterError(name, body[name], "wanted a number of 64 bits")
    except InvalidParameterError as error:
        raise RequestRefused(error) from None


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, neutral, wanted in AUTOREGRESSIVE:
        if body.get(name, neutral[0]) not in neutral:
            raise InvalidParameterError(name, body[name], wanted)
    for name, neutral in _NOT_SUPPORTED.items():
        if body.get(name, neutral[0]) not in neutral:
            wanted = "none" if neutral[0] is None else json.dumps(neutral[0])
            raise InvalidParameterError(name, body[name], f"wanted {wanted}: not supported")


def _check_logprobs(request: Any, model_config: Any) -> None:
    """Of chat, `logprobs` is a flag beside `top_logprobs`; of completions it is the number."""
    is_chat = isinstance(request, ChatCompletionRequest)
    name = "top_logprobs" if is_chat else "logprobs"
    check_logprobs(name, getattr(request, name), model_config)
    if not request.echo or not is_chat:
        return
    if request.logprobs:
        raise InvalidParameterError(
            "echo", True, "wanted false beside logprobs, or POST /v1/completions"
        )
    request.top_logprobs = None  # upstream would ask for those of the prompt


def reads_prompt(request: Any) -> bool:
    """Whether a body of completions asks for the log probabilities of its prompt."""
    return bool(request.echo) and request.logprobs is not None


def _shortest_canvas(given: dict[str, Any]) -> None:
    """Beside a prompt that is read, an answer of one token at most has a canvas of one token.

    Evaluation asks for that answer and throws it away; 0 is upstream's word for none at all.
    """
    if given.get("max_tokens") not in (0, 1):
        return
    if given["max_tokens"] == 0:
        del given["max_tokens"]
    if not given.keys() & {"gen_length", *BY_NAME["gen_length"].aliases}:
        given["gen_length"] = 1


def _allow_several_greedy_answers(request: Any, model_config: Any) -> None:
    """Upstream refuses them as all alike; here random remasking may still tell them apart."""
    default = model_config.get_diff_sampling_param().get("temperature", 1.0)
    given = request.temperature if request.temperature is not None else default
    if (request.n or 1) > 1 and given == 0:
        request.vllm_xargs.setdefault("temperature", 0.0)  # the one that counts
        request.temperature = 1.0
        request.top_p, request.top_k, request.min_p = 1.0, 0, 0.0
