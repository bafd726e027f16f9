# SPDX-License-Identifier: Apache-2.0
"""Lengths of a request: canvas, answer, blocks and steps.

Explicit values are applied literally, or refused with the values that would work. Defaults always
work. Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.served_model import ServedModel

DEFAULT_CANVAS = 128
DEFAULT_BLOCK = 32
OFFLINE_MAX_TOKENS = 16  # upstream's default of SamplingParams.max_tokens


@dataclass(frozen=True)
class Lengths:
    """Lengths of one request, in tokens; see `FIELDS`.

    Attributes:
        steps: number of steps; None if it is unlimited.
        steps_per_block: steps of a block in block-causal families; None if the algorithm has no
            steps.
    """

    canvas: int
    max_tokens: int
    block_length: int
    steps: int | None
    steps_per_block: int | None = None


def decide_lengths(
    request: Mapping[str, Any],
    algorithm: Algorithm,
    model: ServedModel,
    prompt_length: int,
    *,
    upstream_max_tokens: int | None,
) -> Lengths:
    """Decide the lengths of a request.

    Args:
        request: values by canonical name.
        algorithm: the decoding algorithm.
        model: the served model.
        prompt_length: tokens of the prompt.
        upstream_max_tokens: a limit that upstream may have set.

    Raises:
        InvalidParameterError: naming the field and values that would work.
    """
    if model.family.is_block_causal:
        return _grid_lengths(request, algorithm, model, prompt_length, upstream_max_tokens)
    canvas, max_tokens = _canvas(request, upstream_max_tokens, model, prompt_length)
    steps = request.get("steps")
    is_usual = algorithm.name == model.family.default_algorithm
    family_steps = model.family.defaults.get("steps") if is_usual else None
    usual_steps = model.defaults.get("steps", model.default_steps) or family_steps or canvas
    if algorithm.blocks == "none":
        return Lengths(canvas, max_tokens, canvas, steps or usual_steps)
    length_asked = request.get("block_length")
    usual_block = model.defaults.get("block_length", DEFAULT_BLOCK)
    if algorithm.ends_short:
        return Lengths(canvas, max_tokens, length_asked or min(usual_block, canvas), steps)
    in_turn = algorithm.blocks == "in turn"
    block_length = _block_length(length_asked, usual_block, canvas, steps if in_turn else None)
    num_blocks = canvas // block_length
    if algorithm.pace == "steps":
        steps = _quota_steps(steps, num_blocks, usual_steps)
    elif in_turn and steps is not None and steps < num_blocks:
        raise InvalidParameterError(
            "steps", steps, f"wanted at least one per block: {num_blocks} or more"
        )
    return Lengths(canvas, max_tokens, block_length, steps)


def with_suffix(lengths: Lengths, algorithm: Algorithm, suffix_length: int) -> Lengths:
    """Return lengths with a canvas that has room for a suffix after the longest answer.

    Block lengths and the steps of each block are unchanged.
    """
    canvas, block = lengths.max_tokens + suffix_length, lengths.block_length
    if algorithm.blocks == "none":
        return replace(lengths, canvas=canvas, block_length=canvas)
    if algorithm.ends_short:
        return replace(lengths, canvas=canvas)
    num_blocks = -(-canvas // block)
    steps = lengths.steps
    if algorithm.pace == "steps" and steps is not None:
        steps = steps // (lengths.canvas // block) * num_blocks
    return replace(lengths, canvas=num_blocks * block, steps=steps)


def forwards_saved(params: DiffusionParams, num_forwards: int, num_committed: int) -> int:
    """Return the number of forward passes that a finished request did not need.

    If the number of steps sets the pace, this counts all steps that were not run, because the
    answer was complete or because they would have committed nothing. Otherwise the number is
    unknown, so the lower bound is returned: one per block that was never begun, or one in total if
    blocks are decoded together. In block-causal families, blocks that were never begun would cost
    nothing, so only steps of begun blocks count. A likelihood request commits nothing and saves
    none.
    """
    if not params.num_open:
        return 0
    if params.is_block_causal:
        num_begun = -(-num_committed // params.block_length)
        return max(0, (params.steps_per_block or 0) * num_begun - num_forwards)
    algorithm = ALGORITHMS[params.algorithm]
    num_blocks = -(-params.num_open // params.block_length)
    if algorithm.pace == "steps" and params.steps is not None:
        return max(0, params.steps // params.num_blocks * num_blocks - num_forwards)
    if algorithm.blocks == "in turn":
        return num_blocks - -(-num_committed // params.block_length)
    return int(num_committed < params.num_open)


def _canvas(
    request: Mapping[str, Any],
    upstream_max_tokens: int | None,
    model: ServedModel,
    prompt_length: int,
) -> tuple[int, int]:
    """Return the lengths of the canvas and of the longest answer."""
    room = model.max_model_len - prompt_length
    canvas: int | None = request.get("gen_length")
    block_length: int | None = request.get("block_length")
    max_tokens = _requested_max_tokens(request, upstream_max_tokens, room, model)
    if canvas is None:
        if max_tokens is None and model.default_max_tokens is not None:
            max_tokens = min(model.default_max_tokens, max(room, 1))
        if max_tokens is None:
            canvas = _whole_blocks_within(min(DEFAULT_CANVAS, max(room, 1)), block_length)
        else:
            canvas = _canvas_for(max_tokens, room, block_length)
    _check_room(request, canvas, max_tokens, model, prompt_length)
    return canvas, canvas if max_tokens is None else max_tokens


def _check_room(
    request: Mapping[str, Any],
    canvas: int,
    max_tokens: int | None,
    model: ServedModel,
    prompt_length: int,
) -> None:
    """Refuse an answer longer than its canvas, and a canvas that exceeds the remaining room."""
    if max_tokens is not None and max_tokens > canvas:
        raise InvalidParameterError(
            "max_tokens", max_tokens, f"wanted at most the canvas, gen_length: {canvas}"
        )
    if canvas > model.max_model_len - prompt_length:
        name = "gen_length" if "gen_length" in request else "max_tokens"
        raise InvalidParameterError(
            name,
            request.get(name, canvas),
            f"a prompt of {prompt_length} tokens and a canvas of {canvas} exceed "
            f"max_model_len {model.max_model_len}",
        )


def _requested_max_tokens(
    request: Mapping[str, Any], upstreams: int | None, room: int, model: ServedModel
) -> int | None:
    """Return the requested length of the longest answer, or None if there is no limit.

    If a request sets none, upstream fills in all the remaining room. If the request sets the
    canvas, the defaults of SamplingParams and of generation_config.json are not meant to limit the
    answer either.
    """
    max_tokens: int | None = request.get("max_tokens")
    if max_tokens is not None or upstreams == room:
        return max_tokens
    has_canvas = request.get("gen_length") is not None
    is_default = upstreams in (OFFLINE_MAX_TOKENS, model.default_max_tokens)
    return None if has_canvas and is_default else upstreams


def _grid_lengths(
    request: Mapping[str, Any],
    algorithm: Algorithm,
    model: ServedModel,
    prompt_length: int,
    upstream_max_tokens: int | None,
) -> Lengths:
    """Decide the lengths in block-causal families.

    Any length of answer and block is allowed, because later blocks cost nothing.
    """
    room = model.max_model_len - prompt_length
    canvas = request.get("gen_length")
    max_tokens = _requested_max_tokens(request, upstream_max_tokens, room, model)
    if canvas is None:
        default = room if model.default_max_tokens is None else min(model.default_max_tokens, room)
        canvas = max(default, 1) if max_tokens is None else max_tokens
    _check_room(request, canvas, max_tokens, model, prompt_length)
    block_length = 1 if algorithm.blocks == "none" else _grid_block(request, model)
    lengths = Lengths(canvas, canvas if max_tokens is None else max_tokens, block_length, None)
    if algorithm.pace != "steps":
        return lengths
    num_blocks = -(-canvas // block_length)
    per_block = _steps_per_block(request, model, num_blocks) or block_length
    if model.family.caps_steps:
        per_block = min(per_block, canvas)
    return replace(lengths, steps=per_block * num_blocks, steps_per_block=per_block)


def _grid_block(request: Mapping[str, Any], model: ServedModel) -> int:
    """Return a block length that the checkpoint supports; replace an unsuitable server-wide
    default.
    """
    block_length = _first_given("block_length", request, model) or DEFAULT_BLOCK
    if block_length % model.block_unit == 0:
        return block_length
    if request.get("block_length") is None:
        return model.block_length or model.block_unit
    raise InvalidParameterError(
        "block_length",
        block_length,
        f"wanted a multiple of {model.block_unit}, the checkpoint's block_size",
    )


def _first_given(name: str, request: Mapping[str, Any], model: ServedModel) -> int | None:
    """Return a length from the request, else from the server, the checkpoint or its family."""
    of_model = {"block_length": model.block_length}.get(name)
    defaults = model.defaults.get(name), of_model, model.family.defaults.get(name)
    values = request.get(name), *defaults
    return next((value for value in values if value is not None), None)


def _steps_per_block(request: Mapping[str, Any], model: ServedModel, num_blocks: int) -> int | None:
    """Return the requested steps per block; both of the request's names override the server's."""
    per_block, steps = request.get("steps_per_block"), request.get("steps")
    if steps is not None:
        steps = _quota_steps(steps, num_blocks, steps) // num_blocks
        if per_block not in (None, steps):
            raise InvalidParameterError(
                "steps_per_block",
                per_block,
                f"it contradicts steps: {request['steps']} in {num_blocks} blocks are {steps} each",
            )
    steps_asked: int | None = per_block or steps or model.defaults.get("steps_per_block")
    default_steps = model.defaults.get("steps", model.default_steps)
    if steps_asked is None and default_steps is not None:
        steps_asked = _quota_steps(None, num_blocks, default_steps) // num_blocks
    return steps_asked or model.family.defaults.get("steps_per_block")


def _whole_blocks_within(length: int, block_length: int | None) -> int:
    if block_length is None:
        return length
    return max(1, length // block_length) * block_length


def _canvas_for(max_tokens: int, room: int, block_length: int | None) -> int:
    """Return the canvas of an answer: `max_tokens` rounded up to whole default blocks.

    If the given block length does not divide a default block, whole blocks of that length are used
    instead. Nothing is rounded if only the rounding would exceed the remaining room.
    """
    unit = DEFAULT_BLOCK
    if block_length is not None and DEFAULT_BLOCK % block_length != 0:
        unit = block_length
    rounded = -(-max_tokens // unit) * unit
    if rounded > room >= max_tokens and max_tokens % (block_length or 1) == 0:
        return max_tokens
    return rounded


def _block_length(given: int | None, default_length: int, canvas: int, steps: int | None) -> int:
    if given is not None:
        if canvas % given:
            raise InvalidParameterError(
                "block_length",
                given,
                f"wanted a divisor of the canvas, {canvas}: {_near_divisors(canvas, given)}",
            )
        return given
    if canvas % default_length == 0 and (steps is None or steps % (canvas // default_length) == 0):
        return default_length
    return canvas


def _quota_steps(given: int | None, num_blocks: int, default_steps: int) -> int:
    """Return a multiple of the number of blocks, near the default; refuse a value that is no
    multiple.
    """
    if given is None:
        nearest = (2 * default_steps + num_blocks) // (2 * num_blocks)
        return max(1, nearest) * num_blocks
    if given % num_blocks:
        below = given // num_blocks * num_blocks
        options = [n for n in (below, below + num_blocks) if n > 0]
        raise InvalidParameterError(
            "steps",
            given,
            f"wanted a multiple of the number of blocks ({num_blocks}), "
            f"for instance {' or '.join(map(str, options))}",
        )
    return given


def _near_divisors(number: int, wanted: int, count: int = 8) -> str:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    nearest = sorted(divisors, key=lambda n: (abs(n - wanted), n))[:count]
    return ", ".join(map(str, sorted(nearest)))
