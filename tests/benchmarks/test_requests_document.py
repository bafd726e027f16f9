# SPDX-License-Identifier: Apache-2.0
"""docs/requests.md lists every field of a request, as the tables of the product have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from vllm.diffusion.api.protocol import GenerateBody
from vllm.diffusion.request.fields import FIELDS
from vllm.diffusion.request.values import as_json

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "requests.md").read_text(encoding="utf-8")
TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    tuple: "token ids",
    list: "list",
    dict: "object",
}
OF_SEVERAL = {"prompt": "string or list", "messages": "list"}


def rows() -> str:
    """The rows of the table: fields of the body, then diffusion parameters."""
    found = []
    for name, field in GenerateBody.model_fields.items():
        default = "" if field.default is None else as_json(field.default)
        kind = OF_SEVERAL.get(name) or type_of(field.annotation)
        found.append(f"| `{name}` | {kind} | {default} | {field.description} |")
    for spec in FIELDS:
        names = f"`{spec.name}`"
        if spec.aliases:
            names += f" ({', '.join(f'`{alias}`' for alias in spec.aliases)})"
        meaning = f"{spec.doc}: {', '.join(spec.choices)}" if spec.choices else spec.doc
        found.append(f"| {names} | {TYPES[spec.kind]} | {spec.documented_default} | {meaning} |")
    return "\n".join(found)


def type_of(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) or [annotation] if kind is not type(None)]
    return " or ".join(
        TYPES.get(kind, "list" if "list" in str(kind) else "object") for kind in kinds
    )


def test_every_field_is_in_the_table() -> None:
    assert f"\n|---|---|---|---|\n{rows()}\n\n" in TEXT, f"wanted in the document:\n{rows()}"
