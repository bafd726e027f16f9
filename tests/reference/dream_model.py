# SPDX-License-Identifier: Apache-2.0
"""The Dream forward pass, and DiffuLLaMA's.

Source: the public Dream repository and model card (Dream 7B, arXiv:2508.15487): Qwen2 layers,
with biases on q, k and v, whose causal mask is removed. DiffuLLaMA (arXiv:2410.17891) has Llama's
layers, which are the same without biases, and the same shift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tests.reference.llama_model import LlamaReference

if TYPE_CHECKING:
    from tests.reference.llama_model import Config


class DreamReference(LlamaReference):
    """A Dream checkpoint. The logits at position i predict the token at position i + 1."""

    logit_shift = 1
    supported: ClassVar[Config] = {
        "hidden_act": "silu",
        "rope_scaling": None,
        "use_sliding_window": False,
    }

    @classmethod
    def has_qkv_bias(cls, config: Config) -> bool:
        return bool(config["model_type"] != "llama")
