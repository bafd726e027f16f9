# SPDX-License-Identifier: Apache-2.0
"""docs/decoding.md and docs/requests.md list every choice that a request has."""

from typing import Any, get_args

import pytest

from tests.programs import ROOT
from vllm.diffusion.api.protocol import GenerateBody
from vllm.diffusion.request import fields
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, CACHES, Algorithm
from vllm.diffusion.request.families import FAMILIES
from vllm.diffusion.request.values import as_json, in_words

TEXT, REQUESTS = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("decoding", "requests")
)
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", tuple: "token ids"}
TYPES |= {list: "list", dict: "object"}
ORDERS = {"in turn": "one after the other", "together": "several at once", "none": "no blocks"}
OF_SEVERAL = {"prompt": "string or list", "messages": "list"}


@pytest.mark.parametrize("table", [ALGORITHMS, BLOCK_ALGORITHMS], ids=["full", "block"])
def test_the_tables_of_algorithms_are_those_of_their_records(table: dict[str, Algorithm]) -> None:
    is_block_causal = table is BLOCK_ALGORITHMS
    families = [family for family in FAMILIES if family.is_block_causal == is_block_causal]
    default_of = {family.name: family.default_algorithm for family in families}
    assert set(default_of.values()) <= set(table)
    rows = "\n".join(
        f"| `{a.name}` | {a.commits} | {'' if is_block_causal else f'{ORDERS[a.blocks]} | '}"
        f"{'; '.join(documented_parameters(a))} | "
        f"{', '.join(f for f, name in default_of.items() if name == a.name)} | [{a.source}] |"
        for a in table.values()
    )
    columns = "---|" * (5 if is_block_causal else 6)
    assert f"\n|{columns}\n{rows}\n\n" in TEXT, f"wanted in the document:\n{rows}"


def documented_parameters(algorithm: Algorithm) -> list[str]:
    by_steps = algorithm.pace == "steps" and not algorithm.is_block_causal
    actual = ["`steps` one per canvas token"] if by_steps else []
    for spec in fields.PARAMETERS:
        if spec.name in algorithm.parameters:
            default = spec.documented_default_for(algorithm.name)
            actual.append(f"`{spec.name}` {in_words(spec.choices) if spec.choices else default}")
    if algorithm.blocks != "none":
        whose = "the checkpoint's" if algorithm.is_block_causal else "32"
        actual.append(f"`block_length` {whose}")
    if algorithm.random_scores != "none":
        actual.append("`remasking` low_confidence or random")
    return actual


@pytest.mark.parametrize("name", CACHES)
def test_caches_have_a_row(name: str) -> None:
    assert f"\n| `{name}` |" in TEXT


@pytest.mark.parametrize(
    "name",
    [spec.name for spec in fields.FIELDS if spec.algorithms or spec.block_algorithms],
)
def test_parameters_of_single_algorithms_are_named(name: str) -> None:
    assert f"`{name}`" in TEXT


def request_rows() -> str:
    """Return the rows of the table: fields of the body, then diffusion parameters."""
    results = []
    for name, field in GenerateBody.model_fields.items():
        default = "" if field.default is None else as_json(field.default)
        kind = OF_SEVERAL.get(name) or type_of(field.annotation)
        results.append(f"| `{name}` | {kind} | {default} | {field.description} |")
    for spec in fields.FIELDS:
        names = f"`{spec.name}`"
        if spec.aliases:
            names += f" ({', '.join(f'`{alias}`' for alias in spec.aliases)})"
        meaning = f"{spec.doc}. Values: {', '.join(spec.choices)}" if spec.choices else spec.doc
        results.append(f"| {names} | {TYPES[spec.kind]} | {spec.documented_default} | {meaning} |")
    return "\n".join(results)


def type_of(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) or [annotation] if kind is not type(None)]
    return " or ".join(
        TYPES.get(kind, "list" if "list" in str(kind) else "object") for kind in kinds
    )


def test_every_field_is_in_the_table() -> None:
    assert f"\n|---|---|---|---|\n{request_rows()}\n\n" in REQUESTS, (
        f"wanted in the document:\n{request_rows()}"
    )
