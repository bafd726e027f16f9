# SPDX-License-Identifier: Apache-2.0
"""The table of request parameters as typed and documented fields of request bodies.

Values are checked by the table's own rules, not by pydantic, so that every refusal names the
field, the given and the wanted value in the same words on every route.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.fields import FIELDS, check

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pydantic import BaseModel

    from vllm.diffusion.values import Field as Parameter

MAX_CHOICES = 128  # answers per prompt

_JSON_TYPES: dict[type, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    tuple: "array",
}


def with_diffusion_fields(
    base: type[BaseModel], name: str, doc: str, keep: Collection[str] = ()
) -> type[Any]:
    """A body like `base` with every request parameter.

    Args:
        base: the body.
        name, doc: of the new class.
        keep: parameters that `base` declares with types of its own.
    """
    fields = described(FIELDS)
    for spelling in keep:
        own = copy(base.model_fields[spelling])
        own.description = own.description or fields[spelling][1].description
        fields[spelling] = (own.annotation, own)
    return create_model(name, __base__=base, __doc__=doc, **fields)


def described(table: Iterable[Parameter]) -> dict[str, Any]:
    """Every spelling of the parameters, as `create_model` takes them; values are checked later."""
    return {
        spelling: (Any, _described(field))
        for field in table
        for spelling in (field.name, *field.aliases)
    }


def checked(
    given: Mapping[str, Any], table: Iterable[Parameter], also_known: Iterable[str] = ()
) -> dict[str, Any]:
    """Values under the canonical names of a route's own table; None counts as not given.

    Raises:
        InvalidParameterError: for an unknown name, a value that is none of the parameter's, or two
            spellings of one that disagree.
    """
    fields = {spelling: f for f in table for spelling in (f.name, *f.aliases)}
    found: dict[str, Any] = {}
    for spelling, value in given.items():
        if spelling not in fields:
            known = ", ".join(sorted({*fields, *also_known}))
            raise InvalidParameterError(spelling, value, f"unknown parameter; known: {known}")
        if value is None:
            continue
        name = fields[spelling].name
        own = check(fields[spelling], spelling, value)
        if found.setdefault(name, own) != own:
            raise InvalidParameterError(
                spelling, value, f"it contradicts another spelling of {name}: {found[name]!r}"
            )
    return found


def check_logprobs(name: str, given: int | None, model_config: Any) -> None:
    """Refuse more log probabilities than the server gives.

    Raises:
        InvalidParameterError: naming the field.
    """
    most = model_config.max_logprobs
    most = model_config.get_vocab_size() if most < 0 else most
    if given is not None and not 0 <= given <= most:
        raise InvalidParameterError(name, given, f"wanted 0 to {most}")


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
