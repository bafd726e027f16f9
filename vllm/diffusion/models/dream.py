# SPDX-License-Identifier: Apache-2.0
"""Dream (Ye et al. 2025, arXiv:2508.15487), and checkpoints of the same architecture.

A Qwen2 transformer without its causal mask: grouped heads, biases on queries, keys and values,
and rotary tables in the model dtype. The logits of row i predict the token at position i + 1;
they are computed as they are, and whoever reads them reads the row before (`Family.logit_shift`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config import Architecture, DiffusionConfig
from vllm.diffusion.models.config_checks import (
    check_id,
    check_only,
    check_positive,
    head_width,
    plain_rope_theta,
)


class DreamConfig(DiffusionConfig):
    """config.json of Dream.

    A key that is absent takes the default of the public configuration class. After construction
    `num_key_value_heads` and `head_dim` are integers, and `sliding_window` is null, as it is never
    in use.

    Raises:
        ModelConfigError: naming the key, its value and what would be accepted.
    """

    model_type: ClassVar[str] = "Dream"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "eos_token_id": 151643,
        "pad_token_id": 151643,
        "mask_token_id": 151666,
    }

    if TYPE_CHECKING:
        max_position_embeddings: int
        eos_token_id: int
        pad_token_id: int
        mask_token_id: int

    def __init__(self, **values: Any) -> None:
        theta = plain_rope_theta(values)
        complete = {**self.DEFAULTS, **({} if theta is None else {"rope_theta": theta}), **values}
        if complete["num_key_value_heads"] is None:
            complete["num_key_value_heads"] = complete["num_attention_heads"]
        check_only(complete, {"hidden_act": "silu", "use_sliding_window": False})
        complete["sliding_window"] = None
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        for key in (*sizes, "num_attention_heads", "num_key_value_heads"):
            check_positive(complete, key)
        check_positive(complete, "max_position_embeddings")
        for key in ("rope_theta", "rms_norm_eps"):
            check_positive(complete, key, whole=False)
        complete["head_dim"] = head_width(complete)
        check_id(complete, "mask_token_id", "vocab_size")
        super().__init__(**complete)

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(has_qkv_bias=True)
