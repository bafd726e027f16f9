# SPDX-License-Identifier: Apache-2.0
"""The parameters of a request: one table, and the rules that turn a request into a decision.

`FIELDS` is the only list of parameters: validation, aliases, HTTP schemas and documentation are
made from it. `resolve` takes what a request gave (under any accepted spelling), the model and the
prompt length, and returns a `DiffusionParams` in which nothing is left open. Explicit values are
taken literally or refused with the values that would work; defaults always work.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion.errors import InvalidParameterError, ServerConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.diffusion.families import Family

DEFAULT_CANVAS = 128
DEFAULT_BLOCK = 32
OFFLINE_MAX_TOKENS = 16  # upstream's default of SamplingParams.max_tokens
SEED_BITS = 64

ALGORITHMS: tuple[str, ...] = ("semi_ar", "threshold")
REMASKING: tuple[str, ...] = ("low_confidence", "random")
CACHES: tuple[str, ...] = ("none", "prefix", "dual")
CONFIDENCE_DTYPES: tuple[str, ...] = ("float32", "float64", "logits")

# A key of SamplingParams.extra_args that is upstream's own and harmless. Those of its KV cache
# connectors are unknown parameters here: there is no such cache.
RESERVED_EXTRA_ARGS = frozenset({"kv_cache_report_mode"})


@dataclass(frozen=True)
class Field:
    """One request parameter.

    Attributes:
        name: canonical name.
        kind: int, float, bool or str.
        doc: one line for users.
        default: the default as text for documentation (defaults that depend on other values are
            computed by `resolve`).
        minimum: smallest accepted number.
        choices: accepted strings.
        aliases: other spellings.
        algorithms: the algorithms that use it; empty means all.
        server_wide: may also be given as a server-wide default.
    """

    name: str
    kind: type
    doc: str
    default: str
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    server_wide: bool = False


FIELDS: tuple[Field, ...] = (
    Field(
        "algorithm",
        str,
        "decoding algorithm: which candidates are committed in a step",
        "semi_ar (threshold when `threshold` is given)",
        choices=ALGORITHMS,
        server_wide=True,
    ),
    Field(
        "remasking",
        str,
        "score of a candidate: its probability, or a random number",
        "low_confidence",
        choices=REMASKING,
        server_wide=True,
    ),
    Field(
        "cache",
        str,
        "reuse of keys and values between steps",
        "none",
        choices=CACHES,
        server_wide=True,
    ),
    Field(
        "gen_length",
        int,
        "length of the canvas in tokens; it is model input, not only a limit",
        "max_tokens rounded up to whole blocks of 32, else 128",
        minimum=1,
        aliases=("output_length",),
    ),
    Field(
        "max_tokens",
        int,
        "longest answer in tokens; cuts the answer, never the canvas",
        "the canvas",
        minimum=1,
        aliases=("max_new_tokens",),
    ),
    Field(
        "steps",
        int,
        "denoise steps of the whole canvas; semi_ar: a multiple of the number of blocks; "
        "threshold: an upper bound",
        "one per canvas token",
        minimum=1,
        aliases=("num_denoising_steps",),
        server_wide=True,
    ),
    Field(
        "block_length",
        int,
        "tokens per block, filled from left to right; divides the canvas",
        "32 where it divides the canvas, else the whole canvas",
        minimum=1,
        aliases=("block_size", "sub_block_size"),
        server_wide=True,
    ),
    Field("temperature", float, "scale of the Gumbel noise; 0 is greedy", "0", minimum=0),
    Field(
        "cfg_scale",
        float,
        "classifier-free guidance; above 0 a second, prompt-masked sequence is run",
        "0",
        minimum=0,
        server_wide=True,
    ),
    Field(
        "threshold",
        float,
        "confidence from which a candidate is committed",
        "0.9",
        algorithms=("threshold",),
        server_wide=True,
    ),
    Field("logits_eos_inf", bool, "never predict the end-of-sequence token", "false"),
    Field(
        "confidence_eos_eot_inf",
        bool,
        "commit end-of-sequence and end-of-turn tokens only after every other candidate",
        "false",
    ),
    Field(
        "confidence_dtype",
        str,
        "precision of the confidence; `logits` is the model's own",
        "float32",
        choices=CONFIDENCE_DTYPES,
        server_wide=True,
    ),
    Field("mask_id", int, "the model's mask token; any other value is refused", "the model's"),
    Field("ignore_eos", bool, "no token ends the answer; the whole canvas is returned", "false"),
    Field("allow_infill", bool, "fill mask tokens of the prompt too", "false"),
    Field("min_tokens", int, "not supported; only 0 is accepted", "0", minimum=0),
    Field("seed", int, "seed of the request's random numbers", "drawn at random"),
    Field(
        "force_single_batch", bool, "run the request alone in its steps", "false", server_wide=True
    ),
)

BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}
CANONICAL: dict[str, str] = {spelling: f.name for f in FIELDS for spelling in (f.name, *f.aliases)}


@dataclass(frozen=True)
class SpecialIds:
    """Token ids of one checkpoint that decoding must know.

    Attributes:
        mask: the mask token.
        eos: end of sequence; None where the checkpoint has none.
        eot: end of turn; None where the tokenizer has none.
        stop: every id that ends an answer (eos, eot and those of generation_config.json).
    """

    mask: int
    eos: int | None
    eot: int | None
    stop: frozenset[int]


@dataclass(frozen=True)
class ServedModel:
    """What the rules below must know of the model being served.

    Attributes:
        family: the model's family.
        ids: its special token ids.
        max_model_len: longest prompt plus canvas, in tokens.
        vocab_size: rows of the embedding; prompt ids are below it.
        default_max_tokens: max_new_tokens of generation_config.json, if given.
        defaults: server-wide defaults under canonical names.
    """

    family: Family
    ids: SpecialIds
    max_model_len: int
    vocab_size: int
    default_max_tokens: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DiffusionParams:
    """A request's parameters with every default filled in; the fields are those of `FIELDS`.

    `steps` is None where no bound was asked for (threshold). `stop_ids` is empty when
    `ignore_eos` is set. `seed` is None until the engine draws one.
    """

    algorithm: str
    remasking: str
    cache: str
    gen_length: int
    max_tokens: int
    steps: int | None
    block_length: int
    temperature: float
    cfg_scale: float
    threshold: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    confidence_dtype: str
    ignore_eos: bool
    allow_infill: bool
    force_single_batch: bool
    seed: int | None
    mask_id: int
    eos_id: int | None
    eot_id: int | None
    stop_ids: frozenset[int]
    top_p: float | None = None
    top_k: int | None = None

    @property
    def num_blocks(self) -> int:
        return self.gen_length // self.block_length

    def with_seed(self, seed: int) -> DiffusionParams:
        return dataclasses.replace(self, seed=seed % 2**SEED_BITS)


def from_sampling_params(sampling: Any) -> dict[str, Any]:
    """What a vLLM `SamplingParams` asks for, under canonical names; unset values are left out.

    `extra_args` holds the diffusion parameters and wins over the fields of `SamplingParams`.

    Raises:
        InvalidParameterError: for an unknown key, contradicting spellings, or a field of
            `SamplingParams` that would act on an autoregressive model but cannot here.
    """
    _refuse_autoregressive_fields(sampling)
    extra = {k: v for k, v in (sampling.extra_args or {}).items() if k not in RESERVED_EXTRA_ARGS}
    given = canonical(extra)
    own = {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": sampling.min_tokens,
    }
    for name, value in own.items():
        if value is not None:
            given.setdefault(name, value)
    if "max_tokens" not in given:
        given["upstream_max_tokens"] = sampling.max_tokens
    given["stop_token_ids"] = tuple(sampling.stop_token_ids or ())
    return given


def _refuse_autoregressive_fields(sampling: Any) -> None:
    for name, neutral, meaning in (
        ("top_p", (1.0,), "wanted 1: nucleus sampling belongs to the dream algorithm"),
        ("top_k", (0, -1), "wanted 0: top-k sampling belongs to the dream algorithm"),
        ("min_p", (0.0,), "wanted 0: it has no meaning for a diffusion language model"),
        ("presence_penalty", (0.0,), "wanted 0: penalties need a left-to-right order"),
        ("frequency_penalty", (0.0,), "wanted 0: penalties need a left-to-right order"),
        ("repetition_penalty", (1.0,), "wanted 1: penalties need a left-to-right order"),
        ("logit_bias", (None, {}), "wanted none: not supported"),
        ("bad_words", (None, []), "wanted none: not supported"),
        ("allowed_token_ids", (None,), "wanted none: not supported"),
        ("structured_outputs", (None,), "wanted none: not supported"),
        ("logprobs", (None,), "wanted none: not supported"),
        ("prompt_logprobs", (None,), "wanted none: not supported"),
    ):
        value = getattr(sampling, name, neutral[0])
        if value not in neutral:
            raise InvalidParameterError(name, value, meaning)


def canonical(given: Mapping[str, Any], also_known: Iterable[str] = ()) -> dict[str, Any]:
    """Rename accepted spellings to canonical names and check each value on its own.

    None counts as not given. `also_known` are names that the refusal of an unknown one lists too.

    Raises:
        InvalidParameterError: for an unknown name, a wrong type or range, or two spellings of
            one parameter that disagree.
    """
    result: dict[str, Any] = {}
    for spelling, value in _expand_shorthands(given).items():
        if value is None:
            continue
        name = CANONICAL.get(spelling)
        if name is None:
            known = ", ".join(sorted({*CANONICAL, *also_known}))
            raise InvalidParameterError(spelling, value, f"unknown parameter; known: {known}")
        checked = check(BY_NAME[name], spelling, value)
        if name in result and result[name] != checked:
            raise InvalidParameterError(
                spelling, value, f"it contradicts another spelling of {name}: {result[name]!r}"
            )
        result[name] = checked
    return result


def _expand_shorthands(given: Mapping[str, Any]) -> dict[str, Any]:
    """Algorithm names in any of their spellings, and names of a remasking as an algorithm."""
    expanded = dict(given)
    algorithm = expanded.get("algorithm")
    if isinstance(algorithm, str):
        algorithm = _snake_case(algorithm)
        if algorithm in REMASKING:
            remasking = expanded.setdefault("remasking", algorithm)
            if remasking != algorithm:
                raise InvalidParameterError(
                    "remasking", remasking, f"it contradicts algorithm: {algorithm!r}"
                )
            algorithm = "semi_ar"
        expanded["algorithm"] = algorithm
    return expanded


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def check(spec: Field, spelling: str, value: Any) -> Any:
    """Return `value` as `spec.kind`, or raise InvalidParameterError naming `spelling`."""
    if spec.kind is bool:
        if not isinstance(value, bool) and value not in (0, 1):
            raise InvalidParameterError(spelling, value, "wanted true or false")
        return bool(value)
    if spec.kind is str:
        if not isinstance(value, str) or value not in spec.choices:
            raise InvalidParameterError(
                spelling, value, f"wanted one of: {', '.join(spec.choices)}"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise InvalidParameterError(spelling, value, "wanted a finite number")
    if spec.kind is int:
        if value != int(value) or not -(2**63) <= value < 2**64:
            raise InvalidParameterError(spelling, value, "wanted a whole number of 64 bits")
        value = int(value)
    if spec.minimum is not None and value < spec.minimum:
        raise InvalidParameterError(spelling, value, f"wanted at least {spec.minimum:g}")
    return spec.kind(value)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


def server_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the server-wide defaults.

    Raises:
        ServerConfigError: for an unknown or unusable setting.
    """
    try:
        defaults = canonical(given)
    except InvalidParameterError as error:
        raise ServerConfigError(f"dllm settings: {error}") from None
    for name in defaults:
        if not BY_NAME[name].server_wide:
            allowed = ", ".join(f.name for f in FIELDS if f.server_wide)
            raise ServerConfigError(
                f"dllm settings: {name} belongs to a request, not to the server; allowed: {allowed}"
            )
    return defaults


def resolve(
    given: Mapping[str, Any],
    model: ServedModel,
    prompt_token_ids: Sequence[int],
    *,
    default_steps: int | None = None,
) -> DiffusionParams:
    """Decide every parameter of a request.

    Args:
        given: values under canonical names, as `canonical` or `from_sampling_params` return them.
            The latter adds `stop_token_ids`, and `upstream_max_tokens`: a limit that upstream may
            have filled in itself.
        model: the served model.
        prompt_token_ids: the prompt.
        default_steps: denoise steps of a request that gives none, brought to the nearest multiple
            of the number of blocks.

    Raises:
        InvalidParameterError: naming the field, the given and the wanted value.
    """
    request = dict(given)
    stop_token_ids = frozenset(request.pop("stop_token_ids", ()))
    upstream_max_tokens = request.pop("upstream_max_tokens", None)
    algorithm = _algorithm(request, model)
    _refuse_unused(request, algorithm)

    def value(name: str, default: Any) -> Any:
        return request.get(name, model.defaults.get(name, default))

    mask_id = request.get("mask_id", model.ids.mask)
    if mask_id != model.ids.mask:
        raise InvalidParameterError("mask_id", mask_id, f"wanted the model's: {model.ids.mask}")
    if request.get("min_tokens", 0) != 0:
        raise InvalidParameterError("min_tokens", request["min_tokens"], "wanted 0")
    allow_infill = request.get("allow_infill", False)
    _check_prompt(prompt_token_ids, model, allow_infill)

    canvas, max_tokens = _canvas(request, upstream_max_tokens, model, len(prompt_token_ids))
    steps = request.get("steps")
    block_length = _block_length(
        request.get("block_length"), model.defaults.get("block_length"), canvas, steps
    )
    steps = _steps(
        steps,
        canvas // block_length,
        model.defaults.get("steps", default_steps) or canvas,
        quota=algorithm == "semi_ar",
    )
    ignore_eos = request.get("ignore_eos", False)
    params = DiffusionParams(
        algorithm=algorithm,
        remasking=value("remasking", "low_confidence"),
        cache=value("cache", "none"),
        gen_length=canvas,
        max_tokens=max_tokens,
        steps=steps,
        block_length=block_length,
        temperature=request.get("temperature", 0.0),
        cfg_scale=value("cfg_scale", 0.0),
        threshold=value("threshold", 0.9),
        logits_eos_inf=request.get("logits_eos_inf", False),
        confidence_eos_eot_inf=request.get("confidence_eos_eot_inf", False),
        confidence_dtype=value("confidence_dtype", "float32"),
        ignore_eos=ignore_eos,
        allow_infill=allow_infill,
        force_single_batch=value("force_single_batch", False),
        seed=None,
        mask_id=model.ids.mask,
        eos_id=model.ids.eos,
        eot_id=model.ids.eot,
        stop_ids=frozenset() if ignore_eos else model.ids.stop | stop_token_ids,
    )
    _check_special_ids(params)
    seed = request.get("seed")
    return params if seed is None else params.with_seed(seed)


def _algorithm(request: Mapping[str, Any], model: ServedModel) -> str:
    if "algorithm" in request:
        return str(request["algorithm"])
    if "threshold" in request:
        return "threshold"
    return str(model.defaults.get("algorithm", model.family.default_algorithm))


def _refuse_unused(request: Mapping[str, Any], algorithm: str) -> None:
    for name, value in request.items():
        users = BY_NAME[name].algorithms
        if users and algorithm not in users:
            raise InvalidParameterError(
                name,
                value,
                f"algorithm {algorithm} does not use it; wanted algorithm: {' or '.join(users)}",
            )


def _check_prompt(prompt: Sequence[int], model: ServedModel, allow_infill: bool) -> None:
    if not prompt:
        raise InvalidParameterError("prompt", [], "wanted at least one token")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= model.vocab_size:
        raise InvalidParameterError(
            "prompt",
            lowest if lowest < 0 else highest,
            f"wanted token ids from 0 to {model.vocab_size - 1}",
        )
    if not allow_infill and model.ids.mask in prompt:
        raise InvalidParameterError(
            "prompt",
            model.ids.mask,
            "it holds the mask token; wanted a prompt without it, or allow_infill: true",
        )


def _canvas(
    request: Mapping[str, Any],
    upstream_max_tokens: int | None,
    model: ServedModel,
    prompt_length: int,
) -> tuple[int, int]:
    """Length of the canvas and of the longest answer."""
    room = model.max_model_len - prompt_length
    canvas: int | None = request.get("gen_length")
    block_length: int | None = request.get("block_length")
    max_tokens: int | None = request.get("max_tokens")
    if max_tokens is None and not _filled_in(upstream_max_tokens, canvas, room, model):
        max_tokens = upstream_max_tokens
    if canvas is None:
        if max_tokens is None and model.default_max_tokens is not None:
            max_tokens = min(model.default_max_tokens, max(room, 1))
        if max_tokens is None:
            canvas = _whole_blocks_within(min(DEFAULT_CANVAS, max(room, 1)), block_length)
        else:
            canvas = _canvas_for(max_tokens, room, block_length)
    if max_tokens is not None and max_tokens > canvas:
        raise InvalidParameterError(
            "max_tokens", max_tokens, f"wanted at most the canvas, gen_length: {canvas}"
        )
    if canvas > room:
        name = "gen_length" if "gen_length" in request else "max_tokens"
        raise InvalidParameterError(
            name,
            request.get(name, canvas),
            f"a prompt of {prompt_length} tokens and a canvas of {canvas} exceed "
            f"max_model_len {model.max_model_len}",
        )
    return canvas, canvas if max_tokens is None else max_tokens


def _filled_in(max_tokens: int | None, canvas: int | None, room: int, model: ServedModel) -> bool:
    """Whether upstream's limit stands for "no limit given".

    Upstream writes all the room that is left. Beside an explicit canvas its defaults, of
    SamplingParams and of generation_config.json, are no wish to cut the answer either.
    """
    if max_tokens is None or max_tokens == room:
        return True
    return canvas is not None and max_tokens in (OFFLINE_MAX_TOKENS, model.default_max_tokens)


def _whole_blocks_within(length: int, block_length: int | None) -> int:
    if block_length is None:
        return length
    return max(1, length // block_length) * block_length


def _canvas_for(max_tokens: int, room: int, block_length: int | None) -> int:
    """The canvas of an answer: `max_tokens` rounded up to whole default blocks.

    Whole given blocks instead, where those are not parts of a default block; no rounding where
    only the rounding exceeds the room that is left.
    """
    unit = DEFAULT_BLOCK
    if block_length is not None and DEFAULT_BLOCK % block_length != 0:
        unit = block_length
    rounded = -(-max_tokens // unit) * unit
    if rounded > room >= max_tokens and max_tokens % (block_length or 1) == 0:
        return max_tokens
    return rounded


def _block_length(given: int | None, default: int | None, canvas: int, steps: int | None) -> int:
    if given is not None:
        if canvas % given:
            raise InvalidParameterError(
                "block_length",
                given,
                f"wanted a divisor of the canvas, {canvas}: {_near_divisors(canvas, given)}",
            )
        return given
    block = default or DEFAULT_BLOCK
    if canvas % block == 0 and (steps is None or steps % (canvas // block) == 0):
        return block
    return canvas


def _steps(given: int | None, num_blocks: int, default: int, *, quota: bool) -> int | None:
    if given is None:
        if not quota:
            return None
        nearest = (2 * default + num_blocks) // (2 * num_blocks)
        return max(1, nearest) * num_blocks
    if quota and given % num_blocks:
        below = given // num_blocks * num_blocks
        options = [n for n in (below, below + num_blocks) if n > 0]
        raise InvalidParameterError(
            "steps",
            given,
            f"wanted a multiple of the number of blocks ({num_blocks}), "
            f"for instance {' or '.join(map(str, options))}",
        )
    if given < num_blocks:
        raise InvalidParameterError(
            "steps", given, f"wanted at least one per block: {num_blocks} or more"
        )
    return given


def _near_divisors(number: int, wanted: int, count: int = 8) -> str:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    nearest = sorted(divisors, key=lambda n: (abs(n - wanted), n))[:count]
    return ", ".join(map(str, sorted(nearest)))


def _check_special_ids(params: DiffusionParams) -> None:
    if params.eos_id is None and (params.logits_eos_inf or params.confidence_eos_eot_inf):
        option = "logits_eos_inf" if params.logits_eos_inf else "confidence_eos_eot_inf"
        raise InvalidParameterError(option, True, "the checkpoint has no end-of-sequence token")
    if params.eot_id is None and params.confidence_eos_eot_inf:
        raise InvalidParameterError(
            "confidence_eos_eot_inf", True, "the tokenizer has no end-of-turn token"
        )


def documented_fields() -> Iterable[tuple[str, str, str, str]]:
    """(name, aliases, default, doc) of every field, for tables in documentation and help."""
    for f in FIELDS:
        yield f.name, ", ".join(f.aliases), f.default, f.doc
