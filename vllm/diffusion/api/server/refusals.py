# SPDX-License-Identifier: Apache-2.0
"""Error answers of all routes: a message of one line in the same form, whatever the cause."""

from __future__ import annotations

import json
import re
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException as FastAPIError
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from vllm.diffusion.api import prometheus as metrics
from vllm.diffusion.api.choices import RequestTimedOut
from vllm.diffusion.api.openai.anthropic import error_type
from vllm.diffusion.api.server import body_reading
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import VLLMError, VLLMNotFoundError, VLLMValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI, Request

    from vllm.entrypoints.serve.engine.protocol import ErrorResponse


_TYPES = {HTTPStatus.BAD_REQUEST: "BadRequestError", HTTPStatus.NOT_FOUND: "NotFoundError"}


def install(app: FastAPI) -> None:
    """Install the exception handlers of this module on `app`, in place of upstream's."""
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(VLLMValidationError, _refused_by_upstream)
    app.add_exception_handler(ValidationError, _invalid_later)
    for raised in (HTTPException, FastAPIError):  # upstream has a handler for the second
        app.add_exception_handler(raised, _http_error)
    app.add_exception_handler(RequestTimedOut, _late)
    app.add_exception_handler(VLLMNotFoundError, _not_found)
    for unreadable in (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        app.add_exception_handler(unreadable, _unreadable)
    for kind in (VLLMError, Exception):
        handler = app.exception_handlers.get(kind)
        if handler is not None:
            app.add_exception_handler(kind, partial(_as_upstream, handler))


async def _refused(raw_request: Request, error: Exception) -> Response:
    """Answer a refusal, and count it in the metrics."""
    assert isinstance(error, RequestRefused)
    metrics.count_refusal(error.reason)
    return answer(raw_request, _with_paths(error))


async def _invalid(raw_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [fault for fault in error.errors() if isinstance(fault, dict)]
    if faults:
        refusal = refusal_of(faults)
    else:  # upstream's check of the content type
        given = raw_request.headers.get("content-type")
        refusal = InvalidParameterError("Content-Type", given, "wanted application/json")
    return await _refused(raw_request, RequestRefused(refusal))


async def _invalid_later(raw_request: Request, error: Exception) -> Response:
    """Answer a validation error of a model that upstream makes from a body."""
    assert isinstance(error, ValidationError)
    faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
    return await _refused(raw_request, RequestRefused(refusal_of(faults)))


async def _refused_by_upstream(raw_request: Request, error: Exception) -> Response:
    assert isinstance(error, VLLMValidationError)
    field, text = error.parameter, " ".join(str(error.args[0]).split())
    if field is not None:
        text = _reworded(field, text)
    if field is not None and error.value is not None:
        return await _refused(
            raw_request, RequestRefused(InvalidParameterError(field, error.value, text))
        )
    message = text if field is None else f"{field}: {text}"
    return answer(raw_request, create_error_response(message, param=field))


def _reworded(field: str, text: str) -> str:
    """Rewrite upstream's messages that repeat the field and the given value."""
    name = re.escape(field)
    text = re.sub(rf"^{name} must be (.*), got .*$", r"wanted \1", text)
    limit = rf"^{name}=\S+ cannot be greater than (\w+)=(\d+)\b.*$"
    return re.sub(limit, r"wanted at most \2, the \1", text)


async def _late(raw_request: Request, error: Exception) -> Response:
    response = create_error_response(error)
    response.error.param = "timeout_s"
    return answer(raw_request, response)


async def _not_found(raw_request: Request, error: Exception) -> Response:
    """Answer with the field that the message names, which upstream leaves out."""
    response = _with_paths(error)
    field, colon, _ = str(error).partition(": given ")
    response.error.param = field if colon else None
    return answer(raw_request, response)


async def _unreadable(raw_request: Request, error: Exception) -> Response:
    """Answer an error of the JSON parser, from a route that parses the body itself."""
    fault = body_reading.fault_of(error)
    if fault is None:  # not an error of the JSON parser
        raise error
    return await _refused(raw_request, RequestRefused(fault))


async def _as_upstream(handler: Any, raw_request: Request, error: Exception) -> Response:
    """Answer with upstream's handler; on Anthropic's routes convert the answer to their form."""
    response: Response = await handler(raw_request, error)
    if not raw_request.url.path.startswith("/v1/messages"):
        return response
    content = json.loads(bytes(response.body))
    return JSONResponse(of_anthropic(content, response.status_code), response.status_code)


async def _http_error(raw_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Messages about an unreadable body are generic, so the cause is answered instead.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, RequestRefused):
        return await _refused(raw_request, cause)
    if isinstance(cause, ValidationError):
        return await _invalid_later(raw_request, cause)
    fault = body_reading.fault_of(cause)
    if fault is not None:
        return await _refused(raw_request, RequestRefused(fault))
    status, path = HTTPStatus(error.status_code), raw_request.url.path
    message, headers = str(error.detail), dict(error.headers or {})
    if message == status.phrase and status == HTTPStatus.NOT_FOUND:
        known = {getattr(route, "path", None) for route in raw_request.app.routes}
        wanted = f"/v1{path}" if f"/v1{path}" in known else "one of those that /docs lists"
        message = f"path: given {path!r}; wanted {wanted}"
    if message == status.phrase and status == HTTPStatus.METHOD_NOT_ALLOWED:
        wanted = headers.get("Allow", "another method")
        message = f"method: given {raw_request.method!r}; {path} accepts {wanted}"
    kind = _TYPES.get(status, status.phrase)
    create = create_error_response if message == str(error.detail) else _with_paths
    return answer(raw_request, create(message, kind, status), headers)


def _with_paths(error: Exception | str, *kind: Any) -> ErrorResponse:
    """Create an error response with a message of Mosaic, whose paths upstream would hide.

    Names of models are often paths, and a given value must be recognisable.
    """
    response = create_error_response(error, *kind)
    response.error.message = str(error)
    return response


def answer(
    raw_request: Request, error: ErrorResponse, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error answer; on Anthropic's routes it has their form and error types."""
    body = error.model_dump()
    if raw_request.url.path.startswith("/v1/messages"):
        body = of_anthropic(body, error.error.code)
    return JSONResponse(body, error.error.code, headers)


def of_anthropic(body: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Convert the body of an error answer to Anthropic's form."""
    return {"type": "error", "error": {**body["error"], "type": error_type(status)}}


def refusal_of(errors: Sequence[Mapping[str, Any]]) -> InvalidParameterError:
    """Combine the errors that Pydantic found in a body into one refusal.

    Args:
        errors: errors from `RequestValidationError.errors()`, at least one. If a field may have
            several types, each type reports its errors; the errors with the longest path are used.
    """
    for error in errors:
        cause = error.get("ctx", {}).get("error")
        # an error of our own bodies, which names the path
        if isinstance(cause, InvalidParameterError):
            return cause
        if isinstance(cause, VLLMValidationError):
            field, given = cause.parameter or _path(error) or "body", error.get("input")
            given = given.get(field) if isinstance(given, dict) else given
            return InvalidParameterError(field, given, " ".join(str(cause.args[0]).split()))
    if errors[0]["type"] == "json_invalid":
        return body_reading.no_json(errors[0]["ctx"]["error"], errors[0]["loc"][-1])
    alike = _of_the_same_kind(errors)
    if all(error["type"] == "missing" and _path(error) for error in alike):
        names = ", ".join(dict.fromkeys(map(_path, alike)))
        return InvalidParameterError(names, None, "wanted a value")
    deepest = max(alike, key=lambda error: len(_names(error)))
    of_deepest = [error for error in alike if _names(error) == _names(deepest)]
    wanted = " or ".join(dict.fromkeys(map(_wanted, of_deepest)))
    given = None if deepest["type"] == "missing" else deepest.get("input")
    if deepest["type"] == "extra_forbidden":
        return InvalidParameterError(_path(deepest), given, "unknown parameter")
    return InvalidParameterError(_path(deepest) or "body", given, f"wanted {wanted}")


def _of_the_same_kind(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Drop errors of union members that the `type` field of the value rules out."""
    others = {tuple(e["loc"][:-1]) for e in errors if e["type"] == "literal_error"}

    def is_ruled_out(loc: Sequence[Any]) -> bool:
        return any(tuple(loc[:end]) in others for end in range(len(loc) + 1))

    return [error for error in errors if not is_ruled_out(error["loc"])] or list(errors)


def _names(error: Mapping[str, Any]) -> list[str]:
    """Return the path of the invalid field, without Pydantic's names of union members."""
    cleaned = clean_loc_for_param(tuple(error["loc"])).split(".")
    # The first name is the location: body, path or query.
    return [name for name in cleaned[1:] if name.isdecimal() or not name[:1].isupper()]


def _path(error: Mapping[str, Any]) -> str:
    path = "".join(f"[{n}]" if n.isdecimal() else f".{n}" for n in _names(error))
    return path.removeprefix(".")


# Pydantic's types of errors for a value that is no object
_OBJECTS = ("dataclass_type", "dict_type", "model_attributes_type", "model_type")


def _wanted(error: Mapping[str, Any]) -> str:
    """Describe the expected value for one of the types that a field may have."""
    if not _names(error) and error["type"] in ("missing", *_OBJECTS):
        return "a JSON object"
    if error["type"] in _OBJECTS:
        return "an object"
    if error["type"] == "missing":
        return "a value"
    if error["type"] == "int_parsing_size":
        return "a number of 64 bits"
    if error["type"] == "too_long":
        return f"at most {error['ctx']['max_length']} items"
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    # Errors of upstream's own checks are sentences that begin with the name of the field.
    return text.removeprefix(f"{_path(error)} must be ").partition(", unable")[0]
