# SPDX-License-Identifier: Apache-2.0
"""The parameters of requests to block-causal families, and of AdaBlock."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.params.support import MASK, PROMPT, STANDARD, check_refused, refusal, resolve
from tests.params.support import MODEL as LLADA_MODEL
from vllm import SamplingParams
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.engine.scheduler.trajectories import parameters_of
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, algorithms_for
from vllm.diffusion.request.edits import Edits
from vllm.diffusion.request.families import (
    DIFFUSION_GEMMA,
    DREAM,
    FAST_DLLM,
    IDLM,
    LLADA,
    LLADA2,
    LLADA21,
    LLADA22,
    NEMOTRON,
    SDAR,
    Family,
)
from vllm.diffusion.request.lengths import forwards_saved
from vllm.diffusion.request.served_model import ServedModel
from vllm.diffusion.request.values import in_words
from vllm.diffusion.request.visibility import num_positions

BLOCK_FAMILIES = (LLADA2, LLADA21, SDAR, FAST_DLLM)


def served(family: Family = SDAR, **changes: Any) -> ServedModel:
    return dataclasses.replace(LLADA_MODEL, family=family, **changes)


SERVED = served()

# ---- algorithms --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "algorithm", "threshold"),
    [
        (LLADA2, "low_confidence_dynamic", 0.95),
        (LLADA21, "joint_threshold", 0.95),
        (SDAR, "low_confidence_dynamic", 0.85),
        (LLADA22, "levenshtein", 0.5),
        (FAST_DLLM, "hierarchy_block", 1.0),
        (NEMOTRON, "low_confidence_dynamic", 0.9),
    ],
)
def test_defaults_of_a_family(family: Family, algorithm: str, threshold: float) -> None:
    decided = resolve(served(family))
    assert (decided.algorithm, decided.threshold) == (algorithm, threshold)
    assert (decided.cache, decided.is_block_causal) == ("exact", True)
    assert resolve(served(family), threshold=0.4).algorithm == algorithm
    assert resolve(served(family), threshold=0.4).threshold == 0.4


def test_a_familys_threshold_is_meant_for_its_own_algorithm() -> None:
    assert resolve(SERVED, algorithm="joint_threshold").threshold == 0.95
    assert resolve(SERVED, algorithm="entropy_bounded").threshold == 0.35


@pytest.mark.parametrize(
    "family",
    [*BLOCK_FAMILIES, LLADA22, NEMOTRON, DIFFUSION_GEMMA, LLADA, DREAM],
    ids=lambda f: f.name,
)
def test_algorithms_of_a_family(family: Family) -> None:
    allowed = algorithms_for(family)
    for name in (*ALGORITHMS, *BLOCK_ALGORITHMS):
        if name in allowed:
            assert resolve(served(family), algorithm=name).algorithm == name
            continue
        error = refusal(served(family), algorithm=name)
        assert (error.field, error.given) == ("algorithm", name)
        assert all(other in error.wanted for other in allowed)
    assert set(allowed) == {
        FAST_DLLM.name: {"hierarchy_block"},
        LLADA.name: set(ALGORITHMS),
        DREAM.name: set(ALGORITHMS),
        NEMOTRON.name: {"low_confidence_dynamic", "semi_ar", "self_speculation", "autoregressive"},
        DIFFUSION_GEMMA.name: {"entropy_bound"},
    }.get(
        family.name,
        {"low_confidence_dynamic", "semi_ar", "sequential", "entropy_bounded", "joint_threshold"}
        | ({"levenshtein"} if family is LLADA22 else set()),
    )


THINKING = dataclasses.replace(LLADA_MODEL.ids, think=(5, 6))
CAUSAL = served(NEMOTRON, ids=THINKING)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"num_speculative_states": 3}, "num_speculative_states"),
        ({"allow_infill": True}, "allow_infill"),
        ({"cache": "dual"}, "cache"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 8, "allowed_token_ids": [17, 18]}, "allowed_token_ids"),
        ({"algorithm": "self_speculation", "presence_penalty": 0.5}, "presence_penalty"),
        ({"algorithm": "self_speculation", "complete_blocks": True}, "complete_blocks"),
    ],
)
def test_what_a_causal_context_excludes(parameters: dict[str, Any], field: str) -> None:
    assert refusal(CAUSAL, **parameters).field == field


def test_blocks_of_a_causal_context() -> None:
    """Blocks have one token, so that a given block length is only listed as ignored."""
    decided = resolve(CAUSAL, algorithm="autoregressive", block_length=8, steps=64)
    assert (decided.block_length, decided.kept_unit) == (1, 1)
    assert decided.ignored == ("steps", "block_length")
    decided = resolve(CAUSAL, algorithm="self_speculation", block_length=8, gen_length=32)
    assert (decided.block_length, decided.kept_unit, decided.threshold) == (8, 1, 0.0)
    assert num_positions(NEMOTRON.visibility.with_blocks_of(8), 10, 32) == 49


@pytest.mark.parametrize(
    ("dtype", "given"),
    [(dtype, x) for dtype in ("bfloat16", "float16", "float32") for x in (0.9, 0.85, 0.3, -1.0)],
)
def test_thresholds_of_scores_in_the_dtype_of_logits_have_it(dtype: str, given: float) -> None:
    """The threshold is rounded, because PyTorch rounds a number that a tensor is compared with."""
    model = dataclasses.replace(CAUSAL, dtype=dtype)
    compared = given if dtype == "float32" else torch.tensor(given, dtype=getattr(torch, dtype))
    assert resolve(model, threshold=given).threshold == float(compared)
    assert resolve(model, threshold=given, confidence_dtype="float32").threshold == given


def test_thinking_is_bounded_where_a_model_thinks() -> None:
    decided = resolve(CAUSAL, thinking_token_budget=8)
    assert decided.thinking_token_budget == 8
    assert parameters_of(decided)["thinking_token_budget"] == 8
    assert resolve(CAUSAL, thinking_token_budget=-1).thinking_token_budget is None
    by_server = dataclasses.replace(CAUSAL, defaults={"thinking_token_budget": 9})
    assert resolve(by_server).thinking_token_budget == 9
    assert resolve(by_server, allowed_token_ids=[17, 18]).thinking_token_budget is None
    for model in (SERVED, served(NEMOTRON)):  # their tokenizers have no such tokens
        decided = resolve(model, thinking_token_budget=8)
        assert (decided.thinking_token_budget, decided.ignored) == (
            None,
            ("thinking_token_budget",),
        )


def test_a_budget_of_thinking_wants_both_of_its_tokens() -> None:
    ids = dataclasses.replace(LLADA_MODEL.ids, no_think="</think>")
    model = served(NEMOTRON, ids=ids, defaults={"thinking_token_budget": 9})
    check_refused(model, {"thinking_token_budget": 8}, "thinking_token_budget", "</think>")
    for parameters in ({}, {"thinking_token_budget": -1}):
        decided = resolve(model, **parameters)
        assert (decided.thinking_token_budget, decided.ignored) == (None, ())


def test_blocks_are_whole_windows_of_the_router() -> None:
    """A server-wide default is replaced, and a request's block length is refused."""
    windows = served(LLADA22, block_length=32, block_unit=32)
    assert resolve(windows, block_length=64).block_length == 64
    assert resolve(dataclasses.replace(windows, defaults={"block_length": 16})).block_length == 32
    error = refusal(windows, block_length=48)
    assert (error.field, error.given) == ("block_length", 48)
    assert "multiple of 32" in error.wanted


def test_where_tokens_move_nothing_is_filled_in_place() -> None:
    decided = resolve(served(LLADA22), steps=32, gen_length=32)
    assert (decided.steps_per_block, decided.editing_threshold) == (32, 0.0)
    assert decided.max_post_steps == 16
    other = resolve(served(LLADA22), allow_infill=True)
    assert other.algorithm == "low_confidence_dynamic"
    error = refusal(served(LLADA22), allow_infill=True, algorithm="levenshtein")
    assert (error.field, error.given) == ("algorithm", "levenshtein")


def test_tokens_that_edit_are_for_one_algorithm() -> None:
    ids = dataclasses.replace(LLADA_MODEL.ids, edit=(7, 8))
    windows = served(LLADA22, ids=ids)
    assert resolve(windows).forbidden_ids == ()
    assert resolve(windows, algorithm="semi_ar").forbidden_ids == (7, 8)


@pytest.mark.parametrize(
    ("spelling", "on_blocks"),
    [
        ("LowConfidence", "low_confidence_dynamic"),
        ("low_confidence", "low_confidence_dynamic"),
        ("LowConfidenceDynamic", "low_confidence_dynamic"),
        ("SemiAr", "semi_ar"),
        ("JointThreshold", "joint_threshold"),
        ("EntropyBounded", "entropy_bounded"),
    ],
)
def test_spellings_depend_on_the_kind_of_model(spelling: str, on_blocks: str) -> None:
    assert resolve(SERVED, algorithm=spelling).algorithm == on_blocks
    assert resolve(served(FAST_DLLM), algorithm="HierarchyBlock").algorithm == "hierarchy_block"
    assert resolve(algorithm="LowConfidence").algorithm == "semi_ar"
    assert resolve(algorithm="LowConfidence", threshold=0.5).algorithm == "threshold"


def test_a_servers_algorithm() -> None:
    for family, name, expected in (
        (SDAR, "LowConfidence", "low_confidence_dynamic"),
        (SDAR, "JointThreshold", "joint_threshold"),
        (LLADA, "LowConfidence", "semi_ar"),
        (FAST_DLLM, "HierarchyBlock", "hierarchy_block"),
    ):
        defaults = fields.server_defaults({"algorithm": name}, family)
        assert resolve(served(family, defaults=defaults)).algorithm == expected
    assert resolve(served(defaults={"algorithm": "semi_ar"}), algorithm="sequential")
    settings = {"algorithm": "joint_threshold", "threshold": 0.5, "editing_threshold": 0.0}
    decided = resolve(served(defaults=fields.server_defaults(settings, SDAR)))
    assert (decided.threshold, decided.editing_threshold) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        (SDAR, {"algorithm": "hierarchy_block"}),
        (SDAR, {"algorithm": "threshold"}),
        (LLADA, {"algorithm": "joint_threshold"}),
        (FAST_DLLM, {"algorithm": "low_confidence_dynamic"}),
        (SDAR, {"cache": "prefix"}),
        (SDAR, {"algorithm": "semi_ar", "cache": "dual"}),
        (LLADA, {"cache": "exact"}),
        (SDAR, {"max_post_steps": -1}),
        (SDAR, {"delimiter_ids": []}),
        (SDAR, {"delimiter_ids": "198"}),
    ],
)
def test_server_settings_of_another_kind_stop_the_start(
    family: Family, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ServerConfigError) as error:
        fields.server_defaults(wrong, family)
    assert list(wrong)[-1] in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_are_checked_alone_where_the_model_is_not_known_yet() -> None:
    given = {"algorithm": "JointThreshold", "cache": "exact", "steps_per_block": 8}
    assert fields.server_defaults(given, None) == {**given, "algorithm": "joint_threshold"}
    with pytest.raises(ServerConfigError, match="algorithm"):
        fields.server_defaults({"algorithm": "joint"}, None)


# ---- lengths -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    gen_length=st.integers(1, 300),
    block_length=st.none() | st.integers(1, 80),
    per_block=st.none() | st.integers(1, 100),
    of_config=st.none() | st.integers(1, 64),
    family=st.sampled_from([LLADA2, SDAR]),
)
def test_any_answer_and_any_block(
    gen_length: int, block_length: Any, per_block: Any, of_config: Any, family: Family
) -> None:
    decided = resolve(
        served(family, block_length=of_config),
        gen_length=gen_length,
        block_length=block_length,
        steps_per_block=per_block,
    )
    assert decided.gen_length == decided.max_tokens == gen_length
    assert decided.block_length == (block_length or of_config or 32)
    assert decided.num_blocks == -(-gen_length // decided.block_length)
    usual = 32 if family is LLADA2 else decided.block_length
    wanted = per_block or usual
    if family is LLADA2:
        wanted = min(wanted, gen_length)
    assert decided.steps_per_block == wanted
    assert decided.steps == wanted * decided.num_blocks


def test_steps_are_those_of_a_block_times_the_blocks() -> None:
    parameters: dict[str, Any] = {"gen_length": 70, "block_length": 32}
    assert resolve(SERVED, **parameters, steps=24).steps_per_block == 8
    assert resolve(SERVED, **parameters, steps=24, steps_per_block=8).steps == 24
    error = refusal(SERVED, **parameters, steps=24, steps_per_block=16)
    assert (error.field, error.given) == ("steps_per_block", 16)
    assert "8" in error.wanted
    error = refusal(SERVED, **parameters, steps=25)
    assert (error.field, error.given) == ("steps", 25)
    assert "24 or 27" in error.wanted


def test_steps_of_the_server() -> None:
    parameters: dict[str, Any] = {"gen_length": 64, "block_length": 16}
    by_block = served(defaults={"steps_per_block": 4, "steps": 64})
    assert resolve(by_block, **parameters).steps_per_block == 4
    assert resolve(served(default_steps=30), **parameters).steps_per_block == 8
    assert resolve(by_block, **parameters, steps=8).steps_per_block == 2
    assert resolve(by_block, **parameters, steps_per_block=16).steps == 64


def test_an_answer_may_take_all_the_room_that_is_left() -> None:
    model = served(max_model_len=500)
    decided = resolve(model)
    assert decided.gen_length == decided.max_tokens == 500 - len(PROMPT)
    assert resolve(model, max_tokens=33).gen_length == 33
    cut = resolve(model, max_tokens=33, gen_length=64)
    assert (cut.gen_length, cut.max_tokens) == (64, 33)
    assert resolve(served(max_model_len=500, default_max_tokens=77)).gen_length == 77
    assert refusal(model, gen_length=481).field == "gen_length"
    assert refusal(model, max_tokens=481).field == "max_tokens"
    assert refusal(model, max_tokens=9, gen_length=8).field == "max_tokens"
    assert refusal(served(max_model_len=len(PROMPT))).wanted


def test_upstreams_limit_stands_for_the_room() -> None:
    def decided(**limits: Any) -> int:
        parameters = decision.request_values_of(SamplingParams(**limits))
        return decision.decide(parameters, SERVED, PROMPT).gen_length

    room = SERVED.max_model_len - len(PROMPT)
    assert decided(max_tokens=room) == room
    assert decided(max_tokens=40) == 40
    assert decided(max_tokens=40, extra_args={"gen_length": 64}) == 64


def test_forwards_that_were_saved_are_those_of_blocks_that_were_begun() -> None:
    by_quota = resolve(SERVED, block_length=4, steps_per_block=4)
    assert by_quota.num_blocks > 100
    assert forwards_saved(by_quota, num_forwards=5, num_committed=8) == 3
    assert forwards_saved(by_quota, num_forwards=9, num_committed=8) == 0
    assert forwards_saved(resolve(served(LLADA21)), num_forwards=3, num_committed=32) == 0


# ---- fields with and without effect ------------------------------------------------------------

OWN: dict[str, Any] = {
    "threshold": 0.3,
    "steps_per_block": 3,
    "editing_threshold": 0.2,
    "max_post_steps": 0,
    "num_to_transfer": 3,
    "penalty_lambda": 0.5,
    "sub_block_length": 4,
    "min_p": 0.1,
    "top_p": 0.9,
    "top_k": 40,
    "temperature": 0.5,
}
FOREIGN: dict[str, Any] = {
    "factor": 2.0,
    "alg": "origin",
    "eps": 0.01,
    "delimiter_ids": [3],
    "early_stop": True,
    "confidence_eos_eot_inf": True,
    "cfg_scale": 0.5,
    "remasking": "random",
}


@pytest.mark.parametrize("family", BLOCK_FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("name", [*OWN, *FOREIGN])
def test_a_field_acts_or_is_refused(family: Family, name: str) -> None:
    for algorithm, record in algorithms_for(family).items():
        value = {**OWN, **FOREIGN}[name]
        parameters = {"algorithm": algorithm, name: value, "gen_length": 64}
        if name in record.parameters or name in ("temperature", "min_p", "top_k", "top_p"):
            assert getattr(resolve(served(family), **parameters), name) == value
        else:
            error = refusal(served(family), **parameters)
            assert (error.field, algorithm in error.wanted) == (name, True)
            others = [n for n, a in algorithms_for(family).items() if name in a.parameters]
            instead = f"algorithm: {in_words(others)}" if others else "wanted"
            assert instead in error.wanted
            assert ("algorithm:" in error.wanted) == bool(others)


def test_their_ranges() -> None:
    for name, value in {
        "max_post_steps": -1,
        "num_to_transfer": 0,
        "penalty_lambda": -0.1,
        "steps_per_block": 0,
        "sub_block_length": 0,
        "delimiter_ids": [1, -2],
    }.items():
        error = refusal(SERVED, **{name: value})
        assert (error.field, error.given) == (name, value)
    zero = resolve(served(LLADA21), editing_threshold=0, max_post_steps=0)
    assert (zero.editing_threshold, zero.max_post_steps) == (0.0, 0)


def test_a_part_of_a_block_divides_it() -> None:
    model = served(FAST_DLLM)
    assert resolve(model).sub_block_length == 8
    assert resolve(model, block_length=12).sub_block_length == 12
    assert resolve(model, block_length=12, sub_block_length=4).sub_block_length == 4
    error = refusal(model, block_length=12, sub_block_length=8)
    assert (error.field, error.given) == ("sub_block_length", 8)
    assert "12" in error.wanted


NOTHING_IGNORED = {"low_confidence_dynamic": (), "semi_ar": (), "sequential": ("remasking",)}


@pytest.mark.parametrize("family", BLOCK_FAMILIES, ids=lambda f: f.name)
def test_standard_fields_act_or_are_named(family: Family) -> None:
    standard = {**STANDARD, "cfg_scale": 0.0}
    for algorithm in algorithms_for(family):
        decided = resolve(served(family), algorithm=algorithm, **standard)
        others = ("steps", "remasking") if algorithm == "entropy_bounded" else ("steps",)
        ignored = NOTHING_IGNORED.get(algorithm, others)
        assert decided.ignored == ignored
        for name, value in standard.items():
            if name not in (*ignored, "output_length"):
                assert getattr(decided, name) == value
        assert refusal(served(family), algorithm=algorithm, cfg_scale=0.5).field == "cfg_scale"
        assert refusal(served(family), algorithm=algorithm, remasking="random").field == "remasking"
        assert refusal(served(family), algorithm=algorithm, mask_id=MASK - 1).field == "mask_id"


@pytest.mark.parametrize("family", BLOCK_FAMILIES, ids=lambda f: f.name)
def test_caches(family: Family) -> None:
    for algorithm in algorithms_for(family):
        for cache in ("exact", "none"):
            assert resolve(served(family), algorithm=algorithm, cache=cache).cache == cache
        for cache in ("prefix", "dual", "delayed"):
            error = refusal(served(family), algorithm=algorithm, cache=cache)
            assert (error.field, error.given) == ("cache", cache)
            assert "exact or none" in error.wanted
    for full in (LLADA, DREAM):
        error = refusal(served(full), cache="exact")
        assert (error.field, error.given) == ("cache", "exact")
        assert "none" in error.wanted
    recomputing = served(family, defaults=fields.server_defaults({"cache": "none"}, family))
    assert resolve(recomputing).cache == "none"
    assert resolve(recomputing, cache="exact").cache == "exact"


# ---- generation_config.json --------------------------------------------------------------------


def test_penalties_act_whoever_asked_for_them() -> None:
    """Penalties come from a request, or from generation_config.json, which upstream fills in."""

    def edits(**penalties: float) -> Edits | None:
        parameters = decision.request_values_of(SamplingParams(**penalties))
        return decision.decide(parameters, served(FAST_DLLM), PROMPT).edits

    assert edits(repetition_penalty=1.05) == Edits(repetition_penalty=1.05)
    assert edits() is edits(repetition_penalty=1.0) is None
    both = edits(presence_penalty=0.5, frequency_penalty=0.1)
    assert both == Edits(presence_penalty=0.5, frequency_penalty=0.1)


# ---- AdaBlock ----------------------------------------------------------------------------------


def test_adablock() -> None:
    ids = dataclasses.replace(LLADA_MODEL.ids, line_ends=(7, 9))
    model = dataclasses.replace(LLADA_MODEL, ids=ids)
    decided = resolve(model, algorithm="adablock", gen_length=70)
    assert (decided.delimiter_ids, decided.delimiter_threshold) == ((7, 9), 0.3)
    assert (decided.threshold, decided.block_length, decided.cache) == (0.9, 32, "none")
    on_dream = dataclasses.replace(model, family=DREAM)
    assert resolve(on_dream, algorithm="AdaBlock").delimiter_threshold == 0.5
    own = resolve(model, algorithm="adablock", delimiter_ids=[3], delimiter_threshold=2)
    assert (own.delimiter_ids, own.delimiter_threshold) == ((3,), 2.0)
    error = refusal(model, algorithm="adablock", delimiter_ids=[256])
    assert (error.field, error.given) == ("delimiter_ids", (256,))
    for wrong in ([], "7", 7, [True], [1.5], [-1], ["a"]):
        assert refusal(model, algorithm="adablock", delimiter_ids=wrong).field == "delimiter_ids"
    assert refusal(model, algorithm="threshold", delimiter_ids=[7]).field == "delimiter_ids"


@pytest.mark.parametrize(
    ("block_size", "parameters", "stride"),
    [
        (3, {}, 4),
        (7, {}, 8),
        (32, {}, 4),  # the checkpoint has no block_size
        (3, {"stride": 2}, 2),
        (3, {"stride": 16}, 16),
    ],
)
def test_strides(block_size: int, parameters: dict[str, Any], stride: int) -> None:
    """A forward pass has the latest token, stride - 1 drafts and stride - 1 masks."""
    decided = resolve(served(IDLM, block_length=block_size), **parameters)
    assert (decided.algorithm, decided.stride) == ("introspective", stride)
    assert decided.block_length == 2 * stride - 1
