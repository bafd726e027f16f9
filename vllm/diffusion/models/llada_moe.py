# SPDX-License-Identifier: Apache-2.0
"""LLaDA-MoE (Zhu et al. 2025, arXiv:2509.24389), and checkpoints of the same architecture.

Llama's layers without a causal mask, with a norm of each query and key head and with experts in
the place of most MLPs. Logits at a position predict the token at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.errors import ModelConfigError
from vllm.diffusion.models.config import Architecture, DiffusionConfig
from vllm.diffusion.models.config_checks import (
    check_mask_id,
    check_only,
    check_positive,
    check_quantised_experts,
    check_rotary_share,
    head_width,
    plain_rope_theta,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class LLaDAMoEConfig(DiffusionConfig):
    """config.json of LLaDA-MoE.

    Sizes must be written out; options that are absent or null take the value of the released
    models. `moe_layer_freq` says which layers have experts: a list of a 0 or 1 per layer, or a
    number n for "every n-th layer, from the first on" (0: none, absent: all).

    Raises:
        ModelConfigError: naming the key, its value and what would be accepted.
    """

    model_type: ClassVar[str] = "lladamoe"

    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "expert_intermediate_size",
        "max_position_embeddings",
    )
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "clip_qkv": None,
        "qk_layernorm": True,
        "partial_rotary_factor": 1.0,
        "dense_intermediate_size": None,
        "shared_expert_intermediate_size": None,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "eos_token_id": 156892,
        "pad_token_id": 156892,
        "mask_token_id": 156895,
    }

    if TYPE_CHECKING:
        dense_intermediate_size: int
        expert_intermediate_size: int
        max_position_embeddings: int
        partial_rotary_factor: float
        clip_qkv: float | None
        qk_layernorm: bool
        moe_router_enable_expert_bias: bool
        moe_layer_freq: int | list[int]
        eos_token_id: int
        pad_token_id: int
        mask_token_id: int

    def __init__(self, **values: Any) -> None:
        theta = plain_rope_theta(values)
        given = {key: value for key, value in values.items() if value is not None}
        complete = {**self.DEFAULTS, "rope_theta": theta, **given}
        for key in self.SIZES:
            check_positive(complete, key)
        if complete["num_key_value_heads"] is None:
            complete["num_key_value_heads"] = complete["num_attention_heads"]
        _check_supported(complete)
        complete["head_dim"] = _checked_head_dim(complete)
        check_rotary_share(complete)
        _check_experts(complete)
        check_mask_id(complete)
        super().__init__(**complete)

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


def _check_supported(values: Mapping[str, Any]) -> None:
    """Refuse every option whose value asks for a forward that is not the released models'."""
    check_only(
        values,
        {
            "hidden_act": "silu",
            "attention_bias": False,
            "moe_router_score_function": "softmax",
        },
    )
    for key in ("shared_expert_intermediate_size", "num_shared_experts"):
        if values.get(key):
            refuse(values, key, "only null or 0 is supported: the experts are all routed")
    check_quantised_experts(values)
    if values.get("use_sliding_window"):
        refuse(values, "use_sliding_window", "only false is supported")


def _checked_head_dim(values: Mapping[str, Any]) -> int:
    check_positive(values, "num_key_value_heads")
    for key in ("rope_theta", "rms_norm_eps"):
        check_positive(values, key, whole=False)
    if values["clip_qkv"] is not None:
        check_positive(values, "clip_qkv", whole=False)
    return head_width(values)


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
