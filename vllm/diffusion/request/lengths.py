# SPDX-License-Identifier: Apache-2.0
"""Lengths of a request: canvas, answer, blocks and steps.

Explicit values are applied literally, or refused with the values that would work. Defaults always
work. Nothing here imports torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.algorithms import ALGORITHMS, stride_of
from vllm.diffusion.request.request_fields import FIXED_WITH
from vllm.diffusion.request.revision import SLACK_RUNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.guided.guides import Guide
    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.request import Request
    from vllm.diffusion.request.revision import Revision
    from vllm.diffusion.request.served_model import ServedModel

DEFAULT_CANVAS = 128
DEFAULT_BLOCK = 32
DEFAULT_FIRST = 256  # first length of a canvas that grows
DEFAULT_LONGEST = 2048  # longest canvas of an algorithm that chooses the length
OFFLINE_MAX_TOKENS = 16  # upstream's default of SamplingParams.max_tokens


@dataclass(frozen=True)
class Lengths:
    """Lengths of one request, in tokens; see `FIELDS`.

    Attributes:
        steps: number of steps; None if it is unlimited.
        steps_per_block: steps of a block in block-causal families; None if the algorithm has no
            steps.
        grows: whether the canvas begins shorter than `max_tokens`.
        growth: positions by which a full canvas grows; 0 if the algorithm cannot continue on a
            longer one.
        longest: length of the longest canvas; 0 if the canvas does not grow.
    """

    canvas: int
    max_tokens: int
    block_length: int
    steps: int | None
    steps_per_block: int | None = None
    grows: bool = False
    growth: int = 0
    longest: int = 0


def usual_block(model: ServedModel) -> int:
    """Return the block length of requests that set none."""
    name = "block_length"
    own = model.defaults.get(name) or model.family.defaults.get(name)
    return own or model.block_length or DEFAULT_BLOCK


def usual_first_length(model: ServedModel) -> int:
    """Return the first length of a canvas that grows, before it is rounded to blocks.

    Without a limit the canvas has the checkpoint's length. A limit above it does not change that.
    """
    checkpoints = model.default_max_tokens or DEFAULT_FIRST
    return model.default_gen_length or min(DEFAULT_FIRST, checkpoints)


def decide_lengths(request: Request) -> Lengths:
    """Decide the lengths of a request; a format or a suffix lengthens the canvas.

    Raises:
        InvalidParameterError: naming the field and values that would work.
    """
    if request.algorithm.chooses_length:
        return _first_length(request)
    canvas, max_tokens = _canvas(request)
    is_block_causal = request.model.family.is_block_causal
    first = _first_canvas(request, canvas)
    if first is not None:
        lengths = _growing(_lengths(request, first, max_tokens), request)
    else:
        lengths = (_grid_lengths if is_block_causal else _lengths)(request, canvas, max_tokens)
    if request.revision is not None:
        _check_text(request.revision, lengths)
    suffix = request.values["suffix_ids"]
    return _with_suffix(lengths, suffix, request) if suffix else lengths


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


def _canvas(request: Request) -> tuple[int, int]:
    """Return the lengths of the canvas and of the longest answer."""
    model, room = request.model, request.room
    canvas: int | None = request.given.get("gen_length")
    max_tokens = _requested_max_tokens(request)
    if request.given.get("canvas") == "grow" and not model.family.is_block_causal:
        max_tokens = max(room, 1) if max_tokens is None else max_tokens
        canvas = max(canvas or 0, _default_canvas(request, max_tokens))
    if canvas is None:
        if max_tokens is None and request.revision is not None:
            text = len(request.revision.token_ids)
            max_tokens = _room_of_text(request, text) if ends_with_text(request) else text
        if max_tokens is None and model.default_max_tokens is not None:
            max_tokens = max(min(model.default_max_tokens, room), 1)
        canvas = _default_canvas(request, max_tokens)
    _check_room(request, canvas, max_tokens)
    if request.guide is not None:
        canvas, max_tokens = _guided_canvas(request, request.guide, canvas, max_tokens)
    return canvas, canvas if max_tokens is None else max_tokens


def _requested_max_tokens(request: Request) -> int | None:
    """Return the requested length of the longest answer, or None if there is no limit.

    If a request sets none, upstream fills in all the remaining room. If the request sets the
    canvas, the defaults of SamplingParams and of generation_config.json are not meant to limit the
    answer either.
    """
    max_tokens: int | None = request.given.get("max_tokens")
    upstreams = request.upstream_max_tokens
    if max_tokens is not None or upstreams == request.room:
        return max_tokens
    is_default = upstreams in (OFFLINE_MAX_TOKENS, request.model.default_max_tokens)
    has_length = "gen_length" in request.given or request.revision is not None
    return None if has_length and is_default else upstreams


def _room_of_text(request: Request, length: int) -> int:
    """Return the most tokens of a text of `length` tokens after it has become longer."""
    room, slack = max(request.room, 1), 0 if request.revision is None else request.revision.slack
    if request.algorithm.edits_length:
        return room
    return max(min(length + SLACK_RUNS * slack, room), length)


def ends_with_text(request: Request) -> bool:
    """Whether the answer ends where a text ends that becomes longer or shorter.

    If the request sets a length, masks follow the text.
    """
    if request.revision is None:
        return False
    if not (request.algorithm.edits_length or request.revision.slack):
        return False
    has_length = "gen_length" in request.given or _requested_max_tokens(request) is not None
    return not (has_length or request.values["ignore_eos"])


def _default_canvas(request: Request, max_tokens: int | None) -> int:
    """Return the canvas of a request that sets none.

    Full-attention families: `max_tokens` rounded up to whole default blocks. If the given block
    length does not divide a default block, whole blocks of that length are used instead. Nothing is
    rounded if only the rounding would exceed the remaining room. Block-causal families: nothing is
    rounded, and all the room is used, because later blocks cost nothing.
    """
    room = request.room
    if request.model.family.is_block_causal:
        return max(room, 1) if max_tokens is None else max_tokens
    block_length: int | None = request.given.get("block_length")
    if max_tokens is None:
        canvas = min(DEFAULT_CANVAS, max(room, 1))
        return max(1, canvas // block_length) * block_length if block_length else canvas
    unit = DEFAULT_BLOCK
    if block_length is not None and DEFAULT_BLOCK % block_length != 0:
        unit = block_length
    rounded = -(-max_tokens // unit) * unit
    ends_within_block = max_tokens % (block_length or 1) > 0 and not _may_grow(request)
    if rounded > room >= max_tokens and not ends_within_block:
        return max_tokens
    return rounded


def _may_grow(request: Request) -> bool:
    """Whether the canvas may begin shorter than the longest answer: if only the limit is given."""
    given = request.given
    has_length = "gen_length" in given or _requested_max_tokens(request) is None
    is_fixed = has_length or any(given.get(name) for name in FIXED_WITH)
    default = "fixed" if is_fixed else request.model.defaults.get("canvas", "grow")
    return not request.model.family.is_block_causal and given.get("canvas", default) == "grow"


def _first_canvas(request: Request, canvas: int) -> int | None:
    """Return the first length of a canvas that grows to `canvas`; None if the canvas is fixed."""
    model = request.model
    usual = model.default_gen_length or DEFAULT_FIRST
    if model.default_gen_length is None and _fills_in_turn(request):
        usual = _default_canvas(request, usual_first_length(model))
    block: int = request.given.get("block_length") or model.defaults.get("block_length", 1)
    first: int = request.given.get("gen_length", -(-usual // block) * block)
    return first if _may_grow(request) and first < canvas else None


def _fills_in_turn(request: Request) -> bool:
    return request.algorithm.blocks == "in turn"


def _growing(lengths: Lengths, request: Request) -> Lengths:
    """Return the lengths of a canvas that grows, if the algorithm fills blocks one after the other.

    The longest canvas consists of whole blocks, unless the last one exceeds the remaining room.
    """
    if not _fills_in_turn(request):
        return replace(lengths, max_tokens=min(lengths.max_tokens, lengths.canvas), grows=True)
    block = lengths.block_length
    growth = -(-request.values["growth"] // block) * block
    longest = min(-(-lengths.max_tokens // block) * block, request.room)
    return replace(lengths, grows=True, growth=growth, longest=longest)


def _first_length(request: Request) -> Lengths:
    """Decide the first and the longest canvas for an algorithm that chooses the length."""
    given, model, room = request.given, request.model, request.room
    max_tokens = _requested_max_tokens(request)
    if max_tokens is None:
        max_tokens = max(min(model.default_max_tokens or DEFAULT_LONGEST, room), 1)
    first = given.get("gen_length", request.values["initial_length"])
    if given.get("initial_length", first) != first:
        accepted = f"wanted gen_length, {first}, or one of the two"
        raise InvalidParameterError("initial_length", given["initial_length"], accepted)
    _check_room(request, max_tokens, max_tokens)
    # The end tokens behind the first canvas must not end the answer before its fewest tokens.
    first = min(max(first, request.values["min_tokens"]), max_tokens)
    block_length = given.get("block_length", usual_block(model))
    return Lengths(first, max_tokens, block_length, None)


def _check_room(request: Request, canvas: int, max_tokens: int | None) -> None:
    """Refuse an answer longer than its canvas, and a canvas that exceeds the remaining room."""
    if max_tokens is not None and max_tokens > canvas:
        raise InvalidParameterError(
            "max_tokens", max_tokens, f"wanted at most the canvas, gen_length: {canvas}"
        )
    if canvas > request.room:
        is_given = request.given.get("gen_length") == canvas
        name = "gen_length" if is_given else "max_tokens"
        raise InvalidParameterError(
            name,
            request.given.get(name, canvas),
            f"a prompt of {len(request.prompt)} tokens and a canvas of {canvas} exceed "
            f"max_model_len {request.model.max_model_len}",
        )


def _guided_canvas(
    request: Request, guide: Guide, canvas: int, max_tokens: int | None
) -> tuple[int, int | None]:
    """Lengthen a default canvas to twice the shortest answer of a format, in whole default blocks.

    Nothing is changed if the request sets a length, or if no answer fits.
    """
    room, model = request.room, request.model
    is_open = request.upstream_max_tokens in (None, room, model.default_max_tokens)
    usual = -(-2 * guide.least_tokens // DEFAULT_BLOCK) * DEFAULT_BLOCK
    has_length = not is_open or {"gen_length", "max_tokens"} & request.given.keys()
    if has_length or canvas >= usual or room < guide.least_tokens:
        return canvas, max_tokens
    return min(usual, room), None


def _lengths(request: Request, canvas: int, max_tokens: int) -> Lengths:
    """Decide blocks and steps in full-attention families."""
    algorithm, model = request.algorithm, request.model
    steps = request.given.get("steps")
    is_usual = algorithm.name == model.family.default_algorithm
    family_steps = model.family.defaults.get("steps") if is_usual else None
    usual_steps = model.defaults.get("steps", model.default_steps) or family_steps or canvas
    if algorithm.blocks == "none":
        return Lengths(canvas, max_tokens, canvas, steps or usual_steps)
    given_length = request.given.get("block_length")
    usual = usual_block(model)
    if algorithm.ends_short:
        return Lengths(canvas, max_tokens, given_length or min(usual, canvas), steps)
    in_turn = algorithm.blocks == "in turn"
    block_length = _block_length(given_length, usual, canvas, steps if in_turn else None)
    num_blocks = canvas // block_length
    if algorithm.pace == "steps":
        steps = _quota_steps(steps, num_blocks, usual_steps)
    elif in_turn and steps is not None and steps < num_blocks:
        raise InvalidParameterError(
            "steps", steps, f"wanted at least one per block: {num_blocks} or more"
        )
    return Lengths(canvas, max_tokens, block_length, steps)


def _grid_lengths(request: Request, canvas: int, max_tokens: int) -> Lengths:
    """Decide blocks and steps in block-causal families, where any length of block is allowed."""
    algorithm, model = request.algorithm, request.model
    block_length = _grid_block(request) if algorithm.blocks != "none" else _rows(request)
    lengths = Lengths(canvas, max_tokens, block_length, None)
    if algorithm.pace != "steps":
        return lengths
    num_blocks = -(-canvas // block_length)
    per_block = _steps_per_block(request, num_blocks) or block_length
    if model.family.caps_steps:
        per_block = min(per_block, canvas)
    return replace(lengths, steps=per_block * num_blocks, steps_per_block=per_block)


def _rows(request: Request) -> int:
    """Return the most rows of a forward pass of an algorithm without blocks."""
    if "stride" not in request.algorithm.parameters:
        return 1
    # The latest token, stride - 1 drafts and stride - 1 masks.
    return 2 * stride_of(request) - 1


def _grid_block(request: Request) -> int:
    """Return a block length that the checkpoint supports, in place of an unsuitable default."""
    name, model = "block_length", request.model
    block_length: int = request.given.get(name, usual_block(model))
    longest = model.block_length or DEFAULT_BLOCK
    if model.family.is_open and block_length > longest:
        wanted = f"wanted at most the length of the checkpoint's canvas, {longest}"
        raise InvalidParameterError(name, block_length, wanted)
    if block_length % model.block_unit == 0:
        return block_length
    if name not in request.given:
        return model.block_length or model.block_unit
    wanted = f"wanted a multiple of {model.block_unit}, the checkpoint's block_size"
    raise InvalidParameterError(name, block_length, wanted)


def _steps_per_block(request: Request, num_blocks: int) -> int | None:
    """Return the requested steps per block; both of the request's names override the server's."""
    given, model = request.given, request.model
    per_block, steps = given.get("steps_per_block"), given.get("steps")
    if steps is not None:
        steps = _quota_steps(steps, num_blocks, steps) // num_blocks
        if per_block not in (None, steps):
            raise InvalidParameterError(
                "steps_per_block",
                per_block,
                f"it contradicts steps: {given['steps']} in {num_blocks} blocks are {steps} each",
            )
    requested: int | None = per_block or steps or model.defaults.get("steps_per_block")
    default_steps = model.defaults.get("steps", model.default_steps)
    if requested is None and default_steps is not None:
        requested = _quota_steps(None, num_blocks, default_steps) // num_blocks
    return requested or model.family.defaults.get("steps_per_block")


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
    """Return a multiple of the number of blocks, by default near `default_steps`."""
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


def _with_suffix(lengths: Lengths, suffix: Sequence[int], request: Request) -> Lengths:
    """Lengthen the canvas by a suffix, or refuse a suffix that it cannot have."""
    model, ids = request.model, request.model.ids
    if model.family.is_block_causal:
        wanted = f"wanted none: a model of family {model.family.name} does not see what follows"
        raise InvalidParameterError("suffix_ids", list(suffix), wanted)
    if max(suffix) >= model.vocab_size or ids.mask in suffix or ids.eos is None:
        wanted = f"wanted token ids from 0 to {model.vocab_size - 1} without the mask token"
        wanted = "the checkpoint has no end-of-sequence token" if ids.eos is None else wanted
        raise InvalidParameterError("suffix_ids", list(suffix), wanted)
    longer = _lengthened(lengths, request.algorithm, lengths.max_tokens + len(suffix))
    if longer.canvas > request.room:
        raise InvalidParameterError(
            "suffix_ids",
            list(suffix),
            f"a prompt of {len(request.prompt)} tokens and a canvas of {longer.canvas} with them "
            f"exceed max_model_len {model.max_model_len}",
        )
    return longer


def _check_text(revision: Revision, lengths: Lengths) -> None:
    """Refuse a text that is longer than the answer."""
    number = len(revision.token_ids)
    if number > lengths.max_tokens:
        raise InvalidParameterError(
            "canvas_text",
            f"{number} tokens",
            f"wanted at most max_tokens and gen_length, {lengths.max_tokens}",
        )


def _lengthened(lengths: Lengths, algorithm: Algorithm, canvas: int) -> Lengths:
    """Return lengths with a longer canvas, and the same block length and steps per block."""
    block = lengths.block_length
    if algorithm.blocks == "none":
        return replace(lengths, canvas=canvas, block_length=canvas)
    if algorithm.ends_short:
        return replace(lengths, canvas=canvas)
    num_blocks = -(-canvas // block)
    steps = lengths.steps
    if algorithm.pace == "steps" and steps is not None:
        steps = steps // (lengths.canvas // block) * num_blocks
    return replace(lengths, canvas=num_blocks * block, steps=steps)
