# SPDX-License-Identifier: Apache-2.0
"""Options of the web page: the algorithms and parameters of the served model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.request.algorithms import ALGORITHMS, algorithms_for
from vllm.diffusion.request.fields import BY_NAME, value_of
from vllm.diffusion.request.lengths import usual_block, usual_first_length
from vllm.diffusion.request.revision import limits_for

if TYPE_CHECKING:
    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.served_model import ServedModel

# Common parameters in the page's order; the parameters of the algorithm follow.
COMMON = (
    *("gen_length", "canvas", "steps", "block_length", "temperature", "cache"),
    *("cfg_scale", "remasking", "seed", "num_speculative_states"),
)
CANVASES = tuple(kind for kind in BY_NAME["canvas"].choices if kind not in ALGORITHMS)
BLOCK_CAUSAL_LENGTH = 1024  # in families where blocks after the end of the answer cost nothing
MAX_AUTO_TOKENS = 4096  # longest answer of a request that leaves the length to the server


def page_options(model: ServedModel, name: str, version: str) -> dict[str, Any]:
    """Return the controls of the page.

    Returns:
        `algorithms` by name, each with the description `commits` and with `fields`, its parameters
        and their defaults, and with `auto_length`, what the page sends if the user chooses no
        length; `end_ids` holds the tokens that end an answer; `revises` holds the fields that
        limit how much of a text changes, and is None if the model revises no texts.
    """
    family = model.family
    algorithms = algorithms_for(family)
    default = model.default_algorithm
    return {
        "version": version,
        "model": name,
        "family": family.name,
        "max_model_len": model.max_model_len,
        "end_ids": sorted(model.ids.stop),
        "revises": limits_for(family),
        "algorithm": default,
        "algorithms": {
            algorithm.name: {
                "commits": algorithm.commits,
                "fields": [_control(field, algorithm, model) for field in _fields(algorithm)],
                "auto_length": _auto_length(algorithm, model),
            }
            for algorithm in algorithms.values()
        },
    }


def _auto_length(algorithm: Algorithm, model: ServedModel) -> dict[str, Any] | None:
    """Return the canvas that the page shows first, the longest answer, and the kind of canvas.

    The first step may bring a canvas of another length. The kind is absent if the algorithm implies
    it. None in families where a length costs nothing, so that every request has one.
    """
    if model.family.is_block_causal:
        return None
    # At most half of a sequence, so that a prompt fits, too.
    longest = min(MAX_AUTO_TOKENS, model.max_model_len // 2)
    if algorithm.chooses_length:
        first = value_of(BY_NAME["initial_length"], {}, algorithm, model)
        return {"first": first, "max_tokens": longest}
    canvas = model.defaults.get("canvas")
    kind = canvas if canvas in CANVASES else "grow"
    if algorithm.blocks != "in turn" and model.default_max_tokens:
        kind = "fixed"  # It cannot grow, so it has the checkpoint's length.
    return {"first": usual_first_length(model), "max_tokens": longest, "canvas": kind}


def _fields(algorithm: Algorithm) -> list[str]:
    kind = algorithm.is_block_causal
    return [
        name
        for name in (*COMMON, *algorithm.parameters)
        if BY_NAME[name].is_used_by(algorithm.name, is_block_causal=kind)
        and not (name == "canvas" and algorithm.chooses_length)
    ]


def _control(name: str, algorithm: Algorithm, model: ServedModel) -> dict[str, Any]:
    """Describe one parameter of one algorithm; None values are left out."""
    spec = BY_NAME[name]
    choices = {"cache": algorithm.caches, "canvas": CANVASES}.get(name, spec.choices)
    control = {
        "name": name,
        "type": {int: "integer", float: "number", bool: "boolean", tuple: "list"}.get(
            spec.kind, "string"
        ),
        "doc": spec.doc,
        "default": _default(name, algorithm, model),
        "hint": spec.default_text or None,
        "minimum": spec.minimum,
        "maximum": spec.maximum,
        "choices": list(choices) or None,
    }
    return {key: value for key, value in control.items() if value is not None}


def _default(name: str, algorithm: Algorithm, model: ServedModel) -> Any:
    """Return the value that applies if none is given; None if other parameters determine it."""
    if name == "canvas" or (name == "gen_length" and not model.family.is_block_causal):
        return None
    if name == "gen_length":
        return model.default_max_tokens or min(BLOCK_CAUSAL_LENGTH, model.max_model_len // 2)
    if name == "block_length":
        return usual_block(model)
    if name == "cache":
        default = model.defaults.get(name)
        return default if default in algorithm.caches else algorithm.caches[0]
    if name == "steps":
        return model.defaults.get(name) or model.default_steps
    return value_of(BY_NAME[name], {}, algorithm, model)
