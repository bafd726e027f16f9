# SPDX-License-Identifier: Apache-2.0
"""config.json of Dream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.configs.base import DiffusionConfig
from vllm.diffusion.models.configs.checks import (
    check_heads,
    check_id,
    check_only,
    check_positive,
    plain_rope_theta,
)


class DreamConfig(DiffusionConfig):
    """config.json of Dream (arXiv:2508.15487) and of models that share its architecture.

    A key that is absent takes the default of the public configuration class. After construction
    `num_key_value_heads` is an integer, and `sliding_window` is null, as it is never in use.

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
        vocab_size: int
        hidden_size: int
        intermediate_size: int
        num_hidden_layers: int
        num_attention_heads: int
        num_key_value_heads: int
        max_position_embeddings: int
        rms_norm_eps: float
        tie_word_embeddings: bool
        rope_theta: float
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
        check_heads(complete)
        check_id(complete, "mask_token_id", "vocab_size")
        complete.pop("head_dim", None)
        super().__init__(**complete)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of one attention head: all of them."""
        return self.head_dim
