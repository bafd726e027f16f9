# SPDX-License-Identifier: Apache-2.0
"""A served model, and helpers that decide requests to it or expect a refusal."""

import dataclasses
from typing import Any

import pytest

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import LLADA
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

MASK, EOS, EOT = 251, 250, 249
MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK, eos=EOS, eot=EOT, stop=frozenset({EOS, EOT})),
    max_model_len=4096,
    vocab_size=256,
)
PROMPT = [1] * 20
STANDARD: dict[str, Any] = {
    "max_tokens": 40,
    "gen_length": 64,
    "output_length": 64,
    "steps": 16,
    "block_length": 32,
    "temperature": 0.5,
    "cfg_scale": 0.5,
    "remasking": "low_confidence",
    "mask_id": MASK,
}


def resolve(
    served: ServedModel = MODEL,
    prompt: list[int] = PROMPT,
    **parameters: Any,
) -> DiffusionParams:
    return decision.decide(fields.canonical(parameters), served, prompt)


def refusal(
    served: ServedModel = MODEL, prompt: list[int] = PROMPT, **parameters: Any
) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as error:
        resolve(served, prompt, **parameters)
    assert str(error.value).startswith(f"{error.value.field}: given ")
    assert error.value.wanted in str(error.value)
    return error.value


def model(**changes: Any) -> ServedModel:
    return dataclasses.replace(MODEL, **changes)


def served_with(**defaults: Any) -> ServedModel:
    """Return a LLaDA model with server-wide settings."""
    return model(defaults=fields.server_defaults(defaults, LLADA))


def rows_of(table: dict[str, list[tuple[Any, ...]]]) -> list[Any]:
    """Return the rows of all parts of a table as named parameters; MODEL is the default model."""
    return [
        pytest.param(*row if isinstance(row[0], ServedModel) else (MODEL, *row), id=f"{name} {n}")
        for name, rows in table.items()
        for n, row in enumerate(rows)
    ]


def check_decided(served: ServedModel, parameters: dict[str, Any], wanted: dict[str, Any]) -> None:
    decided = resolve(served, **parameters)
    assert {name: getattr(decided, name) for name in wanted} == wanted


def check_refused(served: ServedModel, parameters: dict[str, Any], name: str, *words: str) -> None:
    """Check that `name` is refused with its value, and that the expected values have `words`."""
    error = refusal(served, **parameters)
    assert (error.field, error.given) == (name, parameters[name])
    assert all(word in error.wanted for word in words)
