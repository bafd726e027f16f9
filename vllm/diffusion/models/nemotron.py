# SPDX-License-Identifier: Apache-2.0
"""Nemotron-Labs-Diffusion (NVIDIA 2026), 3B, 8B and 14B.

Llama's layers with different names, with YaRN and with queries that grow with their position. The
context is causal, and a row of it predicts the next token. The rows of a block that is denoised
attend to each other, and each predicts its own token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.core.positions import QueryGrowth, Yarn
from vllm.diffusion.models.config_checks import check_positive, refuse
from vllm.diffusion.models.rope_keys import description, kind_of
from vllm.diffusion.models.standard_config import StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture

_NUMBERS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "rope_theta")
_READ = frozenset(
    (
        *_NUMBERS,
        *("rope_type", "type", "partial_rotary_factor", "mscale", "mscale_all_dim"),
        *("attention_factor", "llama_4_scaling_beta", "truncate"),
    )
)


class NemotronConfig(StandardConfig):
    """config.json of Nemotron-Labs-Diffusion; see `StandardConfig`.

    `rope_parameters` describes YaRN, whose factor of cosines and sines is 1.
    """

    model_type: ClassVar[str] = "nemotron_labs_diffusion"

    bos_token_id: ClassVar[int] = 1
    eos_token_id: ClassVar[int] = 11
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "dlm_paradigm": "bidirectional",
        "block_size": 32,
    }
    ONLY: ClassVar[dict[str, bool | str]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dlm_paradigm": "bidirectional",
        "dlm_type": "llada",
    }

    if TYPE_CHECKING:
        rope_parameters: dict[str, Any]

    def read_rope(self, values: dict[str, Any]) -> None:
        if values.get("sliding_window") is not None:
            refuse(values, "sliding_window", "only null is supported")
        described, older = (description(values, key) for key in ("rope_parameters", "rope_scaling"))
        if older not in ({}, described):
            refuse(values, "rope_scaling", "null, or what rope_parameters says, is supported")
        if kind_of(described) != "yarn":
            refuse(values, "rope_parameters", 'only rope_type "yarn" is supported')
        unread = sorted(described.keys() - _READ)
        if unread:
            refuse(described, unread[0], "wanted none: a description of YaRN does not have it")
        if described.get("partial_rotary_factor", 1) != 1:
            refuse(described, "partial_rotary_factor", "1, or null")
        values.pop("rope_scaling", None)
        values["rope_parameters"] = described
        for key in _NUMBERS:
            check_positive(described, key, whole=False)
        growth = described.get("llama_4_scaling_beta")
        if growth is not None and (not isinstance(growth, (int, float)) or growth < 0):
            refuse(described, "llama_4_scaling_beta", "a number from 0 on, or null")
        check_positive(described, "mscale", whole=False)
        if described["mscale"] != described.get("mscale_all_dim"):
            refuse(described, "mscale", "the same number as mscale_all_dim")
        if described.get("attention_factor") not in (None, 1):
            refuse(described, "attention_factor", "1, or null")
        if not described.get("truncate", True):
            refuse(described, "truncate", "only true is supported")
        # A `rope_theta` outside of the description is ignored.
        values["rope_theta"] = float(described["rope_theta"])

    def validate_rope(self, *args: Any, **options: Any) -> None:
        """Do nothing: `read_rope` checks rotary keys, and transformers' rules would reject them."""

    @property
    def architecture(self) -> Architecture:
        described = self.rope_parameters
        length = int(described["original_max_position_embeddings"])
        growth = described.get("llama_4_scaling_beta")
        return super().architecture._replace(
            layer_names=tuple(f"encoder.layers.{i}" for i in range(self.num_hidden_layers)),
            yarn=Yarn(described["factor"], length, described["beta_fast"], described["beta_slow"]),
            query_growth=QueryGrowth(growth, length) if growth else None,
            module_names={
                "model.embed_tokens": "encoder.embed_tokens",
                "model.norm": "encoder.norm",
                "lm_head": "diffusion_head",
            },
        )
