# SPDX-License-Identifier: Apache-2.0
"""Body and answer of `POST /generate`.

The diffusion parameters of the body come from the table `fields.FIELDS` (see `schema`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from vllm.diffusion.api.adapter_requests import requested_adapter
from vllm.diffusion.api.bodies import PROMPT
from vllm.diffusion.api.conversations import read_chat
from vllm.diffusion.api.report import CanvasState, DiffusionReport
from vllm.diffusion.api.schema import MAX_CHOICES, with_diffusion_fields
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.upstream_fields import refuse_unsupported
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER
from vllm.exceptions import VLLMNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# field that `vllm-router` adds to each /generate body that it rewrites
OF_ROUTERS = "return_hidden_states"


class GenerateBody(BaseModel):
    """Fields of the body that are not diffusion parameters."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="name of the served model")
    prompt: Any = Field(
        None, description="a string, token ids, or a list of either; used without a chat template"
    )
    messages: Any = Field(
        None, description="a conversation; formatted with the checkpoint's chat template"
    )
    apply_chat_template: bool = Field(
        False, description="treat a string prompt as the user's message of a conversation"
    )
    add_special_tokens: bool = Field(
        True, description="add the tokenizer's special tokens to a string prompt"
    )
    n: int = Field(
        1, description=f"number of answers per prompt, 1 to {MAX_CHOICES}; answer i uses seed + i"
    )
    stop: str | list[str] | None = Field(None, description="strings that end the answer")
    stop_token_ids: list[int] | None = Field(None, description="token ids that end the answer")
    include_stop_str_in_output: bool = Field(False, description="keep the stop string in the text")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    detokenize: bool = Field(
        True,
        description="return text; false leaves `text` empty and saves the time of detokenisation",
    )
    stream: bool = Field(False, description="stream the answer as server-sent events")
    # Clients send it to every model, so it is accepted and listed in `diffusion.ignored`.
    reasoning_effort: str | None = Field(
        None, description="accepted and ignored; listed in `diffusion.ignored`"
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="format of the answer in OpenAI's notation: type text, json_object, or "
        "json_schema with json_schema.schema",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="format of the answer in vLLM's notation: one of json, regex, choice, "
        "json_object",
    )
    logprobs: int | None = Field(
        None,
        description="for every token of the answer, return its log probability and the log "
        "probabilities of this number of most likely tokens, in the step that committed the token",
    )
    logprob_token_ids: list[int] | None = Field(
        None,
        description="return the log probabilities of these token ids instead of the most likely "
        "tokens",
    )


GenerateRequest = with_diffusion_fields(GenerateBody, "GenerateRequest", "Body of POST /generate.")


def check_model(name: str | None, served: Sequence[str]) -> None:
    """Refuse a model that is not served.

    Raises:
        VLLMNotFoundError: HTTP 404.
    """
    adapter = requested_adapter()
    is_adapter = adapter is not None and adapter.lora_name == name
    if name is not None and name not in served and not is_adapter:
        raise VLLMNotFoundError(f"model: given {name!r}; wanted one of: {', '.join(served)}")


def set_priority(body: Any, headers: Mapping[str, str]) -> None:
    """Apply upstream's priority header, which overrides the body's field, as on OpenAI's routes."""
    if PRIORITY_HEADER in headers:
        body.priority = int(headers[PRIORITY_HEADER])


def check_body(body: GenerateBody) -> None:
    """Refuse a body that is invalid for every model.

    Raises:
        InvalidParameterError: naming the field.
    """
    extra = body.model_extra or {}
    if OF_ROUTERS in extra:
        message = "a router has rewritten this body and dropped fields; wanted POST /v1/generate"
        raise InvalidParameterError(OF_ROUTERS, extra[OF_ROUTERS], message)
    if not 1 <= body.n <= MAX_CHOICES:
        raise InvalidParameterError("n", body.n, f"wanted 1 to {MAX_CHOICES}")
    refuse_unsupported(extra, in_sampling=True)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("prompt", body.prompt, "wanted either prompt or messages")
    if body.messages is not None:
        body.messages = read_chat(body.messages)
    if body.apply_chat_template and not isinstance(body.prompt, str):
        raise InvalidParameterError(
            "apply_chat_template", True, "wanted a string prompt with it, or messages"
        )


def split_prompt(prompt: Any) -> list[str] | list[list[int]]:
    """Return one prompt or several prompts as a list of prompts.

    Raises:
        InvalidParameterError: the value is not a string, token ids, or a list of either.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _are_token_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(_are_token_ids(p) for p in prompt):
            return prompt
    raise InvalidParameterError("prompt", prompt, f"wanted {PROMPT}")


def _are_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
    )


class Usage(BaseModel):
    """Token counts. Completion tokens include the stop token if one ended the answer.

    `token_ids` of the answer exclude it, so they may be one fewer.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AlternativeToken(BaseModel):
    """A token and its natural log probability, which is -9999 instead of minus infinity."""

    token_id: int
    token: str
    logprob: float


class TokenLogprob(AlternativeToken):
    """A token of the answer.

    Attributes:
        top_logprobs: the most likely tokens in the step that committed it.
    """

    top_logprobs: list[AlternativeToken]


class GenerateResponse(BaseModel):
    """Answer of POST /generate; lists have one entry per prompt and choice."""

    id: str
    object: Literal["text_diffusion"] = "text_diffusion"
    created: int
    model: str
    text: list[str]
    token_ids: list[list[int]] = Field(
        description="tokens of each answer, without the stop token that ended it, which "
        "usage.completion_tokens counts"
    )
    finish_reason: list[str]
    logprobs: list[list[TokenLogprob]] | None = None
    trajectory: list[dict[str, Any] | None] | None = Field(
        None, description="with return_trajectory, the commits of each answer; null if aborted"
    )
    usage: Usage
    diffusion: DiffusionReport

    def encode(self) -> bytes:
        """Return the answer as JSON, without fields that were not requested.

        The JSON is encoded by msgspec, because a trajectory has thousands of numbers, which
        json.dumps writes slowly while it blocks the event loop.
        """
        unused = {name for name in ("logprobs", "trajectory") if getattr(self, name) is None}
        content = {**self.model_dump(exclude=unused), "diffusion": self.diffusion.content()}
        return msgspec.json.encode(content)


class GenerateChunk(BaseModel):
    """A server-sent event before the last: the finished prefix of answer `index` so far.

    Attributes:
        delta: text added since the previous event.
    """

    id: str
    object: Literal["text_diffusion.chunk"] = "text_diffusion.chunk"
    index: int
    text: str
    token_ids: list[int]
    delta: str


class GenerateCanvas(BaseModel):
    """With `stream_canvas`, a server-sent event: the canvas of answer `index` after a step."""

    id: str
    object: Literal["text_diffusion.canvas"] = "text_diffusion.canvas"
    index: int
    canvas: CanvasState
