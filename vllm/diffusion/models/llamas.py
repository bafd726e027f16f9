# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose model type belongs to upstream, but that are models of our families.

DiffuLLaMA and Stable-DiffCoder have Llama's model type, I-DLM may be a Qwen3 with an adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.models.config import DiffusionConfig, config_class_of
from vllm.diffusion.request.families import DIFFULLAMA, family_of
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_hf_text_config
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def register_llama(model: ModelConfig) -> None:
    """Convert the configuration of such a checkpoint to ours; keep any other model as it is.

    The architecture (from `--hf-overrides`, if given) determines the family. A plain Llama with a
    mask token is a DiffuLLaMA.

    Raises:
        ModelConfigError: it belongs to our families, but requires an unsupported forward pass.
    """
    config = model.hf_config
    if isinstance(config, DiffusionConfig):
        config.from_dict(config.to_dict())  # refuses values that --hf-overrides have set since
        return
    if model.runner_type != "generate":
        return
    family = family_of(config.architectures, None, vars(config))
    if family is None:
        if not _has_mask_token(model):
            return
        logger.info("this Llama checkpoint has a mask token, so it is served as DiffuLLaMA")
        family = DIFFULLAMA
    architectures = list(family.architectures)
    values = {**_values(model), "architectures": architectures}
    model.hf_config = config_class_of(family).from_dict(values)
    model.hf_text_config = get_hf_text_config(model.hf_config)
    model.model_arch_config = model.get_model_arch_config()
    registered = model.registry.inspect_model_cls(architectures, model)
    model._model_info, model._architecture = registered


def _values(model: ModelConfig) -> dict[str, Any]:
    """Return the original values of config.json.

    transformers adds the ids of Llama's special tokens, and rewrites the rotary keys.
    """
    values: dict[str, Any] = model.hf_config.to_dict()
    file = get_hf_file_to_dict("config.json", model.model, model.revision)
    overrides = model.hf_overrides
    if not file or not isinstance(overrides, dict):
        return values
    changed = (*overrides, "quantization_config")  # upstream may read it from another file
    return {**file, **{key: values[key] for key in changed if key in values}}


def _has_mask_token(model: ModelConfig) -> bool:
    if getattr(model.hf_config, "mask_token_id", None) is not None:
        return True
    return any(
        (get_hf_file_to_dict(name, model.tokenizer, model.tokenizer_revision) or {}).get(
            "mask_token"
        )
        for name in TOKENIZER_FILES
    )
