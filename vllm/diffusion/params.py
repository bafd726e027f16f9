# SPDX-License-Identifier: Apache-2.0
"""The rules that turn a request into a decision.

`resolve` takes what a request gave (under any accepted spelling of `vllm.diffusion.fields`), the
model and the prompt length, and returns a `DiffusionParams` in which nothing is left open.
Explicit values are taken literally or refused with the values that would work; defaults always
work, so a server-wide default that cannot stand beside what the request asks for gives way.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.fields import (
    ALGORITHMS,
    BY_CONFIDENCE,
    BY_NAME,
    CACHES,
    CANONICAL,
    CONFIDENCE_DTYPES,
    DREAM_ALGS,
    FIELDS,
    NEVER,
    REMASKING,
    Field,
    caches_of,
    canonical,
    check,
    documented_fields,
    in_words,
    server_defaults,
)
from vllm.diffusion.lengths import DEFAULT_BLOCK, DEFAULT_CANVAS, OFFLINE_MAX_TOKENS, decide_lengths
from vllm.diffusion.scoring import ONLY_READ, SCORE, score_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.families import Family
    from vllm.diffusion.scoring import ScoreRequest

__all__ = [
    "ALGORITHMS",
    "AUTOREGRESSIVE",
    "BY_NAME",
    "CACHES",
    "CANONICAL",
    "CONFIDENCE_DTYPES",
    "DEFAULT_BLOCK",
    "DEFAULT_CANVAS",
    "DREAM_ALGS",
    "FIELDS",
    "OFFLINE_MAX_TOKENS",
    "REMASKING",
    "RESERVED_EXTRA_ARGS",
    "SEED_BITS",
    "DiffusionParams",
    "Field",
    "ServedModel",
    "SpecialIds",
    "caches_of",
    "canonical",
    "check",
    "documented_fields",
    "from_sampling_params",
    "resolve",
    "server_defaults",
]

SEED_BITS = 64

# A key of SamplingParams.extra_args that is upstream's own and harmless. Those of its KV cache
# connectors are unknown parameters here: there is no such cache.
RESERVED_EXTRA_ARGS = frozenset({"kv_cache_report_mode"})


_LEFT_TO_RIGHT = "penalties need a left-to-right order"

# Fields of upstream's SamplingParams that cannot act here: name, values that ask for nothing, and
# what is wanted.
AUTOREGRESSIVE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("min_p", (0.0, None), "wanted 0: it has no meaning for a diffusion language model"),
    ("presence_penalty", (0.0, None), f"wanted 0: {_LEFT_TO_RIGHT}"),
    ("frequency_penalty", (0.0, None), f"wanted 0: {_LEFT_TO_RIGHT}"),
    ("repetition_penalty", (1.0, None), f"wanted 1: {_LEFT_TO_RIGHT}"),
    ("logit_bias", (None, {}), "wanted none: not supported"),
    ("bad_words", (None, []), "wanted none: not supported"),
    ("allowed_token_ids", (None,), "wanted none: not supported"),
    ("structured_outputs", (None,), "wanted none: not supported"),
    ("prompt_logprobs", (None,), "wanted none: prompt tokens are given, not predicted"),
    ("logprob_token_ids", (None, []), "wanted none: not supported"),
    ("repetition_detection", (None,), "wanted none: not supported"),
    ("thinking_token_budget", (None, -1), "wanted none: not supported"),
    ("watermarking", (None, False), "wanted false: not supported"),
)


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
        cached_positions: positions whose keys and values fit into the memory for caches.
        default_steps: denoise steps of a request that gives none (None: one per canvas token).
    """

    family: Family
    ids: SpecialIds
    max_model_len: int
    vocab_size: int
    default_max_tokens: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    cached_positions: int = 2**63 - 1
    default_steps: int | None = None


@dataclass(frozen=True)
class DiffusionParams:
    """A request's parameters with every default filled in; the fields are those of `FIELDS`.

    `steps` is None where no bound was asked for. `stop_ids` is empty and `early_stop` is false
    when `ignore_eos` is set. `top_p` and `top_k` are None when off. `logit_shift` is the family's.
    `seed` is None until the engine draws one. `logprobs` is how many alternatives are reported
    beside every token's log probability, None where none is. `score` is set where the request is
    only read; its canvas is empty then. `ignored` names the standard fields that were given and
    cannot act.
    """

    algorithm: str
    remasking: str
    alg: str
    cache: str
    gen_length: int
    max_tokens: int
    steps: int | None
    block_length: int
    temperature: float
    top_p: float | None
    top_k: int | None
    cfg_scale: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    confidence_dtype: str
    threshold: float
    factor: float
    relaxed_threshold: float
    radius: int
    low_threshold: float
    block_add_threshold: float
    decoded_token_threshold: float
    cache_delay_iter: int
    refresh_interval: int
    early_stop: bool
    alg_temp: float
    eps: float
    ignore_eos: bool
    allow_infill: bool
    force_single_batch: bool
    seed: int | None
    mask_id: int
    eos_id: int | None
    eot_id: int | None
    stop_ids: frozenset[int]
    logit_shift: int
    stream_canvas: bool
    logprobs: int | None = None
    score: ScoreRequest | None = None
    ignored: tuple[str, ...] = ()

    @property
    def num_logprobs(self) -> int | None:
        """The number of most likely tokens to look up; None where no probability is wanted."""
        if self.logprobs is None and self.stream_canvas:
            return 0
        return self.logprobs

    @property
    def num_blocks(self) -> int:
        """The last one may be shorter than the others (full_attn_multi_block)."""
        return -(-self.gen_length // self.block_length)

    def answer_end(self, tokens: Sequence[int], num_before: int) -> int | None:
        """How many of the newest final tokens belong to the answer; None while it goes on.

        A stop token ends the answer and is its last token; the length limit comes second.

        Args:
            tokens: that became final.
            num_before: tokens of the answer before them.
        """
        room = self.max_tokens - num_before
        for index, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                return index + 1
        return room if len(tokens) >= room else None

    def with_seed(self, seed: int) -> DiffusionParams:
        return dataclasses.replace(self, seed=seed % 2**SEED_BITS)


# Fields of DiffusionParams that are the request's value, else the server's, else the table's.
_PLAIN: tuple[str, ...] = tuple(
    f.name
    for f in dataclasses.fields(DiffusionParams)
    if f.name in BY_NAME
    and f.name
    not in ("algorithm", "cache", "gen_length", "max_tokens", "steps", "block_length", "seed")
)


def from_sampling_params(sampling: Any) -> dict[str, Any]:
    """What a vLLM `SamplingParams` asks for, under canonical names; unset values are left out.

    `extra_args` holds the diffusion parameters and wins over the fields of `SamplingParams`.

    Raises:
        InvalidParameterError: for an unknown key, contradicting spellings, or a field of
            `SamplingParams` that would act on an autoregressive model but cannot here.
    """
    _refuse_autoregressive_fields(sampling)
    extra = {k: v for k, v in (sampling.extra_args or {}).items() if k not in RESERVED_EXTRA_ARGS}
    score = extra.pop(SCORE, None)
    if score is not None and extra:
        raise InvalidParameterError(SCORE, score, f"wanted it without {in_words(sorted(extra))}")
    given = canonical(extra)
    if score is not None:
        given |= {SCORE: score, "gen_length": 1, "allow_infill": True}
    if sampling.n > 1 and "seed" in given:
        raise InvalidParameterError(
            "seed", given["seed"], "wanted it as SamplingParams.seed beside n > 1"
        )
    own = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
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
    given["logprobs"] = sampling.logprobs
    if (sampling.logprobs or 0) < 0:
        raise InvalidParameterError(
            "logprobs", sampling.logprobs, "wanted how many alternatives, 0 or more"
        )
    return given


def _refuse_autoregressive_fields(sampling: Any) -> None:
    for name, neutral, meaning in AUTOREGRESSIVE:
        value = getattr(sampling, name, neutral[0])
        if value not in neutral:
            raise InvalidParameterError(name, value, meaning)


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
            The latter adds `stop_token_ids`, `logprobs`, and `upstream_max_tokens`: a limit that
            upstream may have filled in itself.
        model: the served model.
        prompt_token_ids: the prompt.
        default_steps: denoise steps of a request that gives none, brought to the nearest multiple
            of the number of blocks.

    Raises:
        InvalidParameterError: naming the field, the given and the wanted value.
    """
    request = dict(given)
    score = request.pop(SCORE, None)
    stop_token_ids = frozenset(request.pop("stop_token_ids", ()))
    logprobs = request.pop("logprobs", None)
    upstream_max_tokens = request.pop("upstream_max_tokens", None)
    algorithm = _algorithm(request, model)
    ignored = _ignored(request, algorithm)
    for name in ignored:
        del request[name]
    _refuse_unused(request, algorithm)
    mask_id = request.get("mask_id", model.ids.mask)
    if mask_id != model.ids.mask:
        raise InvalidParameterError("mask_id", mask_id, f"wanted the model's: {model.ids.mask}")
    if request.get("min_tokens", 0) != 0:
        raise InvalidParameterError("min_tokens", request["min_tokens"], "wanted 0")
    _check_prompt(prompt_token_ids, model, request.get("allow_infill", False))
    lengths = decide_lengths(
        request,
        algorithm,
        model,
        len(prompt_token_ids),
        upstream_max_tokens=upstream_max_tokens,
        default_steps=default_steps,
    )
    values = {name: _value(name, request, algorithm, model) for name in _PLAIN}
    cache = _cache(request, values, algorithm, model)
    _check_cached_length(cache, len(prompt_token_ids) + lengths.canvas, model)
    _check_special_ids(request, model.ids)
    _check_remasking(request, values, algorithm, model)
    stops = not values["ignore_eos"]
    params = DiffusionParams(
        algorithm=algorithm,
        cache=cache,
        gen_length=lengths.canvas,
        max_tokens=lengths.max_tokens,
        steps=lengths.steps,
        block_length=lengths.block_length,
        seed=None,
        eos_id=model.ids.eos,
        eot_id=model.ids.eot,
        stop_ids=model.ids.stop | stop_token_ids if stops else frozenset(),
        logit_shift=model.family.logit_shift,
        logprobs=logprobs,
        ignored=ignored,
        **values
        | {
            "mask_id": mask_id,
            "early_stop": values["early_stop"] and stops and model.ids.eos is not None,
            "top_p": None if values["top_p"] == 1 else values["top_p"],
            "top_k": values["top_k"] if (values["top_k"] or 0) > 0 else None,
        },
    )
    if score is not None:
        asked = score_request(score, len(prompt_token_ids), model.vocab_size)
        return dataclasses.replace(params, **ONLY_READ, score=asked)
    seed = request.get("seed")
    return params if seed is None else params.with_seed(seed)


def _check_cached_length(cache: str, length: int, model: ServedModel) -> None:
    if cache != "none" and length > model.cached_positions:
        raise InvalidParameterError(
            "cache",
            cache,
            f"prompt and canvas have {length} positions and the memory for caches holds "
            f"{model.cached_positions}; wanted none, or a shorter request",
        )


def _algorithm(request: Mapping[str, Any], model: ServedModel) -> str:
    if "algorithm" in request:
        return str(request["algorithm"])
    usual = str(model.defaults.get("algorithm", model.family.default_algorithm))
    if "threshold" in request and not BY_NAME["threshold"].is_used_by(usual):
        return "threshold"
    return usual


def _ignored(request: Mapping[str, Any], algorithm: str) -> tuple[str, ...]:
    """Names of the standard fields whose given values cannot act.

    Every client sends the standard fields, whatever the model, so none is refused for being of no
    use. A value that asks for what happens anyway, such as temperature 0 where nothing is drawn, is
    not among them.
    """
    cannot_act = {
        "block_length": algorithm == "dream",
        "temperature": request.get("temperature") != 0,
        "remasking": request.get("remasking") == "low_confidence"
        and algorithm not in BY_CONFIDENCE,
    }
    return tuple(
        name
        for name, cannot in cannot_act.items()
        if name in request and not BY_NAME[name].is_used_by(algorithm) and cannot
    )


def _refuse_unused(request: Mapping[str, Any], algorithm: str) -> None:
    for name, value in request.items():
        spec = BY_NAME[name]
        if not spec.is_used_by(algorithm) and value not in spec.neutral:
            neutral = f"{spec.neutral[0]}, or " if spec.neutral else ""
            raise InvalidParameterError(
                name,
                value,
                f"algorithm {algorithm} does not use it; "
                f"wanted {neutral}algorithm: {in_words(spec.algorithms)}",
            )


def _value(name: str, request: Mapping[str, Any], algorithm: str, model: ServedModel) -> Any:
    """The request's value, else the server's where it is meant for the algorithm, else ours.

    A server-wide value of a parameter whose scale depends on the algorithm (a threshold) is meant
    for the server-wide algorithm, where there is one.
    """
    spec = BY_NAME[name]
    if name in request:
        return request[name]
    if name in model.defaults and spec.is_used_by(algorithm):
        meant_for = model.defaults.get("algorithm", algorithm)
        if not spec.defaults or meant_for == algorithm:
            return model.defaults[name]
    return spec.default_for(algorithm, is_shifted=model.family.logit_shift > 0)


def _cache(
    request: Mapping[str, Any], values: dict[str, Any], algorithm: str, model: ServedModel
) -> str:
    """The kind of cache. A server-wide `cfg_scale` gives way to a cache that was asked for."""
    allowed = caches_of(algorithm)
    asked = request.get("cache")
    if asked is not None and asked not in allowed:
        others = [a for a in ALGORITHMS if asked in caches_of(a)]
        raise InvalidParameterError(
            "cache",
            asked,
            f"algorithm {algorithm} wants {in_words(allowed)}; "
            f"{asked} wants algorithm: {in_words(others)}",
        )
    chosen = asked or model.defaults.get("cache")
    if chosen is None and values["cache_delay_iter"] < NEVER:
        chosen = "delayed"
    cache = chosen if chosen in allowed else "none"
    is_explicit = asked is not None or request.get("cache_delay_iter", NEVER) < NEVER
    if cache != "none" and values["cfg_scale"] > 0:
        if not is_explicit:
            cache = "none"
        elif "cfg_scale" in request:
            raise InvalidParameterError(
                "cache", cache, "wanted none beside cfg_scale, or cfg_scale: 0"
            )
        else:
            values["cfg_scale"] = 0.0
    if algorithm == "multi_block" and cache != "delayed":
        for name in ("cache_delay_iter", "refresh_interval"):
            if request.get(name, NEVER) != NEVER:
                raise InvalidParameterError(
                    name, request[name], f"wanted {NEVER}, or cache: delayed"
                )
    return str(cache)


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


def _check_special_ids(request: Mapping[str, Any], ids: SpecialIds) -> None:
    for option in ("logits_eos_inf", "confidence_eos_eot_inf", "early_stop"):
        if request.get(option) and ids.eos is None:
            raise InvalidParameterError(option, True, "the checkpoint has no end-of-sequence token")
    if request.get("confidence_eos_eot_inf") and ids.eot is None:
        raise InvalidParameterError(
            "confidence_eos_eot_inf", True, "the tokenizer has no end-of-turn token"
        )


def _check_remasking(
    request: Mapping[str, Any], values: dict[str, Any], algorithm: str, model: ServedModel
) -> None:
    """Random entropies belong to the variant of multi_block without a shift of the logits."""
    if algorithm != "multi_block" or model.family.logit_shift == 0:
        return
    if request.get("remasking", "low_confidence") != "low_confidence":
        raise InvalidParameterError(
            "remasking",
            request["remasking"],
            f"wanted low_confidence: multi_block on {model.family.name} knows no other",
        )
    values["remasking"] = "low_confidence"
