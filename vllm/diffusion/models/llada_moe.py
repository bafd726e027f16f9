# SPDX-License-Identifier: Apache-2.0
"""LLaDA-MoE (Zhu et al. 2025, arXiv:2509.24389), and checkpoints of its architecture.

Llama's layers without a causal mask, with a norm of each query and key head, and with experts in
place of most MLPs. Logits at a position predict the token at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.models.config import Architecture
from vllm.diffusion.models.config_checks import (
    check_positive,
    check_quantised_experts,
    check_rotary_share,
    refuse,
)
from vllm.diffusion.models.standard_config import StandardConfig

if TYPE_CHECKING:
    from collections.abc import Mapping


class LLaDAMoEConfig(StandardConfig):
    """config.json of LLaDA-MoE; see `StandardConfig`.

    Sizes must be given explicitly; options that are absent or null take the value of the released
    models. `moe_layer_freq` selects the layers with experts: a list with 0 or 1 per layer, or a
    number n for every n-th layer, starting with the first (0: none, absent: all).
    """

    model_type: ClassVar[str] = "lladamoe"

    eos_token_id: ClassVar[int] = 156892
    pad_token_id: ClassVar[int] = 156892
    SIZES: ClassVar[tuple[str, ...]] = (
        *(key for key in StandardConfig.SIZES if key != "intermediate_size"),
        *("num_experts", "num_experts_per_tok", "expert_intermediate_size"),
    )
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_bias": False,
        "clip_qkv": None,
        "qk_layernorm": True,
        "partial_rotary_factor": 1.0,
        "dense_intermediate_size": None,
        "shared_expert_intermediate_size": None,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
    }
    # The public forward never normalises the weights of experts, so this key has no effect.
    HARMLESS: ClassVar[tuple[str, ...]] = (*StandardConfig.HARMLESS, "norm_topk_prob")
    ONLY: ClassVar[dict[str, bool | str]] = {
        **StandardConfig.ONLY,
        "attention_bias": False,
        "moe_router_score_function": "softmax",
    }

    if TYPE_CHECKING:
        dense_intermediate_size: int
        expert_intermediate_size: int
        partial_rotary_factor: float
        clip_qkv: float | None
        qk_layernorm: bool
        moe_router_enable_expert_bias: bool
        moe_layer_freq: int | list[int]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{key: value for key, value in values.items() if value is not None})

    def check_more(self, values: dict[str, Any]) -> None:
        super().check_more(values)
        check_rotary_share(values)
        for key in ("shared_expert_intermediate_size", "num_shared_experts"):
            if values.get(key):
                refuse(values, key, "only null or 0 is supported: the experts are all routed")
        if values["clip_qkv"] is not None:
            check_positive(values, "clip_qkv", whole=False)
        check_quantised_experts(values)
        _check_experts(values)

    @property
    def architecture(self) -> Architecture:
        layers = range(self.num_hidden_layers)
        expert_layers = tuple(i for i in layers if _has_experts(self.moe_layer_freq, i))
        is_mixed = len(expert_layers) < len(layers)
        return Architecture(
            num_embeddings=self.vocab_size,
            rotary_dim=int(self.head_dim * self.partial_rotary_factor),
            dense_width=self.dense_intermediate_size if is_mixed else 0,
            layer_names=tuple(f"model.layers.{i}" for i in layers),
            norms_each_head=self.qk_layernorm,
            max_qkv=self.clip_qkv,
            expert_layers=expert_layers,
            expert_width=self.expert_intermediate_size,
            expert_bias_of="mlp" if self.moe_router_enable_expert_bias else None,
        )


def _has_experts(freq: int | list[int], layer: int) -> bool:
    if isinstance(freq, list):
        return bool(freq[layer])
    return freq > 0 and layer % freq == 0


def _check_experts(values: Mapping[str, Any]) -> None:
    if values["num_experts_per_tok"] > values["num_experts"]:
        refuse(values, "num_experts_per_tok", f"at most num_experts {values['num_experts']}")
    freq, num_layers = values["moe_layer_freq"], values["num_hidden_layers"]
    entries = freq if isinstance(freq, list) else [freq]
    allowed = (0, 1) if isinstance(freq, list) else range(num_layers + 1)
    if any(entry not in allowed for entry in entries) or (
        isinstance(freq, list) and len(freq) != num_layers
    ):
        wanted = f"{num_layers} numbers that are 0 or 1, or one from 0 to {num_layers}"
        raise ModelConfigError("moe_layer_freq", freq, wanted)
    if not all(_has_experts(freq, layer) for layer in range(num_layers)):
        check_positive(values, "dense_intermediate_size")
