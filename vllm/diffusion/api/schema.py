# SPDX-License-Identifier: Apache-2.0
"""Request parameters of the table as typed and documented fields of request bodies.

Values are checked by the table's rules, not by pydantic, so that every refusal names the field, the
given and the wanted value in equal words on every route.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_validator

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.fields import FIELDS, by_spelling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pydantic import BaseModel

    from vllm.diffusion.request.values import Field as Parameter

MAX_CHOICES = 128  # answers per prompt

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
    keep: Collection[str] = (),
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> type[Any]:
    """Make a class of bodies like `base`, with every request parameter.

    Args:
        base: class of the body.
        name, doc: name and docstring of the new class.
        keep: parameters that `base` declares with types of its own.
        read: as for `body_class`.
    """
    fields = described(FIELDS)
    for spelling in keep:
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
    """Make a class of bodies like `base` in which null means "not given".

    Args:
        base: class of the body.
        name, doc: name and docstring of the new class.
        read: function of a body as sent, without nulls, that returns it in the form of `base`. It
            raises InvalidParameterError.
        fields: further fields, as `create_model` takes them.
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
    """Return every spelling of the parameters for `create_model`; values are checked later."""
    return {name: (Any, _described(field)) for name, field in by_spelling(table).items()}


def check_logprobs(name: str, given: int | None, model_config: Any) -> None:
    """Refuse more log probabilities than the server allows.

    Raises:
        InvalidParameterError: naming the field.
    """
    limit = model_config.max_logprobs
    limit = model_config.get_vocab_size() if limit < 0 else limit
    if given is not None and not 0 <= given <= limit:
        raise InvalidParameterError(name, given, f"wanted 0 to {limit}")


def _described(field: Parameter) -> Any:
    extra: dict[str, Any] = {"type": _JSON_TYPES[field.kind]}
    if field.choices:
        extra["enum"] = list(field.choices)
    if field.minimum is not None:
        extra["minimum"] = field.minimum
    if field.maximum is not None:
        extra["maximum"] = field.maximum
    text = f"{field.doc} (default: {field.documented_default})"
    users = tuple(dict.fromkeys((*field.algorithms, *field.block_algorithms)))
    if users:
        text += f"; used by {', '.join(users)}"
    return Field(None, description=text, json_schema_extra=extra)
