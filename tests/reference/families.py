# SPDX-License-Identifier: Apache-2.0
"""Which plain forward pass a checkpoint has, by its architecture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from tests.reference.block_models import (
    FastDLLMReference,
    LLaDA2Reference,
    SDARMoeReference,
    SDARReference,
)
from tests.reference.dream_model import DreamReference
from tests.reference.llada_model import LLaDAReference
from tests.reference.llada_moe_model import LLaDAMoEReference

if TYPE_CHECKING:
    from pathlib import Path

    from tests.reference.llama_model import LlamaReference

REFERENCES: dict[str, type[LlamaReference]] = {
    **dict.fromkeys(("LLaDAModelLM", "LLaDAForDiffusionLM"), LLaDAReference),
    **dict.fromkeys(("DreamModel", "DreamForDiffusionLM"), DreamReference),
    "LlamaForCausalLM": DreamReference,  # DiffuLLaMA
    **dict.fromkeys(("LLaDAMoEModelLM", "LLaDAMoEForDiffusionLM"), LLaDAMoEReference),
    "SDARForCausalLM": SDARReference,
    "SDARMoeForCausalLM": SDARMoeReference,
    "LLaDA2MoeModelLM": LLaDA2Reference,
    "Fast_dLLM_QwenForCausalLM": FastDLLMReference,
}


def reference_of(config: dict[str, Any]) -> type[LlamaReference]:
    """By config.json."""
    return REFERENCES[config["architectures"][0]]


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The reference of a folder, in a dtype; float64 keeps every step in float64."""
    config = json.loads((folder / "config.json").read_text())
    return reference_of(config).from_checkpoint(folder, dtype)
