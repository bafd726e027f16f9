# SPDX-License-Identifier: Apache-2.0
"""Checks of request bodies as the client sent them.

They run before upstream's Pydantic models, whose error messages have another form. Each check
raises an InvalidParameterError that names the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.schema import MAX_CHOICES
from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import STRUCTURED, requested_spec
from vllm.diffusion.request.fields import SPELLINGS, near_miss
from vllm.diffusion.request.upstream_fields import UPSTREAM_FIELDS, refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pydantic import BaseModel

# Each field of a request is compared with the names of all parameters.
MAX_IGNORED_FIELDS = 64
# Tools of one body. The size of their schemas is limited separately, like that of any format.
MAX_TOOLS = 1_024
MAX_MODEL_NAME_LENGTH = 1024
MAX_LABELS = 128  # token ids to compare in one request, the limit of upstream's logprobs
PROMPT = "a string, token ids, or a list of either, none of them empty"

# Arguments of `apply_chat_template` of transformers, and arguments that it derives from other
# fields of a body.
_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)


def check_body(body: Any) -> None:
    """Refuse a body of OpenAI's routes if one of its fields is invalid by itself."""
    if not isinstance(body, dict):
        return
    refuse_fields(body)
    requested_spec(body.get("response_format"), body.get(STRUCTURED))
    for name in sorted(body.keys() - SPELLINGS.keys()):
        if isinstance(body[name], int) and not -(2**63) <= body[name] < 2**63:
            raise InvalidParameterError(name, body[name], "wanted a number of 64 bits")


def is_whole(value: Any, lowest: int, highest: int) -> bool:
    """Whether a value of a body is an integer from `lowest` to `highest`."""
    return type(value) is int and lowest <= value <= highest


def check_tools(body: Mapping[str, Any]) -> None:
    """Refuse a body with too many tools, before any code iterates over them."""
    tools = body.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        given = f"a list of {len(tools)}"
        raise InvalidParameterError("tools", given, f"wanted at most {MAX_TOOLS}")


def refuse_fields(given: Mapping[str, Any]) -> None:
    """Refuse fields that are not supported."""
    check_tools(given)
    refuse_unsupported(given)


def refuse_canvas(given: Any) -> None:
    """Refuse `stream_canvas` on a route that sends no canvas."""
    if given:
        wanted = "wanted false, or POST /v1/chat/completions"
        raise InvalidParameterError("stream_canvas", given, wanted)


def sent_fields(body: BaseModel) -> dict[str, Any]:
    """Return the fields of a body that the client sent."""
    return {name: getattr(body, name) for name in body.model_fields_set}


def ignored_fields(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the names of fields that request something Mosaic does not provide.

    Args:
        given: the fields of a body.
        known: fields that the route acts on, or passes on.

    Raises:
        InvalidParameterError: a name is almost that of a diffusion parameter, or there are too
            many unknown fields to compare.
    """
    names = []
    for name, value in given.items():
        field = UPSTREAM_FIELDS.get(name)
        if field is not None and field.is_ignored:
            if value is None or value in field.neutral:
                continue
        elif name in known or value is None or (field is not None and field.effect == "unlisted"):
            continue
        elif (meant := near_miss(name)) is not None:
            raise InvalidParameterError(name, value, f"unknown parameter; did you mean {meant}?")
        names.append(name)
        if len(names) > MAX_IGNORED_FIELDS:
            wanted = f"wanted at most {MAX_IGNORED_FIELDS} fields that do not act"
            raise InvalidParameterError(name, value, wanted)
    return names


def check_template_kwargs(given: Any, field: str = "chat_template_kwargs") -> None:
    """Refuse arguments of the tokenizer among the variables of a chat template.

    Upstream passes both to one function, where `max_length` with `padding` can exhaust the memory.
    """
    names = given if isinstance(given, dict) else {}
    if len(names) > MAX_IGNORED_FIELDS:
        raise InvalidParameterError(
            field, len(names), f"wanted at most {MAX_IGNORED_FIELDS} variables"
        )
    for name in names:
        if name in _TEMPLATE_ARGUMENTS:
            wanted = "wanted none: only variables that the chat template reads"
            raise InvalidParameterError(f"{field}.{name}", given[name], wanted)


def check_chosen_tool(name: Any, tools: Any, field: str) -> None:
    """Refuse a chosen function that is not among the tools of the body."""
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    functions = [tool.get("function", tool) for tool in listed]
    names = [f.get("name") for f in functions if isinstance(f, dict)]
    if name not in names and not any(tool.get("type") == "namespace" for tool in listed):
        wanted = f"wanted one of: {', '.join(map(str, names))}" if names else "wanted it in tools"
        raise InvalidParameterError(field, name, wanted)


def check_model_name(body: Mapping[str, Any]) -> None:
    """Refuse a model name that is too long to repeat in an error or in the log."""
    name = body.get("model")
    if isinstance(name, str) and len(name) > MAX_MODEL_NAME_LENGTH:
        wanted = f"wanted a served model's name, of at most {MAX_MODEL_NAME_LENGTH} characters"
        raise InvalidParameterError("model", name, wanted)


def check_num_answers(body: Mapping[str, Any]) -> None:
    """Refuse a body that requests more answers than the limit for one request.

    Each answer is a request to the engine, so a large `n` could keep it busy for hours.
    """
    limit, given = envs.max_answers(), body.get("n")
    # An invalid n is refused elsewhere.
    n = given if isinstance(given, int) and 1 <= given <= MAX_CHOICES else 1
    for field in ("prompt", "messages", "items"):
        num_inputs = _num_inputs(body.get(field))
        if num_inputs * n > limit:
            wanted = f"wanted at most {limit} answers of one request (DLLM_MAX_ANSWERS)"
            raise InvalidParameterError(f"{field} x n", num_inputs * n, wanted)
    labels = body.get("label_token_ids")
    if isinstance(labels, list) and len(labels) > MAX_LABELS:
        raise InvalidParameterError("label_token_ids", labels, f"wanted at most {MAX_LABELS} ids")


def _num_inputs(given: Any) -> int:
    """Return the number of prompts, conversations or items in the value of a field."""
    is_several = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
    return len(given) if is_several else 1


def check_text_lengths(body: Mapping[str, Any], max_length: int) -> None:
    """Refuse a body with a text longer than the model's longest prompt, before other work.

    A conversation counts as one text, because the template joins its messages.

    Args:
        body: the fields as sent.
        max_length: maximum number of characters of a text.
    """
    for field, value in body.items():
        is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        parts = value if is_batch else [value]
        lengths = [[0, *map(len, _texts_in(part))] for part in parts]
        length = max(map(sum if field in ("messages", "input") else max, lengths))
        if length > max_length:
            wanted = f"wanted at most {max_length} in a text; the model's longest prompt has fewer"
            raise InvalidParameterError(field, f"{length} characters", wanted)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value at any depth."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def max_characters(tokenizer: Any, max_tokens: int) -> int:
    """Return the number of characters that a number of tokens can have."""
    return max_tokens * (1 if tokenizer is None else int(tokenizer.max_chars_per_token))


def check_text_length(field: str, text: str, tokenizer: Any, max_tokens: int) -> None:
    """Refuse a text that is longer than `max_tokens` tokens can be, before it is tokenised."""
    max_length = max_characters(tokenizer, max_tokens)
    if len(text) > max_length:
        wanted = f"wanted at most {max_length}, as many as {max_tokens} tokens can have"
        raise InvalidParameterError(field, f"{len(text)} characters", wanted)


def check_prompt(prompt: Any) -> None:
    """Refuse a value that is not a prompt of `/v1/completions`."""
    if prompt is None or prompt in ("", []):
        raise InvalidParameterError("prompt", prompt, f"wanted {PROMPT}")
