# SPDX-License-Identifier: Apache-2.0
"""DiffuLLaMA (Gong et al. 2024, arXiv:2410.17891), whose checkpoints claim to be Llama's.

The model is Llama without its causal mask. The logits of row i predict the token at position i + 1,
as in the model that it was trained from. A mask token, of config.json or of the tokenizer,
distinguishes a checkpoint from Llama's; any other llama is left to upstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config import DiffusionConfig
from vllm.diffusion.models.standard_config import StandardConfig
from vllm.diffusion.request.families import DIFFULLAMA
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_hf_text_config
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger(__name__)

TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class DiffuLlamaConfig(StandardConfig):
    """config.json of DiffuLLaMA: Llama's; see `StandardConfig`."""

    model_type: ClassVar[str] = "llama"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    ONLY: ClassVar[dict[str, bool | str]] = {
        **StandardConfig.ONLY,
        "attention_bias": False,
        "mlp_bias": False,
    }


def adopt(model: ModelConfig) -> None:
    """Turn the configuration of a DiffuLLaMA checkpoint into ours; leave any other llama as it is.

    A checkpoint is DiffuLLaMA's if its architecture says so (`--hf-overrides`), or if it has a mask
    token.

    Raises:
        ModelConfigError: it is, and asks for what its forward does not have.
    """
    config, architectures = model.hf_config, list(DIFFULLAMA.architectures)
    if isinstance(config, DiffusionConfig) or model.runner_type != "generate":
        return
    if config.architectures != architectures:
        if not _has_mask_token(model):
            return
        logger.info("A llama checkpoint with a mask token: it is run as DiffuLLaMA.")
    values = {**config.to_dict(), "architectures": architectures}
    model.hf_config = DiffuLlamaConfig.from_dict(values)
    model.hf_text_config = get_hf_text_config(model.hf_config)
    model.model_arch_config = model.get_model_arch_config()
    found = model.registry.inspect_model_cls(architectures, model)
    model._model_info, model._architecture = found


def _has_mask_token(model: ModelConfig) -> bool:
    if getattr(model.hf_config, "mask_token_id", None) is not None:
        return True
    return any(
        (get_hf_file_to_dict(name, model.tokenizer, model.tokenizer_revision) or {}).get(
            "mask_token"
        )
        for name in TOKENIZER_FILES
    )
