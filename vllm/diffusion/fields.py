# SPDX-License-Identifier: Apache-2.0
"""The table of request parameters, and the check of each value on its own.

`FIELDS` is the only list of parameters: validation, aliases, HTTP schemas and documentation are
made from it. How values fit together is decided in `vllm.diffusion.params`.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion.errors import InvalidParameterError, ServerConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALGORITHMS: tuple[str, ...] = (
    "semi_ar",
    "threshold",
    "factor",
    "local_leap",
    "entropy_threshold",
    "full_attn_multi_block",
    "multi_block",
    "hierarchy",
    "credit",
    "dream",
)
REMASKING: tuple[str, ...] = ("low_confidence", "random")
CACHES: tuple[str, ...] = ("none", "prefix", "dual", "delayed")
CONFIDENCE_DTYPES: tuple[str, ...] = ("float32", "float64", "logits")
DREAM_ALGS: tuple[str, ...] = ("entropy", "maskgit_plus", "topk_margin", "origin")
NEVER = 10_000  # iterations: longer than any answer takes
MAX_STEPS = 1_000_000  # dream's schedule has a number for every step

# Groups of algorithms that the table speaks of.
ONE_BLOCK_AFTER_THE_OTHER: tuple[str, ...] = (
    "semi_ar",
    "threshold",
    "factor",
    "local_leap",
    "entropy_threshold",
    "hierarchy",
    "credit",
)
PACED_BY_STEPS: tuple[str, ...] = ("semi_ar", "dream")
SEVERAL_BLOCKS: tuple[str, ...] = ("full_attn_multi_block", "multi_block")
BY_CONFIDENCE: tuple[str, ...] = (
    "semi_ar",
    "threshold",
    "factor",
    "local_leap",
    "hierarchy",
    "credit",
)


@dataclass(frozen=True)
class Field:
    """One request parameter.

    Attributes:
        name: canonical name.
        kind: int, float, bool or str.
        doc: one line for users.
        default: value of a request that gives none; None where there is none, or where it
            depends on other values.
        defaults: the default of an algorithm that has its own.
        shifted_defaults: the same for families that shift their logits (Dream).
        default_text: what documentation says instead, where the values do not say it.
        minimum, maximum: smallest and largest accepted number.
        choices: accepted strings.
        aliases: other spellings.
        algorithms: the algorithms that use it; empty means all.
        neutral: values that change nothing: harmless beside algorithms that do not use it.
        server_wide: may also be given as a server-wide default.
    """

    name: str
    kind: type
    doc: str
    default: Any = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shifted_defaults: Mapping[str, Any] = field(default_factory=dict)
    default_text: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    neutral: tuple[Any, ...] = ()
    server_wide: bool = False

    def default_for(self, algorithm: str, *, is_shifted: bool) -> Any:
        """The value of a request that gives none."""
        own = self.defaults.get(algorithm, self.default)
        return self.shifted_defaults.get(algorithm, own) if is_shifted else own

    def is_used_by(self, algorithm: str) -> bool:
        return not self.algorithms or algorithm in self.algorithms

    @property
    def documented_default(self) -> str:
        """The default in words."""
        if self.default_text:
            return self.default_text
        parts = [] if self.default is None else [_as_json(self.default)]
        for algorithm, value in self.defaults.items():
            text = f"{algorithm} {_as_json(value)}"
            if algorithm in self.shifted_defaults:
                text += f" ({_as_json(self.shifted_defaults[algorithm])} on Dream)"
            parts.append(text)
        return "; ".join(parts)


FIELDS: tuple[Field, ...] = (
    # What is committed in a step.
    Field(
        "algorithm",
        str,
        "decoding algorithm: which candidates are committed in a step",
        default_text="the model's: semi_ar, on Dream dream (threshold when `threshold` is given)",
        choices=ALGORITHMS,
        server_wide=True,
    ),
    Field(
        "use_local_leap",
        bool,
        "another way to say algorithm: local_leap",
        default=False,
        server_wide=True,
    ),
    Field(
        "remasking",
        str,
        "score of a candidate: its probability, or a random number",
        default="low_confidence",
        choices=REMASKING,
        algorithms=("semi_ar", "threshold", "factor", "local_leap", "multi_block"),
        neutral=("low_confidence",),
        server_wide=True,
    ),
    Field(
        "alg",
        str,
        "dream: score of a candidate (probability, difference of the two best, negative entropy), "
        "or origin: positions at random",
        default="entropy",
        choices=DREAM_ALGS,
        algorithms=("dream",),
        server_wide=True,
    ),
    Field(
        "cache",
        str,
        "reuse of keys and values between steps, an approximation: prefix and dual for algorithms "
        "that fill one block after the other, delayed for multi_block",
        default="none",
        choices=CACHES,
        server_wide=True,
    ),
    # Lengths.
    Field(
        "gen_length",
        int,
        "length of the canvas in tokens; it is model input, not only a limit",
        default_text="max_tokens rounded up to whole blocks of 32, else 128",
        minimum=1,
        aliases=("output_length",),
    ),
    Field(
        "max_tokens",
        int,
        "longest answer in tokens; cuts the answer, never the canvas",
        default_text="the canvas",
        minimum=1,
        aliases=("max_new_tokens",),
    ),
    Field(
        "steps",
        int,
        "denoise steps of the whole canvas; semi_ar: a multiple of the number of blocks; "
        "dream: any number; other algorithms: an upper bound",
        default_text="one per canvas token; no bound where it is one",
        minimum=1,
        maximum=MAX_STEPS,
        aliases=("num_denoising_steps",),
        server_wide=True,
    ),
    Field(
        "block_length",
        int,
        "tokens per block, filled from left to right; divides the canvas "
        "(full_attn_multi_block: the last block may be shorter)",
        default_text="32 where it divides the canvas, else the whole canvas",
        minimum=1,
        aliases=("block_size", "sub_block_size"),
        algorithms=(*ONE_BLOCK_AFTER_THE_OTHER, *SEVERAL_BLOCKS),
        server_wide=True,
    ),
    # The choice of tokens.
    Field(
        "temperature",
        float,
        "scale of the Gumbel noise, for dream of the logits; 0 is greedy",
        default=0.0,
        minimum=0,
        algorithms=tuple(a for a in ALGORITHMS if a != "full_attn_multi_block"),
        neutral=(0.0,),
    ),
    Field(
        "top_p",
        float,
        "dream: keep the most likely tokens up to the one that makes their sum exceed it",
        default_text="off",
        minimum=0,
        maximum=1,
        algorithms=("dream",),
        neutral=(1.0,),
    ),
    Field(
        "top_k",
        int,
        "dream: keep so many of the most likely tokens; 0 or -1 keeps all",
        default_text="off",
        minimum=-1,
        algorithms=("dream",),
        neutral=(0, -1),
    ),
    Field(
        "cfg_scale",
        float,
        "classifier-free guidance; above 0 a second, prompt-masked sequence is run",
        default=0.0,
        minimum=0,
        server_wide=True,
    ),
    Field("logits_eos_inf", bool, "never predict the end-of-sequence token", default=False),
    Field(
        "confidence_eos_eot_inf",
        bool,
        "commit end-of-sequence and end-of-turn tokens only after every other candidate",
        default=False,
        algorithms=BY_CONFIDENCE,
        neutral=(False,),
    ),
    Field(
        "confidence_dtype",
        str,
        "precision of the scores; `logits` is the model's own",
        default="float32",
        choices=CONFIDENCE_DTYPES,
        server_wide=True,
    ),
    # Parameters of single algorithms.
    Field(
        "threshold",
        float,
        "confidence from which a candidate is committed, or entropy up to which "
        "(entropy_threshold, full_attn_multi_block, multi_block)",
        default=0.9,
        defaults={"entropy_threshold": 0.95, "full_attn_multi_block": 0.4, "multi_block": 0.5},
        shifted_defaults={"multi_block": 0.9},
        algorithms=(
            "threshold",
            "local_leap",
            "entropy_threshold",
            "full_attn_multi_block",
            "multi_block",
            "hierarchy",
            "credit",
        ),
        server_wide=True,
    ),
    Field(
        "factor",
        float,
        "n candidates are committed while the n-th best reaches 1 - factor / (n + 1)",
        default=1.0,
        minimum=0,
        algorithms=("factor",),
        server_wide=True,
    ),
    Field(
        "relaxed_threshold",
        float,
        "threshold of candidates near one that reaches `threshold`",
        default=0.75,
        algorithms=("local_leap",),
        server_wide=True,
    ),
    Field(
        "radius",
        int,
        "how many positions are near",
        default=4,
        minimum=0,
        algorithms=("local_leap",),
        server_wide=True,
    ),
    Field(
        "low_threshold",
        float,
        "confidence above which the best of each run of masked positions is committed",
        default=0.4,
        algorithms=("hierarchy",),
        server_wide=True,
    ),
    Field(
        "block_add_threshold",
        float,
        "share of the last block that must be decoded before the next one starts",
        default=0.5,
        defaults={"full_attn_multi_block": 0.1},
        aliases=("block_add",),
        algorithms=SEVERAL_BLOCKS,
        server_wide=True,
    ),
    Field(
        "decoded_token_threshold",
        float,
        "share of a block that must be decoded before the next one gets a token in every step",
        default=0.5,
        defaults={"full_attn_multi_block": 0.95},
        aliases=("decoded_thresh",),
        algorithms=SEVERAL_BLOCKS,
        server_wide=True,
    ),
    Field(
        "cache_delay_iter",
        int,
        "steps after its completion at which a block's keys and values are kept; below "
        f"{NEVER} it chooses cache: delayed for multi_block (full_attn_multi_block accepts it "
        "and keeps nothing)",
        default=NEVER,
        minimum=0,
        algorithms=SEVERAL_BLOCKS,
        neutral=(NEVER,),
        server_wide=True,
    ),
    Field(
        "refresh_interval",
        int,
        "with cache: delayed, every such step computes the whole sequence again "
        "(full_attn_multi_block accepts it and always does)",
        default=NEVER,
        minimum=1,
        algorithms=SEVERAL_BLOCKS,
        neutral=(NEVER,),
        server_wide=True,
    ),
    Field(
        "early_stop",
        bool,
        "multi_block: fill everything after the first end-of-sequence token with it in every "
        "step; local_leap: end after a block that holds one",
        default=False,
        algorithms=("local_leap", "multi_block"),
        neutral=(False,),
        server_wide=True,
    ),
    Field(
        "alg_temp",
        float,
        "dream: draw the positions by their scores at this temperature; 0 takes the best",
        default=0.0,
        minimum=0,
        algorithms=("dream",),
        neutral=(0.0,),
        server_wide=True,
    ),
    Field(
        "eps",
        float,
        "dream: end of the schedule, which falls from 1 to it",
        default=1e-3,
        minimum=0,
        maximum=1,
        algorithms=("dream",),
        server_wide=True,
    ),
    # The request.
    Field(
        "mask_id",
        int,
        "the model's mask token; any other value is refused",
        default_text="the model's",
    ),
    Field(
        "ignore_eos",
        bool,
        "no token ends the answer; the whole canvas is returned",
        default=False,
    ),
    Field("allow_infill", bool, "fill mask tokens of the prompt too", default=False),
    Field("min_tokens", int, "not supported; only 0 is accepted", default=0, minimum=0),
    Field("seed", int, "seed of the request's random numbers", default_text="drawn at random"),
    Field(
        "stream_canvas",
        bool,
        "beside stream: an event with the whole canvas, proposals included, after every denoise "
        "step",
        default=False,
    ),
    Field(
        "force_single_batch",
        bool,
        "run the request alone in its steps",
        default=False,
        server_wide=True,
    ),
)

BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}
CANONICAL: dict[str, str] = {spelling: f.name for f in FIELDS for spelling in (f.name, *f.aliases)}


def caches_of(algorithm: str) -> tuple[str, ...]:
    """Values of `cache` that have a meaning for an algorithm."""
    if algorithm in ONE_BLOCK_AFTER_THE_OTHER:
        return ("none", "prefix", "dual")
    return ("none", "delayed") if algorithm == "multi_block" else ("none",)


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
    """Algorithm names in any of their spellings, and what stands for an algorithm.

    The name of a remasking leaves open which algorithm goes by it: semi_ar, unless another
    parameter chooses one.
    """
    expanded = dict(given)
    leaps = expanded.pop("use_local_leap", None)
    if leaps is not None:
        leaps = check(BY_NAME["use_local_leap"], "use_local_leap", leaps)
    algorithm = expanded.get("algorithm")
    if isinstance(algorithm, str):
        algorithm = _snake_case(algorithm)
        if algorithm in REMASKING:
            if expanded.get("remasking") not in (None, algorithm):
                raise InvalidParameterError(
                    "remasking", expanded["remasking"], f"it contradicts algorithm: {algorithm!r}"
                )
            expanded["remasking"] = algorithm
            algorithm = "semi_ar" if expanded.get("threshold") is None else "threshold"
            algorithm = "local_leap" if leaps else algorithm
        expanded["algorithm"] = algorithm
    if leaps and expanded.get("algorithm") is None:
        expanded["algorithm"] = "local_leap"
    if leaps is not None and (expanded.get("algorithm") == "local_leap") != leaps:
        raise InvalidParameterError(
            "use_local_leap", leaps, f"it contradicts algorithm: {expanded.get('algorithm')!r}"
        )
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
        raise InvalidParameterError(spelling, value, f"wanted at least {_as_json(spec.minimum)}")
    if spec.maximum is not None and value > spec.maximum:
        raise InvalidParameterError(spelling, value, f"wanted at most {_as_json(spec.maximum)}")
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
    cache = defaults.get("cache", "none")
    if cache != "none" and defaults.get("cfg_scale", 0) > 0:
        raise ServerConfigError(f"dllm settings: cache {cache} works with cfg_scale 0 only")
    allowed_caches = caches_of(defaults["algorithm"]) if "algorithm" in defaults else CACHES
    if cache not in allowed_caches:
        raise ServerConfigError(
            f"dllm settings: cache: given {cache!r}; "
            f"algorithm {defaults['algorithm']} wants {in_words(allowed_caches)}"
        )
    return defaults


def documented_fields() -> Iterable[tuple[str, str, str, str]]:
    """(name, aliases, default, doc) of every field, for tables in documentation and help."""
    for f in FIELDS:
        yield f.name, ", ".join(f.aliases), f.documented_default, f.doc


def _as_json(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_words(names: Iterable[str]) -> str:
    """a, b or c."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
