# SPDX-License-Identifier: Apache-2.0
"""How config.json describes rotary embeddings: read, or refused by key.

transformers 4 has `rope_theta` and, for scaled frequencies, `rope_scaling`. transformers 5 has both
in `rope_parameters`, in one description for all layers or in one for each type of layer, of which
ours is "full_attention".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.diffusion.models.config_checks import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DESCRIPTIONS = ("rope_scaling", "rope_parameters")
ROPE_KEYS = ("rope_theta", "partial_rotary_factor", *DESCRIPTIONS)
OUR_LAYERS = "full_attention"  # a type of layers, in transformers' words

_OF_A_TYPE = ("rope_type", "type")
_MOVED = ("rope_theta", "partial_rotary_factor")  # keys of their own in transformers 4
_NEUTRAL = {"factor": (None, 1), "original_max_position_embeddings": ()}


class Rope(NamedTuple):
    """What config.json says of the rotary embedding; None for what it leaves open."""

    theta: Any = None
    partial: Any = None


def read_rope(values: dict[str, Any], default_partial: float | None = 1.0) -> Rope:
    """Take the description of the rotary embedding out of `values`.

    `rope_theta` and `partial_rotary_factor` are set in `values` where they stand in a description.

    Args:
        values: keys of config.json; changed.
        default_partial: the only share of a head's channels that may be rotated; None where the
            family reads it.

    Raises:
        ModelConfigError: a description has what no forward of ours has, or two keys disagree.
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
    return Rope(values.get("rope_theta"), partial)


def description(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the description under a key, that of our layers if there is one for each type.

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
    """Return the type of a description; what names none is plain, as in transformers 5."""
    kinds = {described[name] for name in _OF_A_TYPE if name in described}
    return kinds.pop() if len(kinds) == 1 else ("default" if not kinds else None)


def _check_plain(values: Mapping[str, Any], key: str, described: Mapping[str, Any]) -> None:
    others = set(_unread(described))
    if kind_of(described) != "default" or others:
        about = f" without {', '.join(sorted(others))}" if others else ""
        refuse(values, key, f'only null, or rope_type "default"{about}, is supported')


def _unread(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a description that no plain rotary embedding has."""
    for name, value in described.items():
        if name in (*_OF_A_TYPE, *_MOVED):
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None or (neutral and value not in neutral):
            yield name


def _move(values: dict[str, Any], key: str, name: str, described: Any) -> None:
    """Set a key that a description gives; one that says something else is refused."""
    if described is None:
        return
    given = values.get(name)
    if given is not None and given != described:
        refuse(values, name, f"the {described!r} of {key}, or null, is supported")
    values[name] = described
