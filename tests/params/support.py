# SPDX-License-Identifier: Apache-2.0
"""A served model, and requests to it that are decided or refused."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import LLADA
from vllm.diffusion.request.params import DiffusionParams, ServedModel, SpecialIds

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
    **asked: Any,
) -> DiffusionParams:
    return decision.decide(fields.canonical(asked), served, prompt)


def refusal(
    served: ServedModel = MODEL, prompt: list[int] = PROMPT, **asked: Any
) -> InvalidParameterError:
    with pytest.raises(InvalidParameterError) as error:
        resolve(served, prompt, **asked)
    assert str(error.value).startswith(f"{error.value.field}: given ")
    assert error.value.wanted in str(error.value)
    return error.value
