# SPDX-License-Identifier: Apache-2.0
"""Limits on the work of Pydantic for an invalid request body.

Pydantic reports every invalid item of a list once for each type that the item may have. A history
of 500 invalid items for `/v1/responses` (550 KB) causes 100,000 errors, which block the event loop
for minutes. One error is enough for a refusal, so lists, sets, tuples and dicts report only the
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute
from pydantic_core import SchemaValidator

if TYPE_CHECKING:
    from fastapi import FastAPI

_CONTAINERS = frozenset({"list", "set", "frozenset", "tuple", "dict"})
_NOT_VALIDATED = frozenset({"metadata", "serialization"})  # keys of a core schema


def stop_at_first_fault(app: FastAPI) -> None:
    """Make the bodies of all routes of `app` report only the first invalid item of a container."""
    for route in app.routes:
        if not isinstance(route, APIRoute):
            continue
        for field in route.dependant.body_params:
            adapter = field._type_adapter
            _fail_fast(adapter.core_schema, set())
            # The prebuilt validators of nested models do not stop at the first error.
            adapter.validator = SchemaValidator(adapter.core_schema, _use_prebuilt=False)


def _fail_fast(schema: Any, visited: set[int]) -> None:
    """Set `fail_fast` in every container of a core schema, which may contain cycles."""
    if id(schema) in visited:
        return
    visited.add(id(schema))
    if isinstance(schema, dict):
        kind = schema.get("type")
        is_schema = isinstance(kind, str)  # otherwise a dict of fields by name
        if is_schema and kind in _CONTAINERS:
            schema["fail_fast"] = True
        for key, value in schema.items():
            if not (is_schema and key in _NOT_VALIDATED):
                _fail_fast(value, visited)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _fail_fast(part, visited)
