# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/edit/completions` and `POST /v1/apply/completions`, in the form of Inception's API.

Both become a chat request. An edit revises the region around the cursor. An apply request needs the
model only where the context of its snippet does not decide the places.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.bodies import is_whole
from vllm.diffusion.api.openai.openai_protocol import ChatCompletionBody
from vllm.diffusion.api.schema import body_class
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.editing.differences import Edit
from vllm.diffusion.editing.merge import merged
from vllm.diffusion.editing.regions import Region
from vllm.diffusion.editing.tags import TagError, lines_around, read_apply, read_edit
from vllm.diffusion.request.revision import MAX_SLACK
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.diffusion.api.openai.openai_serving import DiffusionServingChat
    from vllm.diffusion.api.validator import Validator

EDIT, APPLY = "edit.completion", "apply.completion"
MAX_TOKENS = 8192
DEFAULT_EDIT_TOKENS = 1024
# Masks at the cursor and behind masked tokens, which the model may leave empty.
DEFAULT_SLACK = 16
# Lines around the cursor's line that may change.
LINES_ABOVE, LINES_BELOW = 2, 5

_EDIT_TASK = (
    "Continue the work of the programmer: rewrite the code around the cursor as it will be after "
    "the next edit. Answer with the code only."
)
_APPLY_TASK = (
    "Apply the update snippet to the original code. Comments with dots in the snippet are in place "
    "of code that stays. Answer with the whole new code only."
)
# Fields that the routes set themselves.
_OWN = ("canvas_text", "canvas_token_ids", "pinned", "suffix_ids", "response_format", "tools")
# Fields that do not reach the model: a region is returned as a whole.
_DROPPED = ("messages", "stream", "stream_options", "stop", "slack", "nextEdit")

EditBody = body_class(ChatCompletionBody, "EditBody", "Body of POST /v1/edit/completions.")
ApplyBody = body_class(ChatCompletionBody, "ApplyBody", "Body of POST /v1/apply/completions.")


def check(body: Mapping[str, Any]) -> None:
    """Refuse a body that is not one of an edit or apply request.

    Raises:
        InvalidParameterError: naming the field.
    """
    user_message(body)
    for name in _OWN:
        if body.get(name) is not None:
            raise InvalidParameterError(name, body[name], "wanted none: the route sets it")
    if body.get("n", 1) not in (None, 1):
        raise InvalidParameterError("n", body["n"], "wanted 1")
    max_tokens, slack = body.get("max_tokens"), body.get("slack")
    if max_tokens is not None and not is_whole(max_tokens, 1, MAX_TOKENS):
        raise InvalidParameterError("max_tokens", max_tokens, f"wanted 1 to {MAX_TOKENS}")
    if slack is not None and not is_whole(slack, 0, MAX_SLACK):
        raise InvalidParameterError("slack", slack, f"wanted 0 to {MAX_SLACK}")


def user_message(body: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number and the text of the only message of the user.

    Raises:
        InvalidParameterError: there is none, there are several, or it is not a text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidParameterError("messages", messages, "wanted a list with one user message")
    of_user = [(at, m.get("content")) for at, m in enumerate(messages) if m.get("role") == "user"]
    if len(of_user) != 1:
        raise InvalidParameterError("messages", f"{len(of_user)} user messages", "wanted one")
    number, content = of_user[0]
    if not isinstance(content, str):
        field = f"messages[{number}].content"
        raise InvalidParameterError(field, content, "wanted a string with Inception's tags")
    return number, content


class RevisionHandler:
    """Handler of both routes.

    Args:
        chat: the handler of chat completions.
        validator: the validator of the engine.
    """

    def __init__(self, chat: DiffusionServingChat, validator: Validator) -> None:
        self._chat, self._validator = chat, validator
        self._tokenizer = chat.renderer.tokenizer

    async def edit(self, body: Mapping[str, Any], raw_request: Any) -> dict[str, Any] | Any:
        """Return the answer to an edit request, or upstream's error.

        Raises:
            RequestRefused: HTTP 400, naming the field.
        """
        try:
            self._validator.refuse_revisions("/v1/edit/completions")
            call = _read(read_edit, body)
            limit = body.get("max_tokens") or DEFAULT_EDIT_TOKENS
            inserts = self._validator.inserts_tokens(body.get("algorithm"))
            slack = body.get("slack", 0 if inserts else DEFAULT_SLACK)
            if inserts and slack:
                raise InvalidParameterError("slack", slack, "wanted 0: the model inserts tokens")
            # The answer ends where the text ends, which may become longer or shorter.
            moves = inserts or (slack and self._validator.scores_texts(body.get("algorithm")))
            region = self._region(call.region, call.cursor, slack, limit, _content_field(body))
            fields = {
                "canvas_token_ids": region.token_ids,
                "pinned": _pinned(region, call.cursor),
                # End tokens among the region's tokens add no text.
                "ignore_eos": not moves,
                "max_tokens": None if moves else len(region.token_ids),
            }
            if moves and not inserts:
                fields["slack"] = slack
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        answer = await self._ask(body, _EDIT_TASK, call.context, fields, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        (edits,) = answer.diffusion["edits"]
        named = [Edit(*(edit[name] for name in Edit._fields)) for edit in edits]
        text = region.revised(named, self._tokenizer)
        return _completion(answer.model_dump(), EDIT, f"```\n{text}\n```")

    def _region(
        self, text: str, cursor: int | None, slack: int, max_tokens: int, field: str
    ) -> Region:
        """Return the code to edit as a canvas.

        Raises:
            InvalidParameterError: it is empty, too long, or has a mask token.
        """
        if not text:
            raise InvalidParameterError(field, text, "wanted code between the tags")
        token_ids, spans = self._validator.tokens_of(field, text)
        masks = [self._validator.mask_id] * (slack if cursor is not None else 0)
        region = Region.of(text, token_ids, spans, masks, cursor or 0)
        if len(region.token_ids) > max_tokens:
            given = f"code of {len(token_ids)} tokens, and {len(masks)} masks at the cursor"
            raise InvalidParameterError(field, given, f"wanted at most max_tokens, {max_tokens}")
        return region

    async def apply(self, body: Mapping[str, Any], raw_request: Any) -> dict[str, Any] | Any:
        """Return the answer to an apply request, or upstream's error; see `edit`."""
        try:
            original, snippet = _read(read_apply, body)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        text = merged(original, snippet)
        if text is not None:
            name = body.get("model") or self._chat.models.model_name()
            return _completion(_without_model(name), APPLY, text)
        _, content = user_message(body)
        length = len(self._tokenizer.encode(f"{original}\n{snippet}", add_special_tokens=False))
        limit = min(max(2 * length, 1), body.get("max_tokens") or MAX_TOKENS)
        answer = await self._ask(body, _APPLY_TASK, content, {"max_tokens": limit}, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        return _completion(answer.model_dump(), APPLY, _bare(answer.choices[0].message.content))

    async def _ask(
        self,
        body: Mapping[str, Any],
        task: str,
        content: str,
        fields: Mapping[str, Any],
        raw_request: Any,
    ) -> Any:
        """Return the answer to a chat request with the fields of the body and of the route."""
        given = {name: value for name, value in body.items() if name not in _DROPPED}
        own = [m for m in body["messages"] if m.get("role") != "user"]
        messages = [
            *(own or [{"role": "system", "content": task}]),
            {"role": "user", "content": content},
        ]
        request = ChatCompletionBody(
            **{"temperature": 0.0, **given, **fields, "messages": messages, "stream": False}
        )
        return await self._chat.create_chat_completion(request, raw_request)


def _content_field(body: Mapping[str, Any]) -> str:
    return f"messages[{user_message(body)[0]}].content"


def _read(reader: Callable[[str], Any], body: Mapping[str, Any]) -> Any:
    """Read the tags of the user's message.

    Raises:
        InvalidParameterError: a tag is missing or appears twice.
    """
    number, content = user_message(body)
    try:
        return reader(content)
    except TagError as error:
        field = f"messages[{number}].content"
        raise InvalidParameterError(field, content, f"{error}") from None


def _pinned(region: Region, cursor: int | None) -> list[list[int]]:
    """Return the ranges of tokens that must not change."""
    text = region.text
    # A line feed before the closing tag may belong to the tag.
    end = len(text) - text.endswith("\n")
    if cursor is None:
        return region.outside(0, end)
    start, stop = lines_around(text, cursor, above=LINES_ABOVE, below=LINES_BELOW)
    return region.outside(start, min(stop, end))


def _bare(text: str | None) -> str:
    """Return the code of an answer, without a code fence and without tags around it."""
    code = (text or "").strip("\n")
    if code.startswith("```") and code.endswith("\n```"):
        code = code.partition("\n")[2].removesuffix("```").removesuffix("\n")
    code = code.removeprefix("<|updated_code|>").removesuffix("<|/updated_code|>")
    return code.strip("\n") if code != text else code


def _without_model(model: str) -> dict[str, Any]:
    """Return an answer that no model has written, in the form of chat completions."""
    choice = {"index": 0, "message": {"role": "assistant"}, "finish_reason": "stop"}
    return {
        "id": f"apply-{time.time_ns():x}",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "diffusion": {"num_forwards": 0},
    }


def _completion(answer: dict[str, Any], kind: str, text: str) -> dict[str, Any]:
    """Return an answer of chat completions as one of these routes, with its text."""
    (choice,) = answer["choices"]
    message = {"role": "assistant", "content": text}
    reason = "stop" if kind == EDIT else choice["finish_reason"]
    return {
        **{name: answer[name] for name in ("id", "created", "model", "usage", "diffusion")},
        "object": kind,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


def chunks_of(answer: Mapping[str, Any], *, has_usage: bool) -> list[dict[str, Any]]:
    """Return the chunks of chat completions that stream an answer."""
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    (choice,) = answer["choices"]
    deltas = [
        ({"role": "assistant", "content": choice["message"]["content"]}, None),
        ({}, choice["finish_reason"]),
    ]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    chunks[-1]["diffusion"] = answer["diffusion"]
    if has_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return chunks
