# SPDX-License-Identifier: Apache-2.0
"""Copies of a rule that process drafts do not change the decisions of the rule itself."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.decoding.support import EOS, MASK, MODEL, SHIFTED, candidates
from vllm.diffusion.decoding import DecodingRule, ForwardTarget, make_rule
from vllm.diffusion.decoding.base import Array
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    Algorithm,
    algorithms_for,
)
from vllm.diffusion.request.families import FAST_DLLM, NEMOTRON, SDAR, Family

PROMPT = [*range(1, 9)]


def see(
    rule: DecodingRule, tokens: Array, target: ForwardTarget, chance: random.Random
) -> list[int]:
    """Run one forward pass of a random model, and return the committed positions."""
    positions = target.eligible.tolist()
    actual = [MASK if not rule.forbid_mask and chance.random() < 0.1 else 5 for _ in positions]
    actual = [EOS if chance.random() < 0.05 else token for token in actual]
    numbers = np.array([[chance.random() for _ in positions] for _ in range(2)])
    greedy = np.array(actual, dtype=np.int64)
    scores = (numbers[0] - 0.5).tolist()
    commit = rule.decide(candidates(positions, scores, actual, greedy=greedy, draws=numbers[1]))
    tokens[commit.positions] = commit.tokens
    return [*commit.positions.tolist(), *commit.tokens.tolist()]


def decode(rule: DecodingRule, *, forks: bool) -> list[list[int]]:
    """Return the commits of every forward pass; with `forks`, copies decode differently before."""
    chance, other = random.Random(3), random.Random(4)
    length = 32
    if rule.params.has_causal_context:
        length += rule.params.block_length - 1
    tokens, committed = np.array([*PROMPT, *[MASK] * length]), list[list[int]]()
    while (target := rule.prepare(tokens)) is not None and len(committed) < 300:
        if target.fill is not None:
            tokens[target.fill[0] : target.fill_end] = target.fill[1]
        for _ in range(3 * forks):
            astray, row, next_work = rule.fork(), tokens.copy(), target
            while next_work is not None and other.random() < 0.8:
                see(astray, row, next_work, other)
                next_work = astray.prepare(row)
        committed.append(see(rule, tokens, target, chance) if target.eligible.size else [])
        rule.num_settled(tokens)
    return committed


def case(algorithm: Algorithm, family: Family, parameters: dict[str, Any]) -> Any:
    name = "-".join([family.name, algorithm.name, *map(str, parameters.values())])
    return pytest.param(algorithm, family, parameters, id=name)


@pytest.mark.parametrize(
    ("algorithm", "family", "parameters"),
    [
        *(
            case(a, family, {})
            for a in ALGORITHMS.values()
            for family in (MODEL.family, SHIFTED.family)
            if not a.chooses_length
        ),
        *(case(a, SDAR, {}) for a in algorithms_for(SDAR).values()),
        *(case(a, NEMOTRON, {}) for a in algorithms_for(NEMOTRON).values()),
        case(BLOCK_ALGORITHMS["self_speculation"], NEMOTRON, {"threshold": 0.8}),
        case(BLOCK_ALGORITHMS["hierarchy_block"], FAST_DLLM, {"sub_block_length": 2}),
        case(ALGORITHMS["multi_block"], MODEL.family, {"cache": "delayed", "cache_delay_iter": 1}),
        case(ALGORITHMS["multi_block"], MODEL.family, {"early_stop": True}),
        case(ALGORITHMS["dream"], SHIFTED.family, {"alg": "origin"}),
        case(ALGORITHMS["dream"], SHIFTED.family, {"alg": "entropy", "alg_temp": 0.5}),
        case(ALGORITHMS["semi_ar"], MODEL.family, {"cache": "dual"}),
    ],
)
def test_forks_change_nothing_of_their_rule(
    algorithm: Algorithm, family: Family, parameters: dict[str, Any]
) -> None:
    parameters = {"algorithm": algorithm.name, "gen_length": 32, **parameters}
    if algorithm.blocks != "none":
        parameters["block_length"] = 8
    if "threshold" in algorithm.parameters:
        parameters["threshold"] = 0.4
    params = decision.decide(fields.canonical(parameters), replace(MODEL, family=family), PROMPT)
    alone, forked = (decode(make_rule(params, len(PROMPT)), forks=f) for f in (False, True))
    assert len(alone) > 3
    assert forked == alone
