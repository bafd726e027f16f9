# SPDX-License-Identifier: Apache-2.0
"""The table of request parameters, checks of single values, and server-wide defaults.

`FIELDS` is the only list of parameters: validation, aliases, HTTP schemas and documentation are
derived from it. Parameters of single algorithms are declared in
`vllm.diffusion.request.algorithms`. `vllm.diffusion.request.decision` checks combinations of
values.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError, ServerConfigError
from vllm.diffusion.request.algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    GUIDED_CACHES,
    MAX_STEPS,
    PARAMETERS,
    algorithms_for,
    users,
)
from vllm.diffusion.request.values import Field, as_json, in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.families import Family

MAX_DRAFTS = 15  # drafts per forward pass
REMASKING: tuple[str, ...] = ("low_confidence", "random")
ATTENTION_DTYPES = ("model", "fp8")
_RECORDS = (*ALGORITHMS.values(), *BLOCK_ALGORITHMS.values())
CACHES = tuple(dict.fromkeys(cache for a in _RECORDS for cache in a.caches))

FIELDS: tuple[Field, ...] = (
    # What a step commits.
    Field(
        "algorithm",
        str,
        "the decoding algorithm, which decides what a step commits",
        default_text="the model's; threshold if a full-attention model gets `threshold`",
        choices=tuple(dict.fromkeys((*ALGORITHMS, *BLOCK_ALGORITHMS, *REMASKING))),
        server_wide=True,
    ),
    Field(
        "use_local_leap",
        bool,
        "the same as algorithm: local_leap",
        default=False,
        server_wide=True,
    ),
    Field(
        "remasking",
        str,
        "score of a candidate, its probability or a random number",
        default="low_confidence",
        choices=REMASKING,
        neutral=("low_confidence",),
        server_wide=True,
        **users(lambda a: a.random_scores != "none"),
    ),
    Field(
        "cache",
        str,
        "which keys and values later steps reuse; exact on block-causal families, an "
        "approximation on full-attention families: frozen (the prompt's) with every algorithm, "
        "prefix and dual with algorithms that fill one block after the other, delayed with "
        "multi_block",
        default_text="none; exact for block-causal families",
        choices=CACHES,
        server_wide=True,
    ),
    # Lengths.
    Field(
        "gen_length",
        int,
        "length of the canvas in tokens; the model sees this many mask tokens, so the length "
        "changes the answer and is not just a limit",
        default_text="max_tokens rounded up to whole blocks of 32, else 128",
        minimum=1,
        aliases=("output_length",),
    ),
    Field(
        "max_tokens",
        int,
        "most tokens of the answer; cuts the answer, not the canvas",
        default_text="gen_length",
        minimum=1,
        aliases=("max_new_tokens",),
    ),
    Field(
        "steps",
        int,
        "denoising steps for the whole canvas; semi_ar and block-causal families: a multiple of "
        "the number of blocks; dream: any number; other algorithms: an upper bound",
        default_text="one per canvas token; unlimited where steps is an upper bound",
        minimum=1,
        maximum=MAX_STEPS,
        aliases=("num_denoising_steps",),
        server_wide=True,
        **users(lambda a: a.pace != "rule alone"),
    ),
    Field(
        "block_length",
        int,
        "tokens per block; blocks are filled from left to right. Must divide the canvas, except "
        "that with full_attn_multi_block and adablock the last block may be shorter and "
        "block-causal families accept any length",
        default_text="32 if it divides the canvas, else the whole canvas; block-causal families: "
        "the value of config.json, else 32",
        minimum=1,
        aliases=("block_size", "sub_block_size"),
        server_wide=True,
        **users(lambda a: a.blocks != "none"),
    ),
    # The choice of tokens.
    Field(
        "temperature",
        float,
        "scale of the Gumbel noise; with dream and on block-causal families, divisor of the "
        "logits; 0 is greedy",
        default=0.0,
        minimum=0,
        neutral=(0.0,),
        **users(lambda a: a.draws),
    ),
    Field(
        "min_p",
        float,
        "with temperature above 0: sample from tokens whose probability is at least this share of "
        "the highest one; 0 keeps all",
        default=0.0,
        minimum=0,
        maximum=1,
        neutral=(0.0,),
        **users(lambda a: a.draws),
    ),
    Field(
        "top_k",
        int,
        "with temperature above 0: sample from the top_k most likely tokens, keeping ties with "
        "the last; 0 or -1 keeps all",
        default_text="off",
        minimum=-1,
        neutral=(0, -1),
        **users(lambda a: a.draws),
    ),
    Field(
        "top_p",
        float,
        "with temperature above 0: sample from the fewest most likely tokens whose probabilities "
        "sum to at least this value",
        default_text="off",
        minimum=0,
        maximum=1,
        neutral=(1.0,),
        **users(lambda a: a.draws),
    ),
    Field(
        "repetition_penalty",
        float,
        "divides positive logits and multiplies negative logits of tokens in the prompt and of "
        "committed tokens of the answer",
        default=1.0,
    ),
    Field(
        "presence_penalty",
        float,
        "subtracted from the logits of committed tokens of the answer",
        default=0.0,
        minimum=-2,
        maximum=2,
    ),
    Field(
        "frequency_penalty",
        float,
        "subtracted from a token's logit once per committed occurrence in the answer",
        default=0.0,
        minimum=-2,
        maximum=2,
    ),
    Field(
        "logit_bias",
        dict,
        "numbers that are added to logits, by token id; clipped to -100 to 100",
        default_text="none",
    ),
    Field(
        "bad_words",
        list,
        "words that must not appear in the answer",
        default_text="none",
    ),
    Field(
        "allowed_token_ids",
        tuple,
        "the only token ids that the answer may contain",
        default_text="all",
    ),
    Field(
        "cfg_scale",
        float,
        "classifier-free guidance; above 0 every step also computes a second sequence with a "
        "masked prompt",
        default=0.0,
        minimum=0,
        neutral=(0.0,),
        server_wide=True,
        **users(lambda a: not a.is_block_causal),
    ),
    Field("logits_eos_inf", bool, "never predict the end-of-sequence token", default=False),
    Field(
        "confidence_eos_eot_inf",
        bool,
        "commit end-of-sequence and end-of-turn tokens only after every other candidate",
        default=False,
        neutral=(False,),
        **users(lambda a: a.score == "confidence" and not a.is_block_causal),
    ),
    Field(
        "confidence_dtype",
        str,
        "precision of the scores; `logits` is that of the model's logits",
        default="float32",
        choices=("float32", "float64", "logits"),
        server_wide=True,
    ),
    Field(
        "mask_id",
        int,
        "must be the model's mask token; any other value returns 400",
        default_text="the model's",
    ),
    Field("ignore_eos", bool, "no token ends the answer; returns the whole canvas", default=False),
    Field("allow_infill", bool, "also fill mask tokens in the prompt", default=False),
    Field(
        "suffix_ids",
        tuple,
        "token ids after the canvas; the answer fills the gap between the prompt and them",
        default_text="none",
    ),
    Field(
        "min_tokens",
        int,
        "fewest tokens of the answer before a token can end it",
        default=0,
        minimum=0,
    ),
    Field("seed", int, "seed of the request's random numbers", default_text="random"),
    Field(
        "stream_canvas",
        bool,
        "with stream: send an event with the whole canvas, proposals included, after every "
        "denoising step",
        default=False,
    ),
    Field(
        "return_trajectory",
        bool,
        "return, for every token, the step that committed it and its log probability in that step",
        default=False,
    ),
    Field(
        "return_entropy",
        bool,
        "with return_trajectory: also return the entropy of the distribution at each commit",
        default=False,
    ),
    Field(
        "complete_blocks",
        bool,
        "end an answer only when the block of its last token is full; the tokens after that token "
        "appear only in the trajectory",
        default=False,
    ),
    Field(
        "force_single_batch",
        bool,
        "run the request alone in its steps",
        default=False,
        server_wide=True,
    ),
    Field(
        "attention_dtype",
        str,
        "number format of attention in forward passes over a whole long sequence: the model's, or "
        "fp8 (e4m3) on a server started with it",
        default="model",
        choices=ATTENTION_DTYPES,
        neutral=("model",),
        server_wide=True,
        **users(lambda a: not a.is_block_causal),
    ),
    Field(
        "num_speculative_states",
        int,
        "most draft states per forward pass: predicted later states of the canvas, which the pass "
        "evaluates together with the current one; accepted drafts save passes and never change "
        "the answer; 0 drafts none; the default on a GPU is 7",
        default=0,
        minimum=0,
        maximum=MAX_DRAFTS,
        neutral=(0,),
        server_wide=True,
        **users(lambda a: a.speculates is not None),
    ),
    Field(
        "thinking_token_budget",
        int,
        "most tokens of the answer before the token that ends thinking; only for models that "
        "think (nemotron); -1 is unlimited",
        default_text="none",
        minimum=-1,
        neutral=(-1,),
        server_wide=True,
    ),
    # Scheduling.
    Field(
        "priority",
        int,
        "scheduling priority; lower runs first",
        default_text="0",
        minimum=-(2**31),
        maximum=2**31 - 1,
    ),
    Field(
        "timeout_s",
        float,
        "seconds after arrival at which an unfinished request ends, queued or running: "
        "finish_reason abort, or HTTP 504 if nothing was streamed",
        default_text="none",
        minimum=0.001,
        server_wide=True,
    ),
    *PARAMETERS,
)

BY_NAME: dict[str, Field] = {f.name: f for f in FIELDS}


def by_spelling(table: Iterable[Field]) -> dict[str, Field]:
    """Return the parameters of a table by each of their names."""
    return {spelling: field for field in table for spelling in (field.name, *field.aliases)}


SPELLINGS = by_spelling(FIELDS)

# Parameters that are also fields of upstream's SamplingParams; the collected ones have other types
# there.
COLLECTED = ("logit_bias", "bad_words", "allowed_token_ids")
OF_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", *COLLECTED),
    "thinking_token_budget",
)
# Parameters that other servers have, too. A name similar to one of them may be a foreign field, so
# it is not reported as misspelt.
_STANDARD = frozenset({*OF_SAMPLING, "max_tokens", "priority"})
OWN_SPELLINGS = tuple(name for name, field in SPELLINGS.items() if field.name not in _STANDARD)
MAX_BIAS = 100.0  # limit of a logit's bias, as in OpenAI's API
MAX_DIGITS = 18  # digits of a token id
_MAX_NAME_LENGTH = 64  # characters of a name that is compared with known names
_ALIKE = 0.8  # minimum similarity of two names, as the share of matching letters


def canonical(given: Mapping[str, Any], also_known: Iterable[str] = ()) -> dict[str, Any]:
    """Check values by the table of all requests, after expanding shorthands; see `checked`."""
    return checked(_expand_shorthands(given), SPELLINGS, also_known)


def checked(
    given: Mapping[str, Any], spellings: Mapping[str, Field], also_known: Iterable[str] = ()
) -> dict[str, Any]:
    """Rename accepted spellings to canonical names and check each value by itself.

    None counts as not given. `also_known` are further names for the suggestions about an unknown
    name.

    Raises:
        InvalidParameterError: a name is unknown, a type or range is wrong, or two spellings of one
            parameter disagree.
    """
    result: dict[str, Any] = {}
    for spelling, value in given.items():
        if value is None:
            continue
        field = spellings.get(spelling)
        if field is None:
            raise unknown(spelling, value, {*spellings, *also_known})
        checked_value = check(field, spelling, value)
        if result.setdefault(field.name, checked_value) != checked_value:
            raise InvalidParameterError(
                spelling,
                value,
                f"it contradicts another spelling of {field.name}: {result[field.name]!r}",
            )
    return result


def unknown(name: str, value: Any, known: Iterable[str]) -> InvalidParameterError:
    """Return the refusal of an unknown parameter."""
    names = sorted(known)
    meant = near_miss(name, names)
    if meant is not None:
        return InvalidParameterError(name, value, f"unknown parameter; did you mean {meant}?")
    nearest = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], names, n=3, cutoff=0.0)
    hint = f"the nearest are {', '.join(nearest)}; /docs lists all"
    return InvalidParameterError(name, value, f"unknown parameter; {hint}")


def near_miss(name: str, known: Iterable[str] = OWN_SPELLINGS) -> str | None:
    """Return the known name that is almost `name`, ignoring case, dashes and underscores."""
    names = {_letters(other): other for other in sorted(known)}
    matches = difflib.get_close_matches(_letters(name), names, n=1, cutoff=_ALIKE)
    return names[matches[0]] if matches else None


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _expand_shorthands(given: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise algorithm names, and expand parameters that are shorthands for an algorithm.

    A kind of remasking may refer to several algorithms; the decision chooses one.
    """
    expanded = dict(given)
    leaps = expanded.pop("use_local_leap", None)
    if leaps is not None:
        leaps = check(BY_NAME["use_local_leap"], "use_local_leap", leaps)
    algorithm = expanded.get("algorithm")
    if isinstance(algorithm, str):
        algorithm = _snake_case(algorithm)
        algorithm = "adablock" if algorithm == "ada_block" else algorithm
        if algorithm in REMASKING:
            if expanded.get("remasking") not in (None, algorithm):
                raise InvalidParameterError(
                    "remasking", expanded["remasking"], f"it contradicts algorithm: {algorithm!r}"
                )
            expanded["remasking"] = algorithm
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
    """Return `value` converted to `spec.kind`, or raise InvalidParameterError naming `spelling`."""
    if spec.kind is bool:
        if not isinstance(value, bool) and value not in (0, 1):
            raise InvalidParameterError(spelling, value, "wanted true or false")
        return bool(value)
    if spec.kind is tuple:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or not all(type(token) is int and 0 <= token < 2**63 for token in value):
            raise InvalidParameterError(spelling, value, "wanted a list of token ids")
        return tuple(value)
    if spec.kind in (dict, list):
        return _by_token(spelling, value) if spec.kind is dict else _words(spelling, value)
    if spec.kind is str:
        if not isinstance(value, str) or value not in spec.choices:
            raise InvalidParameterError(
                spelling, value, f"wanted one of: {', '.join(spec.choices)}"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        kind = "whole" if spec.kind is int and not isinstance(value, (int, float)) else "finite"
        raise InvalidParameterError(spelling, value, f"wanted a {kind} number")
    if spec.kind is int:
        if value != int(value) or not -(2**63) <= value < 2**64:
            raise InvalidParameterError(spelling, value, "wanted a whole number of 64 bits")
        value = int(value)
    if spec.minimum is not None and value < spec.minimum:
        raise InvalidParameterError(spelling, value, f"wanted at least {as_json(spec.minimum)}")
    if spec.maximum is not None and value > spec.maximum:
        raise InvalidParameterError(spelling, value, f"wanted at most {as_json(spec.maximum)}")
    return spec.kind(value)


def _by_token(spelling: str, value: Any) -> dict[int, float]:
    """Return numbers by token id, clipped to -100 and 100; JSON has the ids as strings."""
    wanted = "wanted an object of token ids and numbers"
    if not isinstance(value, dict):
        raise InvalidParameterError(spelling, value, wanted)
    biases = {}
    for token, bias in value.items():
        is_id = type(token) is int or (isinstance(token, str) and token.isdecimal())
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_id or not is_number or not _is_finite(bias) or len(str(token)) > MAX_DIGITS:
            raise InvalidParameterError(spelling, {token: bias}, wanted)
        biases[int(token)] = min(max(float(bias), -MAX_BIAS), MAX_BIAS)
    return biases


def _words(spelling: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(word, str) and word.strip() for word in value):
        raise InvalidParameterError(spelling, value, "wanted a list of words, none of them empty")
    return tuple(dict.fromkeys(value))


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer outside the range of float
        return False


def named_algorithm(request: Mapping[str, Any], *, is_block_causal: bool) -> str | None:
    """Return the algorithm that canonical values name, or None if they name none."""
    name: str | None = request.get("algorithm")
    if name not in REMASKING:
        return name
    if is_block_causal:
        return "low_confidence_dynamic"
    return "semi_ar" if request.get("threshold") is None else "threshold"


def server_defaults(given: Mapping[str, Any], family: Family | None) -> dict[str, Any]:
    """Check the server-wide defaults.

    Args:
        given: values under any accepted spelling.
        family: family of the served model; None if it is not known yet, so that only names and
            single values are checked.

    Raises:
        ServerConfigError: a setting is unknown or unusable.
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
    if family is None:
        return defaults
    named = named_algorithm(defaults, is_block_causal=family.is_block_causal)
    if named is not None:
        defaults["algorithm"] = named
    _check_together(defaults, algorithms_for(family))
    attention = defaults.get("attention_dtype", "model")
    if family.is_block_causal and attention != "model":
        raise ServerConfigError(
            f"dllm settings: attention_dtype: given {attention}; wanted model: family "
            f"{family.name} is block-causal"
        )
    return defaults


def _check_together(defaults: Mapping[str, Any], algorithms: Mapping[str, Algorithm]) -> None:
    """Refuse server-wide defaults that contradict each other."""
    name, cache = defaults.get("algorithm"), defaults.get("cache")
    if name is not None and name not in algorithms:
        raise ServerConfigError(
            f"dllm settings: algorithm: given {name!r}; wanted {in_words(algorithms)}"
        )
    records = list(algorithms.values()) if name is None else [algorithms[name]]
    allowed = tuple(dict.fromkeys(kind for record in records for kind in record.caches))
    if cache is not None and cache not in allowed:
        whose = "this model" if name is None else f"algorithm {name}"
        raise ServerConfigError(
            f"dllm settings: cache: given {cache!r}; {whose} wants {in_words(allowed)}"
        )
    guided = defaults.get("cfg_scale", 0) > 0
    if cache is not None and cache not in GUIDED_CACHES and guided:
        raise ServerConfigError(f"dllm settings: cache {cache} works with cfg_scale 0 only")
