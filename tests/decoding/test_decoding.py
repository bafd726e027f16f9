# SPDX-License-Identifier: Apache-2.0
"""Decoding rules on candidates made by hand: what is committed, and that it always ends."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.decode import num_transfer_tokens
from vllm.diffusion import params
from vllm.diffusion.decoding import (
    RULES,
    Candidates,
    DecodingRule,
    make_rule,
    most_certain_first,
)
from vllm.diffusion.decoding.semi_ar import SemiAutoregressive, transfer_quota
from vllm.diffusion.decoding.threshold import Threshold
from vllm.diffusion.families import LLADA
from vllm.diffusion.params import DiffusionParams, ServedModel, SpecialIds

if TYPE_CHECKING:
    from collections.abc import Callable

MASK = 15
MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK, eos=14, eot=13, stop=frozenset({13, 14})),
    max_model_len=4096,
    vocab_size=16,
)


def decided(**asked: Any) -> DiffusionParams:
    return params.resolve(params.canonical(asked), MODEL, [1])


def candidates(positions: list[int], scores: list[float], tokens: list[int] | None = None) -> Any:
    return Candidates(
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(tokens or [1] * len(positions), dtype=torch.int64),
        torch.tensor(scores, dtype=torch.float64),
    )


class Row:
    """A sequence under a rule, as the engine keeps it."""

    def __init__(self, asked: DiffusionParams, prompt: list[int]) -> None:
        self.rule = make_rule(asked, len(prompt))
        self.tokens = torch.tensor([*prompt, *[MASK] * asked.gen_length])
        self.windows: list[int] = []
        self.committed: list[list[int]] = []

    def eligible(self) -> list[int] | None:
        masked = self.tokens == MASK
        end = self.rule.window(masked)
        if end is None:
            return None
        self.windows.append(end)
        found: list[int] = masked[:end].nonzero().flatten().tolist()
        return found

    def commit(self, found: Candidates) -> None:
        chosen = self.rule.select(found)
        assert chosen.dtype == torch.int64
        assert len(set(chosen.tolist())) == chosen.numel()
        self.tokens[found.positions[chosen]] = found.tokens[chosen]
        self.committed.append(sorted(found.positions[chosen].tolist()))

    def run(self, propose: Callable[[int, bool], tuple[int, float]], limit: int = 10_000) -> int:
        """Forwards until nothing is left; `propose(position, forbid_mask)` is the model."""
        for count in itertools.count():
            positions = self.eligible()
            if positions is None:
                return count
            assert positions, "a forward without an eligible position commits nothing"
            assert count < limit, "the rule does not come to an end"
            proposals = [propose(position, self.rule.forbid_mask) for position in positions]
            self.commit(candidates(positions, [s for _, s in proposals], [t for t, _ in proposals]))
        raise AssertionError


# ---- order -------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_index() -> None:
    assert most_certain_first(torch.tensor([0.5, 0.9, 0.5, 0.9])).tolist() == [1, 3, 0, 2]
    assert most_certain_first(torch.ones(1000)).tolist() == list(range(1000))


def test_nan_is_the_least_certain() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([nan, 0.1, -inf, 0.7, nan], dtype=torch.float64)
    assert most_certain_first(scores).tolist() == [3, 1, 2, 0, 4]
    assert most_certain_first(torch.tensor([], dtype=torch.float64)).tolist() == []


def test_rules_are_registered_under_the_names_of_requests() -> None:
    assert set(RULES) == set(params.ALGORITHMS)
    assert isinstance(make_rule(decided(), 3), SemiAutoregressive)
    assert isinstance(make_rule(decided(threshold=0.5), 3), Threshold)


# ---- semi-autoregressive -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_masked", "num_steps", "quotas"), [(5, 3, [2, 2, 1]), (2, 4, [1, 1, 0, 0]), (8, 1, [8])]
)
def test_quotas_of_a_block(num_masked: int, num_steps: int, quotas: list[int]) -> None:
    assert [transfer_quota(num_masked, num_steps, step) for step in range(num_steps)] == quotas


@given(st.integers(0, 200), st.integers(1, 200))
def test_quotas_equal_the_reference_and_sum_up(num_masked: int, num_steps: int) -> None:
    quotas = [transfer_quota(num_masked, num_steps, step) for step in range(num_steps)]
    assert quotas == num_transfer_tokens(num_masked, num_steps)
    assert sum(quotas) == num_masked


def test_the_most_certain_are_committed_block_after_block() -> None:
    score = {2: 0.1, 3: 0.9, 4: 0.5, 5: 0.5, 6: 0.2, 7: 0.3, 8: 0.4, 9: 0.6}
    row = Row(decided(gen_length=8, block_length=4, steps=4), [1, 1])
    assert row.run(lambda position, _: (position % 5, score[position])) == 4
    assert row.committed == [[3, 4], [2, 5], [8, 9], [6, 7]]
    assert row.windows == [6, 6, 10, 10]
    assert row.tokens.tolist() == [1, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_steps_without_a_quota_are_skipped() -> None:
    row = Row(decided(gen_length=4, block_length=2, steps=16), [1])
    assert row.run(lambda position, _: (3, 0.5)) == 4
    assert row.committed == [[1], [2], [3], [4]]


def test_quotas_are_fixed_when_the_block_starts() -> None:
    row = Row(decided(gen_length=5, block_length=5, steps=3), [1])
    assert row.run(lambda position, _: (3, 1.0 / position)) == 3
    assert row.committed == [[1, 2], [3, 4], [5]]


def test_a_proposed_mask_spends_quota_and_is_filled_in_the_end() -> None:
    """Position 2 proposes the mask, most certainly, until that is forbidden."""

    def propose(position: int, forbid_mask: bool) -> tuple[int, float]:
        return (MASK, 0.9) if position == 2 and not forbid_mask else (position, 0.5)

    row = Row(decided(gen_length=4, block_length=2, steps=4), [1])
    # Block 1: the quota goes to position 2 twice, so 1 and 2 stay masked and go on competing.
    assert row.run(propose) == 5
    assert row.committed == [[2], [2], [2], [2], [1, 2, 3, 4]]
    assert row.rule.forbid_mask
    assert row.windows[-1] == 5
    assert row.tokens.tolist() == [1, 1, 2, 3, 4]


def test_masks_of_the_prompt_take_quota_of_the_first_block() -> None:
    row = Row(decided(gen_length=4, block_length=2, steps=4, allow_infill=True), [7, MASK])
    assert row.run(lambda position, _: (3, 1.0 / (1 + position))) == 5
    assert row.committed == [[1], [2], [3], [4], [5]]
    assert MASK not in row.tokens.tolist()


def test_nan_scores_do_not_stop_the_block() -> None:
    row = Row(decided(gen_length=4, block_length=4, steps=4), [1])
    assert row.run(lambda position, _: (3, float("nan"))) == 4
    assert row.committed == [[1], [2], [3], [4]]


def test_unresolved_steps_are_an_error() -> None:
    unresolved = decided(threshold=0.5)
    assert unresolved.steps is None
    with pytest.raises(ValueError, match="steps"):
        SemiAutoregressive(unresolved, 1)


# ---- threshold ---------------------------------------------------------------------------------


def test_everything_at_the_threshold_is_committed_and_always_the_best() -> None:
    row = Row(decided(gen_length=4, block_length=4, threshold=0.5), [1])
    assert row.eligible() == [1, 2, 3, 4]
    row.commit(candidates([1, 2, 3, 4], [0.5, 0.4999, 0.7, 0.1]))
    assert row.committed[-1] == [1, 3]  # equal to the threshold is enough
    assert row.eligible() == [2, 4]
    row.commit(candidates([2, 4], [0.2, 0.2]))
    assert row.committed[-1] == [2]  # none reaches it: the best alone, the lowest of equals
    assert row.eligible() == [4]
    row.commit(candidates([4], [float("nan")]))
    assert row.committed[-1] == [4]
    assert row.eligible() is None


def test_the_next_block_waits_for_a_complete_one() -> None:
    score = {1: 0.9, 2: 0.1, 3: 0.9, 4: 0.9}
    row = Row(decided(gen_length=4, block_length=2, threshold=0.5), [1])
    assert row.run(lambda position, _: (2, score[position])) == 3
    assert row.committed == [[1], [2], [3, 4]]
    assert row.windows == [3, 3, 5]


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
    """Never sure of anything: one a forward, but later blocks still get theirs."""
    row = Row(decided(gen_length=8, block_length=4, steps=steps, threshold=0.9), [1])
    assert row.run(lambda position, _: (2, 1.0 / (10 + position))) == len(committed)
    assert row.committed == committed


def test_a_mask_that_changes_nothing_is_forbidden_once() -> None:
    asked: list[bool] = []

    def propose(position: int, forbid_mask: bool) -> tuple[int, float]:
        asked.append(forbid_mask)
        return (position, 0.4) if forbid_mask else (MASK, 0.8)

    row = Row(decided(gen_length=2, block_length=2, threshold=0.9), [1])
    assert row.run(propose) == 4
    assert row.committed == [[1], [1], [2], [2]]
    assert asked == [False, False, True, True, False, True]
    assert row.tokens.tolist() == [1, 1, 2]


def test_a_mask_beside_a_real_token_is_no_standstill() -> None:
    row = Row(decided(gen_length=2, block_length=2, threshold=0.5), [1])
    row.eligible()
    row.commit(candidates([1, 2], [0.9, 0.8], [MASK, 3]))
    assert not row.rule.forbid_mask
    assert row.eligible() == [1]


# ---- progress ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(1, 5),
    block_length=st.integers(1, 9),
    steps_per_block=st.integers(1, 12),
    threshold=st.none() | st.floats(-1, 2),
    bounded=st.booleans(),
    mask_chance=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    prompt=st.lists(st.sampled_from([1, MASK]), min_size=1, max_size=6),
)
def test_every_model_comes_to_an_end(
    seed: int,
    num_blocks: int,
    block_length: int,
    steps_per_block: int,
    threshold: float | None,
    bounded: bool,
    mask_chance: float,
    prompt: list[int],
) -> None:
    """Also one that proposes the mask whenever it may, with any scores, NaN among them."""
    chance = random.Random(seed)

    def propose(position: int, forbid_mask: bool) -> tuple[int, float]:
        score = chance.choice([chance.random(), 1.0, 0.0, float("nan"), float("-inf")])
        proposes_mask = not forbid_mask and chance.random() < mask_chance
        return (MASK if proposes_mask else 2), score

    lengths = {"gen_length": num_blocks * block_length, "block_length": block_length}
    steps = {"steps": num_blocks * steps_per_block}
    asked = (
        decided(allow_infill=True, **lengths, **steps)
        if threshold is None
        else decided(
            allow_infill=True, threshold=threshold, **lengths, **(steps if bounded else {})
        )
    )
    row = Row(asked, prompt)
    num_masked = int((row.tokens == MASK).sum())
    num_forwards = row.run(propose, limit=2 * num_masked + num_blocks + 1)
    assert MASK not in row.tokens.tolist()
    assert row.windows == sorted(row.windows)
    if threshold is None:
        assert num_forwards <= min(asked.gen_length, steps["steps"]) + 1
    elif mask_chance == 0 and bounded:
        assert num_forwards <= steps["steps"]
    if mask_chance == 0:
        everything = [position for part in row.committed for position in part]
        assert len(everything) == len(set(everything)) == num_masked


@pytest.mark.parametrize("algorithm", params.ALGORITHMS)
def test_a_model_that_only_knows_the_mask(algorithm: str) -> None:
    row = Row(decided(gen_length=12, block_length=4, algorithm=algorithm), [1])
    count = row.run(lambda _, forbid_mask: (5 if forbid_mask else MASK, 0.5))
    assert row.tokens.tolist() == [1] + [5] * 12
    assert count <= 24


def test_rules_share_no_state() -> None:
    asked = decided(gen_length=4, block_length=2, steps=4)
    rules: list[DecodingRule] = [make_rule(asked, 1), make_rule(asked, 1)]
    masked = torch.tensor([False, True, True, True, True])
    assert rules[0].window(masked) == 3
    rules[0].select(candidates([1, 2], [0.1, 0.2]))
    rules[0].select(candidates([1], [0.1]))
    assert rules[0].window(masked) == 5
    assert rules[1].window(masked) == 3
