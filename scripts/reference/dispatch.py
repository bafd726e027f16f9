# SPDX-License-Identifier: Apache-2.0
"""The reference run for the parameters of a request."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

from torch import Tensor

from reference import adablock, d3llm, decode, dinfer, dream, fast_dllm, local_leap, sglang
from reference.frozen import FrozenPrompt
from reference.philox import uniform_matrix

# Purposes of the random numbers of a request.
TOKEN_NOISE, REMASKING_SCORE, DREAM_TOKEN, DREAM_COMMIT, DREAM_CHOICE = range(5)

BLOCK_CACHES = ("none", "prefix", "dual", "frozen")
CACHES: dict[str, tuple[str, ...]] = {
    "semi_ar": BLOCK_CACHES,
    "threshold": BLOCK_CACHES,
    "factor": BLOCK_CACHES,
    "local_leap": BLOCK_CACHES,
    "entropy_threshold": BLOCK_CACHES,
    "hierarchy": BLOCK_CACHES,
    "credit": BLOCK_CACHES,
    "full_attn_multi_block": ("none", "frozen"),
    "multi_block": ("none", "delayed", "frozen"),
    "dream": ("none", "frozen"),
    "adablock": BLOCK_CACHES,
}
LOOPS: dict[str, Callable[..., decode.Decoded]] = {
    "factor": fast_dllm.factor,
    "local_leap": local_leap.local_leap,
    "entropy_threshold": sglang.entropy_threshold,
    "hierarchy": dinfer.hierarchy,
    "credit": dinfer.credit,
    "full_attn_multi_block": sglang.full_attn_multi_block,
    "multi_block": d3llm.multi_block,
    "dream": dream.diffusion_generate,
    "adablock": adablock.adablock,
}


def run(
    model: decode.LogitModel,
    prompt_ids: Iterable[int],
    *,
    ids: decode.SpecialIds,
    algorithm: str,
    cache: str = "none",
    seed: int | None = None,
    confidence_dtype: str = "float32",
    **parameters: Any,
) -> decode.Decoded:
    """Return the whole canvas that the source of `algorithm` gives for a request.

    `parameters` are request parameters by their own names: gen_length; block_length, except for
    dream; steps for semi_ar and dream; and other parameters of the loop. Idle steps of semi_ar and
    dream make no forward pass. multi_block follows d3LLM-Dream (variant "dream") for a model with
    shifted logits, unless a variant is given; full_attn_multi_block has a threshold for each. With
    a seed, random numbers are those of Philox.

    Raises ValueError for a cache that the algorithm does not support.
    """
    if cache not in CACHES[algorithm]:
        raise ValueError(f"cache: {algorithm} wants one of {CACHES[algorithm]}, got {cache!r}")
    prompt_ids = list(prompt_ids)
    if cache == "frozen":
        model, cache = FrozenPrompt(cast("fast_dllm.WindowModel", model), len(prompt_ids)), "none"
    options: dict[str, Any] = {"ids": ids, **parameters}
    if algorithm == "dream":
        options.setdefault("skip_idle_steps", True)
        if seed is not None:
            options["uniform_tokens"] = partial(_columns, seed, DREAM_TOKEN)
            options["uniform_commits"] = partial(_first_column, seed, DREAM_COMMIT)
            options["uniform_choices"] = partial(_first_column, seed, DREAM_CHOICE)
        return LOOPS[algorithm](model, prompt_ids, **options)

    options["confidence_dtype"] = confidence_dtype
    if seed is not None:
        options["uniform_logits"] = partial(_columns, seed, TOKEN_NOISE)
        options["uniform_scores"] = partial(_first_column, seed, REMASKING_SCORE)
    if algorithm in ("semi_ar", "threshold"):
        return _llada(model, prompt_ids, algorithm, cache, options)
    is_shifted = getattr(model, "logit_shift", 0) > 0
    if algorithm == "multi_block" and is_shifted:
        options.setdefault("variant", "dream")
    if algorithm == "full_attn_multi_block":
        options.setdefault("threshold", 0.4 if is_shifted else 0.5)
    if cache != "none":
        options["cache"] = cache
    return LOOPS[algorithm](model, prompt_ids, **options)


def _llada(
    model: decode.LogitModel,
    prompt_ids: Iterable[int],
    algorithm: str,
    cache: str,
    options: dict[str, Any],
) -> decode.Decoded:
    if algorithm == "threshold":
        options.setdefault("threshold", 0.9)
    if cache != "none":
        window_model = cast("fast_dllm.WindowModel", model)
        return fast_dllm.cached(window_model, prompt_ids, cache=cache, **options)
    if algorithm == "threshold":
        return decode.threshold(model, prompt_ids, **options)
    return decode.semi_ar(model, prompt_ids, skip_idle_steps=True, **options)


def _columns(
    seed: int, purpose: int, step: int, positions: Sequence[int], columns: Sequence[int]
) -> Tensor:
    return _matrix(seed, purpose, step, tuple(positions), len(columns))


def _first_column(seed: int, purpose: int, step: int, positions: Sequence[int]) -> Tensor:
    return _matrix(seed, purpose, step, tuple(positions), 1)[:, 0]


@lru_cache(maxsize=4096)
def _matrix(
    seed: int, purpose: int, step: int, positions: tuple[int, ...], num_columns: int
) -> Tensor:
    return uniform_matrix(seed, purpose, step, positions, num_columns)
