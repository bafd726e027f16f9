# SPDX-License-Identifier: Apache-2.0
"""A2D, autoregressive models that were trained into diffusion models (dllm, 2025).

The transformers are Qwen3, Qwen2 and Llama without their causal masks. All positions attend to each
other (mdlm), or to their own block and the blocks before it (bd3lm). Logits at a position predict
the token at that position. Only the tokenizer defines the mask token. Source:
https://github.com/ZHZisZZ/dllm, `pipelines/a2d`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.diffusion.models.diffullama import DiffuLlamaConfig
from vllm.diffusion.models.dream import DreamConfig
from vllm.diffusion.models.sdar import SDARConfig
from vllm.diffusion.request.families import A2D_KIND


class A2DQwen3Config(SDARConfig):
    """config.json of an A2D model with Qwen3's keys; see `StandardConfig`."""

    model_type: ClassVar[str] = "a2d-qwen3"

    HARMLESS: ClassVar[tuple[str, ...]] = (*SDARConfig.HARMLESS, A2D_KIND)


class A2DQwen2Config(DreamConfig):
    """config.json of an A2D model with Qwen2's keys; see `StandardConfig`."""

    model_type: ClassVar[str] = "a2d-qwen2"

    HARMLESS: ClassVar[tuple[str, ...]] = (*DreamConfig.HARMLESS, A2D_KIND)


class A2DLlamaConfig(DiffuLlamaConfig):
    """config.json of an A2D model with Llama's keys; see `StandardConfig`."""

    model_type: ClassVar[str] = "a2d-llama"

    HARMLESS: ClassVar[tuple[str, ...]] = (*DiffuLlamaConfig.HARMLESS, A2D_KIND)
    DEFAULTS: ClassVar[dict[str, Any]] = {**DiffuLlamaConfig.DEFAULTS, "head_dim": None}
