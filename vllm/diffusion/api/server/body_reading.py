# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that checks the raw bytes of JSON bodies on every route, including upstream's.

It checks a body when its last bytes have arrived, before a route parses it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from vllm.diffusion.api.bodies import (
    check_template_kwargs,
    check_text_lengths,
    max_characters,
)
from vllm.diffusion.api.prometheus import begin_request
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.core.surrogates import refuse_lone_surrogates

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A surrogate as a JSON escape, or as bytes that Python's JSON parser accepts. Most escapes are
# valid pairs, so a match only means that the parsed body must be checked.
_MAYBE_LONE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Fields whose texts count as one text, unless the names are written with escapes.
_MAYBE_JOINED = re.compile(rb'"(messages|input)"|\\u')
# Every server accepts texts of this many characters, because `/tokenize` also counts texts that
# are longer than a prompt.
MIN_TEXT_LENGTH = 1 << 20
_TEMPLATE_KWARGS = "chat_template_kwargs"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x78\x9c": "zlib"}
_OTHER_UNICODE = (b"\xff\xfe", b"\xfe\xff", b"\x00")


class BodyReading:
    """Middleware that refuses unreadable JSON when a route receives it.

    `receive` raises the error, so that the handlers of route errors answer it.

    Args:
        max_text_length: maximum number of characters of a text.
    """

    def __init__(self, app: ASGIApp, max_text_length: int) -> None:
        self._app, self._max_text_length = app, max_text_length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        begin_request()
        if "json" not in Headers(scope=scope).get("content-type", "json"):
            return await self._app(scope, receive, send)
        chunks: list[bytes] = []

        async def checked() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                chunks.append(message.get("body", b""))
                if not message.get("more_body", False):
                    try:
                        check(b"".join(chunks), self._max_text_length)
                    except InvalidParameterError as error:
                        raise RequestRefused(error) from None
                    chunks.clear()
            return message

        await self._app(scope, checked, send)


def check(body: bytes, max_text_length: int) -> None:
    """Refuse a body that is compressed, not in UTF-8, has lone surrogates or steers the tokenizer.

    Text that is not JSON at all is left to the route.

    Raises:
        InvalidParameterError: naming `body`, or the path of the value.
    """
    for magic, name in _COMPRESSED.items():
        if body.startswith(magic):
            wanted = "wanted JSON without compression: the server decodes no Content-Encoding"
            raise InvalidParameterError("body", f"{name} data", wanted)
    if body.startswith(_OTHER_UNICODE) or body[1:2] == b"\x00":
        raise InvalidParameterError("body", "UTF-16 or UTF-32", "wanted JSON in UTF-8")
    is_long = len(body) > max_text_length and _may_have_long_text(body, max_text_length)
    if is_long or _MAYBE_LONE.search(body) or _TEMPLATE_KWARGS.encode() in body:
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return
        refuse_lone_surrogates(content)
        if isinstance(content, dict):
            if is_long:
                check_text_lengths(content, max_text_length)
            check_template_kwargs(content.get(_TEMPLATE_KWARGS))


def _may_have_long_text(body: bytes, max_length: int) -> bool:
    """Whether `check_text_lengths` may refuse a body, without parsing it."""
    # An escaped quote or backslash is one character of a text.
    plain = body.replace(rb"\\", b"-").replace(rb"\"", b"-")
    lengths = [0, *map(len, plain.split(b'"')[1::2])]
    return (sum if _MAYBE_JOINED.search(body) else max)(lengths) > max_length


def max_text_length(engine: Any) -> int:
    """Return the maximum number of characters of a prompt, at least `MIN_TEXT_LENGTH`."""
    max_tokens = int(engine.model_config.max_model_len)
    return max(MIN_TEXT_LENGTH, max_characters(engine.renderer.tokenizer, max_tokens))


def fault_of(cause: BaseException | None) -> InvalidParameterError | None:
    """Return the error of a body from the JSON parser's exception, or None if it is unknown."""
    given: Any
    if isinstance(cause, RecursionError) and "JSON" in str(cause):
        given, wanted = "JSON that is nested too deeply", "wanted less depth, a few hundred levels"
    elif isinstance(cause, UnicodeDecodeError):
        given, wanted = f"byte {cause.object[cause.start]:#04x} at {cause.start}", "wanted UTF-8"
    elif isinstance(cause, json.JSONDecodeError):
        return no_json(cause.msg, cause.pos)
    elif isinstance(cause, ValueError) and "digits" in str(cause):
        given, wanted = "a number with thousands of digits", "wanted numbers of 64 bits"
    else:
        return None
    return InvalidParameterError("body", given, wanted)


def no_json(reason: str, position: int) -> InvalidParameterError:
    """Return the error of a body that is not JSON from a position on, counted in characters."""
    wanted = f"wanted JSON: {reason} after {position} characters"
    return InvalidParameterError("body", "no JSON", wanted)
