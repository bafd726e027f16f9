# SPDX-License-Identifier: Apache-2.0
"""The shape of a model, what one forward of it must move and compute, and the least time of that.

Letters: D width, H heads, K key and value heads, hd head width, M inner width of a feed-forward,
E experts, V rows of the head, T rows of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

FAMILY_OF_ARCHITECTURE = {
    "LLaDAModelLM": "llada",
    "DreamModel": "dream",
    "LLaDAMoEModelLM": "llada-moe",
}


@dataclass(frozen=True)
class Shape:
    """What config.json says, in one vocabulary for all families.

    Attributes:
        mlp_width: inner width of a feed-forward, or of one expert.
        num_experts: 0 where the feed-forward is dense.
        num_chosen: experts that one row passes.
        rotates_in_fp32: query and key are rotated in fp32, not in the model's dtype.
        shifts_rows: position i is read from row i - 1.
    """

    family: str
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    vocab_size: int
    mask_id: int
    eps: float
    rope_theta: float
    num_experts: int = 0
    num_chosen: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    rotates_in_fp32: bool = False
    shifts_rows: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    @property
    def attention_parameters(self) -> int:
        """Elements of the four matrices of one layer's attention."""
        kv_width = self.num_kv_heads * self.head_dim
        return 2 * self.width * (self.width + kv_width)

    @property
    def mlp_parameters(self) -> int:
        """Elements of the three matrices of one feed-forward, or of one expert."""
        return 3 * self.width * self.mlp_width

    @property
    def head_parameters(self) -> int:
        """Elements of the head's matrix."""
        return self.width * self.vocab_size

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape that a config.json with the released models' keys describes.

        Raises:
            ValueError: the architecture is none of the three families'.
        """
        architecture = config["architectures"][0]
        family = FAMILY_OF_ARCHITECTURE.get(architecture)
        if family is None:
            wanted = ", ".join(FAMILY_OF_ARCHITECTURE)
            raise ValueError(f"architectures: wanted one of {wanted}, got {architecture}")
        if family == "llada":
            return cls(
                family=family,
                width=config["d_model"],
                num_layers=config["n_layers"],
                num_heads=config["n_heads"],
                num_kv_heads=config["n_kv_heads"],
                mlp_width=config["mlp_hidden_size"],
                vocab_size=config["embedding_size"],
                mask_id=config["mask_token_id"],
                eps=config["rms_norm_eps"],
                rope_theta=config["rope_theta"],
                rotates_in_fp32=config["rope_full_precision"],
            )
        has_experts = family == "llada-moe"
        return cls(
            family=family,
            width=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            mlp_width=config["expert_intermediate_size" if has_experts else "intermediate_size"],
            vocab_size=config["vocab_size"],
            mask_id=config["mask_token_id"],
            eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            num_experts=config["num_experts"] if has_experts else 0,
            num_chosen=config["num_experts_per_tok"] if has_experts else 0,
            qkv_bias=not has_experts,
            qk_norm=has_experts,
            shifts_rows=not has_experts,
        )


@dataclass(frozen=True)
class Work:
    """What one forward of several sequences must at least do."""

    weight_bytes: float
    matmul_flops: float
    attention_flops: float

    def floor_ms(self, bandwidth: float, matmul_rate: float, attention_rate: float) -> float:
        """The larger of moving the weights and computing; rates in bytes and FLOP per second."""
        moving = self.weight_bytes / bandwidth
        computing = self.matmul_flops / matmul_rate + self.attention_flops / attention_rate
        return 1000 * max(moving, computing)


def forward_work(
    shape: Shape,
    num_rows: int,
    num_sequences: int = 1,
    *,
    head_rows: int = 32,
    touched_experts: float | None = None,
    bytes_per_weight: int = 2,
) -> Work:
    """One forward of `num_sequences` sequences of `num_rows` rows, all rows through all layers.

    Args:
        head_rows: rows of one sequence whose logits are computed.
        touched_experts: experts of a layer that at least one row passes, on average; None: all.
    """
    rows = num_rows * num_sequences
    experts_read, experts_passed = 1.0, 1
    if shape.num_experts:
        experts_read = shape.num_experts if touched_experts is None else touched_experts
        experts_passed = shape.num_chosen
    router = shape.width * shape.num_experts
    layer_bytes = shape.attention_parameters + router + experts_read * shape.mlp_parameters
    layer_flops = shape.attention_parameters + router + experts_passed * shape.mlp_parameters
    head_rows_of_all = min(head_rows, num_rows) * num_sequences
    return Work(
        weight_bytes=bytes_per_weight * (shape.num_layers * layer_bytes + shape.head_parameters),
        matmul_flops=2.0
        * (rows * shape.num_layers * layer_flops + head_rows_of_all * shape.head_parameters),
        attention_flops=4.0
        * shape.num_layers
        * num_sequences
        * num_rows**2
        * shape.num_heads
        * shape.head_dim,
    )
