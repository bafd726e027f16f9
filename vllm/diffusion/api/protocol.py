# SPDX-License-Identifier: Apache-2.0
"""Body and answer of `POST /generate`.

The body's diffusion parameters are the table `params.FIELDS`; they are checked by its rules, not
by pydantic, so that every refusal names the field, the given and the wanted value in the same
words on every route.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from vllm.diffusion import params
from vllm.diffusion.errors import InvalidParameterError

_JSON_TYPES: dict[type, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_MAX_CHOICES = 128


class GenerateBody(BaseModel):
    """Fields of the body that are not diffusion parameters."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="a served model's name")
    prompt: Any = Field(None, description="a string, token ids, or a list of either; taken as is")
    messages: list[dict[str, Any]] | None = Field(
        None, description="a conversation; it goes through the checkpoint's chat template"
    )
    apply_chat_template: bool = Field(
        False, description="treat a string prompt as the user's message of a conversation"
    )
    add_special_tokens: bool = Field(
        True, description="add the tokenizer's special tokens to a string prompt"
    )
    n: int = Field(
        1, description=f"answers per prompt, 1 to {_MAX_CHOICES}; answer i uses seed + i"
    )
    stop: str | list[str] | None = Field(None, description="strings that end the answer")
    stop_token_ids: list[int] | None = Field(None, description="token ids that end the answer")
    include_stop_str_in_output: bool = Field(False, description="keep the stop string in the text")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    detokenize: bool = Field(
        True, description="answer with text; false leaves it empty and saves its cost"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    stream_canvas: bool = Field(False, description="not supported; only false is accepted")
    # Fields of autoregressive sampling: accepted at the value that changes nothing.
    min_p: float = Field(0.0, description="only 0 is accepted")
    presence_penalty: float = Field(0.0, description="only 0 is accepted")
    frequency_penalty: float = Field(0.0, description="only 0 is accepted")
    repetition_penalty: float = Field(1.0, description="only 1 is accepted")
    logit_bias: dict[str, float] | None = Field(None, description="not supported")
    logprobs: int | None = Field(None, description="not supported")


def _schema_of(field: params.Field) -> Any:
    extra: dict[str, Any] = {"type": _JSON_TYPES[field.kind]}
    if field.choices:
        extra["enum"] = list(field.choices)
    if field.minimum is not None:
        extra["minimum"] = field.minimum
    if field.maximum is not None:
        extra["maximum"] = field.maximum
    text = f"{field.doc} (default: {field.documented_default})"
    return Field(None, description=text, json_schema_extra=extra)


_DIFFUSION_FIELDS: dict[str, Any] = {
    spelling: (Any, _schema_of(field))
    for field in params.FIELDS
    for spelling in (field.name, *field.aliases)
}

GenerateRequest: type[GenerateBody] = create_model(
    "GenerateRequest", __base__=GenerateBody, __doc__="Body of POST /generate.", **_DIFFUSION_FIELDS
)


def diffusion_fields(body: GenerateBody) -> dict[str, Any]:
    """The diffusion parameters of a body under canonical names, unknown fields refused.

    Raises:
        InvalidParameterError: naming the field.
    """
    given = {
        name: value
        for name, value in body.model_dump(exclude_unset=True).items()
        if name not in GenerateBody.model_fields
    }
    check_body(body)
    return params.canonical(given, also_known=tuple(GenerateBody.model_fields))


def check_body(body: GenerateBody) -> None:
    """Refuse what can be seen without the model.

    Raises:
        InvalidParameterError: naming the field.
    """
    if not 1 <= body.n <= _MAX_CHOICES:
        raise InvalidParameterError("n", body.n, f"wanted 1 to {_MAX_CHOICES}")
    if body.stream_canvas:
        raise InvalidParameterError("stream_canvas", True, "wanted false: not supported")
    if body.logit_bias:
        raise InvalidParameterError("logit_bias", body.logit_bias, "wanted none: not supported")
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "both"
        raise InvalidParameterError("prompt", given, "wanted either prompt or messages")
    for message in body.messages or []:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidParameterError(
                "messages", message, "wanted a role and a content in every message"
            )
    if body.apply_chat_template and not isinstance(body.prompt, str):
        raise InvalidParameterError(
            "apply_chat_template", True, "wanted a string prompt beside it (or use messages)"
        )


def split_prompt(prompt: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as a list of prompts.

    Raises:
        InvalidParameterError: for anything but a string, token ids, or a list of either.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _are_token_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(_are_token_ids(p) for p in prompt):
            return prompt
    raise InvalidParameterError(
        "prompt", prompt, "wanted a string, token ids, or a non-empty list of either"
    )


def _are_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
    )


class Usage(BaseModel):
    """Token counts; completion tokens include the stop token where one ended the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class DiffusionReport(BaseModel):
    """How the answers were denoised; sums and maxima where there are several.

    Attributes:
        steps: denoise steps asked for; null where nothing bounds them.
        num_forwards: forwards that were run.
        tokens_per_forward: canvas tokens committed per forward.
        queue_ms, denoise_ms: longest wait, and longest time from admission to the last token.
        seeds: seed of every answer, to repeat it.
        peak_bytes, average_bytes: of the activation pool on one GPU, most in use at any time of
            the steps of these answers, and in that step on average.
        budget_bytes: of the pool.
        infilled: per answer, tokens that replaced mask tokens of the prompt, by position.
    """

    steps: int | None
    num_forwards: int
    tokens_per_forward: float
    queue_ms: float
    denoise_ms: float
    seeds: list[int]
    peak_bytes: int | None = None
    average_bytes: int | None = None
    budget_bytes: int | None = None
    infilled: list[dict[int, int]] | None = None


class GenerateResponse(BaseModel):
    """Answer of POST /generate; lists have one entry per prompt and choice."""

    id: str
    object: Literal["text_diffusion"] = "text_diffusion"
    created: int
    model: str
    text: list[str]
    token_ids: list[list[int]]
    finish_reason: list[str]
    usage: Usage
    diffusion: DiffusionReport

    def content(self) -> dict[str, Any]:
        """The answer as JSON; `infilled` is left out where nothing was."""
        unused = {"diffusion": {"infilled"}} if self.diffusion.infilled is None else None
        return self.model_dump(exclude=unused)


class GenerateChunk(BaseModel):
    """One server-sent event before the last: the finished prefix of answer `index` so far."""

    id: str
    object: Literal["text_diffusion.chunk"] = "text_diffusion.chunk"
    index: int
    text: str
    token_ids: list[int]
