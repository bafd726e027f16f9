# SPDX-License-Identifier: Apache-2.0
"""The parameters of a request: spellings, defaults, lengths, ids, and what a refusal says."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.params.support import EOS, EOT, MASK, MODEL, PROMPT, STANDARD, refusal, resolve
from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import InvalidParameterError, ServerConfigError
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.algorithms import ALGORITHMS
from vllm.diffusion.request.families import DIFFULLAMA, DREAM, LLADA, LLADA_MOE
from vllm.diffusion.request.params import DiffusionParams, ServedModel, SpecialIds


def model(**changes: Any) -> ServedModel:
    return dataclasses.replace(MODEL, **changes)


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "name", "value"),
    [
        ("output_length", "gen_length", 64),
        ("max_new_tokens", "max_tokens", 64),
        ("num_denoising_steps", "steps", 32),
        ("block_size", "block_length", 16),
        ("sub_block_size", "block_length", 16),
    ],
)
def test_other_spellings(spelling: str, name: str, value: Any) -> None:
    assert getattr(resolve(**{spelling: value}), name) == value
    assert resolve(**{spelling: value}) == resolve(**{name: value})
    assert resolve(**{spelling: value, name: value}) == resolve(**{name: value})
    error = refusal(**{name: value, spelling: 2 * value})
    assert error.field == spelling
    assert error.given == 2 * value
    assert name in error.wanted
    assert str(value) in error.wanted


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    for wrong, meant in (("gen_lenght", "gen_length"), ("algoritm", "algorithm")):
        error = refusal(**{wrong: 32})
        assert (error.field, error.given) == (wrong, 32)
        assert error.wanted == f"unknown parameter; did you mean {meant}?"
    error = refusal(foreign=32)
    for field in fields.FIELDS:
        assert field.name in error.wanted
        for alias in field.aliases:
            assert alias in error.wanted


def test_none_counts_as_not_given() -> None:
    everything: dict[str, Any] = dict.fromkeys(fields.SPELLINGS)
    assert resolve(**everything) == resolve()


@pytest.mark.parametrize(
    ("given", "algorithm", "remasking"),
    [
        ("semi_ar", "semi_ar", "low_confidence"),
        ("SemiAr", "semi_ar", "low_confidence"),
        ("LowConfidence", "semi_ar", "low_confidence"),
        ("low_confidence", "semi_ar", "low_confidence"),
        ("random", "semi_ar", "random"),
        ("Random", "semi_ar", "random"),
        ("threshold", "threshold", "low_confidence"),
        ("Threshold", "threshold", "low_confidence"),
    ],
)
def test_spellings_of_an_algorithm(given: str, algorithm: str, remasking: str) -> None:
    decided = resolve(algorithm=given)
    assert (decided.algorithm, decided.remasking) == (algorithm, remasking)


def test_a_remasking_as_algorithm_must_not_contradict_the_remasking() -> None:
    assert resolve(algorithm="random", remasking="random").remasking == "random"
    error = refusal(algorithm="LowConfidence", remasking="random")
    assert (error.field, error.given) == ("remasking", "random")
    assert "low_confidence" in error.wanted


def test_a_threshold_chooses_its_algorithm() -> None:
    decided = resolve(threshold=0.7)
    assert (decided.algorithm, decided.threshold) == ("threshold", 0.7)
    assert resolve(algorithm="threshold").threshold == 0.9
    error = refusal(algorithm="semi_ar", threshold=0.7)
    assert (error.field, error.given) == ("threshold", 0.7)
    assert "threshold" in error.wanted
    assert "semi_ar" in error.wanted


RANDOM_SCORES = ("semi_ar", "threshold", "factor", "local_leap", "multi_block")


def test_remasking_low_confidence_is_harmless_beside_any_algorithm() -> None:
    for algorithm in ALGORITHMS:
        assert resolve(algorithm=algorithm, remasking="low_confidence").algorithm == algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_random_remasking_belongs_to_some_algorithms(algorithm: str) -> None:
    if algorithm in RANDOM_SCORES:
        assert resolve(algorithm=algorithm, remasking="random").remasking == "random"
        return
    error = refusal(algorithm=algorithm, remasking="random")
    assert (error.field, error.given) == ("remasking", "random")
    assert "low_confidence" in error.wanted
    assert all(name in error.wanted for name in RANDOM_SCORES)


def test_random_entropies_do_not_exist_on_dream() -> None:
    error = refusal(model(family=DREAM), algorithm="multi_block", remasking="random")
    assert (error.field, error.given) == ("remasking", "random")
    decided = resolve(model(family=DREAM, defaults={"remasking": "random"}), algorithm="MultiBlock")
    assert decided.remasking == "low_confidence"


@pytest.mark.parametrize(
    ("asked", "algorithm"),
    [
        ({"algorithm": "EntropyThreshold"}, "entropy_threshold"),
        ({"algorithm": "FullAttnMultiBlock"}, "full_attn_multi_block"),
        ({"algorithm": "LocalLeap"}, "local_leap"),
        ({"use_local_leap": True}, "local_leap"),
        ({"use_local_leap": 1, "threshold": 0.8}, "local_leap"),
        ({"use_local_leap": True, "algorithm": "low_confidence"}, "local_leap"),
        ({"use_local_leap": True, "algorithm": "local_leap"}, "local_leap"),
        ({"use_local_leap": False}, "semi_ar"),
        ({"algorithm": "LowConfidence", "threshold": 0.95}, "threshold"),
        ({"algorithm": "LowConfidence", "remasking": None}, "semi_ar"),
    ],
)
def test_what_stands_for_an_algorithm(asked: dict[str, Any], algorithm: str) -> None:
    assert resolve(**asked).algorithm == algorithm


@pytest.mark.parametrize(
    "asked",
    [
        {"use_local_leap": True, "algorithm": "factor"},
        {"use_local_leap": False, "algorithm": "local_leap"},
        {"use_local_leap": "yes"},
    ],
)
def test_contradictions_of_use_local_leap(asked: dict[str, Any]) -> None:
    assert refusal(**asked).field == "use_local_leap"


def test_dream_is_the_default_algorithm_of_dream_alone() -> None:
    assert resolve(model(family=DREAM)).algorithm == "dream"
    assert resolve(model(family=LLADA_MOE)).algorithm == "semi_ar"
    assert resolve(model(family=DREAM), threshold=0.7).algorithm == "threshold"


def test_a_threshold_keeps_the_servers_algorithm_if_that_uses_one() -> None:
    assert resolve(served_with(algorithm="multi_block"), threshold=0.7).algorithm == "multi_block"
    assert resolve(served_with(algorithm="factor"), threshold=0.7).algorithm == "threshold"


# ---- parameters of single algorithms -----------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "name", "value", "on_dream"),
    [
        ("threshold", "threshold", 0.9, 0.9),
        ("local_leap", "threshold", 0.9, 0.9),
        ("hierarchy", "threshold", 0.9, 0.9),
        ("credit", "threshold", 0.9, 0.9),
        ("entropy_threshold", "threshold", 0.95, 0.95),
        ("full_attn_multi_block", "threshold", 0.5, 0.4),
        ("multi_block", "threshold", 0.5, 0.9),
        ("multi_block", "block_add_threshold", 0.5, 0.5),
        ("multi_block", "decoded_token_threshold", 0.5, 0.5),
        ("multi_block", "cache_delay_iter", 10000, 10000),
        ("multi_block", "refresh_interval", 10000, 10000),
        ("multi_block", "early_stop", False, False),
        ("full_attn_multi_block", "block_add_threshold", 0.1, 0.1),
        ("full_attn_multi_block", "decoded_token_threshold", 0.95, 0.95),
        ("factor", "factor", 1.0, 1.0),
        ("local_leap", "relaxed_threshold", 0.75, 0.75),
        ("local_leap", "radius", 4, 4),
        ("local_leap", "early_stop", False, False),
        ("hierarchy", "low_threshold", 0.4, 0.4),
        ("dream", "alg", "entropy", "entropy"),
        ("dream", "alg_temp", 0.0, 0.0),
        ("dream", "eps", 1e-3, 1e-3),
        ("dream", "top_p", None, None),
        ("dream", "top_k", None, None),
    ],
)
def test_defaults_of_an_algorithm(algorithm: str, name: str, value: Any, on_dream: Any) -> None:
    assert getattr(resolve(algorithm=algorithm), name) == value
    assert getattr(resolve(model(family=DREAM), algorithm=algorithm), name) == on_dream


USED: dict[str, Any] = {
    "threshold": 0.3,
    "factor": 2.0,
    "relaxed_threshold": 0.5,
    "radius": 7,
    "low_threshold": 0.1,
    "block_add_threshold": 0.7,
    "decoded_token_threshold": 0.8,
    "early_stop": True,
    "alg": "origin",
    "alg_temp": 0.5,
    "eps": 0.01,
    "top_p": 0.9,
    "top_k": 40,
    "block_length": 16,
    "confidence_eos_eot_inf": True,
    "temperature": 0.5,
    "delimiter_ids": (7, 8),
    "delimiter_threshold": 0.4,
}
ENDS_SHORT = ("full_attn_multi_block", "adablock")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", USED)
def test_a_parameter_is_used_or_refused(algorithm: str, name: str) -> None:
    spec, value = fields.BY_NAME[name], USED[name]
    if spec.is_used_by(algorithm):
        assert getattr(resolve(algorithm=algorithm, **{name: value}), name) == value
        return
    if name in (*STANDARD, "top_p", "top_k"):
        decided = resolve(algorithm=algorithm, **{name: value})
        assert decided == dataclasses.replace(resolve(algorithm=algorithm), ignored=(name,))
        return
    error = refusal(algorithm=algorithm, **{name: value})
    assert (error.field, error.given) == (name, value)
    assert algorithm in error.wanted
    assert any(user in error.wanted for user in spec.algorithms)
    for neutral in spec.neutral:
        assert resolve(algorithm=algorithm, **{name: neutral}) == resolve(algorithm=algorithm)


CANNOT_ACT = {
    "adablock": ("steps",),
    "dream": ("block_length", "remasking"),
    "entropy_threshold": ("remasking",),
    "full_attn_multi_block": ("temperature", "remasking"),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_standard_fields_act_or_are_named(algorithm: str) -> None:
    """With the prompt they are what every client sends."""
    decided = resolve(algorithm=algorithm, **STANDARD)
    ignored = CANNOT_ACT.get(algorithm, ())
    assert decided.ignored == ignored
    for name, value in STANDARD.items():
        if name not in (*ignored, "output_length"):
            assert getattr(decided, name) == value
    useful = {name: value for name, value in STANDARD.items() if name not in ignored}
    assert resolve(algorithm=algorithm, **useful) == dataclasses.replace(decided, ignored=())


@pytest.mark.parametrize("served_algorithm", ALGORITHMS)
def test_standard_fields_of_no_use_to_the_servers_algorithm(served_algorithm: str) -> None:
    served = model(defaults=fields.server_defaults({"algorithm": served_algorithm}, LLADA))
    assert resolve(served, **STANDARD).ignored == CANNOT_ACT.get(served_algorithm, ())
    assert resolve(model(family=DREAM), **STANDARD).ignored == CANNOT_ACT["dream"]
    on_dream = resolve(model(family=DREAM), algorithm="multi_block", **STANDARD)
    assert on_dream.ignored == ("remasking",)


def test_an_ignored_block_length_shapes_nothing() -> None:
    for lengths in ({"gen_length": 70}, {"max_tokens": 33}, {}):
        asked: dict[str, Any] = {"algorithm": "dream", **lengths}
        for block_length in (7, 48, 1000):
            decided = resolve(block_length=block_length, **asked)
            assert decided == dataclasses.replace(resolve(**asked), ignored=("block_length",))
    assert refusal(algorithm="dream", block_length=0).field == "block_length"


def test_what_happens_anyway_is_not_ignored() -> None:
    assert resolve(algorithm="full_attn_multi_block", temperature=0).ignored == ()
    for algorithm in ("hierarchy", "credit"):
        assert resolve(algorithm=algorithm, remasking="low_confidence").ignored == ()


def test_who_uses_what() -> None:
    users = {name: set(fields.BY_NAME[name].algorithms) for name in USED}
    assert users["factor"] == {"factor"}
    assert users["relaxed_threshold"] == users["radius"] == {"local_leap"}
    assert users["low_threshold"] == {"hierarchy"}
    assert users["early_stop"] == {"local_leap", "multi_block"}
    for name in ("alg", "alg_temp", "eps", "top_p", "top_k"):
        assert users[name] == {"dream"}
    for name in ("delimiter_ids", "delimiter_threshold"):
        assert users[name] == {"adablock"}
    assert users["block_length"] == set(ALGORITHMS) - {"dream"}
    assert users["temperature"] == set(ALGORITHMS) - {"full_attn_multi_block"}


def test_names_of_other_projects_for_block_thresholds() -> None:
    decided = resolve(algorithm="FullAttnMultiBlock", block_add=0.3, decoded_thresh=0.6)
    assert (decided.block_add_threshold, decided.decoded_token_threshold) == (0.3, 0.6)
    # Its published configuration names these two as well, without effect.
    assert resolve(algorithm="FullAttnMultiBlock", cache_delay_iter=2, refresh_interval=3)


def test_early_stop_is_off_where_the_end_is_ignored() -> None:
    assert resolve(algorithm="multi_block", early_stop=True).early_stop is True
    assert resolve(algorithm="multi_block", early_stop=True, ignore_eos=True).early_stop is False
    blind = model(ids=SpecialIds(MASK, None, EOT, frozenset({EOT})))
    assert refusal(blind, algorithm="multi_block", early_stop=True).field == "early_stop"


# ---- caches ------------------------------------------------------------------------------------

BLOCKWISE = {
    "semi_ar",
    "threshold",
    "factor",
    "local_leap",
    "entropy_threshold",
    "hierarchy",
    "credit",
    "adablock",
}


@pytest.mark.parametrize("cache", fields.CACHES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_caches_of_an_algorithm(algorithm: str, cache: str) -> None:
    allowed = {"none", "frozen"}
    if algorithm in BLOCKWISE:
        allowed |= {"prefix", "dual"}
    if algorithm == "multi_block":
        allowed |= {"delayed"}
    assert resolve(algorithm=algorithm).cache == "none"
    if cache in allowed:
        assert resolve(algorithm=algorithm, cache=cache).cache == cache
        return
    error = refusal(algorithm=algorithm, cache=cache)
    assert (error.field, error.given) == ("cache", cache)
    assert all(name in error.wanted for name in allowed)
    if cache != "exact":  # which no algorithm of this family has
        assert "multi_block" in error.wanted or "semi_ar" in error.wanted


def test_guidance_and_caches_exclude_each_other() -> None:
    settings: list[dict[str, Any]] = [
        {"cache": "dual"},
        {"algorithm": "multi_block", "cache": "delayed"},
    ]
    for asked in settings:
        assert refusal(cfg_scale=0.5, **asked).field == "cache"
        assert resolve(cfg_scale=0, **asked).cache == asked["cache"]
        # What the request asks for wins over what the server has by default.
        assert resolve(served_with(cfg_scale=0.5), **asked).cfg_scale == 0
    assert resolve(served_with(cache="prefix"), cfg_scale=0.5).cache == "none"


def test_a_delay_chooses_the_delayed_cache() -> None:
    decided = resolve(algorithm="multi_block", cache_delay_iter=2, refresh_interval=3)
    assert (decided.cache, decided.cache_delay_iter, decided.refresh_interval) == ("delayed", 2, 3)
    served = served_with(algorithm="multi_block", cache_delay_iter=2)
    assert resolve(served).cache == "delayed"
    assert resolve(served, cache="none").cache == "none"
    assert resolve(served, algorithm="threshold").cache == "none"
    delays: list[dict[str, Any]] = [{"cache_delay_iter": 2}, {"refresh_interval": 3}]
    for asked in delays:
        error = refusal(algorithm="multi_block", cache="none", **asked)
        assert {error.field: error.given} == asked
        assert "cache: delayed" in error.wanted


# ---- several blocks, no blocks -----------------------------------------------------------------


def test_full_attn_multi_block_takes_any_canvas() -> None:
    decided = resolve(algorithm="full_attn_multi_block", gen_length=70, block_length=32)
    assert (decided.gen_length, decided.block_length, decided.num_blocks) == (70, 32, 3)
    assert resolve(algorithm="full_attn_multi_block", gen_length=70).block_length == 32
    assert resolve(algorithm="full_attn_multi_block", gen_length=5).block_length == 5
    assert refusal(algorithm="multi_block", gen_length=70, block_length=32).field == "block_length"


def test_dream_has_no_blocks_and_any_number_of_steps() -> None:
    for steps in (1, 7, 70, 200):
        decided = resolve(algorithm="dream", gen_length=70, steps=steps)
        assert (decided.steps, decided.block_length, decided.num_blocks) == (steps, 70, 1)
    assert resolve(algorithm="dream", gen_length=70).steps == 70
    assert resolve(model(default_steps=33), algorithm="dream", gen_length=70).steps == 33
    assert resolve(served_with(steps=50, block_length=7), algorithm="dream").steps == 50


def test_several_blocks_are_bounded_by_any_number_of_steps() -> None:
    for algorithm in ("multi_block", "full_attn_multi_block"):
        decided = resolve(algorithm=algorithm, gen_length=64, steps=1)
        assert (decided.steps, decided.block_length) == (1, 32)


# ---- values ------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    ("algorithm", "best"),
    ("algorithm", 3),
    ("remasking", "entropy"),
    ("cache", "prefixes"),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_k", -2),
    ("alg", "best"),
    ("eps", 2),
    ("radius", -1),
    ("refresh_interval", 0),
    ("cache_delay_iter", -1),
    ("factor", -0.5),
    ("confidence_dtype", "int8"),
    ("gen_length", 0),
    ("gen_length", -8),
    ("gen_length", 3.5),
    ("gen_length", "32"),
    ("gen_length", True),
    ("gen_length", [32]),
    ("max_tokens", 0),
    ("steps", 0),
    ("steps", -1),
    ("block_length", 0),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("cfg_scale", -1),
    ("cfg_scale", float("nan")),
    ("threshold", "high"),
    ("seed", 1.5),
    ("seed", 10**400),
    ("seed", 2**64),
    ("mask_id", 5),
    ("min_tokens", 3),
    ("ignore_eos", "yes"),
    ("ignore_eos", 2),
    ("logits_eos_inf", []),
    ("confidence_eos_eot_inf", {}),
    ("allow_infill", "true"),
    ("force_single_batch", 0.5),
]


@pytest.mark.parametrize(
    ("name", "value"), WRONG, ids=[f"{i}-{n}" for i, (n, _) in enumerate(WRONG)]
)
def test_wrong_values_name_the_field_and_the_value(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.field == name
    assert repr(error.given)[:20] in str(error)
    assert len(str(error)) < 400


def test_a_refusal_names_the_spelling_that_was_used() -> None:
    assert refusal(num_denoising_steps=-3).field == "num_denoising_steps"
    assert refusal(output_length=0).field == "output_length"


def test_refusals_cross_processes() -> None:
    error = refusal(steps=-3)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.given, copy.wanted) == (error.field, error.given, error.wanted)
    assert str(copy) == str(error)


def test_numbers_may_come_as_json_writes_them() -> None:
    """Whole floats are whole numbers, and 0 and 1 are false and true."""
    decided = resolve(gen_length=64.0, steps=8.0, ignore_eos=1, logits_eos_inf=0, temperature=1)
    assert (decided.gen_length, decided.steps, decided.ignore_eos) == (64, 8, True)
    assert decided.logits_eos_inf is False
    assert isinstance(decided.gen_length, int)
    assert isinstance(decided.temperature, float)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1])
def test_seeds_have_64_bits(seed: int) -> None:
    assert resolve(seed=seed).seed == seed % 2**64


def test_a_missing_seed_stays_open_until_it_is_drawn() -> None:
    decided = resolve()
    assert decided.seed is None
    assert decided.with_seed(7).seed == 7
    assert dataclasses.replace(decided.with_seed(7), seed=None) == decided


# ---- defaults ----------------------------------------------------------------------------------


def test_defaults_without_any_field() -> None:
    assert resolve() == DiffusionParams(
        algorithm="semi_ar",
        remasking="low_confidence",
        cache="none",
        gen_length=128,
        max_tokens=128,
        steps=128,
        block_length=32,
        temperature=0.0,
        cfg_scale=0.0,
        threshold=0.9,
        logits_eos_inf=False,
        confidence_eos_eot_inf=False,
        confidence_dtype="float32",
        ignore_eos=False,
        allow_infill=False,
        force_single_batch=False,
        seed=None,
        mask_id=MASK,
        eos_id=EOS,
        eot_id=EOT,
        stop_ids=frozenset({EOS, EOT}),
        alg="entropy",
        top_p=None,
        top_k=None,
        factor=1.0,
        relaxed_threshold=0.75,
        radius=4,
        low_threshold=0.4,
        block_add_threshold=0.5,
        decoded_token_threshold=0.5,
        cache_delay_iter=10000,
        refresh_interval=10000,
        early_stop=False,
        alg_temp=0.0,
        eps=1e-3,
        steps_per_block=None,
        editing_threshold=0.9,
        max_post_steps=16,
        num_to_transfer=1,
        penalty_lambda=0.0,
        sub_block_length=8,
        delimiter_ids=(),
        delimiter_threshold=0.3,
        logit_shift=0,
        is_block_causal=False,
        scores_after_filters=False,
        stream_canvas=False,
        logprobs=None,
    )


@pytest.mark.parametrize(
    ("max_tokens", "canvas", "block"),
    [(1, 32, 32), (31, 32, 32), (32, 32, 32), (33, 64, 32), (100, 128, 32), (500, 512, 32)],
)
def test_max_tokens_rounds_up_to_whole_default_blocks(
    max_tokens: int, canvas: int, block: int
) -> None:
    decided = resolve(max_tokens=max_tokens)
    assert (decided.gen_length, decided.max_tokens) == (canvas, max_tokens)
    assert (decided.block_length, decided.steps) == (block, canvas)


@pytest.mark.parametrize(
    ("room", "canvas", "block"),
    [(1, 1, 1), (31, 31, 31), (32, 32, 32), (96, 96, 32), (127, 127, 127)],
)
def test_the_default_canvas_is_clipped_to_the_room(room: int, canvas: int, block: int) -> None:
    decided = resolve(model(max_model_len=20 + room))
    assert (decided.gen_length, decided.max_tokens) == (canvas, canvas)
    assert (decided.block_length, decided.steps) == (block, canvas)


def test_a_rounded_canvas_falls_back_to_max_tokens_where_there_is_no_room() -> None:
    decided = resolve(model(max_model_len=130), max_tokens=100)
    assert (decided.gen_length, decided.max_tokens, decided.block_length) == (100, 100, 100)


@pytest.mark.parametrize(
    ("asked", "block"),
    [
        ({"gen_length": 64}, 32),
        ({"gen_length": 48}, 48),
        ({"gen_length": 21}, 21),
        ({"gen_length": 128, "steps": 8}, 32),
        ({"gen_length": 128, "steps": 6}, 128),
        ({"gen_length": 128, "steps": 1}, 128),
        ({"gen_length": 128, "threshold": 0.5}, 32),
    ],
)
def test_default_block_length(asked: dict[str, Any], block: int) -> None:
    assert resolve(**asked).block_length == block


@pytest.mark.parametrize(
    ("wanted", "asked", "steps"),
    [
        (64, {"gen_length": 128}, 64),
        (65, {"gen_length": 128}, 64),
        (67, {"gen_length": 128}, 68),
        (66, {"gen_length": 128}, 68),
        (1, {"gen_length": 128}, 4),
        (1000, {"gen_length": 64}, 1000),
        (10, {"gen_length": 30}, 10),
        (10, {"gen_length": 128, "steps": 16}, 16),
    ],
)
def test_server_wide_steps_come_to_the_nearest_multiple(
    wanted: int, asked: dict[str, Any], steps: int
) -> None:
    assert resolve(model(default_steps=wanted), **asked).steps == steps


def test_the_environment_gives_default_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLLM_DIFFUSION_STEPS", raising=False)
    assert envs.default_steps() is None
    monkeypatch.setenv("DLLM_DIFFUSION_STEPS", "48")
    assert envs.default_steps() == 48
    for wrong in ("0", "-3", "many", "1.5"):
        monkeypatch.setenv("DLLM_DIFFUSION_STEPS", wrong)
        with pytest.raises(ServerConfigError, match=f"DLLM_DIFFUSION_STEPS.*{wrong}"):
            envs.default_steps()


def test_threshold_has_no_bound_unless_steps_are_given() -> None:
    assert resolve(algorithm="threshold", gen_length=64).steps is None
    decided = resolve(algorithm="threshold", gen_length=64, block_length=32, steps=3)
    assert decided.steps == 3
    error = refusal(algorithm="threshold", gen_length=64, block_length=32, steps=1)
    assert (error.field, error.given) == ("steps", 1)
    assert "2" in error.wanted


# ---- lengths -----------------------------------------------------------------------------------


def test_explicit_lengths_are_taken_literally() -> None:
    decided = resolve(gen_length=30, block_length=10, steps=9, max_tokens=17)
    assert (decided.gen_length, decided.block_length, decided.steps) == (30, 10, 9)
    assert decided.max_tokens == 17
    assert decided.num_blocks == 3


def test_a_block_length_that_divides_nothing_is_refused_with_those_that_would() -> None:
    error = refusal(gen_length=64, block_length=24)
    assert (error.field, error.given) == ("block_length", 24)
    assert "64" in error.wanted
    for divisor in (16, 32):
        assert str(divisor) in error.wanted
    for block_length in (16, 32):
        assert resolve(gen_length=64, block_length=block_length).block_length == block_length


def test_steps_that_divide_nothing_are_refused_with_those_that_would() -> None:
    error = refusal(gen_length=64, block_length=16, steps=10)
    assert (error.field, error.given) == ("steps", 10)
    assert "(4)" in error.wanted
    assert "8 or 12" in error.wanted
    for steps in (8, 12):
        assert resolve(gen_length=64, block_length=16, steps=steps).steps == steps


def test_more_steps_than_tokens_are_accepted() -> None:
    assert resolve(gen_length=16, block_length=8, steps=64).steps == 64


def test_max_tokens_beyond_the_canvas_is_refused() -> None:
    assert resolve(gen_length=32, max_tokens=32).max_tokens == 32
    error = refusal(gen_length=32, max_tokens=33)
    assert (error.field, error.given) == ("max_tokens", 33)
    assert "32" in error.wanted


def test_the_context_limit_is_refused_with_its_three_numbers() -> None:
    served = model(max_model_len=100)
    assert resolve(served, gen_length=80).gen_length == 80
    too_long: list[dict[str, Any]] = [{"gen_length": 81}, {"max_tokens": 90}]
    for asked in too_long:
        error = refusal(served, **asked)
        assert error.field in asked
        assert error.given == asked[error.field]
        assert "20" in error.wanted
        assert "100" in error.wanted
    assert "81" in refusal(served, gen_length=81).wanted
    full = refusal(served, [1] * 100)
    assert "100" in full.wanted


# ---- ids ---------------------------------------------------------------------------------------


def test_the_mask_id_may_only_be_the_models() -> None:
    assert resolve(mask_id=MASK).mask_id == MASK
    error = refusal(mask_id=126336)
    assert (error.field, error.given) == ("mask_id", 126336)
    assert str(MASK) in error.wanted


def test_a_mask_in_the_prompt_needs_allow_infill() -> None:
    error = refusal(prompt=[1, MASK, 2])
    assert (error.field, error.given) == ("prompt", MASK)
    assert "allow_infill" in error.wanted
    assert resolve(prompt=[1, MASK, 2], allow_infill=True).allow_infill is True


@pytest.mark.parametrize(("prompt", "given"), [([], []), ([1, 256], 256), ([-1, 3], -1)])
def test_prompts_that_are_no_tokens(prompt: list[int], given: Any) -> None:
    error = refusal(prompt=prompt)
    assert (error.field, error.given) == ("prompt", given)


def test_stop_ids() -> None:
    def stop_ids(**asked: Any) -> frozenset[int]:
        return decision.decide(asked, MODEL, PROMPT).stop_ids

    assert stop_ids() == {EOS, EOT}
    assert stop_ids(stop_token_ids=(7, 9)) == {EOS, EOT, 7, 9}
    assert stop_ids(stop_token_ids=(7,), ignore_eos=True) == frozenset()


@pytest.mark.parametrize(
    ("ids", "option"),
    [
        (SpecialIds(MASK, None, EOT, frozenset({EOT})), "logits_eos_inf"),
        (SpecialIds(MASK, None, EOT, frozenset({EOT})), "confidence_eos_eot_inf"),
        (SpecialIds(MASK, EOS, None, frozenset({EOS})), "confidence_eos_eot_inf"),
    ],
)
def test_options_that_need_an_id_the_checkpoint_has_not(ids: SpecialIds, option: str) -> None:
    yes: dict[str, Any] = {option: True}
    no: dict[str, Any] = {option: False}
    error = refusal(model(ids=ids), **yes)
    assert (error.field, error.given) == (option, True)
    assert resolve(model(ids=ids), **no).eot_id == ids.eot


# ---- server-wide defaults ----------------------------------------------------------------------


def served_with(**defaults: Any) -> ServedModel:
    return model(defaults=fields.server_defaults(defaults, LLADA))


def test_server_wide_defaults_and_requests_own_values() -> None:
    served = served_with(
        algorithm="Threshold",
        threshold=0.5,
        sub_block_size=16,
        confidence_dtype="float64",
        cfg_scale=0.5,
        remasking="random",
        force_single_batch=True,
    )
    decided = resolve(served)
    assert decided.algorithm == "threshold"
    assert decided.threshold == 0.5
    assert decided.block_length == 16
    assert decided.confidence_dtype == "float64"
    assert decided.cfg_scale == 0.5
    assert decided.remasking == "random"
    assert decided.force_single_batch is True
    own = resolve(
        served,
        threshold=0.8,
        block_length=64,
        confidence_dtype="float32",
        cfg_scale=0,
        remasking="low_confidence",
        force_single_batch=False,
    )
    assert (own.threshold, own.block_length, own.confidence_dtype) == (0.8, 64, "float32")
    assert (own.cfg_scale, own.remasking, own.force_single_batch) == (0, "low_confidence", False)
    assert resolve(served, algorithm="semi_ar").algorithm == "semi_ar"


def test_server_wide_block_length_and_steps_bend_to_the_canvas() -> None:
    served = served_with(block_length=48, steps=50)
    assert resolve(served, gen_length=96).block_length == 48
    assert resolve(served, gen_length=96).steps == 50
    assert resolve(served, gen_length=64).block_length == 64
    assert resolve(served_with(steps=50), gen_length=128).steps == 52
    both = dataclasses.replace(served_with(steps=50), default_steps=99)
    assert resolve(both, gen_length=128).steps == 52


def test_generation_config_limits_the_default_canvas() -> None:
    decided = resolve(model(default_max_tokens=100))
    assert (decided.gen_length, decided.max_tokens) == (128, 100)
    assert resolve(model(default_max_tokens=100), gen_length=64).max_tokens == 64
    assert resolve(model(default_max_tokens=100), max_tokens=20).max_tokens == 20


@pytest.mark.parametrize(
    "settings",
    [{"threshold_": 0.5}, {"threshold": "high"}, {"algorithm": "guess"}, {"prompt": "x"}],
)
def test_unknown_or_wrong_server_settings_stop_the_start(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ServerConfigError, match=name) as error:
        fields.server_defaults(settings, LLADA)
    assert "\n" not in str(error.value)


def test_server_wide_values_count_where_they_are_meant() -> None:
    served = served_with(
        algorithm="multi_block",
        threshold=0.4,
        block_add=0.1,
        decoded_thresh=0.95,
        early_stop=True,
        cache="delayed",
        remasking="random",
    )
    decided = resolve(served)
    assert (decided.threshold, decided.block_add_threshold) == (0.4, 0.1)
    assert (decided.decoded_token_threshold, decided.early_stop) == (0.95, True)
    assert (decided.cache, decided.remasking) == ("delayed", "random")
    # A confidence is no entropy; what another algorithm does not use gives way.
    other = resolve(served, algorithm="hierarchy")
    assert (other.threshold, other.early_stop, other.cache) == (0.9, False, "none")
    assert other.remasking == "low_confidence"
    assert resolve(served_with(threshold=0.4), algorithm="entropy_threshold").threshold == 0.4


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "prefix", "cfg_scale": 1.0},
        {"algorithm": "multi_block", "cache": "prefix"},
        {"algorithm": "dream", "cache": "delayed"},
    ],
)
def test_server_settings_that_cannot_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ServerConfigError, match="cache"):
        fields.server_defaults(settings, LLADA)


@pytest.mark.parametrize("name", ["gen_length", "seed", "mask_id", "ignore_eos", "temperature"])
def test_what_belongs_to_a_request_is_no_server_setting(name: str) -> None:
    with pytest.raises(ServerConfigError, match=f"{name} belongs to a request"):
        fields.server_defaults({name: 1}, LLADA)


# ---- SamplingParams ----------------------------------------------------------------------------


def sampled(**fields: Any) -> DiffusionParams:
    from vllm import SamplingParams

    asked = decision.asked_by(SamplingParams(**fields))
    return decision.decide(asked, MODEL, PROMPT)


def test_sampling_params_as_they_stand() -> None:
    decided = sampled(temperature=1.0, max_tokens=100)
    assert (decided.temperature, decided.gen_length, decided.max_tokens) == (1.0, 128, 100)
    assert sampled().max_tokens == 16  # upstream's default, a limit like any other
    assert sampled().gen_length == 32


def test_extra_args_carry_the_diffusion_parameters_and_win() -> None:
    decided = sampled(
        temperature=1.0,
        seed=5,
        extra_args={"gen_length": 64, "steps": 16, "temperature": 0.5, "kv_cache_report_mode": "x"},
    )
    assert (decided.gen_length, decided.max_tokens, decided.steps) == (64, 64, 16)
    assert (decided.temperature, decided.seed) == (0.5, 5)


def test_max_tokens_beside_a_canvas() -> None:
    assert sampled(extra_args={"gen_length": 64}).max_tokens == 64
    assert sampled(max_tokens=20, extra_args={"gen_length": 64}).max_tokens == 20
    assert sampled(max_tokens=None, extra_args={"gen_length": 64}).max_tokens == 64
    assert sampled(extra_args={"gen_length": 64, "max_tokens": 16}).max_tokens == 16
    with pytest.raises(InvalidParameterError, match=r"max_tokens: given 65.*64"):
        sampled(max_tokens=65, extra_args={"gen_length": 64})


def test_a_limit_that_upstream_filled_in_is_no_limit() -> None:
    """Upstream writes "no max_tokens" as everything that is left of the context."""
    room = MODEL.max_model_len - len(PROMPT)
    assert sampled(max_tokens=room).gen_length == sampled(max_tokens=room).max_tokens == 128
    assert sampled(max_tokens=room, extra_args={"gen_length": 64}).max_tokens == 64
    assert resolve(max_tokens=room).max_tokens == room  # a request's own word is literal


def test_stop_ids_and_ignore_eos_of_sampling_params() -> None:
    assert sampled(stop_token_ids=[7]).stop_ids == {EOS, EOT, 7}
    assert sampled(stop_token_ids=[7], ignore_eos=True).stop_ids == frozenset()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", {5: 1.0}),
        ("thinking_token_budget", 8),
    ],
)
def test_fields_that_every_client_sends_are_named(field: str, value: Any) -> None:
    decided = sampled(temperature=1.0, **{field: value})
    assert decided.ignored == (field,)
    assert dataclasses.replace(decided, ignored=()) == sampled(temperature=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("logprobs", -1),
        ("prompt_logprobs", 1),
        ("watermarking", True),
        ("min_tokens", 2),
    ],
)
def test_fields_that_cannot_be_had(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{field}: given ") as error:
        sampled(temperature=1.0, **{field: value})
    assert error.value.field == field


def test_top_p_and_top_k_are_dreams() -> None:
    decided = sampled(temperature=1.0, top_p=0.5, top_k=7, extra_args={"algorithm": "dream"})
    assert (decided.top_p, decided.top_k) == (0.5, 7)
    own = sampled(top_p=0.5, extra_args={"algorithm": "dream", "top_p": 0.8, "top_k": 0})
    assert (own.top_p, own.top_k) == (0.8, None)


def test_log_probabilities_and_canvases_to_look_at() -> None:
    assert (sampled().logprobs, sampled().num_logprobs) == (None, None)
    assert (sampled(logprobs=3).logprobs, sampled(logprobs=3).num_logprobs) == (3, 3)
    watched = sampled(extra_args={"stream_canvas": True})
    assert (watched.logprobs, watched.num_logprobs) == (None, 0)


def test_seeds_of_several_answers_are_upstreams() -> None:
    """Upstream gives answer i the seed + i, of a seed that it knows."""
    from vllm import SamplingParams

    for sampling in (SamplingParams(n=3, seed=5), SamplingParams(n=3, extra_args={"seed": 5})):
        decided = decision.decide(decision.asked_by(sampling), MODEL, PROMPT)
        decision.attach(sampling, decided)
        assert decided.seed == sampling.seed == 5


def test_values_without_effect_are_accepted() -> None:
    decided = sampled(
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
    )
    assert decided == sampled()
    # At temperature 0 upstream itself drops them.
    assert sampled(temperature=0.0, top_p=0.5).temperature == 0.0


# ---- properties --------------------------------------------------------------------------------

BLOCK_LENGTHS = st.integers(1, 96)


@settings(max_examples=300, deadline=None)
@given(
    prompt_length=st.integers(1, 400),
    max_tokens=st.none() | st.integers(1, 500),
    steps=st.none() | st.integers(1, 300),
    algorithm=st.none() | st.sampled_from(list(ALGORITHMS)),
    server_block=st.none() | BLOCK_LENGTHS,
    server_steps=st.none() | st.integers(1, 300),
    max_model_len=st.integers(2, 600),
)
def test_defaults_always_work(
    prompt_length: int,
    max_tokens: int | None,
    steps: int | None,
    algorithm: str | None,
    server_block: int | None,
    server_steps: int | None,
    max_model_len: int,
) -> None:
    """Whatever is left out is chosen so that the request runs, if the prompt leaves room at all."""
    room = max_model_len - prompt_length
    defaults = {"block_length": server_block, "steps": server_steps}
    served = model(
        max_model_len=max_model_len,
        defaults=fields.server_defaults(defaults, LLADA),
    )
    asked: dict[str, Any] = {"max_tokens": max_tokens, "steps": steps, "algorithm": algorithm}
    if room < max(1, max_tokens or 1):
        refusal(served, [1] * prompt_length, **asked)
        return
    decided = resolve(served, [1] * prompt_length, **asked)
    assert 1 <= decided.max_tokens <= decided.gen_length <= room
    if decided.algorithm not in ENDS_SHORT:
        assert decided.gen_length % decided.block_length == 0
    if max_tokens is not None:
        assert decided.max_tokens == max_tokens
        assert decided.gen_length < max_tokens + 32
    if steps is not None:
        assert decided.steps == (None if decided.algorithm == "adablock" else steps)
    if decided.algorithm == "semi_ar":
        assert decided.steps is not None
        assert decided.steps % decided.num_blocks == 0
        assert decided.steps >= decided.num_blocks


@settings(max_examples=200, deadline=None)
@given(max_tokens=st.integers(1, 400), block_length=BLOCK_LENGTHS)
def test_a_given_block_length_shapes_a_canvas_that_was_not_given(
    max_tokens: int, block_length: int
) -> None:
    limits: list[dict[str, Any]] = [{"max_tokens": max_tokens}, {}]
    for asked in limits:
        decided = resolve(block_length=block_length, **asked)
        assert decided.block_length == block_length
        assert decided.gen_length % block_length == 0
        assert decided.gen_length >= decided.max_tokens
        if asked:
            assert decided.max_tokens == max_tokens


@settings(max_examples=100, deadline=None)
@given(num_blocks=st.integers(1, 20), block_length=BLOCK_LENGTHS, per_block=st.integers(1, 40))
def test_lengths_that_divide_are_never_changed(
    num_blocks: int, block_length: int, per_block: int
) -> None:
    decided = resolve(
        gen_length=num_blocks * block_length,
        block_length=block_length,
        steps=num_blocks * per_block,
    )
    assert decided.num_blocks == num_blocks
    assert decided.block_length == block_length
    assert decided.steps == num_blocks * per_block


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1, 200)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["semi_ar", "threshold", "random", "float64", "none"])
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=1)
)


@settings(max_examples=200, deadline=None)
@given(
    asked=st.dictionaries(st.sampled_from(sorted(fields.SPELLINGS)), VALUES, max_size=6),
    prompt=st.lists(st.integers(-2, 260), max_size=4),
)
def test_resolve_decides_or_refuses_and_nothing_else(
    asked: dict[str, Any], prompt: list[int]
) -> None:
    try:
        decided = resolve(prompt=prompt, **asked)
    except InvalidParameterError as error:
        assert error.field in {*asked, *fields.BY_NAME, "prompt"}
        return
    assert decided.gen_length % decided.block_length == 0 or decided.algorithm in ENDS_SHORT
    assert len(prompt) + decided.gen_length <= MODEL.max_model_len


def test_every_field_is_documented() -> None:
    assert len(fields.BY_NAME) == len(fields.FIELDS)
    assert all(field.doc and field.documented_default for field in fields.FIELDS)
    assert fields.BY_NAME["threshold"].documented_default == (
        "0.9; entropy_threshold 0.95; full_attn_multi_block 0.5 (0.4 on Dream); "
        "multi_block 0.5 (0.9 on Dream); low_confidence_dynamic 0.95; entropy_bounded 0.35; "
        "joint_threshold 0.95; hierarchy_block 1"
    )
    assert fields.BY_NAME["early_stop"].documented_default == "false"
    assert len(fields.SPELLINGS) == sum(1 + len(f.aliases) for f in fields.FIELDS)


def test_a_family_may_have_defaults_of_its_own() -> None:
    """They are meant for the family's algorithm, and give way to the server's and the request's."""
    served = model(family=DIFFULLAMA)
    own = resolve(served, max_tokens=96)
    assert (own.algorithm, own.alg, own.eps) == ("dream", "origin", 0)
    assert (own.steps, own.top_p) == (64, 0.9)
    assert resolve(served, max_tokens=96, steps=8, alg="entropy").steps == 8
    assert resolve(model(family=DIFFULLAMA, default_steps=16), max_tokens=96).steps == 16
    assert resolve(served, max_tokens=96, algorithm="semi_ar").steps == 96
