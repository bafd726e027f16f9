# SPDX-License-Identifier: Apache-2.0
"""Checks of request bodies as sent, before upstream's models, whose errors differ in wording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import STRUCTURED, asked_spec
from vllm.diffusion.request.decision import refuse_unsupported
from vllm.diffusion.request.fields import SPELLINGS, near_miss

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Of a message's content: text, and what chat templates write of tools.
PARTS = frozenset(
    {
        *("text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"),
        *("tool_use", "tool_result", "tool_reference", "tool_addition", "tool_removal"),
    }
)
MOST_LEFT_OUT = 64  # fields of a request; each is compared with all parameters
MAX_TOOLS = 1_024  # of a body; their schemas together are limited as all formats are
PROMPT = "a string, token ids, or a list of either, none of them empty"

# Fields that upstream acts on and that cannot be had, with the values that ask for nothing.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "prompt_embeds": (),
}

# Fields that change no answer wherever they are taken.
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

# Fields that ask for something which a request does not get, unless they have one of these values.
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "reasoning_effort": ("none",),
    "reasoning": (),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
}


def check_body(body: Any) -> None:
    """Refuse a body of OpenAI's routes for what can be seen of single fields.

    Raises:
        InvalidParameterError: naming the field.
    """
    if not isinstance(body, dict):
        return
    refuse_fields(body)
    check_tools(body)
    asked_spec(body.get("response_format"), body.get(STRUCTURED))
    for name in sorted(body.keys() - SPELLINGS.keys()):
        if isinstance(body[name], int) and not -(2**63) <= body[name] < 2**63:
            raise InvalidParameterError(name, body[name], "wanted a number of 64 bits")


def check_tools(body: Mapping[str, Any]) -> None:
    """Refuse a body with too many tools before anything looks at each of them.

    Raises:
        InvalidParameterError: naming them.
    """
    tools = body.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        given = f"a list of {len(tools)}"
        raise InvalidParameterError("tools", given, f"wanted at most {MAX_TOOLS}")


def refuse_fields(given: Mapping[str, Any]) -> None:
    """Refuse fields that are not supported.

    Raises:
        InvalidParameterError: naming the first of them.
    """
    refuse_unsupported(given)
    for name, neutral in _NOT_SUPPORTED.items():
        if given.get(name) not in (None, *neutral):
            wanted = "false" if neutral else "none"
            raise InvalidParameterError(name, given[name], f"wanted {wanted}: not supported")


def refuse_canvas(given: Any) -> None:
    """Refuse `stream_canvas` on a route that sends no canvas.

    Raises:
        InvalidParameterError: naming it.
    """
    if given:
        wanted = "wanted false, or POST /v1/chat/completions"
        raise InvalidParameterError("stream_canvas", given, wanted)


def left_out(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the names of fields that ask for something which the request does not get.

    Args:
        given: the fields of a body.
        known: fields that the route acts on, or passes on.

    Raises:
        InvalidParameterError: a name is almost that of a diffusion parameter, or there are too
            many to look at.
    """
    names = []
    for name, value in given.items():
        if name in known and name not in _LEFT_OUT:
            continue
        if name in WITHOUT_EFFECT or value is None or value in _LEFT_OUT.get(name, ()):
            continue
        meant = None if name in _LEFT_OUT else near_miss(name)
        if meant is not None:
            raise InvalidParameterError(name, value, f"unknown parameter; did you mean {meant}?")
        names.append(name)
        if len(names) > MOST_LEFT_OUT:
            wanted = f"wanted at most {MOST_LEFT_OUT} fields that do not act"
            raise InvalidParameterError(name, value, wanted)
    return names


def check_messages(messages: Any, field: str = "messages") -> None:
    """Refuse a list of messages that is no conversation.

    Raises:
        InvalidParameterError: naming the message, and what is wrong with it.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidParameterError(field, messages, "wanted a list of messages, at least one")
    for index, message in enumerate(messages):
        check_message(message, f"{field}[{index}]", ROLES)


def check_conversations(body: Mapping[str, Any]) -> None:
    """Refuse a body whose `messages` are no list of conversations.

    Raises:
        InvalidParameterError: naming the message, and what is wrong with it.
    """
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        raise InvalidParameterError("messages", found, "wanted a list of conversations")
    for index, messages in enumerate(found):
        check_messages(messages, f"messages[{index}]")


def check_message(message: Any, field: str, roles: Collection[str]) -> None:
    """Refuse a value that is no message: an object with a role and a content of text or of parts.

    Raises:
        InvalidParameterError: naming what is wrong.
    """
    if not isinstance(message, dict):
        raise InvalidParameterError(field, message, "wanted an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in roles:
        raise InvalidParameterError(f"{field}.role", role, f"wanted one of: {', '.join(roles)}")
    if content is None and role == "assistant":
        return
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{field}.content[{index}]")
    elif not isinstance(content, str):
        raise InvalidParameterError(
            f"{field}.content", content, "wanted a string or a list of parts"
        )


def _check_part(part: Any, field: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidParameterError(field, part, "wanted an object with a type")
    if part["type"] not in PARTS:
        raise InvalidParameterError(f"{field}.type", part["type"], "wanted text and no more")
    if part["type"].endswith("text") and not isinstance(part.get("text"), str):
        raise InvalidParameterError(f"{field}.text", part.get("text"), "wanted a string")


def check_prompt(prompt: Any) -> None:
    """Refuse a value that is no prompt of completions.

    Raises:
        InvalidParameterError: naming it.
    """
    if prompt is None or prompt in ("", []):
        raise InvalidParameterError("prompt", prompt, f"wanted {PROMPT}")
