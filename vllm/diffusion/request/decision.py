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
from functools import partial
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
from vllm.diffusion.request.edit_values import edits_of
from vllm.diffusion.request.fields import (
    BY_NAME,
    COLLECTED,
    OF_SAMPLING,
    canonical,
    check,
    named_algorithm,
)
from vllm.diffusion.request.lengths import DEFAULT_BLOCK, decide_lengths, with_suffix
from vllm.diffusion.request.likelihood import (
    BESIDE_A_SCORE,
    ONLY_READ,
    SCORE,
    SCORED_AS,
    likelihood_request,
)
from vllm.diffusion.request.params import SEED_BITS, DiffusionParams
from vllm.diffusion.request.values import as_score, in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.guided.guides import Guide
    from vllm.diffusion.request.algorithms import Algorithm
    from vllm.diffusion.request.lengths import Lengths
    from vllm.diffusion.request.likelihood import ScoreRequest
    from vllm.diffusion.request.served_model import ServedModel, SpecialIds
    from vllm.diffusion.request.values import Field

DECISION = "dllm_decision"  # key of extra_args that stores the decision

# A harmless key of SamplingParams.extra_args that upstream defines. The keys of upstream's KV
# cache connectors are unknown parameters here, because there is no such cache.
RESERVED_EXTRA_ARGS = frozenset({"kv_cache_report_mode"})

MAX_LOGPROB_TOKEN_IDS = 128  # upstream's limit of `logprob_token_ids`

IGNORED = "dllm_ignored"  # key of extra_args for names of fields that our routes ignore

# Fields of upstream's SamplingParams that change an answer and are not supported: the values
# without effect, and the text of the refusal.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "prompt_logprobs": ((None,), "wanted none: prompt tokens are given, not predicted"),
    "repetition_detection": ((None,), "wanted none: not supported"),
    "watermarking": ((None, False), "wanted false: not supported"),
}

# Parameters that restrict a distribution before sampling, with the values that keep all of it.
NO_FILTERS: dict[str, Any] = {"min_p": 0.0, "top_k": None, "top_p": None}
FILTERS = tuple(NO_FILTERS)

# Fields of DiffusionParams whose value is the request's, else the server's, else the table's.
_PLAIN: tuple[str, ...] = tuple(
    f.name
    for f in dataclasses.fields(DiffusionParams)
    if f.name in BY_NAME
    and f.name
    not in (
        *("algorithm", "cache", "gen_length", "max_tokens", "steps", "steps_per_block"),
        *("block_length", "sub_block_length", "delimiter_ids", "seed"),
    )
)


# Fields that are thresholds on a score.
_SCORES = (
    *("threshold", "relaxed_threshold", "low_threshold", "editing_threshold"),
    "delimiter_threshold",
)

# fp8 attention runs the steps of one request alone and without drafts.
_WITH_FP8_ATTENTION: dict[str, Any] = {"num_speculative_states": 0}


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
    return isinstance((sampling.extra_args or {}).get(DECISION), DiffusionParams)


def decision_of(
    sampling: Any, model: ServedModel, prompt_token_ids: Sequence[int]
) -> DiffusionParams:
    """Return the attached decision, or decide a request without one.

    Raises:
        InvalidParameterError: see `decide`.
    """
    attached = (sampling.extra_args or {}).get(DECISION)
    if attached is None:
        return decide(request_values_of(sampling), model, prompt_token_ids)
    decided = attached
    # The decision was sent from another process.
    if not isinstance(decided, DiffusionParams):
        decided = msgspec.convert(attached, DiffusionParams)
    return decided if sampling.seed is None else decided.with_seed(sampling.seed)


def request_values_of(sampling: Any) -> dict[str, Any]:
    """Return the values of a vLLM `SamplingParams` by canonical name, without unset ones.

    `extra_args` contains the diffusion parameters and overrides the fields of `SamplingParams`.

    Raises:
        InvalidParameterError: a key is unknown, spellings contradict each other, or a field of
            `SamplingParams` is not supported.
    """
    refuse_unsupported({name: getattr(sampling, name, None) for name in UNSUPPORTED})
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
    for name in OF_SAMPLING:
        value = getattr(sampling, name, None)
        if value is not None and name not in given:
            given[name] = check(BY_NAME[name], name, value) if name in COLLECTED else value
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


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Refuse fields that are not supported.

    Raises:
        InvalidParameterError: naming the first unsupported field.
    """
    for name, (neutral, wanted) in UNSUPPORTED.items():
        if given.get(name) not in (None, *neutral):
            raise InvalidParameterError(name, given[name], wanted)


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
    request = dict(fields)
    spec, score = request.pop(STRUCTURED, None), request.pop(SCORE, None)
    stop_token_ids = frozenset(request.pop("stop_token_ids", ()))
    end_ids = model.ids.stop | stop_token_ids
    logprob_token_ids = _logprob_token_ids(request.pop("logprob_token_ids", None), model)
    logprobs, left_out = request.pop("logprobs", None), request.pop(IGNORED, ())
    upstream_max_tokens = request.pop("upstream_max_tokens", None)
    algorithm = _algorithm(request, model, spec)
    _check_thinking(request, model)
    ignored = _ignored(request, algorithm, model)
    request = {name: value for name, value in request.items() if name not in ignored}
    _check(request, algorithm, model)
    _check_prompt(prompt_token_ids, model, request.get("allow_infill", False))
    if score is None:
        _check_infill(request, model)
    num_prompt = len(prompt_token_ids)
    guide = None if spec is None else _guide(spec, request, model, stop_token_ids)
    lengths = _lengths(request, guide, algorithm, model, num_prompt, upstream_max_tokens)
    lengths = _with_suffix(lengths, request.get("suffix_ids"), algorithm, model, num_prompt)
    cache = _cache(request, algorithm, model)
    values = _values(request, algorithm, model, cache, lengths)
    if values["attention_dtype"] == "fp8" and num_prompt + lengths.canvas >= model.fp8_from:
        values |= _WITH_FP8_ATTENTION | ({} if model.cuts_steps else {"force_single_batch": True})
    params = DiffusionParams(
        algorithm=algorithm.name,
        cache=cache,
        seed=None,
        stop_ids=frozenset() if values["ignore_eos"] else end_ids,
        edits=edits_of(request, model, end_ids, lengths.max_tokens, num_prompt + lengths.canvas),
        logprobs=len(logprob_token_ids) if logprob_token_ids else logprobs,
        logprob_token_ids=logprob_token_ids,
        ignored=(*ignored, *left_out),
        **values,
    )
    if spec is not None and guide is not None:
        params = _guided(params, spec, guide, prompt_token_ids)
    elif params.thinking_token_budget is not None:
        params = _with_end_of_thinking(params, request)
    if score is not None:
        return _scored(params, score, spec, model, num_prompt)
    if algorithm.drafts:
        _check_drafted(request, params)
    seed = request.get("seed")
    return params if seed is None else params.with_seed(seed)


def _check_drafted(request: Mapping[str, Any], params: DiffusionParams) -> None:
    """Refuse parameters that depend on earlier tokens, because some of those may only be drafts."""
    edits = params.edits
    depends = {
        "complete_blocks": params.complete_blocks,
        "bad_words": edits is not None and len(edits.never) < len(edits.bad_words),
        **{
            name: edits is not None and edits.counts_tokens and name in request
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        },
    }
    for name in (name for name, is_asked in depends.items() if is_asked):
        wanted = "wanted algorithm: autoregressive, which gives the same answer"
        raise InvalidParameterError(name, request[name], wanted)


def _lengths(
    request: Mapping[str, Any],
    guide: Guide | None,
    algorithm: Algorithm,
    model: ServedModel,
    num_prompt: int,
    upstream_max_tokens: int | None,
) -> Lengths:
    """Return the lengths of a request; a format may need a longer canvas than the default."""
    lengths_of = partial(
        decide_lengths,
        algorithm=algorithm,
        model=model,
        prompt_length=num_prompt,
        upstream_max_tokens=upstream_max_tokens,
    )
    lengths = lengths_of(request)
    if guide is None or lengths.canvas >= _usual_canvas(guide):
        return lengths
    longer = _longer(request, guide, model, num_prompt, upstream_max_tokens)
    return lengths if longer is None else lengths_of(longer)


def _scored(
    params: DiffusionParams, score: Any, spec: Spec | None, model: ServedModel, num_prompt: int
) -> DiffusionParams:
    """Return the complete parameters of a likelihood request."""
    if spec is not None:
        raise InvalidParameterError(SCORE, score, f"wanted it without {STRUCTURED}")
    wanted = likelihood_request(score, num_prompt, model.vocab_size)
    return dataclasses.replace(params, **_score_values(wanted, model), score=wanted)


def _values(
    request: dict[str, Any],
    algorithm: Algorithm,
    model: ServedModel,
    cache: str,
    lengths: Lengths,
) -> dict[str, Any]:
    """Return the parameters that are determined by single fields, the lengths and the model."""
    values = {name: _value(name, request, algorithm, model) for name in _PLAIN}
    if values["confidence_dtype"] == "logits":
        values |= {name: as_score(values[name], model.dtype) for name in _SCORES}
    if cache not in GUIDED_CACHES:
        # A server-wide default is dropped.
        values["cfg_scale"] = 0.0
    values["sub_block_length"] = _sub_block_length(request, lengths.block_length, algorithm, model)
    values["delimiter_ids"] = _delimiter_ids(request, algorithm, model)
    may_stop = not values["ignore_eos"] and model.ids.eos is not None
    values["suffix_ids"] = tuple(request.get("suffix_ids", ()))
    # early_stop would end the whole canvas at once, including the suffix.
    values["early_stop"] = values["early_stop"] and may_stop and not values["suffix_ids"]
    values["top_p"] = None if values["top_p"] == 1 else values["top_p"]
    values["top_k"] = values["top_k"] if (values["top_k"] or 0) > 0 else None
    budget = values["thinking_token_budget"]
    values["thinking_token_budget"] = None if budget == -1 or not model.ids.think else budget
    family, ids = model.family, model.ids
    return values | {
        "gen_length": lengths.canvas,
        "max_tokens": lengths.max_tokens,
        "steps": lengths.steps,
        "steps_per_block": lengths.steps_per_block,
        "block_length": lengths.block_length,
        "mask_id": ids.mask,
        "eos_id": ids.eos,
        "eot_id": ids.eot,
        "logit_shift": family.logit_shift,
        "is_block_causal": family.is_block_causal,
        "has_causal_context": family.has_causal_context,
        "scores_after_filters": family.scores_after_filters,
        "counts_masks": family.counts_masks,
        "completes_prompts": family.visibility.is_whole,
        "edit_ids": ids.edit,
        "forbidden_ids": () if algorithm.edits_length else ids.edit,
        "think_ids": ids.think,
        "fp8_attention_from": model.fp8_from,
    }


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
    return {**ONLY_READ, "cfg_scale": float(score.cfg_scale)}


def _guide(
    spec: Spec, request: Mapping[str, Any], model: ServedModel, stop_token_ids: frozenset[int]
) -> Guide:
    """Return the compiled format of an answer; refuse values that would break the format."""
    if request.get("logits_eos_inf"):
        raise InvalidParameterError("logits_eos_inf", True, f"wanted false beside {spec.field}")
    others = sorted(stop_token_ids - model.ids.stop)
    if others:
        raise InvalidParameterError("stop_token_ids", others, f"wanted none beside {spec.field}")
    if model.guides is None:
        wanted = "wanted a server that has a tokenizer and divides no sequence over ranks"
        raise InvalidParameterError(spec.field, spec.value, wanted)
    return model.guides.guide(spec)


def _usual_canvas(guide: Guide) -> int:
    """Return twice the length of the shortest answer, rounded up to whole default blocks."""
    return -(-2 * guide.least_tokens // DEFAULT_BLOCK) * DEFAULT_BLOCK


def _longer(
    request: Mapping[str, Any],
    guide: Guide,
    model: ServedModel,
    prompt_length: int,
    upstream_max_tokens: int | None,
) -> dict[str, Any] | None:
    """Return the request with a canvas that fits its format, or None if it sets a length."""
    room = model.max_model_len - prompt_length
    is_open = upstream_max_tokens in (None, room, model.default_max_tokens)
    if not is_open or {"gen_length", "max_tokens"} & request.keys():
        return None
    canvas = min(_usual_canvas(guide), room)
    return {**request, "gen_length": canvas} if canvas >= guide.least_tokens else None


def _guided(
    params: DiffusionParams, spec: Spec, guide: Guide, prompt: Sequence[int]
) -> DiffusionParams:
    """Add a guide to the parameters, and check that the answer and the prompt's gaps have room for
    it.

    Filters of single tokens are dropped, because they cannot be combined with a format, and so is
    thinking before the answer.
    """
    is_cut = params.max_tokens < params.gen_length
    room = min(params.max_tokens, params.gen_length)
    check_room(guide, spec, room, "max_tokens" if is_cut else "gen_length")
    for is_gap, tokens in groupby(prompt, lambda token: token == params.mask_id):
        if is_gap:
            check_room(guide, spec, len(list(tokens)), "prompt")
    without = {**NO_FILTERS, "thinking_token_budget": None}
    others = tuple(n for n, value in without.items() if getattr(params, n) != value)
    return dataclasses.replace(params, guide=guide, **without, ignored=(*params.ignored, *others))


def _with_end_of_thinking(params: DiffusionParams, request: Mapping[str, Any]) -> DiffusionParams:
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
    if "thinking_token_budget" in request:
        wanted = f"wanted token {end}, which ends thinking, beside thinking_token_budget"
        raise InvalidParameterError(name, request[name], wanted)
    return dataclasses.replace(params, thinking_token_budget=None)


def _with_suffix(
    lengths: Lengths,
    suffix: Sequence[int] | None,
    algorithm: Algorithm,
    model: ServedModel,
    prompt_length: int,
) -> Lengths:
    """Add the suffix to the lengths; refuse a suffix that is not visible, does not fit or has
    gaps.
    """
    if not suffix:
        return lengths
    family, ids = model.family, model.ids
    if family.is_block_causal:
        wanted = f"wanted none: a model of family {family.name} does not see what follows"
        raise InvalidParameterError("suffix_ids", list(suffix), wanted)
    if max(suffix) >= model.vocab_size or ids.mask in suffix or ids.eos is None:
        wanted = f"wanted token ids from 0 to {model.vocab_size - 1} without the mask token"
        wanted = "the checkpoint has no end-of-sequence token" if ids.eos is None else wanted
        raise InvalidParameterError("suffix_ids", list(suffix), wanted)
    longer = with_suffix(lengths, algorithm, len(suffix))
    if prompt_length + longer.canvas > model.max_model_len:
        raise InvalidParameterError(
            "suffix_ids",
            list(suffix),
            f"a prompt of {prompt_length} tokens and a canvas of {longer.canvas} with them exceed "
            f"max_model_len {model.max_model_len}",
        )
    return longer


def _algorithm(request: Mapping[str, Any], model: ServedModel, spec: Spec | None) -> Algorithm:
    """Return the requested algorithm, or a default that supports the rest of the request."""
    allowed = algorithms_for(model.family)
    keeps_places = {n: a for n, a in allowed.items() if not (a.edits_length or a.drafts)}
    needs_places = spec is not None or request.get("allow_infill", False)
    algorithm = named_algorithm(request, is_block_causal=model.family.is_block_causal)
    if algorithm is not None:
        if algorithm not in allowed:
            raise InvalidParameterError(
                "algorithm",
                algorithm,
                f"a model of family {model.family.name} wants {in_words(allowed)}",
            )
        if needs_places and algorithm not in keeps_places:
            field = "allow_infill" if spec is None else spec.field
            wanted = f"wanted {in_words(keeps_places)} beside {field}, as it moves tokens"
            raise InvalidParameterError("algorithm", algorithm, wanted)
        return allowed[algorithm]
    default = allowed[model.defaults.get("algorithm", model.family.default_algorithm)]
    if needs_places and default.name not in keeps_places:
        default = next(iter(keeps_places.values()))
    if "threshold" in request and "threshold" not in default.parameters and "threshold" in allowed:
        return allowed["threshold"]
    return default


def _is_used(name: str, algorithm: Algorithm, model: ServedModel) -> bool:
    """Return whether a parameter has an effect with an algorithm in this family."""
    if name == "remasking":
        return algorithm.can_score_at_random(is_shifted=model.is_shifted)
    if name == "num_speculative_states":
        return algorithm.speculates is not None
    if name == "thinking_token_budget":
        return bool(model.ids.think)
    return BY_NAME[name].is_used_by(algorithm.name, is_block_causal=model.family.is_block_causal)


def _ignored(
    request: Mapping[str, Any], algorithm: Algorithm, model: ServedModel
) -> tuple[str, ...]:
    """Return the names of standard fields whose given values have no effect.

    Every client sends the standard fields, whatever the model, so they are never refused for
    having no effect. A value that changes nothing, such as temperature 0 if nothing is drawn, is
    not listed. Defaults of generation_config.json without effect are listed.
    """
    cannot_act = {
        "steps": True,
        "block_length": True,
        "temperature": request.get("temperature") != 0,
        "remasking": request.get("remasking") == "low_confidence"
        and algorithm.score != "confidence",
        **{
            name: request.get(name) not in BY_NAME[name].neutral
            for name in (*FILTERS, "thinking_token_budget")
        },
    }
    unused = [
        name
        for name, cannot in cannot_act.items()
        if cannot and name in request and not _is_used(name, algorithm, model)
    ]
    return (*unused, *(name for name in model.unused_defaults if request.get(name, 1) == 1))


def _check(request: Mapping[str, Any], algorithm: Algorithm, model: ServedModel) -> None:
    """Refuse values that this algorithm, model or checkpoint does not support."""
    for name, value in request.items():
        spec = BY_NAME[name]
        if not _is_used(name, algorithm, model) and value not in spec.neutral:
            raise InvalidParameterError(name, value, _wanted_instead(spec, algorithm, model))
    if request.get("mask_id", model.ids.mask) != model.ids.mask:
        wanted = f"wanted the model's: {model.ids.mask}"
        raise InvalidParameterError("mask_id", request["mask_id"], wanted)
    _check_special_ids(request, model.ids)
    if request.get("return_entropy") and not request.get("return_trajectory"):
        raise InvalidParameterError(
            "return_entropy", True, "wanted false, or return_trajectory: true"
        )
    attention = request.get("attention_dtype", "model")
    if attention not in ("model", model.defaults.get("attention_dtype")):
        wanted = "wanted model, or a server whose --additional-config has it, too"
        raise InvalidParameterError("attention_dtype", attention, wanted)


def _wanted_instead(spec: Field, algorithm: Algorithm, model: ServedModel) -> str:
    """Describe the alternatives to a parameter that has no effect with an algorithm."""
    users = spec.users(is_block_causal=model.family.is_block_causal)
    others = [
        other.name
        for other in algorithms_for(model.family).values()
        if other.name in users and _is_used(spec.name, other, model)
    ]
    wanted = [str(value) for value in spec.neutral[:1]]
    wanted += [f"algorithm: {in_words(others)}"] if others else []
    alternatives = f"wanted {', or '.join(wanted)}" if wanted else "wanted it left out"
    return f"algorithm {algorithm.name} does not use it; {alternatives}"


def _value(name: str, request: Mapping[str, Any], algorithm: Algorithm, model: ServedModel) -> Any:
    """Return the request's value, else the server's if it applies to the algorithm, else our
    default.

    A server-wide value of a parameter whose scale depends on the algorithm (a threshold) applies
    only to the server-wide algorithm, if there is one.
    """
    spec = BY_NAME[name]
    if name in request:
        return request[name]
    if name in model.defaults and _is_used(name, algorithm, model):
        meant_for = model.defaults.get("algorithm", algorithm.name)
        if not spec.defaults or meant_for == algorithm.name:
            return model.defaults[name]
    family = model.family
    is_for_all = not spec.defaults and name not in FILTERS
    is_meant = is_for_all or algorithm.name == family.default_algorithm
    if name in family.defaults and is_meant and _is_used(name, algorithm, model):
        return family.defaults[name]
    return spec.default_for(algorithm.name, is_shifted=model.is_shifted)


def default_of(name: str, algorithm: Algorithm, model: ServedModel) -> Any:
    """Return the value of a parameter for an algorithm in a request that does not set it."""
    return _value(name, {}, algorithm, model)


def _cache(request: Mapping[str, Any], algorithm: Algorithm, model: ServedModel) -> str:
    """Return the kind of cache; replace a default that cannot be combined with guidance."""
    cache_asked = request.get("cache")
    if cache_asked is not None and cache_asked not in algorithm.caches:
        others = [
            name for name, a in algorithms_for(model.family).items() if cache_asked in a.caches
        ]
        more = f"; {cache_asked} wants algorithm: {in_words(others)}" if others else ""
        raise InvalidParameterError(
            "cache",
            cache_asked,
            f"algorithm {algorithm.name} wants {in_words(algorithm.caches)}{more}",
        )
    chosen = cache_asked or model.defaults.get("cache")
    if chosen is None and _value("cache_delay_iter", request, algorithm, model) < NEVER:
        chosen = "delayed"
    default = "exact" if model.family.is_block_causal else "none"
    cache = str(chosen) if chosen in algorithm.caches else default
    is_explicit = cache_asked is not None or request.get("cache_delay_iter", NEVER) < NEVER
    is_alone = cache not in GUIDED_CACHES
    if is_alone and request.get("cfg_scale", 0) > 0 and is_explicit:
        raise InvalidParameterError(
            "cache", cache, f"wanted {in_words(GUIDED_CACHES)} beside cfg_scale, or cfg_scale: 0"
        )
    if is_alone and not is_explicit and _value("cfg_scale", request, algorithm, model) > 0:
        cache = "none"
    if "delayed" in algorithm.caches and cache != "delayed":
        for name in ("cache_delay_iter", "refresh_interval"):
            if request.get(name, NEVER) != NEVER:
                raise InvalidParameterError(
                    name, request[name], f"wanted {NEVER}, or cache: delayed"
                )
    return cache


def _sub_block_length(
    request: Mapping[str, Any], block_length: int, algorithm: Algorithm, model: ServedModel
) -> int:
    """Return a divisor of the block length; replace an unsuitable default by the whole block."""
    length: int = _value("sub_block_length", request, algorithm, model)
    if block_length % length == 0 or not _is_used("sub_block_length", algorithm, model):
        return length
    if "sub_block_length" in request:
        raise InvalidParameterError(
            "sub_block_length", length, f"wanted a divisor of block_length, {block_length}"
        )
    return block_length


def _delimiter_ids(
    request: Mapping[str, Any], algorithm: Algorithm, model: ServedModel
) -> tuple[int, ...]:
    ids: tuple[int, ...] | None = _value("delimiter_ids", request, algorithm, model)
    if ids is None:
        return model.ids.line_ends
    if max(ids) >= model.vocab_size:
        raise InvalidParameterError(
            "delimiter_ids", ids, f"wanted token ids from 0 to {model.vocab_size - 1}"
        )
    return tuple(dict.fromkeys(ids))


def check_score(score: Any, model: ServedModel, prompt: Sequence[int]) -> ScoreRequest:
    """Check a likelihood request for a prompt, and return it in its internal form.

    Raises:
        InvalidParameterError: naming the prompt, or the key of `score`.
    """
    _check_prompt(prompt, model, allow_infill=True)
    return likelihood_request(score, len(prompt), model.vocab_size)


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


def _check_infill(request: Mapping[str, Any], model: ServedModel) -> None:
    if request.get("allow_infill") and model.family.has_causal_context:
        wanted = f"wanted false: a model of family {model.family.name} reads a prompt causally"
        raise InvalidParameterError("allow_infill", True, wanted)


def _check_thinking(request: Mapping[str, Any], model: ServedModel) -> None:
    """Refuse a thinking budget if the model thinks but its tokenizer lacks the tokens for it."""
    name, absent = "thinking_token_budget", model.ids.no_think
    if absent is not None and request.get(name) not in (None, *BY_NAME[name].neutral):
        raise InvalidParameterError(name, request[name], f"wanted none: no token is {absent}")


def _check_special_ids(request: Mapping[str, Any], ids: SpecialIds) -> None:
    for option in ("logits_eos_inf", "confidence_eos_eot_inf", "early_stop"):
        if request.get(option) and ids.eos is None:
            raise InvalidParameterError(option, True, "the checkpoint has no end-of-sequence token")
    if request.get("confidence_eos_eot_inf") and ids.eot is None:
        raise InvalidParameterError(
            "confidence_eos_eot_inf", True, "the tokenizer has no end-of-turn token"
        )
