# SPDX-License-Identifier: Apache-2.0
"""Decoding rules with candidates made by hand: their commits, and that decoding always ends."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.decoding.support import EOS, MASK, MODEL, SHIFTED, Row, candidates, decided
from vllm.diffusion.decoding import DecodingRule, make_rule, most_certain_first
from vllm.diffusion.decoding.dream import Dream
from vllm.diffusion.decoding.semi_ar import SemiAutoregressive, transfer_quota
from vllm.diffusion.request import fields
from vllm.diffusion.request.algorithms import ALGORITHMS, CACHES

# Algorithms that can be tested with proposals made by hand.
BY_HAND = [name for name, algorithm in ALGORITHMS.items() if not algorithm.chooses_length]

# ---- order -------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_index() -> None:
    assert most_certain_first(np.array([0.5, 0.9, 0.5, 0.9])).tolist() == [1, 3, 0, 2]
    assert most_certain_first(np.ones(1000)).tolist() == list(range(1000))


def test_nan_is_the_least_certain() -> None:
    nan, inf = float("nan"), float("inf")
    scores = np.array([nan, 0.1, -inf, 0.7, nan])
    assert most_certain_first(scores).tolist() == [3, 1, 2, 0, 4]
    assert most_certain_first(np.array([])).tolist() == []


# ---- semi-autoregressive -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_masked", "num_steps", "quotas"), [(5, 3, [2, 2, 1]), (2, 4, [1, 1, 0, 0]), (8, 1, [8])]
)
def test_quotas_of_a_block(num_masked: int, num_steps: int, quotas: list[int]) -> None:
    assert [transfer_quota(num_masked, num_steps, step) for step in range(num_steps)] == quotas


def test_a_proposed_mask_spends_quota_and_is_filled_in_the_end() -> None:
    """Position 2 proposes the mask with the highest score until the mask is forbidden."""

    def propose(position: int, forbid_mask: bool) -> tuple[int, float]:
        return (MASK, 0.9) if position == 2 and not forbid_mask else (position, 0.5)

    row = Row(decided(gen_length=4, block_length=2, steps=4), [1])
    # Position 2 uses the quota of block 1 twice, so 1 and 2 stay masked and compete further.
    assert row.run(propose) == 5
    assert row.committed == [[2], [2], [2], [2], [1, 2, 3, 4]]
    assert row.rule.forbid_mask
    assert row.ends[-1] == 5
    assert row.tokens.tolist() == [1, 1, 2, 3, 4]


def test_masks_of_the_prompt_take_quota_of_the_first_block() -> None:
    row = Row(decided(gen_length=4, block_length=2, steps=4, allow_infill=True), [7, MASK])
    assert row.run(lambda position, _: (3, 1.0 / (1 + position))) == 5
    assert row.committed == [[1], [2], [3], [4], [5]]
    assert MASK not in row.tokens.tolist()


def test_unresolved_steps_are_an_error() -> None:
    unresolved = decided(threshold=0.5)
    assert unresolved.steps is None
    for rule in (SemiAutoregressive, Dream):
        with pytest.raises(ValueError, match="steps"):
            rule(unresolved, 1)


# ---- threshold ---------------------------------------------------------------------------------


def test_everything_at_the_threshold_is_committed_and_always_the_best() -> None:
    row = Row(decided(gen_length=4, block_length=4, threshold=0.5), [1])
    assert row.eligible() == [1, 2, 3, 4]
    row.commit(candidates([1, 2, 3, 4], [0.5, 0.4999, 0.7, 0.1]))
    assert row.committed[-1] == [1, 3]  # reaching the threshold is enough
    assert row.eligible() == [2, 4]
    row.commit(candidates([2, 4], [0.2, 0.2]))
    assert row.committed[-1] == [2]  # none reaches it: the best one, the lowest of equal ones
    assert row.eligible() == [4]
    row.commit(candidates([4], [float("nan")]))
    assert row.committed[-1] == [4]
    assert row.eligible() is None


@pytest.mark.parametrize(
    ("steps", "committed"),
    [
        (2, [[1, 2, 3, 4], [5, 6, 7, 8]]),
        (3, [[1], [2, 3, 4], [5, 6, 7, 8]]),
        (5, [[1], [2], [3], [4], [5, 6, 7, 8]]),
        (6, [[1], [2], [3], [4], [5], [6, 7, 8]]),
        (20, [[1], [2], [3], [4], [5], [6], [7], [8]]),
    ],
)
def test_steps_bound_the_forwards(steps: int, committed: list[list[int]]) -> None:
    """No score is high, so that a forward pass commits one token; later blocks get their steps."""
    row = Row(decided(gen_length=8, block_length=4, steps=steps, threshold=0.9), [1])
    assert row.run(lambda position, _: (2, 1.0 / (10 + position))) == len(committed)
    assert row.committed == committed


def test_a_mask_that_changes_nothing_is_forbidden_once() -> None:
    forbidden_steps: list[bool] = []

    def propose(position: int, forbid_mask: bool) -> tuple[int, float]:
        forbidden_steps.append(forbid_mask)
        return (position, 0.4) if forbid_mask else (MASK, 0.8)

    row = Row(decided(gen_length=2, block_length=2, threshold=0.9), [1])
    assert row.run(propose) == 4
    assert row.committed == [[1], [1], [2], [2]]
    assert forbidden_steps == [False, False, True, True, False, True]
    assert row.tokens.tolist() == [1, 1, 2]


# ---- progress ----------------------------------------------------------------------------------


# All blocks are cached, and the prompt still has a mask.
@example(
    algorithm="multi_block",
    model=MODEL,
    seed=163,
    num_blocks=1,
    block_length=4,
    steps_per_block=None,
    threshold=None,
    cache="delayed",
    early_stop=True,
    block_thresholds=(0.0, 0.0),
    delay=0,
    refresh=3,
    mask_chance=0.9,
    prompt=[MASK],
)
@settings(max_examples=200, deadline=None)
@given(
    algorithm=st.sampled_from(BY_HAND),
    model=st.sampled_from([MODEL, SHIFTED]),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(1, 5),
    block_length=st.integers(1, 9),
    steps_per_block=st.none() | st.integers(1, 12),
    threshold=st.none() | st.floats(-1, 3),
    cache=st.sampled_from(CACHES),
    early_stop=st.booleans(),
    block_thresholds=st.tuples(st.floats(0, 1.5), st.floats(0, 1.5)),
    delay=st.integers(0, 4),
    refresh=st.integers(1, 4),
    mask_chance=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    prompt=st.lists(st.sampled_from([1, MASK, EOS]), min_size=1, max_size=6),
)
def test_every_model_comes_to_an_end(
    algorithm: str,
    model: Any,
    seed: int,
    num_blocks: int,
    block_length: int,
    steps_per_block: int | None,
    threshold: float | None,
    cache: str,
    early_stop: bool,
    block_thresholds: tuple[float, float],
    delay: int,
    refresh: int,
    mask_chance: float,
    prompt: list[int],
) -> None:
    """The model may propose the mask whenever it is allowed, with any scores, including NaN."""
    chance = random.Random(seed)

    def propose(position: int, forbid_mask: bool) -> tuple[int, float]:
        score = chance.choice([chance.random(), -chance.random(), 1.0, 0.0, float("nan")])
        score = chance.choice([score, float("-inf")])
        proposes_mask = not forbid_mask and chance.random() < mask_chance
        return (MASK if proposes_mask else chance.choice([2, 2, 2, EOS])), score

    everything: dict[str, Any] = {
        "block_length": block_length,
        "steps": None if steps_per_block is None else num_blocks * steps_per_block,
        "threshold": threshold,
        "early_stop": early_stop,
        "cache": cache if cache in ALGORITHMS[algorithm].caches else None,
        "block_add_threshold": block_thresholds[0],
        "decoded_token_threshold": block_thresholds[1],
        **({"cache_delay_iter": delay, "refresh_interval": refresh} if cache == "delayed" else {}),
        "alg": chance.choice(fields.BY_NAME["alg"].choices),
        "alg_temp": chance.choice([0.0, 0.5]),
    }
    used = {k: v for k, v in everything.items() if fields.BY_NAME[k].is_used_by(algorithm)}
    params = decided(
        model, algorithm=algorithm, gen_length=num_blocks * block_length, allow_infill=True, **used
    )
    row = Row(params, prompt)
    num_masked = int((row.tokens == MASK).sum())
    limit = 2 * num_masked + num_blocks + 2
    if algorithm == "dream":
        limit = (params.steps or 0) + 1
    elif params.early_stop and algorithm == "multi_block":
        limit = 4 * num_masked + 4  # positions after the end may be filled more than once
    num_forwards = row.run(propose, limit=limit)
    assert MASK not in row.tokens.tolist()
    if algorithm == "semi_ar":
        assert num_forwards <= min(params.gen_length, params.steps or 0) + 1
    elif params.steps is not None and mask_chance == 0:
        assert num_forwards <= params.steps + (MASK in prompt)
    if mask_chance == 0 and not params.early_stop:
        committed = [position for part in row.committed for position in part]
        assert len(committed) == len(set(committed)) == num_masked


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_a_model_that_only_knows_the_mask(algorithm: str) -> None:
    blocks: dict[str, Any] = {} if algorithm == "dream" else {"block_length": 4}
    row = Row(decided(gen_length=12, algorithm=algorithm, **blocks), [1])
    count = row.run(lambda _, forbid_mask: (5 if forbid_mask else MASK, 0.5))
    assert row.tokens.tolist() == [1] + [5] * 12
    assert count <= 25


def test_rules_share_no_state() -> None:
    params = decided(gen_length=4, block_length=2, steps=4)
    rules: list[DecodingRule] = [make_rule(params, 1), make_rule(params, 1)]
    tokens = np.array([1, MASK, MASK, MASK, MASK])

    def end_of(rule: DecodingRule) -> int:
        target = rule.prepare(tokens)
        assert target is not None
        return int(target.eligible[-1]) + 1

    assert end_of(rules[0]) == 3
    rules[0].select(candidates([1, 2], [0.1, 0.2]))
    rules[0].select(candidates([1], [0.1]))
    assert end_of(rules[0]) == 5
    assert end_of(rules[1]) == 3
