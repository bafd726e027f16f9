# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.0 and 2.1 (Bie et al. 2025, arXiv:2512.15745), mini and flash.

Llama's layers with a block-causal mask. Queries, keys and values are one matrix, each query and key
head has a norm, only some channels of a head are rotated, and all layers except the first ones have
experts. A router in fp32 chooses among groups of experts; a shared expert processes every row.
Logits at a position predict the token at that position.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config import RouterScoring
from vllm.diffusion.models.config_checks import (
    check_positive,
    check_quantised_experts,
    check_rotary_share,
    refuse,
)
from vllm.diffusion.models.standard_config import StandardConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.models.config import Architecture


class LLaDA2Config(StandardConfig):
    """config.json of LLaDA2; see `StandardConfig`.

    Sizes must be given explicitly; options that are absent or null take the value of the released
    models. The tokenizer defines the mask token.
    """

    model_type: ClassVar[str] = "llada2_moe"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "partial_rotary_factor": 0.5,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "norm_head": False,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
    }
    ONLY: ClassVar[dict[str, bool | str]] = {
        **StandardConfig.ONLY,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "norm_head": False,
        "score_function": "sigmoid",
        "scoring_func": "sigmoid",
        "moe_router_score_function": "sigmoid",
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
    }
    SIZES: ClassVar[tuple[str, ...]] = (
        *StandardConfig.SIZES,
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"),
    )

    if TYPE_CHECKING:
        partial_rotary_factor: float
        moe_intermediate_size: int
        num_shared_experts: int
        first_k_dense_replace: int
        n_group: int
        topk_group: int
        routed_scaling_factor: float

    def __init__(self, **values: Any) -> None:
        super().__init__(**{key: value for key, value in values.items() if value is not None})

    def check_more(self, values: dict[str, Any]) -> None:
        super().check_more(values)
        check_rotary_share(values)
        check_positive(values, "routed_scaling_factor", whole=False)
        for key in ("num_shared_experts", "first_k_dense_replace"):
            if not isinstance(values[key], int) or values[key] < 0:
                refuse(values, key, "a whole number of at least 0")
        check_quantised_experts(values)
        if values["num_experts_per_tok"] > values["num_experts"]:
            refuse(values, "num_experts_per_tok", f"at most num_experts {values['num_experts']}")
        self.check_routing(values)

    def check_routing(self, values: dict[str, Any]) -> None:
        """Check the keys that limit the choice of experts."""
        _check_groups(values)

    @property
    def scoring(self) -> RouterScoring:
        """The choice and weighting of experts."""
        return RouterScoring(
            is_sigmoid=True,
            num_groups=self.n_group,
            num_kept_groups=self.topk_group,
            is_normalised=self.num_experts_per_tok > 1,
            scale=self.routed_scaling_factor,
            in_fp32=True,
        )

    @property
    def architecture(self) -> Architecture:
        num_layers = self.num_hidden_layers
        num_dense = min(self.first_k_dense_replace, num_layers)
        return super().architecture._replace(
            rotary_dim=int(self.head_dim * self.partial_rotary_factor),
            dense_width=self.intermediate_size if num_dense else 0,
            norms_each_head=True,
            has_fused_qkv=True,
            expert_layers=tuple(range(num_dense, num_layers)),
            expert_width=self.moe_intermediate_size,
            shared_expert_width=self.num_shared_experts * self.moe_intermediate_size,
            scoring=self.scoring,
            expert_bias_of="mlp.gate",
            module_names=MODULE_NAMES,
        )


MODULE_NAMES = MappingProxyType(
    {
        "model.embed_tokens": "model.word_embeddings",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
    }
)


def _check_groups(values: Mapping[str, Any]) -> None:
    """Check that the kept groups have enough experts."""
    experts, chosen = values["num_experts"], values["num_experts_per_tok"]
    groups, kept = values["n_group"], values["topk_group"]
    if groups > 1 and (experts % groups or experts < 2 * groups):
        refuse(values, "n_group", f"a divisor of num_experts {experts} that leaves 2 or more")
    if kept > groups or kept * (experts // groups) < chosen:
        wanted = f"at most n_group {groups}, with num_experts_per_tok {chosen} experts or more"
        refuse(values, "topk_group", wanted)
