# SPDX-License-Identifier: Apache-2.0
"""The parameters of a request: spellings, defaults, lengths, ids, and refusals."""

import dataclasses
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.params.support import (
    EOS,
    EOT,
    MASK,
    MODEL,
    PROMPT,
    STANDARD,
    check_decided,
    check_refused,
    model,
    refusal,
    resolve,
    rows_of,
    served_with,
)
from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import InvalidParameterError, ServerConfigError
from vllm.diffusion.guided.guides import Guide, Spec
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.algorithms import ALGORITHMS, CACHES
from vllm.diffusion.request.edits import Edits
from vllm.diffusion.request.families import DIFFULLAMA, DREAM, LLADA, LLADA_MOE
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

ON_DREAM = model(family=DREAM)
BLIND = model(ids=SpecialIds(MASK, None, EOT, frozenset({EOT})))
SHORT = model(max_model_len=100)
ON_DIFFULLAMA = model(family=DIFFULLAMA)
NEUTRAL = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
NO_DRAFTS = {"num_speculative_states": 0}
DRAFTING = served_with(num_speculative_states=7)
ROOM = MODEL.max_model_len - len(PROMPT)
TEXTS = {"long": [5] * 85, "fits": [5] * 84, "masked": [5, MASK], "mask": [MASK]}
TOKENISING = model(encode=lambda text: TEXTS.get(text, []))
SETTINGS: dict[str, Any] = {"threshold": 0.5, "confidence_dtype": "float64", "cfg_scale": 0.5}
SETTINGS |= {"remasking": "random", "force_single_batch": True}
WITH_SETTINGS = served_with(algorithm="Threshold", sub_block_size=16, **SETTINGS)
OWN_VALUES: dict[str, Any] = {"threshold": 0.8, "block_length": 64, "cfg_scale": 0}
OWN_VALUES |= {"confidence_dtype": "float32", "remasking": "low_confidence"}
OWN_VALUES |= {"force_single_batch": False}
MULTI_BLOCK = {"threshold": 0.4, "early_stop": True, "cache": "delayed", "remasking": "random"}
WITH_MULTI_BLOCK = served_with(
    algorithm="multi_block", block_add=0.1, decoded_thresh=0.95, **MULTI_BLOCK
)
ENDS_SHORT = ("full_attn_multi_block", "adablock", "daedal")
GROWN: dict[str, Any] = {"gen_length": 256, "block_length": 32, "steps": 256}
GROWN |= {"canvas": "grow", "growth": 128}
# A served model unless it is MODEL, the parameters of a request, and the decided values.
DECIDED: dict[str, list[tuple[Any, ...]]] = {
    "a spelling of an algorithm": [
        ({"algorithm": spelling}, {"algorithm": name, "remasking": remasking})
        for spelling, name, remasking in (
            ("semi_ar", "semi_ar", "low_confidence"),
            ("SemiAr", "semi_ar", "low_confidence"),
            ("LowConfidence", "semi_ar", "low_confidence"),
            ("low_confidence", "semi_ar", "low_confidence"),
            ("random", "semi_ar", "random"),
            ("Random", "semi_ar", "random"),
            ("threshold", "threshold", "low_confidence"),
            ("Threshold", "threshold", "low_confidence"),
            ("EntropyThreshold", "entropy_threshold", "low_confidence"),
            ("FullAttnMultiBlock", "full_attn_multi_block", "low_confidence"),
            ("LocalLeap", "local_leap", "low_confidence"),
        )
    ],
    "fields that choose an algorithm": [
        ({"use_local_leap": True}, {"algorithm": "local_leap"}),
        ({"use_local_leap": 1, "threshold": 0.8}, {"algorithm": "local_leap"}),
        ({"use_local_leap": True, "algorithm": "low_confidence"}, {"algorithm": "local_leap"}),
        ({"use_local_leap": True, "algorithm": "local_leap"}, {"algorithm": "local_leap"}),
        ({"use_local_leap": False}, {"algorithm": "semi_ar"}),
        ({"algorithm": "LowConfidence", "threshold": 0.95}, {"algorithm": "threshold"}),
        ({"algorithm": "LowConfidence", "remasking": None}, {"algorithm": "semi_ar"}),
        ({"algorithm": "random", "remasking": "random"}, {"remasking": "random"}),
        ({"threshold": 0.7}, {"algorithm": "threshold", "threshold": 0.7}),
        (ON_DREAM, {}, {"algorithm": "dream"}),
        (ON_DREAM, {"threshold": 0.7}, {"algorithm": "threshold"}),
        (model(family=LLADA_MOE), {}, {"algorithm": "semi_ar"}),
    ],
    "a threshold keeps the server's algorithm if that uses one": [
        (served_with(algorithm="multi_block"), {"threshold": 0.7}, {"algorithm": "multi_block"}),
        (served_with(algorithm="factor"), {"threshold": 0.7}, {"algorithm": "threshold"}),
    ],
    "other projects' names": [
        (
            {"algorithm": "FullAttnMultiBlock", "block_add": 0.3, "decoded_thresh": 0.6},
            {"block_add_threshold": 0.3, "decoded_token_threshold": 0.6},
        ),
        # The published configuration of the algorithm has these two parameters, without effect.
        (
            {"algorithm": "FullAttnMultiBlock", "cache_delay_iter": 2, "refresh_interval": 3},
            {"cache": "none"},
        ),
    ],
    "a field with the value that applies anyway is not ignored": [
        ({"algorithm": "full_attn_multi_block", "temperature": 0}, {"ignored": ()}),
        ({"algorithm": "hierarchy", "remasking": "low_confidence"}, {"ignored": ()}),
        ({"algorithm": "credit", "remasking": "low_confidence"}, {"ignored": ()}),
    ],
    "early stop is off where the end is ignored": [
        ({"algorithm": "multi_block", "early_stop": True}, {"early_stop": True}),
        (
            {"algorithm": "multi_block", "early_stop": True, "ignore_eos": True},
            {"early_stop": False},
        ),
    ],
    "guidance and caches": [
        ({"cfg_scale": 0, "cache": "dual"}, {"cache": "dual"}),
        ({"cfg_scale": 0, "cache": "delayed", "algorithm": "multi_block"}, {"cache": "delayed"}),
        # A parameter of the request takes precedence over a server-wide default.
        (served_with(cfg_scale=0.5), {"cache": "dual"}, {"cfg_scale": 0}),
        (served_with(cache="prefix"), {"cfg_scale": 0.5}, {"cache": "none"}),
    ],
    "a delay chooses the delayed cache": [
        (
            {"algorithm": "multi_block", "cache_delay_iter": 2, "refresh_interval": 3},
            {"cache": "delayed", "cache_delay_iter": 2, "refresh_interval": 3},
        ),
        *(
            (served_with(algorithm="multi_block", cache_delay_iter=2), parameters, {"cache": cache})
            for parameters, cache in (
                ({}, "delayed"),
                ({"cache": "none"}, "none"),
                ({"algorithm": "threshold"}, "none"),
            )
        ),
    ],
    "full_attn_multi_block takes any canvas": [
        (
            {"algorithm": "full_attn_multi_block", "gen_length": 70, "block_length": 32},
            {"gen_length": 70, "block_length": 32, "num_blocks": 3},
        ),
        *(
            ({"algorithm": "full_attn_multi_block", "gen_length": n}, {"block_length": block})
            for n, block in ((70, 32), (5, 5))
        ),
    ],
    "dream has no blocks and any number of steps": [
        *(
            (
                {"algorithm": "dream", "gen_length": 70, "steps": steps},
                {"steps": steps or 70, "block_length": 70, "num_blocks": 1},
            )
            for steps in (1, 7, 70, 200, None)
        ),
        (model(default_steps=33), {"algorithm": "dream", "gen_length": 70}, {"steps": 33}),
        (served_with(steps=50, block_length=7), {"algorithm": "dream"}, {"steps": 50}),
    ],
    "several blocks are bounded by any number of steps": [
        ({"algorithm": name, "gen_length": 64, "steps": 1}, {"steps": 1, "block_length": 32})
        for name in ("multi_block", "full_attn_multi_block")
    ],
    "max_tokens rounds up to whole default blocks": [
        (
            {"max_tokens": most},
            {"gen_length": canvas, "max_tokens": most, "block_length": 32, "steps": canvas},
        )
        for most, canvas in ((1, 32), (31, 32), (32, 32), (33, 64), (100, 128), (256, 256))
    ],
    "a larger max_tokens is a limit up to which the canvas grows": [
        ({"max_tokens": 500}, {**GROWN, "max_tokens": 500, "longest_canvas": 512}),
        ({"max_tokens": 500, "steps": 64}, {**GROWN, "steps": 64, "longest_canvas": 512}),
        ({"max_tokens": 500, "canvas": "fixed"}, {"gen_length": 512, "canvas": "fixed"}),
        ({"max_tokens": 500, "return_trajectory": True}, {"gen_length": 512, "canvas": "fixed"}),
        ({"max_tokens": 500, "gen_length": 512}, {"gen_length": 512, "canvas": "fixed"}),
        ({"max_tokens": 300, "growth": 40}, {**GROWN, "growth": 64, "longest_canvas": 320}),
        (
            {"max_tokens": 300, "gen_length": 96, "canvas": "grow"},
            {**GROWN, "gen_length": 96, "steps": 96, "longest_canvas": 320},
        ),
        (
            {"max_tokens": 300, "gen_length": 512, "canvas": "grow"},
            {"gen_length": 512, "max_tokens": 300, "canvas": "fixed"},
        ),
        ({"canvas": "grow"}, {**GROWN, "max_tokens": ROOM, "longest_canvas": ROOM}),
        ({"max_tokens": 300, "block_length": 96}, {"gen_length": 288, "longest_canvas": 384}),
        (served_with(canvas="fixed"), {"max_tokens": 500}, {"gen_length": 512, "canvas": "fixed"}),
        (
            model(default_gen_length=64),
            {"max_tokens": 65},
            {**GROWN, "gen_length": 64, "steps": 64},
        ),
        (
            model(default_max_tokens=100),
            {"max_tokens": 300},
            {**GROWN, "gen_length": 128, "steps": 128, "longest_canvas": 320},
        ),
        (model(default_max_tokens=100), {"max_tokens": 120}, {"gen_length": 128}),
        (
            model(default_max_tokens=100),
            {"max_tokens": 300, "algorithm": "dream"},
            {"gen_length": 256, "max_tokens": 256},
        ),
        (
            {"max_tokens": 500, "algorithm": "multi_block"},
            {"gen_length": 256, "max_tokens": 256, "canvas": "grow", "growth": 0},
        ),
        (model(family=DREAM), {"max_tokens": 500}, {"gen_length": 256, "max_tokens": 256}),
    ],
    "the default canvas is clipped to the room": [
        (
            model(max_model_len=20 + room),
            {},
            {"gen_length": room, "max_tokens": room, "block_length": block, "steps": room},
        )
        for room, block in ((1, 1), (31, 31), (32, 32), (96, 32), (127, 127))
    ],
    "a rounded canvas falls back to max_tokens where there is no room": [
        (
            model(max_model_len=130),
            {"max_tokens": 100},
            {"gen_length": 100, "max_tokens": 100, "block_length": 100},
        )
    ],
    "the default block length": [
        ({"gen_length": 64}, {"block_length": 32}),
        ({"gen_length": 48}, {"block_length": 48}),
        ({"gen_length": 21}, {"block_length": 21}),
        ({"gen_length": 128, "steps": 8}, {"block_length": 32}),
        ({"gen_length": 128, "steps": 6}, {"block_length": 128}),
        ({"gen_length": 128, "steps": 1}, {"block_length": 128}),
        ({"gen_length": 128, "threshold": 0.5}, {"block_length": 32}),
    ],
    "server-wide steps come to the nearest multiple": [
        (model(default_steps=wanted), parameters, {"steps": steps})
        for wanted, parameters, steps in (
            (64, {"gen_length": 128}, 64),
            (65, {"gen_length": 128}, 64),
            (67, {"gen_length": 128}, 68),
            (66, {"gen_length": 128}, 68),
            (1, {"gen_length": 128}, 4),
            (1000, {"gen_length": 64}, 1000),
            (10, {"gen_length": 30}, 10),
            (10, {"gen_length": 128, "steps": 16}, 16),
        )
    ],
    "threshold has no bound unless steps are given": [
        ({"algorithm": "threshold", "gen_length": 64}, {"steps": None}),
        (
            {"algorithm": "threshold", "gen_length": 64, "block_length": 32, "steps": 3},
            {"steps": 3},
        ),
    ],
    "lengths are taken literally": [
        (
            {"gen_length": 30, "block_length": 10, "steps": 9, "max_tokens": 17},
            {"gen_length": 30, "block_length": 10, "steps": 9, "max_tokens": 17, "num_blocks": 3},
        ),
        ({"gen_length": 64, "block_length": 16}, {"block_length": 16}),
        ({"gen_length": 64, "block_length": 32}, {"block_length": 32}),
        ({"gen_length": 64, "block_length": 16, "steps": 8}, {"steps": 8}),
        ({"gen_length": 64, "block_length": 16, "steps": 12}, {"steps": 12}),
        ({"gen_length": 16, "block_length": 8, "steps": 64}, {"steps": 64}),
        ({"gen_length": 32, "max_tokens": 32}, {"max_tokens": 32}),
        (SHORT, {"gen_length": 80}, {"gen_length": 80}),
    ],
    "ids": [
        ({"mask_id": MASK}, {"mask_id": MASK}),
        ({"prompt": [1, MASK, 2], "allow_infill": True}, {"allow_infill": True}),
        (BLIND, {"logits_eos_inf": False}, {"eot_id": EOT}),
    ],
    "the server's lengths bend to the canvas": [
        (served_with(block_length=48, steps=50), {"gen_length": 96}, {"block_length": 48}),
        (served_with(block_length=48, steps=50), {"gen_length": 96}, {"steps": 50}),
        (served_with(block_length=48, steps=50), {"gen_length": 64}, {"block_length": 64}),
        (served_with(steps=50), {"gen_length": 128}, {"steps": 52}),
        (
            dataclasses.replace(served_with(steps=50), default_steps=99),
            {"gen_length": 128},
            {"steps": 52},
        ),
    ],
    "generation_config.json limits the default canvas": [
        (model(default_max_tokens=100), {}, {"gen_length": 128, "max_tokens": 100}),
        (model(default_max_tokens=100), {"gen_length": 64}, {"max_tokens": 64}),
        (model(default_max_tokens=100), {"max_tokens": 20}, {"max_tokens": 20}),
    ],
    "a limit of the request itself is kept, even if it is the whole context": [
        ({"max_tokens": ROOM}, {"max_tokens": ROOM})
    ],
    "defaults": [
        ({}, {"algorithm": "semi_ar", "remasking": "low_confidence", "cache": "none"}),
        ({}, {"logit_shift": 0, "is_block_causal": False, "confidence_dtype": "float32"}),
        ({}, {"gen_length": 128, "max_tokens": 128, "steps": 128, "block_length": 32}),
        ({}, {"temperature": 0.0, "cfg_scale": 0.0, "min_p": 0.0, "top_p": None, "top_k": None}),
        ({}, {"mask_id": MASK, "eos_id": EOS, "eot_id": EOT, "stop_ids": {EOS, EOT}}),
        ({}, {"seed": None, "logprobs": None, "allow_infill": False, "stream_canvas": False}),
        ({}, {"logits_eos_inf": False, "confidence_eos_eot_inf": False, "ignore_eos": False}),
        ({}, {"force_single_batch": False, "delimiter_ids": ()}),
        # Parameters of other algorithms have the defaults of their records, too.
        *(
            ({}, {spec.name: spec.default_for("semi_ar", is_shifted=False)})
            for spec in fields.PARAMETERS
            if spec.name != "delimiter_ids"
        ),
    ],
    "defaults of a family apply to its algorithm": [
        (
            ON_DIFFULLAMA,
            {"max_tokens": 96},
            {"algorithm": "dream", "alg": "origin", "eps": 0, "steps": 64, "top_p": 0.9},
        ),
        (ON_DIFFULLAMA, {"max_tokens": 96, "steps": 8, "alg": "entropy"}, {"steps": 8}),
        (model(family=DIFFULLAMA, default_steps=16), {"max_tokens": 96}, {"steps": 16}),
        (ON_DIFFULLAMA, {"max_tokens": 96, "algorithm": "semi_ar"}, {"steps": 96}),
    ],
    "server-wide defaults": [
        (WITH_SETTINGS, {}, {**SETTINGS, "algorithm": "threshold", "block_length": 16}),
        (WITH_SETTINGS, OWN_VALUES, OWN_VALUES),
        (WITH_SETTINGS, {"algorithm": "semi_ar"}, {"algorithm": "semi_ar"}),
        (WITH_MULTI_BLOCK, {}, MULTI_BLOCK),
        (WITH_MULTI_BLOCK, {}, {"block_add_threshold": 0.1, "decoded_token_threshold": 0.95}),
        # A confidence is no entropy. Values that another algorithm does not use are ignored.
        (
            WITH_MULTI_BLOCK,
            {"algorithm": "hierarchy"},
            {"threshold": 0.9, "early_stop": False, "cache": "none"},
        ),
        (WITH_MULTI_BLOCK, {"algorithm": "hierarchy"}, {"remasking": "low_confidence"}),
        (served_with(threshold=0.4), {"algorithm": "entropy_threshold"}, {"threshold": 0.4}),
    ],
    "server-wide drafts only apply to algorithms that support them": [
        (DRAFTING, {}, {"num_speculative_states": 7}),
        (DRAFTING, NO_DRAFTS, NO_DRAFTS),
        (DRAFTING, {"algorithm": "credit"}, NO_DRAFTS),
        (DRAFTING, {"algorithm": "credit", **NO_DRAFTS}, {"algorithm": "credit", **NO_DRAFTS}),
    ],
    "standard fields that Dream ignores": [
        (ON_DREAM, STANDARD, {"ignored": ("block_length", "remasking")}),
        (ON_DREAM, {"algorithm": "multi_block", **STANDARD}, {"ignored": ("remasking",)}),
    ],
    "seeds have 64 bits": [
        ({"seed": seed}, {"seed": seed % 2**64}) for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1)
    ],
    "bad words that no answer can contain are omitted": [
        (
            TOKENISING,
            {"bad_words": [*TEXTS], "gen_length": 64},  # the prompt has 20 tokens
            {"edits": Edits(bad_words=((5,) * 84, (MASK,)))},
        ),
        (TOKENISING, {"bad_words": ["long"], "gen_length": 64}, {"edits": None}),
    ],
    "edits with neutral values": [
        ({"logit_bias": {}, "min_tokens": 0, "bad_words": [], **NEUTRAL}, {"edits": None})
    ],
}


@pytest.mark.parametrize(("served", "parameters", "wanted"), rows_of(DECIDED))
def test_decisions(served: ServedModel, parameters: dict[str, Any], wanted: dict[str, Any]) -> None:
    check_decided(served, parameters, wanted)


# A served model unless it is MODEL, the parameters, the refused field, and words of the error.
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "contradictions": [
        ({"use_local_leap": True, "algorithm": "factor"}, "use_local_leap"),
        ({"use_local_leap": False, "algorithm": "local_leap"}, "use_local_leap"),
        ({"use_local_leap": "yes"}, "use_local_leap"),
        ({"cfg_scale": 0.5, "cache": "dual"}, "cache"),
        ({"cfg_scale": 0.5, "cache": "delayed", "algorithm": "multi_block"}, "cache"),
        *(
            ({"algorithm": "multi_block", "cache": "none", name: 2}, name, "cache: delayed")
            for name in ("cache_delay_iter", "refresh_interval")
        ),
    ],
    "random entropies do not exist on Dream": [
        (ON_DREAM, {"algorithm": "multi_block", "remasking": "random"}, "remasking")
    ],
    "lengths": [
        ({"algorithm": "dream", "block_length": 0}, "block_length"),
        ({"algorithm": "multi_block", "gen_length": 70, "block_length": 32}, "block_length"),
        ({"gen_length": 64, "block_length": 16, "steps": 10}, "steps", "(4)", "8 or 12"),
        (SHORT, {"gen_length": 81}, "gen_length", "20", "100", "81"),
        (SHORT, {"max_tokens": 90}, "max_tokens", "20", "100"),
    ],
    "ids": [
        ({"mask_id": 126336}, "mask_id", str(MASK)),
        (BLIND, {"algorithm": "multi_block", "early_stop": True}, "early_stop"),
        (BLIND, {"logits_eos_inf": True}, "logits_eos_inf"),
        (BLIND, {"confidence_eos_eot_inf": True}, "confidence_eos_eot_inf"),
        (
            model(ids=SpecialIds(MASK, EOS, None, frozenset({EOS}))),
            {"confidence_eos_eot_inf": True},
            "confidence_eos_eot_inf",
        ),
    ],
    "drafts of an algorithm without them": [
        (
            DRAFTING,
            {"num_speculative_states": 1, "algorithm": "credit"},
            "num_speculative_states",
            "algorithm credit",
        )
    ],
}


@pytest.mark.parametrize("row", [pytest.param(row.values, id=row.id) for row in rows_of(REFUSED)])
def test_refusals(row: tuple[Any, ...]) -> None:
    check_refused(*row)


@pytest.mark.parametrize(
    ("prompt", "given", "word"),
    [([1, MASK, 2], MASK, "allow_infill"), ([], [], ""), ([1, 256], 256, ""), ([-1, 3], -1, "")],
)
def test_prompts_that_cannot_be_decoded(prompt: list[int], given: Any, word: str) -> None:
    assert "100" in refusal(SHORT, prompt=[1] * 100).wanted
    error = refusal(prompt=prompt)
    assert (error.field, error.given) == ("prompt", given)
    assert word in error.wanted


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


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    for wrong, meant in (("gen_lenght", "gen_length"), ("algoritm", "algorithm")):
        error = refusal(**{wrong: 32})
        assert (error.field, error.given) == (wrong, 32)
        assert error.wanted == f"unknown parameter; did you mean {meant}?"
    error = refusal(length_of_output=32)
    assert error.wanted.startswith("unknown parameter; the nearest are ")
    assert error.wanted.endswith("; /docs lists all")
    assert error.wanted.count(", ") == 2


def test_a_margin_replaces_the_factor() -> None:
    assert resolve(algorithm="factor").frechet_margin is None
    error = refusal(algorithm="factor", factor=2.0, frechet_margin=0.1)
    assert (error.field, error.wanted) == (
        "frechet_margin",
        "wanted factor or frechet_margin, not both",
    )


def test_none_counts_as_not_given() -> None:
    everything: dict[str, Any] = dict.fromkeys(fields.SPELLINGS)
    assert resolve(**everything) == resolve()


# ---- every algorithm, by its record ------------------------------------------------------------

USED: dict[str, Any] = {
    "threshold": 0.3,
    "factor": 2.0,
    "frechet_margin": 0.2,
    "relaxed_threshold": 0.5,
    "radius": 7,
    "low_threshold": 0.1,
    "block_add_threshold": 0.7,
    "decoded_token_threshold": 0.8,
    "early_stop": True,
    "alg": "origin",
    "alg_temp": 0.5,
    "eps": 0.01,
    "min_p": 0.2,
    "top_p": 0.9,
    "top_k": 40,
    "block_length": 16,
    "confidence_eos_eot_inf": True,
    "temperature": 0.5,
    "delimiter_ids": (7, 8),
    "delimiter_threshold": 0.4,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", USED)
def test_a_parameter_is_used_or_refused(algorithm: str, name: str) -> None:
    spec, value = fields.BY_NAME[name], USED[name]
    if spec.is_used_by(algorithm):
        assert getattr(resolve(algorithm=algorithm, **{name: value}), name) == value
        return
    if name in (*STANDARD, "min_p", "top_p", "top_k"):
        decided = resolve(algorithm=algorithm, **{name: value})
        assert decided == dataclasses.replace(resolve(algorithm=algorithm), ignored=(name,))
        return
    error = refusal(algorithm=algorithm, **{name: value})
    assert (error.field, error.given) == (name, value)
    assert algorithm in error.wanted
    assert any(user in error.wanted for user in spec.algorithms)
    for neutral in spec.neutral:
        assert resolve(algorithm=algorithm, **{name: neutral}) == resolve(algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_follows_its_record(algorithm: str) -> None:
    """Defaults (listed in docs/decoding.md), caches, and random scores follow the record."""
    record = ALGORITHMS[algorithm]
    for served, is_shifted in ((MODEL, False), (ON_DREAM, True)):
        decided = resolve(served, algorithm=algorithm)
        assert decided.cache == "none"
        for name in record.parameters:
            default = fields.BY_NAME[name].default_for(algorithm, is_shifted=is_shifted)
            assert getattr(decided, name) == (() if name == "delimiter_ids" else default)
    for cache in CACHES:
        if cache in record.caches:
            assert resolve(algorithm=algorithm, cache=cache).cache == cache
            continue
        error = refusal(algorithm=algorithm, cache=cache)
        assert (error.field, error.given) == ("cache", cache)
        assert all(name in error.wanted for name in record.caches)
        if cache != "exact":  # no algorithm of this family supports it
            assert "multi_block" in error.wanted or "semi_ar" in error.wanted
    # This value is accepted for every algorithm.
    assert resolve(algorithm=algorithm, remasking="low_confidence").algorithm == algorithm
    if record.random_scores != "none":
        assert resolve(algorithm=algorithm, remasking="random").remasking == "random"
        return
    error = refusal(algorithm=algorithm, remasking="random")
    assert (error.field, error.given) == ("remasking", "random")
    scored = [name for name, other in ALGORITHMS.items() if other.random_scores != "none"]
    assert all(name in error.wanted for name in ("low_confidence", *scored))


IGNORED = {
    "adablock": ("steps",),
    "daedal": ("steps",),
    "dream": ("block_length", "remasking"),
    "entropy_threshold": ("remasking",),
    "full_attn_multi_block": ("temperature", "remasking"),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_standard_fields_act_or_are_listed_as_ignored(algorithm: str) -> None:
    """Every client sends these fields together with the prompt."""
    decided = resolve(algorithm=algorithm, **STANDARD)
    ignored = IGNORED.get(algorithm, ())
    assert decided.ignored == resolve(served_with(algorithm=algorithm), **STANDARD).ignored
    assert decided.ignored == ignored
    for name, value in STANDARD.items():
        if name not in (*ignored, "output_length"):
            # The canvas of daedal is at most max_tokens.
            is_cut = name == "gen_length" and algorithm == "daedal"
            wanted = STANDARD["max_tokens"] if is_cut else value
            assert getattr(decided, name) == wanted
    useful = {name: value for name, value in STANDARD.items() if name not in ignored}
    assert resolve(algorithm=algorithm, **useful) == dataclasses.replace(decided, ignored=())


def test_an_ignored_block_length_shapes_nothing() -> None:
    for lengths in ({"gen_length": 70}, {"max_tokens": 33}, {}):
        parameters: dict[str, Any] = {"algorithm": "dream", **lengths}
        for block_length in (7, 48, 1000):
            decided = resolve(block_length=block_length, **parameters)
            assert decided == dataclasses.replace(resolve(**parameters), ignored=("block_length",))


# ---- values ------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    ("algorithm", 3),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_k", -2),
    ("alg", "best"),
    ("eps", 2),
    ("radius", -1),
    ("refresh_interval", 0),
    ("cache_delay_iter", -1),
    ("factor", -0.5),
    ("frechet_margin", -0.1),
    ("frechet_margin", 1.5),
    ("gen_length", True),
    ("steps", -1),
    ("block_length", 0),
    ("temperature", 10**400),
    ("temperature", 1e7),
    ("temperature", 1e-300),
    ("seed", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 129),  # more than the canvas
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-7),
    ("repetition_penalty", 1e7),
    ("cfg_scale", 1e7),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", [5]),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {5: "high"}),
    ("bad_words", "France"),
    ("bad_words", ["France", " "]),
    ("bad_words", ["France"]),  # this server has no tokenizer
    ("allowed_token_ids", []),
    ("allowed_token_ids", [256]),
    ("allowed_token_ids", [MASK]),
    ("ignore_eos", "yes"),
    ("logits_eos_inf", []),
    ("confidence_eos_eot_inf", {}),
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


def test_refusals_cross_processes() -> None:
    error = refusal(steps=-3)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.given, copy.wanted) == (error.field, error.given, error.wanted)
    assert str(copy) == str(error)


def test_numbers_may_come_as_json_writes_them() -> None:
    """Whole floats are accepted as integers, and 0 and 1 as false and true."""
    decided = resolve(gen_length=64.0, steps=8.0, ignore_eos=1, logits_eos_inf=0, temperature=1)
    assert (decided.gen_length, decided.steps, decided.ignore_eos) == (64, 8, True)
    assert decided.logits_eos_inf is False
    assert isinstance(decided.gen_length, int)
    assert isinstance(decided.temperature, float)


def test_a_missing_seed_stays_open_until_it_is_drawn() -> None:
    decided = resolve()
    assert decided.seed is None
    assert decided.with_seed(7).seed == 7
    assert dataclasses.replace(decided.with_seed(7), seed=None) == decided


def test_the_environment_gives_default_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLLM_DIFFUSION_STEPS", raising=False)
    assert envs.default_steps() is None
    monkeypatch.setenv("DLLM_DIFFUSION_STEPS", "48")
    assert envs.default_steps() == 48
    for wrong in ("0", "-3", "many", "1.5"):
        monkeypatch.setenv("DLLM_DIFFUSION_STEPS", wrong)
        with pytest.raises(ServerConfigError, match=f"DLLM_DIFFUSION_STEPS.*{wrong}"):
            envs.default_steps()


@pytest.mark.parametrize(
    ("least_tokens", "parameters", "gen_length", "max_tokens", "steps"),
    [
        (10, {}, 128, 128, 128),
        (150, {}, 320, 320, 320),
        # The steps suit the longer canvas, whose blocks are ten.
        (150, {"block_length": 32, "steps": 10}, 320, 320, 10),
        (150, {"suffix_ids": (1, 2)}, 352, 320, 352),
        (150, {"gen_length": 160}, 160, 160, 160),
        (150, {"max_tokens": 150}, 160, 150, 160),
    ],
)
def test_a_format_lengthens_a_default_canvas(
    least_tokens: int, parameters: dict[str, Any], gen_length: int, max_tokens: int, steps: int
) -> None:
    """To twice its shortest answer, in whole blocks of 32; a suffix is added after the answer."""
    formats: Any = SimpleNamespace(guide=lambda _: Guide(b"", least_tokens))
    values = {**fields.canonical(parameters), "structured_outputs": Spec("regex", '"a"')}
    decided = decision.decide(values, model(guides=formats), PROMPT)
    assert (decided.gen_length, decided.max_tokens, decided.steps) == (
        gen_length,
        max_tokens,
        steps,
    )
    assert decided.guide == formats.guide(None)


# ---- server-wide defaults ----------------------------------------------------------------------


OF_A_REQUEST = ("gen_length", "seed", "mask_id", "ignore_eos", "temperature")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({name: 1}, f"{name} can only be set by requests") for name in OF_A_REQUEST),
        *(({name: "x"}, name) for name in ("threshold_", "threshold", "algorithm", "prompt")),
        ({"cache": "prefix", "cfg_scale": 1.0}, "cache"),
        ({"algorithm": "multi_block", "cache": "prefix"}, "cache"),
        ({"algorithm": "dream", "cache": "delayed"}, "cache"),
    ],
)
def test_wrong_server_settings_stop_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerConfigError, match=message) as error:
        fields.server_defaults(settings, LLADA)
    assert "\n" not in str(error.value)


# ---- SamplingParams ----------------------------------------------------------------------------


def sampled(**fields: Any) -> DiffusionParams:
    from vllm import SamplingParams

    values = decision.request_values_of(SamplingParams(**fields))
    return decision.decide(values, MODEL, PROMPT)


CANVAS = {"gen_length": 64}
OF_DREAM = {"algorithm": "dream"}
# Fields of SamplingParams, and the decided values.
SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"temperature": 1.0, "max_tokens": 100},
        {"temperature": 1.0, "gen_length": 128, "max_tokens": 100},
    ),
    ({}, {"max_tokens": 16, "gen_length": 32}),  # upstream's default acts as a limit
    # extra_args have the parameters of diffusion, and take precedence.
    (
        {
            "temperature": 1.0,
            "seed": 5,
            "extra_args": {**CANVAS, "steps": 16, "temperature": 0.5, "kv_cache_report_mode": "x"},
        },
        {"gen_length": 64, "max_tokens": 64, "steps": 16, "temperature": 0.5, "seed": 5},
    ),
    (
        {"temperature": 1.0, "top_p": 0.5, "top_k": 7, "extra_args": OF_DREAM},
        {"top_p": 0.5, "top_k": 7},
    ),
    (
        {"top_p": 0.5, "extra_args": {**OF_DREAM, "top_p": 0.8, "top_k": 0}},
        {"top_p": 0.8, "top_k": None},
    ),
    # Upstream's default does not limit a canvas that the request sets.
    ({"extra_args": CANVAS}, {"max_tokens": 64}),
    ({"max_tokens": 20, "extra_args": CANVAS}, {"max_tokens": 20}),
    ({"max_tokens": None, "extra_args": CANVAS}, {"max_tokens": 64}),
    ({"extra_args": {**CANVAS, "max_tokens": 16}}, {"max_tokens": 16}),
    # Upstream sets max_tokens to the rest of the context if the request has no limit.
    ({"max_tokens": ROOM}, {"gen_length": 128, "max_tokens": 128}),
    ({"max_tokens": ROOM, "extra_args": CANVAS}, {"max_tokens": 64}),
    ({"stop_token_ids": [7]}, {"stop_ids": {EOS, EOT, 7}}),
    ({"stop_token_ids": [7], "ignore_eos": True}, {"stop_ids": frozenset()}),
    ({}, {"logprobs": None, "num_logprobs": None}),
    ({"logprobs": 3}, {"logprobs": 3, "num_logprobs": 3}),
    ({"extra_args": {"stream_canvas": True}}, {"logprobs": None, "num_logprobs": 0}),
    # Upstream itself ignores filters at temperature 0.
    ({"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.0}),
]


@pytest.mark.parametrize(("given", "wanted"), SAMPLED)
def test_decisions_from_sampling_params(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    decided = sampled(**given)
    assert {name: getattr(decided, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("given", "name", "word"),
    [
        ({"logprobs": -1}, "logprobs", ""),
        ({"prompt_logprobs": 1}, "prompt_logprobs", ""),
        ({"watermarking": True}, "watermarking", ""),
        ({"max_tokens": 65, "extra_args": CANVAS}, "max_tokens", "64"),
    ],
)
def test_refusals_of_sampling_params(given: dict[str, Any], name: str, word: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name}: given .*{word}") as error:
        sampled(temperature=1.0, **given)
    assert error.value.field == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.5),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {5: 1.0}),
        ("allowed_token_ids", [1, 7]),
        ("min_tokens", 2),
    ],
)
def test_fields_of_sampling_params_that_edit_logits(field: str, value: Any) -> None:
    """Upstream's object and a JSON body, whose keys are strings, give the same edits."""
    decided = sampled(extra_args={"gen_length": 64}, **{field: value})
    assert decided.edits is not None and decided.ignored == ()
    assert dataclasses.replace(decided, edits=None) == sampled(extra_args={"gen_length": 64})
    sent = json.loads(json.dumps({field: value}))
    assert resolve(**sent).edits == sampled(extra_args=sent).edits == decided.edits


def test_edits_of_logits() -> None:
    words = {"Paris": [9], " Paris": [10], "New York": [1, 2], " New York": [3, 1, 2]}
    served = model(encode=words.__getitem__)
    decided = resolve(
        served,
        min_tokens=3,
        ignore_eos=True,
        logit_bias={"7": -1000, "3": 2, "4": 0},
        bad_words=["Paris", "New York", "Paris"],
        allowed_token_ids=[9, 7, 7, MASK],
    )
    assert decided.stop_ids == frozenset()
    assert decided.edits == Edits(
        allowed_token_ids=(7, 9),
        bad_words=((9,), (10,), (1, 2)),  # the form after a space is omitted if its length differs
        min_tokens=3,
        end_ids=(EOT, EOS),
        logit_bias=((3, 2.0), (7, -100.0)),
    )
    check_refused(served, {"bad_words": [""]}, "bad_words", "none of them empty")
    error = refusal(served, allowed_token_ids=[9, 10], bad_words=["Paris"])
    assert (error.field, "bad_words" in error.wanted) == ("allowed_token_ids", True)
    error = refusal(served, allowed_token_ids=[EOS], min_tokens=1)
    assert (error.field, "min_tokens" in error.wanted) == ("allowed_token_ids", True)


def test_bad_words_are_counted_before_they_are_tokenised() -> None:
    tokenised: list[str] = []

    def encode(text: str) -> list[int]:
        tokenised.append(text)
        return [ord(letter) % 200 for letter in text]

    served = model(encode=encode)
    many = [f"word {number}" for number in range(200_000)]
    check_refused(served, {"bad_words": many}, "bad_words", "at most 256 words", "got 200000")
    long = ["x" * 20_000, "y" * 20_000]
    check_refused(served, {"bad_words": long}, "bad_words", "32768 letters", "got 40000")
    assert not tokenised


def test_the_words_of_a_body_are_tokenised_once() -> None:
    tokenised: list[str] = []
    served = model(encode=lambda text: tokenised.append(text) or [len(text)])
    for prompt in ([1] * 20, [2] * 30):
        resolve(served, prompt, bad_words=["one", "other"])
    assert tokenised == ["one", " one", "other", " other"]


def test_a_field_without_effect_is_listed_as_ignored() -> None:
    decided = sampled(temperature=1.0, thinking_token_budget=8)
    assert decided.ignored == ("thinking_token_budget",)
    assert dataclasses.replace(decided, ignored=()) == sampled(temperature=1.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_filters_act_wherever_tokens_are_drawn(algorithm: str) -> None:
    parameters = {"temperature": 1.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1}
    decided = sampled(**parameters, extra_args={"algorithm": algorithm})
    if ALGORITHMS[algorithm].draws:
        assert (decided.min_p, decided.top_k, decided.top_p) == (0.1, 7, 0.5)
        assert decided.ignored == ()
    else:
        assert set(decided.ignored) == set(parameters)


def test_seeds_of_several_answers_are_upstreams() -> None:
    """Answer i has seed + i, as upstream sets it for a seed that it receives."""
    from vllm import SamplingParams

    for sampling in (SamplingParams(n=3, seed=5), SamplingParams(n=3, extra_args={"seed": 5})):
        decided = decision.decide(decision.request_values_of(sampling), MODEL, PROMPT)
        decision.attach(sampling, decided)
        assert decided.seed == sampling.seed == 5


def test_values_without_effect_are_accepted() -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}
    assert sampled(**neutral, presence_penalty=0.0, repetition_penalty=1.0) == sampled()


# ---- properties --------------------------------------------------------------------------------

BLOCK_LENGTHS = st.integers(1, 96)


@settings(max_examples=300, deadline=None)
@given(
    prompt_length=st.integers(1, 400),
    parameters=st.fixed_dictionaries(
        {
            "max_tokens": st.none() | st.integers(1, 500),
            "steps": st.none() | st.integers(1, 300),
            "algorithm": st.none() | st.sampled_from(list(ALGORITHMS)),
        }
    ),
    server_block=st.none() | BLOCK_LENGTHS,
    server_steps=st.none() | st.integers(1, 300),
    max_model_len=st.integers(2, 600),
)
def test_defaults_always_work(
    prompt_length: int, parameters: Any, server_block: Any, server_steps: Any, max_model_len: int
) -> None:
    """Defaults of missing fields make a request valid whenever the prompt leaves room."""
    room = max_model_len - prompt_length
    served = dataclasses.replace(
        served_with(block_length=server_block, steps=server_steps), max_model_len=max_model_len
    )
    max_tokens, steps = parameters["max_tokens"], parameters["steps"]
    if room < max(1, max_tokens or 1):
        refusal(served, [1] * prompt_length, **parameters)
        return
    decided = resolve(served, [1] * prompt_length, **parameters)
    longest = max(decided.gen_length, decided.longest_canvas)
    if decided.canvas != "daedal":
        assert decided.max_tokens <= longest
    assert 1 <= decided.max_tokens <= room
    assert longest <= room
    if decided.algorithm not in ENDS_SHORT:
        assert decided.gen_length % decided.block_length == 0
    if decided.canvas == "daedal":
        assert decided.max_tokens == (max_tokens or min(2048, room))
    elif max_tokens is not None and decided.growth + (decided.canvas == "fixed"):
        assert decided.max_tokens == max_tokens
        assert longest < max_tokens + max(32, decided.block_length)
    if steps is not None:
        has_steps = decided.algorithm not in ("adablock", "daedal")
        assert decided.steps == (steps if has_steps else None)
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
    for parameters in limits:
        decided = resolve(block_length=block_length, **parameters)
        assert decided.block_length == block_length
        assert decided.gen_length % block_length == 0
        assert max(decided.gen_length, decided.longest_canvas) >= decided.max_tokens
        if parameters:
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
    parameters=st.dictionaries(st.sampled_from(sorted(fields.SPELLINGS)), VALUES, max_size=6),
    prompt=st.lists(st.integers(-2, 260), max_size=4),
)
def test_resolve_decides_or_refuses_and_nothing_else(
    parameters: dict[str, Any], prompt: list[int]
) -> None:
    try:
        decided = resolve(prompt=prompt, **parameters)
    except InvalidParameterError as error:
        name = error.field.partition("[")[0]  # an item of a list is named by its index
        assert name in {*parameters, *fields.BY_NAME, "prompt"}
        return
    assert decided.gen_length % decided.block_length == 0 or decided.algorithm in ENDS_SHORT
    assert len(prompt) + decided.gen_length <= MODEL.max_model_len


def test_every_field_is_documented() -> None:
    assert len(fields.BY_NAME) == len(fields.FIELDS)
    assert all(field.doc and field.documented_default for field in fields.FIELDS)
    assert fields.BY_NAME["threshold"].documented_default == (
        "0.9; entropy_threshold 0.95; full_attn_multi_block 0.5 (0.4 on Dream); "
        "multi_block 0.5 (0.9 on Dream); low_confidence_dynamic 0.95; entropy_bounded 0.35; "
        "joint_threshold 0.95; levenshtein 0.5; hierarchy_block 1; self_speculation 0"
    )
    assert fields.BY_NAME["early_stop"].documented_default == "false"
    assert len(fields.SPELLINGS) == sum(1 + len(f.aliases) for f in fields.FIELDS)


LETTER = "x'\"é\n"


@pytest.mark.parametrize(
    "value",
    [
        5,
        LETTER * 3,
        LETTER * 100,
        [LETTER] * 100,
        [1, [2, [3] * 200]],
        {str(index): [index, {"a": LETTER}] for index in range(100)},
        [[[[0] * 50] * 50] * 50],
        [],
        {},
    ],
)
def test_an_error_shows_the_start_of_what_was_given(value: Any) -> None:
    """The value is shown as its repr, of which only the start is computed."""
    written = repr(value)
    shown = written if len(written) <= 80 else f"{written[:77]}..."
    assert str(InvalidParameterError("f", value, "wanted less")) == f"f: given {shown}; wanted less"


def test_an_error_shows_tuples_as_lists() -> None:
    error = InvalidParameterError("f", (1, {"a": (2, 3)}), "wanted less")
    assert str(error) == "f: given [1, {'a': [2, 3]}]; wanted less"


def test_an_error_looks_at_no_more_than_it_shows() -> None:
    class Unread(list[int]):
        def __repr__(self) -> str:
            raise AssertionError

    values: list[Any] = [*range(100), Unread()]
    assert "0, 1, 2" in str(InvalidParameterError("f", values, "wanted less"))
