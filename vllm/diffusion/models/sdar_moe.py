# SPDX-License-Identifier: Apache-2.0
"""SDAR with experts (Cheng et al. 2025, arXiv:2510.06303): SDAR's layers, Qwen3-MoE's MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config import RouterScoring
from vllm.diffusion.models.config_checks import check_quantised_experts, refuse
from vllm.diffusion.models.sdar import SDARConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class SDARMoeConfig(SDARConfig):
    """config.json of SDAR with experts; see `StandardConfig`.

    Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`.
    """

    model_type: ClassVar[str] = "sdar_moe"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **SDARConfig.DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
    SIZES: ClassVar[tuple[str, ...]] = (
        *SDARConfig.SIZES,
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    )

    if TYPE_CHECKING:
        decoder_sparse_step: int
        mlp_only_layers: list[int] | None
        moe_intermediate_size: int
        norm_topk_prob: bool

    HARMLESS: ClassVar[tuple[str, ...]] = (*SDARConfig.HARMLESS, "num_local_experts")

    def __init__(self, **values: Any) -> None:
        # transformers 5 stores the number of experts under another name.
        local = values.get("num_local_experts")
        if local is not None and values.setdefault("num_experts", local) != local:
            refuse(values, "num_local_experts", "null, or what num_experts says, is supported")
        super().__init__(**values)

    def check_more(self, values: dict[str, Any]) -> None:
        super().check_more(values)
        experts, num_layers = values["num_experts"], values["num_hidden_layers"]
        if values["num_experts_per_tok"] > experts:
            refuse(values, "num_experts_per_tok", f"at most num_experts {experts}")
        if not isinstance(values["norm_topk_prob"], bool):
            refuse(values, "norm_topk_prob", "true or false")
        if any(layer not in range(num_layers) for layer in values["mlp_only_layers"] or ()):
            refuse(values, "mlp_only_layers", f"numbers of layers, from 0 to {num_layers - 1}")
        check_quantised_experts(values)

    @property
    def architecture(self) -> Architecture:
        layers = range(self.num_hidden_layers)
        dense = set(self.mlp_only_layers or ())
        sparse = [i for i in layers if (i + 1) % self.decoder_sparse_step == 0 and i not in dense]
        return super().architecture._replace(
            dense_width=self.intermediate_size if len(sparse) < len(layers) else 0,
            expert_layers=tuple(sparse),
            expert_width=self.moe_intermediate_size,
            scoring=RouterScoring(is_normalised=self.norm_topk_prob),
        )
