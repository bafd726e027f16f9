# SPDX-License-Identifier: Apache-2.0
"""Request parameters as typed and documented fields of Pydantic bodies.

The rules of the parameter table check the values, not Pydantic. So a refusal names the field, the
given and the expected value in the same form on every route.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_validator

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.fields import FIELDS, by_spelling, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pydantic import BaseModel

    from vllm.diffusion.request.values import Field as Parameter

MAX_CHOICES = 128  # maximum number of answers per prompt

_JSON_TYPES: dict[type, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    tuple: "array",
    list: "array",
    dict: "object",
}


def with_diffusion_fields(
    base: type[BaseModel],
    name: str,
    doc: str,
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ours: Collection[str] = (),
) -> type[Any]:
    """Return a class of bodies like `base`, with all request parameters as fields.

    Parameters that `base` declares keep its types.

    Args:
        base: class of the body.
        name, doc: name and docstring of the new class.
        read: see `body_class`.
        ours: parameters that `base` declares and whose types are ours nevertheless.
    """
    fields = described(FIELDS)
    for spelling in (fields.keys() & base.model_fields.keys()) - set(ours):
        field_info = copy(base.model_fields[spelling])
        field_info.description = field_info.description or fields[spelling][1].description
        fields[spelling] = (field_info.annotation, field_info)
    return body_class(base, name, doc, read, **fields)


def body_class(
    base: type[BaseModel],
    name: str,
    doc: str,
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **fields: Any,
) -> type[Any]:
    """Return a class of bodies like `base` in which null means "not given".

    Args:
        base: class of the body.
        name, doc: name and docstring of the new class.
        read: converts a body as sent, without nulls, to the form of `base`. It raises
            InvalidParameterError.
        fields: further fields in the form of `create_model`.
    """

    def as_given(cls: type[BaseModel], body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        return given if read is None else read(given)

    reading: Any = model_validator(mode="before")(classmethod(as_given))  # type: ignore[arg-type]
    return create_model(
        name, __base__=base, __doc__=doc, __validators__={"as_given": reading}, **fields
    )


def described(table: Iterable[Parameter]) -> dict[str, Any]:
    """Return fields for `create_model` for all spellings of the parameters, without checks."""
    return {name: (Any, _described(field)) for name, field in by_spelling(table).items()}


def parameters_of(
    body: BaseModel, base: type[BaseModel], table: Iterable[Parameter]
) -> dict[str, Any]:
    """Return the checked parameters of a body: the fields that `base` does not declare.

    Raises:
        InvalidParameterError: naming the field.
    """
    sent = body.model_dump(exclude_unset=True)
    given = {name: value for name, value in sent.items() if name not in base.model_fields}
    return checked(given, by_spelling(table), also_known=base.model_fields)


def check_logprobs(name: str, given: int | None, model_config: Any) -> None:
    """Refuse a number of log probabilities above the server's limit.

    Raises:
        InvalidParameterError: naming the field.
    """
    limit = model_config.max_logprobs
    limit = model_config.get_vocab_size() if limit < 0 else limit
    if given is not None and not 0 <= given <= limit:
        raise InvalidParameterError(name, given, f"wanted 0 to {limit}")


def _described(field: Parameter) -> Any:
    extra: dict[str, Any] = {
        "type": _JSON_TYPES[field.kind],
        "enum": list(field.choices) or None,
        "minimum": field.minimum,
        "maximum": field.maximum,
    }
    extra = {name: value for name, value in extra.items() if value is not None}
    text = f"{field.doc}. Default: {field.documented_default}"
    users = tuple(dict.fromkeys((*field.algorithms, *field.block_algorithms)))
    if users:
        text += f". Used by {', '.join(users)}"
    return Field(None, description=text, json_schema_extra=extra)
