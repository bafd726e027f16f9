# SPDX-License-Identifier: Apache-2.0
"""Decision about a request: converts its values to complete parameters.

Explicit values are applied literally, or refused with the values that would work. Defaults always
work, so a server-wide default that conflicts with a value of the request is dropped.

A request is decided once. The decision is stored in its `SamplingParams.extra_args` under a name
that clients cannot set. The scheduler decides only requests without a stored decision.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import (
    SPEC,
    STRUCTURED,
    Spec,
    check_room,
    spec_of,
    unpacked,
)
from vllm.diffusion.request.algorithms import GUIDED_CACHES, NEVER, algorithms_for
from vllm.diffusion.request.edits import edits_of
from vllm.diffusion.request.fields import BY_NAME, FIELDS, canonical, named_algorithm, value_of
from vllm.diffusion.request.lengths import decide_lengths
from vllm.diffusion.request.likelihood import (
    BESIDE_A_SCORE,
    ONLY_READ,
    SCORE,
    SCORED_AS,
    likelihood_request,
)
from vllm.diffusion.request.params import SEED_BITS, DiffusionParams
from vllm.diffusion.request.request import Request
from vllm.diffusion.request.request_fields import FIXED_WITH, NO_FILTERS
from vllm.diffusion.request.revision import repaired, revision_of
from vllm.diffusion.request.upstream_fields import UPSTREAM_FIELDS, refuse_unsupported
from vllm.diffusion.request.values import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.guided.guides import Guide
    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.likelihood import ScoreRequest
    from vllm.diffusion.request.served_model import ServedModel
    from vllm.diffusion.request.values import Field

DECISION = "dllm_decision"  # key of extra_args that stores the decision

# A harmless key of SamplingParams.extra_args that upstream defines. The keys of upstream's KV
# cache connectors are unknown parameters here, because there is no such cache.
RESERVED_EXTRA_ARGS = frozenset({"kv_cache_report_mode"})

MAX_LOGPROB_TOKEN_IDS = 128  # upstream's limit of `logprob_token_ids`

IGNORED = "dllm_ignored"  # key of extra_args for names of fields that our routes ignore

# Standard fields that are ignored, instead of refused, if the algorithm or the model does not use
# them; in the order in which a report lists them.
_IGNORED_IF_UNUSED = (
    *("steps", "block_length", "temperature", "remasking"),
    *(*NO_FILTERS, "thinking_token_budget"),
    *("predicted_text", "predicted_token_ids"),
)
# Fields that have no meaning, or no implementation, without a mask token.
_NOT_OF_OPEN = (*("mask_id", "logits_eos_inf", "confidence_dtype", "complete_blocks"),)
# Keys of the values of a request that are no fields.
_NO_FIELDS = frozenset(
    {
        *(STRUCTURED, SCORE, IGNORED, "stop_token_ids", "logprobs", "logprob_token_ids"),
        "upstream_max_tokens",
    }
)
# How attributes of DiffusionParams are computed that no request sets.
_DERIVED = {
    attribute.name: attribute.metadata["derived"]
    for attribute in dataclasses.fields(DiffusionParams)
    if "derived" in attribute.metadata
}
# Fields that are attributes of DiffusionParams.
_RESOLVED = [BY_NAME[a.name] for a in dataclasses.fields(DiffusionParams) if a.name in BY_NAME]
# Special tokens that fields need, with the refusal if a model does not have one.
_SPECIAL_TOKENS = {
    "eos": "the checkpoint has no end-of-sequence token",
    "eot": "the tokenizer has no end-of-turn token",
}


def attach(sampling: Any, decided: DiffusionParams, index: int = 0) -> None:
    """Store the decision in a request's `SamplingParams` instead of the values that led to it.

    Args:
        sampling: parameters to change; not a client's own object.
        decided: the decision.
        index: index of the answer; it is added to the seed, which is stored outside the decision.
    """
    kept = {k: v for k, v in (sampling.extra_args or {}).items() if k in RESERVED_EXTRA_ARGS}
    sampling.extra_args = {**kept, DECISION: decided}
    # Upstream would compile a grammar that is never used.
    sampling.structured_outputs = None
    # Upstream would tokenise the words again.
    sampling.bad_words = None
    # Upstream would require a server with a reasoning parser.
    sampling.thinking_token_budget = None
    sampling.seed = None if decided.seed is None else (decided.seed + index) % 2**SEED_BITS


def is_decided(sampling: Any) -> bool:
    """Return whether a decision is attached. A client cannot send a value of its type."""
    extra = sampling.extra_args
    return isinstance(extra, dict) and isinstance(extra.get(DECISION), DiffusionParams)


def check_extra_args(sampling: Any) -> None:
    """Check that parameters in `extra_args` have names.

    Raises:
        InvalidParameterError: `extra_args` is no dictionary, or a key is no text.
    """
    extra = sampling.extra_args or {}
    if not isinstance(extra, dict) or not all(isinstance(name, str) for name in extra):
        raise InvalidParameterError("extra_args", extra, "wanted a dictionary of names and values")


def decision_of(
    sampling: Any, model: ServedModel, prompt_token_ids: Sequence[int]
) -> DiffusionParams:
    """Return the attached decision, or decide a request without one.

    Raises:
        InvalidParameterError: see `decide`.
    """
    attached = (sampling.extra_args or {}).get(DECISION)
    if attached is None:
        decided = decide(request_values_of(sampling), model, prompt_token_ids)
    else:
        decided = attached
        # The decision was sent from another process.
        if not isinstance(decided, DiffusionParams):
            decided = msgspec.convert(attached, DiffusionParams)
        if sampling.seed is not None:
            decided = decided.with_seed(sampling.seed)
    if decided.return_trajectory and sampling.stop:
        decided = dataclasses.replace(decided, has_stop_strings=True)
    return decided


def request_values_of(sampling: Any) -> dict[str, Any]:
    """Return the values of a vLLM `SamplingParams` by canonical name, without unset ones.

    `extra_args` contains the diffusion parameters and overrides the fields of `SamplingParams`.

    Raises:
        InvalidParameterError: a key is unknown, spellings contradict each other, or a field of
            `SamplingParams` is not supported.
    """
    names = [name for name, field in UPSTREAM_FIELDS.items() if field.in_sampling]
    refuse_unsupported({name: getattr(sampling, name, None) for name in names})
    extra = {k: v for k, v in (sampling.extra_args or {}).items() if k not in RESERVED_EXTRA_ARGS}
    ignored = _ignored_elsewhere(extra.pop(IGNORED, []))
    spec = requested_format(sampling)
    extra = {k: v for k, v in extra.items() if k not in (STRUCTURED, SPEC)}
    score = extra.pop(SCORE, None)
    others = sorted(extra.keys() - BESIDE_A_SCORE)
    if score is not None and others:
        raise InvalidParameterError(SCORE, score, f"wanted it without {in_words(others)}")
    given = canonical(extra)
    if score is not None:
        given |= {SCORE: score, **SCORED_AS}
    if spec is not None:
        given[STRUCTURED] = spec
    for field in FIELDS:
        value = getattr(sampling, field.name, None) if field.in_sampling else None
        if value is not None and field.name not in given:
            # Upstream has checked numbers.
            is_number = field.kind in (bool, int, float)
            given[field.name] = value if is_number else field.checked(field.name, value)
    if "max_tokens" not in given:
        given["upstream_max_tokens"] = sampling.max_tokens
    given[IGNORED] = tuple(dict.fromkeys(ignored))
    given["stop_token_ids"] = tuple(sampling.stop_token_ids or ())
    given["logprobs"] = sampling.logprobs
    given["logprob_token_ids"] = tuple(getattr(sampling, "logprob_token_ids", None) or ())
    if (sampling.logprobs or 0) < 0:
        raise InvalidParameterError(
            "logprobs", sampling.logprobs, "wanted how many alternatives, 0 or more"
        )
    return given


def requested_format(sampling: Any) -> Spec | None:
    """Return the format that a `SamplingParams` requests.

    Raises:
        InvalidParameterError: the format is invalid.
    """
    extra = sampling.extra_args or {}
    if SPEC in extra:
        return unpacked(extra[SPEC])
    return spec_of(extra.get(STRUCTURED) or _structured_outputs(sampling))


def _structured_outputs(sampling: Any) -> dict[str, Any] | None:
    given = getattr(sampling, STRUCTURED, None)
    return None if given is None else dict(vars(given))


def _ignored_elsewhere(given: Any) -> list[str]:
    """Return the names of fields that a route ignored, after checking the value of `IGNORED`."""
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise InvalidParameterError(IGNORED, given, "wanted it left out")
    return given


def decide(
    fields: Mapping[str, Any], model: ServedModel, prompt_token_ids: Sequence[int]
) -> DiffusionParams:
    """Decide every parameter of a request.

    Args:
        fields: values by canonical name, as returned by `canonical` or `request_values_of`. The
            latter adds `stop_token_ids`, `logprobs`, `structured_outputs` (a `Spec`), `IGNORED`
            (names of ignored fields), and `upstream_max_tokens`, a limit that upstream may have set
            itself.
        model: the served model.
        prompt_token_ids: the prompt.

    Raises:
        InvalidParameterError: naming the field, the given and the expected value.
    """
    spec, score = fields.get(STRUCTURED), fields.get(SCORE)
    stop_token_ids = frozenset(fields.get("stop_token_ids", ()))
    request = _request(fields, model, prompt_token_ids, model.ids.stop | stop_token_ids, spec)
    _check(request)
    if model.family.is_open:
        _check_open(request)
    _check_prompt(prompt_token_ids, model, request.values["allow_infill"])
    if score is None:
        _check_infill(request)
    if spec is not None:
        request.guide = _guide(spec, request, stop_token_ids)
    if score is None:
        request.revision = revision_of(request, spec)
    request.lengths = decide_lengths(request)
    request.cache = _cache(request)
    params = DiffusionParams(
        **_resolved(request), edits=edits_of(request), revision=request.revision
    )
    if spec is not None and request.guide is not None:
        params = _guided(params, spec, request.guide, prompt_token_ids)
    elif params.thinking_token_budget is not None:
        params = _with_end_of_thinking(params, request)
    if score is not None:
        return _scored(params, score, spec, request)
    if request.algorithm.drafts and not model.family.is_strictly_causal:
        _check_drafted(request, params)
    seed = request.given.get("seed")
    return params if seed is None else params.with_seed(seed)


def _request(
    fields: Mapping[str, Any],
    model: ServedModel,
    prompt: Sequence[int],
    end_ids: frozenset[int],
    spec: Spec | None,
) -> Request:
    """Choose the algorithm, and find the value of every field."""
    logprob_token_ids = _logprob_token_ids(fields.get("logprob_token_ids"), model)
    given = {name: value for name, value in fields.items() if name not in _NO_FIELDS}
    algorithm = _algorithm(given, model, spec)
    _check_thinking(given, model)
    ignored = _ignored(given, algorithm, model)
    given = {name: value for name, value in given.items() if name not in ignored}
    return Request(
        given=given,
        values={field.name: value_of(field, given, algorithm, model) for field in FIELDS},
        model=model,
        algorithm=algorithm,
        prompt=prompt,
        end_ids=end_ids,
        upstream_max_tokens=fields.get("upstream_max_tokens"),
        logprobs=fields.get("logprobs"),
        logprob_token_ids=logprob_token_ids,
        ignored=(*ignored, *fields.get(IGNORED, ())),
    )


def _resolved(request: Request) -> dict[str, Any]:
    """Return the attributes of `DiffusionParams` that `param` and `derived` declare."""
    resolved = {name: of(request) for name, of in _DERIVED.items()}
    for field in _RESOLVED:
        value = request.values[field.name]
        resolved[field.name] = value if field.resolve is None else field.resolve(value, request)
    return resolved


def _check_drafted(request: Request, params: DiffusionParams) -> None:
    """Refuse parameters that depend on earlier tokens, because some of those may only be drafts."""
    edits = params.edits
    depends = {
        "complete_blocks": params.complete_blocks,
        "bad_words": edits is not None and len(edits.never) < len(edits.bad_words),
        **{
            name: edits is not None and edits.counts_tokens and name in request.given
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        },
    }
    for name in (name for name, is_asked in depends.items() if is_asked):
        wanted = "wanted algorithm: autoregressive, which gives the same answer"
        raise InvalidParameterError(name, request.given[name], wanted)


def _scored(
    params: DiffusionParams, score: Any, spec: Spec | None, request: Request
) -> DiffusionParams:
    """Return the complete parameters of a likelihood request."""
    model = request.model
    if spec is not None:
        raise InvalidParameterError(SCORE, score, f"wanted it without {STRUCTURED}")
    wanted = _score_request(score, model, request.prompt)
    return dataclasses.replace(params, **_score_values(wanted, model), score=wanted)


def _logprob_token_ids(given: Any, model: ServedModel) -> tuple[int, ...]:
    """Return the tokens whose log probabilities are reported instead of the most likely ones."""
    ids = tuple(given or ())
    if len(ids) > MAX_LOGPROB_TOKEN_IDS or len(set(ids)) < len(ids):
        raise InvalidParameterError(
            "logprob_token_ids",
            given,
            f"wanted at most {MAX_LOGPROB_TOKEN_IDS} token ids, each once",
        )
    if not all(type(token) is int and 0 <= token < model.vocab_size for token in ids):
        raise InvalidParameterError(
            "logprob_token_ids", given, f"wanted token ids from 0 to {model.vocab_size - 1}"
        )
    return ids


def _score_request(score: Any, model: ServedModel, prompt: Sequence[int]) -> ScoreRequest:
    request = likelihood_request(score, len(prompt), model.vocab_size)
    # Rows before the first mask may be cached, so they are not computed.
    if request.shares_prefix and model.ids.mask not in prompt[: request.positions[0] + 1]:
        wanted = "wanted false: a scored position is before the first mask"
        raise InvalidParameterError(f"{SCORE}.shares_prefix", True, wanted)
    return request


def _score_values(score: ScoreRequest, model: ServedModel) -> dict[str, Any]:
    """Return the other parameters of a likelihood request."""
    if 0 in score.positions and model.family.has_causal_context:
        raise InvalidParameterError(
            f"{SCORE}.positions",
            list(score.positions),
            f"wanted positions from 1 on: a model of family {model.family.name} predicts the next "
            "token",
        )
    if score.cfg_scale > 0 and model.family.is_block_causal:
        raise InvalidParameterError(
            f"{SCORE}.cfg_scale",
            score.cfg_scale,
            f"wanted 0: a model of family {model.family.name} has no guidance",
        )
    cache = "exact" if score.shares_prefix and model.family.is_block_causal else "none"
    return {**ONLY_READ, "cfg_scale": float(score.cfg_scale), "cache": cache}


def _guide(spec: Spec, request: Request, stop_token_ids: frozenset[int]) -> Guide:
    """Return the compiled format of an answer; refuse values that would break the format."""
    model = request.model
    if request.given.get("logits_eos_inf"):
        raise InvalidParameterError("logits_eos_inf", True, f"wanted false with {spec.field}")
    others = sorted(stop_token_ids - model.ids.stop)
    if others:
        raise InvalidParameterError("stop_token_ids", others, f"wanted none with {spec.field}")
    if model.guides is None:
        wanted = "wanted a server that has a tokenizer and divides no sequence over ranks"
        raise InvalidParameterError(spec.field, spec.value, wanted)
    return model.guides.guide(spec)


def _guided(
    params: DiffusionParams, spec: Spec, guide: Guide, prompt: Sequence[int]
) -> DiffusionParams:
    """Add a guide, and check that the answer and the prompt's gaps have room for it.

    Filters of single tokens are dropped, because they cannot be combined with a format, and so is
    thinking before the answer. Tokens of a text that break the format become masks.
    """
    is_limit = params.can_grow or params.max_tokens < params.gen_length
    check_room(guide, spec, params.longest_answer, "max_tokens" if is_limit else "gen_length")
    for is_gap, tokens in groupby(prompt, lambda token: token == params.mask_id):
        if is_gap:
            check_room(guide, spec, len(list(tokens)), "prompt")
    without = {**NO_FILTERS, "thinking_token_budget": None}
    others = tuple(n for n, value in without.items() if getattr(params, n) != value)
    revision = params.revision and repaired(params.revision, spec, guide, params)
    ignored = (*params.ignored, *others)
    return dataclasses.replace(params, guide=guide, revision=revision, **without, ignored=ignored)


def _with_end_of_thinking(params: DiffusionParams, request: Request) -> DiffusionParams:
    """Refuse a thinking budget if the answer must not contain its end token; drop a default one."""
    end, edits = params.think_ids[1], params.edits
    if edits is None:
        return params
    excluded_by = {
        "bad_words": end in edits.never,
        "allowed_token_ids": bool(edits.allowed_token_ids) and end not in edits.allowed_token_ids,
    }
    name = next((name for name, excludes in excluded_by.items() if excludes), None)
    if name is None:
        return params
    if "thinking_token_budget" in request.given:
        wanted = (
            f"wanted token {end}, which ends thinking, to be possible with thinking_token_budget"
        )
        raise InvalidParameterError(name, request.given[name], wanted)
    return dataclasses.replace(params, thinking_token_budget=None)


def _algorithm(request: Mapping[str, Any], model: ServedModel, spec: Spec | None) -> Algorithm:
    """Return the requested algorithm, or a default that supports the rest of the request."""
    allowed = algorithms_for(model.family)
    usable = {n: a for n, a in allowed.items() if _needs_places(a, request, spec) is None}
    algorithm = named_algorithm(request, is_block_causal=model.family.is_block_causal)
    if algorithm is not None:
        if algorithm not in allowed:
            raise InvalidParameterError(
                "algorithm",
                algorithm,
                f"a model of family {model.family.name} supports {in_words(allowed)}",
            )
        if algorithm not in usable:
            field = _needs_places(allowed[algorithm], request, spec)
            wanted = f"wanted {in_words(usable)} with {field}, because {algorithm} moves tokens"
            raise InvalidParameterError("algorithm", algorithm, wanted)
        return allowed[algorithm]
    default = allowed[model.default_algorithm]
    if default.name not in usable:
        default = next(iter(usable.values()))
    if "threshold" in request and "threshold" not in default.parameters and "threshold" in allowed:
        return allowed["threshold"]
    return default


def _needs_places(
    algorithm: Algorithm, request: Mapping[str, Any], spec: Spec | None
) -> str | None:
    """Return the field that excludes an algorithm because it moves tokens, if any."""
    if not algorithm.moves_tokens:
        return None
    names = ("allow_infill", *(FIXED_WITH if algorithm.chooses_length else ()))
    given = [name for name in names if request.get(name)]
    return spec.field if spec is not None else next(iter(given), None)


def _ignored(given: Mapping[str, Any], algorithm: Algorithm, model: ServedModel) -> tuple[str, ...]:
    """Return the names of standard fields whose given values have no effect.

    Every client sends the standard fields, whatever the model, so they are never refused for
    having no effect. A value that changes nothing, such as temperature 0 if nothing is drawn, is
    not listed. Defaults of generation_config.json without effect are listed.
    """
    unused = []
    for name in _IGNORED_IF_UNUSED:
        if name not in given or BY_NAME[name].acts(algorithm, model):
            continue
        is_neutral = given[name] in BY_NAME[name].neutral
        if name == "remasking":
            # Another value is refused. Low confidence is what an algorithm without it does.
            is_neutral = not is_neutral or algorithm.score == "confidence"
        if not is_neutral:
            unused.append(name)
    return (*unused, *(name for name in model.unused_defaults if given.get(name, 1) == 1))


def _check(request: Request) -> None:
    """Refuse values that this algorithm, model or checkpoint does not support."""
    given, algorithm, model = request.given, request.algorithm, request.model
    for name, value in given.items():
        field = BY_NAME[name]
        if not field.acts(algorithm, model) and value not in field.neutral:
            raise InvalidParameterError(name, value, _wanted_instead(field, algorithm, model))
    if not model.family.is_open and given.get("mask_id", model.ids.mask) != model.ids.mask:
        wanted = f"wanted the model's: {model.ids.mask}"
        raise InvalidParameterError("mask_id", given["mask_id"], wanted)
    fields = [field for field in FIELDS if field.name in given]
    for token, absent in _SPECIAL_TOKENS.items():
        for field in fields:
            is_needed = token in field.needs and given[field.name]
            if is_needed and getattr(model.ids, token) is None:
                raise InvalidParameterError(field.name, True, absent)
    for field in fields:
        accepted = None if field.refuse is None else field.refuse(given[field.name], request)
        if accepted is not None:
            raise InvalidParameterError(field.name, given[field.name], accepted)


def _wanted_instead(field: Field, algorithm: Algorithm, model: ServedModel) -> str:
    """Describe the alternatives to a field that has no effect with an algorithm."""
    others = [a.name for a in algorithms_for(model.family).values() if field.acts(a, model)]
    wanted = [str(value) for value in field.neutral[:1]]
    wanted += [f"algorithm: {in_words(others)}"] if others else []
    alternatives = f"wanted {', or '.join(wanted)}" if wanted else "wanted it left out"
    return f"algorithm {algorithm.name} does not use it; {alternatives}"


def _cache(request: Request) -> str:
    """Return the kind of cache; replace a default that cannot be combined with guidance."""
    given, algorithm, model = request.given, request.algorithm, request.model
    requested = given.get("cache")
    if requested is not None and requested not in algorithm.caches:
        others = [name for name, a in algorithms_for(model.family).items() if requested in a.caches]
        more = f"; {requested} requires algorithm: {in_words(others)}" if others else ""
        wanted = f"algorithm {algorithm.name} supports {in_words(algorithm.caches)}{more}"
        raise InvalidParameterError("cache", requested, wanted)
    chosen = requested or model.defaults.get("cache")
    if chosen is None and request.values["cache_delay_iter"] < NEVER:
        chosen = "delayed"
    default = "exact" if model.family.is_block_causal else "none"
    cache = str(chosen) if chosen in algorithm.caches else default
    is_explicit = requested is not None or given.get("cache_delay_iter", NEVER) < NEVER
    is_alone = cache not in GUIDED_CACHES
    if is_alone and given.get("cfg_scale", 0) > 0 and is_explicit:
        wanted = f"wanted {in_words(GUIDED_CACHES)} with cfg_scale, or cfg_scale: 0"
        raise InvalidParameterError("cache", cache, wanted)
    if is_alone and not is_explicit and request.values["cfg_scale"] > 0:
        cache = "none"
    if "delayed" in algorithm.caches and cache != "delayed":
        for name in ("cache_delay_iter", "refresh_interval"):
            if given.get(name, NEVER) != NEVER:
                wanted = f"wanted {NEVER}, or cache: delayed"
                raise InvalidParameterError(name, given[name], wanted)
    return cache


def check_score(score: Any, model: ServedModel, prompt: Sequence[int]) -> None:
    """Check a likelihood request for a prompt.

    Raises:
        InvalidParameterError: naming the prompt, or the key of `score`.
    """
    _check_prompt(prompt, model, allow_infill=True)
    _score_request(score, model, prompt)


def _check_prompt(prompt: Sequence[int], model: ServedModel, allow_infill: bool) -> None:
    if not prompt:
        raise InvalidParameterError("prompt", [], "wanted at least one token")
    try:
        lowest, highest = min(prompt), max(prompt)
        is_outside = lowest < 0 or highest >= model.vocab_size
    except TypeError:  # `LLM` accepts lists of any Python objects
        raise InvalidParameterError("prompt", prompt, "wanted token ids") from None
    if is_outside:
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


def _check_infill(request: Request) -> None:
    family = request.model.family
    if request.given.get("allow_infill") and family.has_causal_context:
        wanted = f"wanted false: a model of family {family.name} reads a prompt causally"
        raise InvalidParameterError("allow_infill", True, wanted)


def _check_open(request: Request) -> None:
    """Refuse what a family without a mask token does not support."""
    family = f"a model of family {request.model.family.name}"
    for name in _NOT_OF_OPEN:
        default = BY_NAME[name].default
        if request.given.get(name, default) != default:
            wanted = f"wanted it left out: {family} does not use it"
            raise InvalidParameterError(name, request.given[name], wanted)


def _check_thinking(request: Mapping[str, Any], model: ServedModel) -> None:
    """Refuse a thinking budget if the model thinks but its tokenizer lacks the tokens for it."""
    name, absent = "thinking_token_budget", model.ids.no_think
    if absent is not None and request.get(name) not in (None, *BY_NAME[name].neutral):
        raise InvalidParameterError(name, request[name], f"wanted none: no token is {absent}")
