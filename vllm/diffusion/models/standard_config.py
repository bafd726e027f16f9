# SPDX-License-Identifier: Apache-2.0
"""Base of configurations with the keys of transformers' own Llama and Qwen configurations."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.diffusion.models.config import DiffusionConfig
from vllm.diffusion.models.config_checks import (
    check_mask_id,
    check_only,
    check_positive,
    check_rotary_dim,
    head_width,
    refuse,
)
from vllm.diffusion.models.config_keys import check_foreign
from vllm.diffusion.models.rope_keys import read_rope

# Defaults of Qwen2's configuration class, from which several families are derived.
QWEN_DEFAULTS: dict[str, Any] = {
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
}


class StandardConfig(DiffusionConfig):
    """Configuration of a family that only sets its defaults and its unsupported options.

    An absent key takes its value in `DEFAULTS`. After construction `num_key_value_heads` and
    `head_dim` are integers, and `sliding_window` is null, because it is never in use.

    Attributes:
        DEFAULTS: defaults of the family's public configuration class.
        ONLY: options with a single supported value.
        SIZES: keys whose values are whole numbers of at least 1.
        HARMLESS: further keys of the family's files that do not affect the forward pass.
    """

    HARMLESS: ClassVar[tuple[str, ...]] = ("sliding_window",)
    DEFAULTS: ClassVar[dict[str, Any]] = {}
    ONLY: ClassVar[dict[str, bool | str]] = {"hidden_act": "silu", "use_sliding_window": False}
    SIZES: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    )

    def __init__(self, **values: Any) -> None:
        self.read_rope(values)
        if values.get("rope_theta") is None:
            values.pop("rope_theta", None)  # null means the default
        complete = {**self.DEFAULTS, **values}
        if complete["num_key_value_heads"] is None:
            complete["num_key_value_heads"] = complete["num_attention_heads"]
        check_only(complete, self.ONLY)
        check_foreign(complete, self.known_keys())
        complete["sliding_window"] = None
        for key in self.SIZES:
            check_positive(complete, key)
        for key in ("rope_theta", "rms_norm_eps"):
            check_positive(complete, key, whole=False)
        complete["head_dim"] = head_width(complete)
        self.check_more(complete)
        # Families with `partial_rotary_factor` use it instead of `rotary_dim`.
        if "partial_rotary_factor" not in self.DEFAULTS:
            check_rotary_dim(complete)
        if complete.get("weight_tying") not in (None, complete["tie_word_embeddings"]):
            refuse(complete, "weight_tying", "null, or what tie_word_embeddings says, is supported")
        super().__init__(**complete)

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        family_keys = (*cls.DEFAULTS, *cls.ONLY, *cls.SIZES, *cls.HARMLESS)
        return frozenset((*family_keys, cls.block_length_key))

    def read_rope(self, values: dict[str, Any]) -> None:
        """Check the description of rotary embeddings, and write its keys to `values`."""
        read_rope(values, None if "partial_rotary_factor" in self.DEFAULTS else 1.0)

    def check_more(self, values: dict[str, Any]) -> None:
        """Check, or complete, the keys of this family; all other keys of `values` are complete."""
        if values.get(self.block_length_key) is not None:
            check_positive(values, self.block_length_key)
        check_mask_id(values)
