# SPDX-License-Identifier: Apache-2.0
"""Requests, settings and plans that several engine tests share."""

from collections.abc import Iterable
from typing import Any

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import BLOCKS, NOISY, Request
from vllm.diffusion.memory.plan import ChunkRows, Plan, Residency
from vllm.diffusion.request.families import LLADA
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

PROMPT_LENGTH = 13
FOUR_BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 8}
TWO_BLOCKS: dict[str, Any] = {"gen_length": 8, "block_length": 4, "seed": 5}
MULTI: dict[str, Any] = {**FOUR_BLOCKS, "algorithm": "multi_block"}
DELAYED: dict[str, Any] = {**MULTI, "cache": "delayed"}
FULL: dict[str, Any] = {**FOUR_BLOCKS, "algorithm": "full_attn_multi_block"}
DREAM: dict[str, Any] = {"gen_length": 24, "algorithm": "dream"}
ADABLOCK: dict[str, Any] = {"algorithm": "adablock", "delimiter_ids": list(range(0, 250, 5))}

PARITY: dict[str, dict[str, Any]] = {
    "one token a step": {"gen_length": 32, "block_length": 32, "steps": 32},
    "whole canvas in a step": {"gen_length": 32, "block_length": 32, "steps": 1},
    "uneven quotas": {"gen_length": 30, "block_length": 10, "steps": 9},
    "idle steps": {"gen_length": 16, "block_length": 4, "steps": 32},
    "small blocks": {"gen_length": 32, "block_length": 4, "steps": 16},
    "blocks of one token": {"gen_length": 8, "block_length": 1, "steps": 8},
    "one-token canvas": {"gen_length": 1, "block_length": 1, "steps": 1},
    "odd lengths": {"gen_length": 21, "block_length": 7, "steps": 6},
    "guidance": {**BLOCKS, "cfg_scale": 0.5},
    "strong guidance": {**BLOCKS, "cfg_scale": 3.0},
    "float64 confidence": {**BLOCKS, "confidence_dtype": "float64"},
    "confidence in the logits' dtype": {**BLOCKS, "confidence_dtype": "logits"},
    "no end-of-sequence": {**BLOCKS, "logits_eos_inf": True},
    "late end-of-sequence": {**BLOCKS, "confidence_eos_eot_inf": True},
    "both end-of-sequence options": {
        **BLOCKS,
        "logits_eos_inf": True,
        "confidence_eos_eot_inf": True,
    },
    "random remasking": {**BLOCKS, "remasking": "random", "seed": 11},
    "temperature": {**NOISY, "temperature": 1.0},
    "low temperature, 64-bit seed": {**NOISY, "temperature": 0.3, "seed": 2**63 + 5},
    "temperature and random remasking": {**NOISY, "temperature": 0.7, "remasking": "random"},
    "temperature and guidance": {**NOISY, "temperature": 0.5, "cfg_scale": 1.0},
    "temperature, late end-of-turn": {
        **NOISY,
        "temperature": 2.0,
        "confidence_eos_eot_inf": True,
    },
    "temperature, no end-of-sequence": {**NOISY, "temperature": 2.0, "logits_eos_inf": True},
    "threshold 0.3": {"gen_length": 32, "block_length": 16, "threshold": 0.3},
    "threshold 0.6": {"gen_length": 32, "block_length": 16, "threshold": 0.6},
    "threshold 0.9": {"gen_length": 32, "block_length": 16, "threshold": 0.9},
    "threshold 0.98": {"gen_length": 32, "block_length": 8, "threshold": 0.98},
    "threshold above 1": {"gen_length": 16, "block_length": 8, "threshold": 1.5},
    "threshold 0": {"gen_length": 32, "block_length": 8, "threshold": 0.0},
    "threshold by default": {"gen_length": 32, "block_length": 16, "algorithm": "threshold"},
    "threshold with guidance": {
        "gen_length": 32,
        "block_length": 16,
        "threshold": 0.8,
        "cfg_scale": 1.0,
    },
    "threshold with random scores": {
        "gen_length": 32,
        "block_length": 16,
        "threshold": 0.8,
        "remasking": "random",
        "seed": 3,
    },
    "threshold with temperature": {
        "gen_length": 16,
        "block_length": 8,
        "threshold": 0.6,
        "temperature": 0.6,
        "seed": 5,
    },
}

SHORT: dict[str, Any] = {
    "algorithm": "semi_ar",
    "gen_length": 16,
    "block_length": 8,
    "steps": 4,
    "ignore_eos": True,
}
# Whole sequences (one with guidance) and windows of cached requests share the same steps.
MIXED: list[tuple[int, dict[str, Any]]] = [
    (20, SHORT),
    (5, {**SHORT, "cfg_scale": 1.0}),
    (33, {**SHORT, "cache": "dual"}),
    (3, {**SHORT, "cache": "prefix"}),
    (9, {**SHORT, "temperature": 0.7, "seed": 3}),
    (71, {**SHORT, "cache": "frozen", "cfg_scale": 1.0}),
]
# These sizes divide no length, so that chunks cross the bounds of sequences and requests.
CUT = Plan(Residency(keep_queries=False), ChunkRows(37, 29, 23, 5))
PLANS = {
    "chunks": CUT,
    "chunks, queries kept": Plan(Residency(keep_queries=True), CUT.rows),
    "2 head groups": Plan(Residency(False, 2), CUT.rows),
    "rows in host memory": Plan(Residency(False, host_residual=True), CUT.rows),
    "2 head groups, rows in host memory": Plan(Residency(False, 2, host_residual=True), CUT.rows),
    "one chunk, 2 head groups": Plan(Residency(False, 2), ChunkRows.equal(1000)),
    "one chunk in host memory": Plan(Residency(False, host_residual=True), ChunkRows.equal(1000)),
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": -3, "maximum": 120},
        "tag": {"enum": ["a", "bb"]},
        "word": {"type": "string", "maxLength": 4},
    },
    "required": ["ok", "n"],
}
GUIDED: dict[str, Any] = {"gen_length": 64, "block_length": 16}
GUIDED_RULES: dict[str, dict[str, Any]] = {
    "semi_ar": {"steps": 16},
    "random remasking": {"steps": 16, "remasking": "random"},
    "guidance": {"steps": 16, "cfg_scale": 0.5},
    "no end-of-sequence early": {"steps": 16, "confidence_eos_eot_inf": True},
    "prefix cache": {"threshold": 0.2, "cache": "prefix"},
    "dual cache": {"steps": 16, "cache": "dual"},
    "frozen prompt": {"steps": 16, "cache": "frozen"},
    "threshold": {"threshold": 0.2},
    "factor": {"algorithm": "factor"},
    "local_leap": {"algorithm": "local_leap"},
    "credit": {"algorithm": "credit", "threshold": 0.2},
    "hierarchy": {"algorithm": "hierarchy"},
    "entropies": {"algorithm": "entropy_threshold"},
    "adablock": {"algorithm": "adablock"},
    "full_attn_multi_block": {"algorithm": "full_attn_multi_block"},
    "several blocks": {"algorithm": "multi_block"},
    "early stop": {"algorithm": "multi_block", "early_stop": True},
    "delayed cache": {"algorithm": "multi_block", "cache": "delayed"},
    "dream": {"algorithm": "dream", "steps": 16},
    "dream, origin": {"algorithm": "dream", "alg": "origin", "steps": 16},
}

SERVED = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK_ID, eos=1, eot=None, stop=frozenset()),
    max_model_len=4096,
    vocab_size=256,
)


def mixed_asks() -> list[Request]:
    return [
        Request(random_prompt(length, seed), extra) for seed, (length, extra) in enumerate(MIXED)
    ]


def whole_asks() -> list[Request]:
    """Return requests without a cache, whose steps can be divided over ranks."""
    return [ask for ask in mixed_asks() if "cache" not in ask.extra]


def guided_asks(
    rules: Iterable[str], temperature: float, count: int = 1, **structured: Any
) -> list[Request]:
    results = []
    for rule in rules:
        extra = {**GUIDED, **GUIDED_RULES[rule], "temperature": temperature}
        if GUIDED_RULES[rule].get("algorithm") == "dream":
            del extra["block_length"]
        for seed in range(count):
            own = {**extra, "seed": seed, "structured_outputs": structured}
            results.append(Request(random_prompt(9, seed), own))
    return results
