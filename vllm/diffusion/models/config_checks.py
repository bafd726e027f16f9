# SPDX-License-Identifier: Apache-2.0
"""Checks of config.json that the families share. All of them raise ModelConfigError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.core.quantisation import scheme_of, stores_experts

if TYPE_CHECKING:
    from collections.abc import Mapping


def refuse(values: Mapping[str, Any], key: str, wanted: str) -> NoReturn:
    """Refuse the value of `key`; `wanted` describes the accepted values."""
    raise ModelConfigError(key, values.get(key), wanted)


def check_positive(values: Mapping[str, Any], key: str, whole: bool = True) -> None:
    """Check that the value is a number above 0, and an integer if `whole` is true."""
    value: Any = values.get(key)
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or value <= 0:
        refuse(values, key, "a whole number of at least 1" if whole else "a number above 0")


def check_only(values: Mapping[str, Any], only: Mapping[str, bool | str]) -> None:
    """Check that each key of `only` is absent or has the given value."""
    for key, wanted in only.items():
        if values.get(key, wanted) != wanted:
            refuse(values, key, f"only {_json(wanted)} is supported")


def check_mask_id(values: Mapping[str, Any], size_key: str = "vocab_size") -> None:
    """Check that the mask token, if given, is a row of the embedding, which `size_key` counts.

    Without it in config.json, the tokenizer defines the mask token.
    """
    key = "mask_token_id"
    token, size = values.get(key), values[size_key]
    if token is not None and (type(token) is not int or not 0 <= token < size):
        refuse(values, key, f"an id from 0 to {size_key} - 1 = {size - 1}")


def head_width(
    values: Mapping[str, Any],
    width_key: str = "hidden_size",
    heads_key: str = "num_attention_heads",
    kv_heads_key: str = "num_key_value_heads",
) -> int:
    """Return the width of a head: `head_dim`, or if null the hidden size over the heads.

    The width must be even, and the number of key/value heads must divide the number of heads.
    """
    width, heads, head_dim = values[width_key], values[heads_key], values.get("head_dim")
    if head_dim is None:
        if width % (2 * heads):
            wanted = f"a divisor of {width_key} {width} that leaves an even head width"
            refuse(values, heads_key, wanted)
        head_dim = width // heads
    elif not isinstance(head_dim, int) or head_dim < 1 or head_dim % 2:
        refuse(values, "head_dim", "an even number above 0, or null")
    if heads % values[kv_heads_key]:
        refuse(values, kv_heads_key, f"a divisor of {heads_key} {heads}")
    return int(head_dim)


def check_rotary_share(values: Mapping[str, Any]) -> None:
    """Check the share of a head's rotated channels, `partial_rotary_factor` of `head_dim`."""
    check_positive(values, "partial_rotary_factor", whole=False)
    head_dim = values["head_dim"]
    rotary_dim = int(head_dim * values["partial_rotary_factor"])
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        wanted = f"a share of the head width {head_dim} that is an even number of channels"
        refuse(values, "partial_rotary_factor", wanted)


def check_rotary_dim(values: Mapping[str, Any]) -> None:
    """Check that all of a head's channels are rotated, if their number is given."""
    if values.get("rotary_dim") not in (None, values["head_dim"]):
        refuse(values, "rotary_dim", f"null, or all {values['head_dim']}, is supported")


def _json(value: bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def check_quantised_experts(values: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose experts are quantised in an unsupported format."""
    config = values.get("quantization_config")
    if config is not None and not stores_experts(scheme_of(None, config)):
        refuse(
            values,
            "quantization_config",
            "with experts only null, or fp8 with a scale a matrix or channel, is supported; a "
            "plain checkpoint runs with --quantization fp8, int4 or nf4",
        )
