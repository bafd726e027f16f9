# SPDX-License-Identifier: Apache-2.0
"""Every algorithm with every cache and family: tokens and forwards of its published loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.harness import (
    Engine,
    as_request,
    assert_parity,
    clear_case,
    load_reference,
    reference,
    running,
)
from tests.reference import decode
from tests.reference.dream_model import DreamReference
from tests.reference.llada_moe_model import LLaDAMoEReference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOADERS: dict[str, Callable[[Path], Any]] = {
    "mha": load_reference,
    "gqa": load_reference,
    "dream": DreamReference.from_checkpoint,
    "moe": LLaDAMoEReference.from_checkpoint,
}
CASES = ("mha", "dream", "moe")
PROMPT_LENGTH = 13
BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 8}
SHORT: dict[str, Any] = {"gen_length": 8, "block_length": 4, "seed": 5}
MULTI: dict[str, Any] = {**BLOCKS, "algorithm": "multi_block"}
DELAYED: dict[str, Any] = {**MULTI, "cache": "delayed"}
FULL: dict[str, Any] = {**BLOCKS, "algorithm": "full_attn_multi_block"}
DREAM: dict[str, Any] = {"gen_length": 24, "algorithm": "dream"}

# (algorithm, parameters) that work with every cache of blocks.
BLOCKWISE: list[dict[str, Any]] = [
    {"algorithm": "semi_ar", "steps": 16},
    {"algorithm": "semi_ar", "steps": 4},
    {"algorithm": "semi_ar", "steps": 32},
    {"algorithm": "semi_ar", "steps": 16, "remasking": "random", "seed": 3},
    {"algorithm": "threshold", "threshold": 0.6},
    {"algorithm": "factor"},
    {"algorithm": "factor", "factor": 2.0},
    {"algorithm": "local_leap"},
    {"algorithm": "local_leap", "threshold": 0.7, "relaxed_threshold": 0.3, "radius": 2},
    {"algorithm": "entropy_threshold"},
    {"algorithm": "entropy_threshold", "threshold": 2.0},
    {"algorithm": "hierarchy"},
    {"algorithm": "hierarchy", "threshold": 0.6, "low_threshold": 0.2},
    {"algorithm": "credit"},
    {"algorithm": "credit", "threshold": 0.5},
]
OTHERS: list[dict[str, Any]] = [
    {**MULTI},
    {**MULTI, "threshold": 1.5},
    {**MULTI, "threshold": 1.5, "block_add_threshold": 0.1, "decoded_token_threshold": 0.95},
    {**MULTI, "threshold": 1.0, "block_add_threshold": 0.0, "decoded_token_threshold": 0.2},
    {**MULTI, "threshold": 1.0, "block_add_threshold": 1.0, "decoded_token_threshold": 1.0},
    {**MULTI, "threshold": 1.0, "block_length": 4},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 0},
    {**DELAYED, "threshold": 1.0, "cache_delay_iter": 1},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 2, "refresh_interval": 3},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 2, "block_length": 4},
    {**DELAYED, "threshold": 2.5, "cache_delay_iter": 3, "block_length": 4},
    {**DELAYED, "threshold": 1.0},
    {**FULL},
    {**FULL, "threshold": 1.5},
    {**FULL, "threshold": 1.5, "block_length": 7},
    {**FULL, "threshold": 1.0, "block_add_threshold": 0.0, "decoded_token_threshold": 0.3},
    {**FULL, "threshold": 2.0, "block_add_threshold": 0.5, "gen_length": 30, "block_length": 8},
    {**FULL, "block_length": 64},
    {**DREAM, "steps": 24},
    {**DREAM, "steps": 7, "alg": "maskgit_plus"},
    {**DREAM, "steps": 12, "alg": "topk_margin"},
    {**DREAM, "steps": 30, "alg": "entropy"},
    {**DREAM, "steps": 9, "alg": "entropy", "eps": 0.2},
    {**DREAM, "steps": 8, "alg": "origin", "seed": 3},
    {**DREAM, "steps": 8, "alg": "maskgit_plus", "alg_temp": 0.5, "seed": 4},
    {**DREAM, "steps": 8, "alg": "entropy", "alg_temp": 0.2, "seed": 2**64 - 1},
    {**DREAM, "steps": 8, "alg": "entropy", "top_k": 5},
    {**DREAM, "steps": 8, "alg": "maskgit_plus", "top_p": 0.7},
    {**DREAM, "steps": 1},
    {**DREAM, "gen_length": 6, "steps": 4, "temperature": 0.8, "seed": 6},
    {**DREAM, "gen_length": 6, "steps": 4, "temperature": 0.8, "top_p": 0.8, "seed": 6},
    {
        **DREAM,
        **{"gen_length": 6, "steps": 4, "temperature": 1.2, "top_p": 0.9, "top_k": 9, "seed": 7},
        **{"alg": "topk_margin", "alg_temp": 0.3},
    },
    {**DREAM, "gen_length": 6, "steps": 4, "temperature": 0.5, "alg": "origin", "seed": 8},
]
NOISY: list[dict[str, Any]] = [
    {**SHORT, "temperature": 0.6, "algorithm": "factor"},
    {**SHORT, "temperature": 0.6, "algorithm": "local_leap", "remasking": "random"},
    {**SHORT, "temperature": 0.6, "algorithm": "entropy_threshold"},
    {**SHORT, "temperature": 0.6, "algorithm": "hierarchy", "threshold": 0.6},
    {**SHORT, "temperature": 0.6, "algorithm": "credit", "threshold": 0.6},
    {**SHORT, "temperature": 0.6, "algorithm": "multi_block", "threshold": 1.0},
    {**SHORT, "temperature": 0.6, "algorithm": "multi_block", "threshold": 0.2},
    {**SHORT, "temperature": 0.6, "algorithm": "semi_ar", "steps": 4, "cache": "dual"},
    {**SHORT, "algorithm": "entropy_threshold", "cfg_scale": 1.0},
    {**SHORT, "algorithm": "full_attn_multi_block", "cfg_scale": 0.5, "threshold": 1.0},
    {**SHORT, "algorithm": "multi_block", "cfg_scale": 0.5, "threshold": 1.0},
    {**SHORT, "algorithm": "credit", "cfg_scale": 0.5},
    {**SHORT, "algorithm": "hierarchy", "logits_eos_inf": True},
    {**SHORT, "algorithm": "factor", "confidence_eos_eot_inf": True},
    {**SHORT, "algorithm": "factor", "remasking": "random"},
    {**SHORT, "algorithm": "entropy_threshold", "confidence_dtype": "float64"},
]


def name_of(asked: dict[str, Any]) -> str:
    parts = {k: v for k, v in asked.items() if k not in ("gen_length", "algorithm")}
    return "-".join([str(asked["algorithm"]), *(f"{k}={v}" for k, v in parts.items())])


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[str, Engine, Any]]:
    folder = checkpoint(request.param)
    with running(folder) as engine:
        yield request.param, engine, LOADERS[request.param](folder)


Pair = tuple[str, Engine, decode.LogitModel]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("asked", BLOCKWISE, ids=name_of)
def test_one_block_after_the_other(pair: Pair, asked: dict[str, Any], cache: str) -> None:
    _, engine, model = pair
    assert_parity(engine, model, PROMPT_LENGTH, {**BLOCKS, **asked, "cache": cache})


@pytest.mark.parametrize("asked", [*OTHERS, *NOISY], ids=name_of)
def test_every_parameter(pair: Pair, asked: dict[str, Any]) -> None:
    _, engine, model = pair
    assert_parity(engine, model, PROMPT_LENGTH, asked)
