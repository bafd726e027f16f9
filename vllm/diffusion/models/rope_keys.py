# SPDX-License-Identifier: Apache-2.0
"""Descriptions of rotary embeddings in config.json: read, or refused by key.

transformers 4 has `rope_theta` and, for scaled frequencies, `rope_scaling`. transformers 5 has both
in `rope_parameters`, in one description for all layers or in one for each type of layer; the type
of our layers is "full_attention".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.models.config_checks import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DESCRIPTIONS = ("rope_scaling", "rope_parameters")
ROPE_KEYS = ("rope_theta", "partial_rotary_factor", *DESCRIPTIONS)
OUR_LAYERS = "full_attention"  # a layer type of transformers

_OF_A_TYPE = ("rope_type", "type")
_MOVED = ("rope_theta", "partial_rotary_factor")  # separate keys in transformers 4
_NEUTRAL = {"factor": (None, 1), "original_max_position_embeddings": ()}


def read_rope(values: dict[str, Any], default_partial: float | None = 1.0) -> None:
    """Replace descriptions of the rotary embedding in `values` by separate keys.

    These are `rope_theta` and `partial_rotary_factor`, if a description has them.

    Args:
        values: keys of config.json; changed.
        default_partial: the only supported share of rotated channels of a head; None if the family
            reads the share.

    Raises:
        ModelConfigError: a description has something unsupported, or two keys disagree.
    """
    for key in DESCRIPTIONS:
        described = description(values, key)
        _check_plain(values, key, described)
        for name in _MOVED:
            _move(values, key, name, described.get(name))
    for key in DESCRIPTIONS:
        values.pop(key, None)
    partial = values.get("partial_rotary_factor")
    if default_partial is not None and partial not in (None, default_partial):
        refuse(values, "partial_rotary_factor", f"only {default_partial:g} is supported")


def description(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the description under a key: the one of our layers if there is one for each type.

    Raises:
        ModelConfigError: it is no description, or has none for our layers.
    """
    rope = values.get(key)
    if rope is None:
        return {}
    if not isinstance(rope, dict):
        refuse(values, key, "an object, or null, is supported")
    nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if not nested:
        return {name: value for name, value in rope.items() if value is not None}
    our_rope = nested.get(OUR_LAYERS)
    shared = {name: rope[name] for name in rope.keys() - nested.keys()}
    is_like = our_rope is not None and all(
        value is None or our_rope.get(name, value) == value for name, value in shared.items()
    )
    if our_rope is None or not is_like:
        refuse(values, key, f'one description, or one of "{OUR_LAYERS}", is supported')
    return {name: value for name, value in {**shared, **our_rope}.items() if value is not None}


def kind_of(described: Mapping[str, Any]) -> Any:
    """Return the type of a description; without a type it is plain, as in transformers 5."""
    kinds = {described[name] for name in _OF_A_TYPE if name in described}
    return kinds.pop() if len(kinds) == 1 else ("default" if not kinds else None)


def _check_plain(values: Mapping[str, Any], key: str, described: Mapping[str, Any]) -> None:
    others = set(_unread(described))
    if kind_of(described) != "default" or others:
        about = f" without {', '.join(sorted(others))}" if others else ""
        refuse(values, key, f'only null, or rope_type "default"{about}, is supported')


def _unread(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a description that a plain rotary embedding does not have."""
    for name, value in described.items():
        if name in (*_OF_A_TYPE, *_MOVED):
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None or (neutral and value not in neutral):
            yield name


def _move(values: dict[str, Any], key: str, name: str, described: Any) -> None:
    """Set a key that a description gives; refuse a different value."""
    if described is None:
        return
    current = values.get(name)
    if current is not None and current != described:
        refuse(values, name, f"the {described!r} of {key}, or null, is supported")
    values[name] = described
