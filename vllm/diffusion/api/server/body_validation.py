# SPDX-License-Identifier: Apache-2.0
"""Bounds the work that a wrong request body causes while pydantic validates it.

pydantic reports every wrong item of a list once for each type that the item may have. A history of
500 wrong items for `/v1/responses` (550 KB) gives 100,000 errors, which hold up the event loop for
minutes. One error is enough for a refusal, so lists, sets, tuples and dicts report their first one.
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
    """Make the bodies of all routes of `app` report the first wrong item of each container."""
    for route in app.routes:
        if not isinstance(route, APIRoute):
            continue
        for field in route.dependant.body_params:
            adapter = field._type_adapter
            _fail_fast(adapter.core_schema, set())
            # The prebuilt validators of nested models do not stop at the first error.
            adapter.validator = SchemaValidator(adapter.core_schema, _use_prebuilt=False)


def _fail_fast(schema: Any, visited: set[int]) -> None:
    """Set `fail_fast` in every container of a core schema, which may refer to itself."""
    if id(schema) in visited:
        return
    visited.add(id(schema))
    if isinstance(schema, dict):
        kind = schema.get("type")
        is_schema = isinstance(kind, str)  # else a dict of fields by name
        if is_schema and kind in _CONTAINERS:
            schema["fail_fast"] = True
        for key, value in schema.items():
            if not (is_schema and key in _NOT_VALIDATED):
                _fail_fast(value, visited)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _fail_fast(part, visited)
