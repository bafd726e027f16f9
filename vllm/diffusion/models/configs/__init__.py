# SPDX-License-Identifier: Apache-2.0
"""Configuration classes: config.json of a diffusion language model, checked and completed."""

from vllm.diffusion.models.configs.base import CLASS_OF_FAMILY, DiffusionConfig
from vllm.diffusion.models.configs.dream import DreamConfig
from vllm.diffusion.models.configs.llada import LLaDAConfig
from vllm.diffusion.models.configs.llada_moe import DLLMConfig, LLaDAMoEConfig

CLASS_OF_FAMILY.update(
    {
        "llada": LLaDAConfig,
        "dream": DreamConfig,
        "llada-moe": LLaDAMoEConfig,
    }
)

CONFIG_CLASSES: dict[str, type[DiffusionConfig]] = {
    config.model_type: config for config in (LLaDAConfig, DreamConfig, LLaDAMoEConfig, DLLMConfig)
}
"""Configuration class to register for each `model_type`."""

__all__ = [
    "CONFIG_CLASSES",
    "DLLMConfig",
    "DiffusionConfig",
    "DreamConfig",
    "LLaDAConfig",
    "LLaDAMoEConfig",
]
