# SPDX-License-Identifier: Apache-2.0
"""Dream's schedule, counts and draws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.support import MASK, SHIFTED, Row, candidates, decided
from tests.reference.dream import num_commits, times
from vllm.diffusion.core.random_streams import CHOICE, COMMIT
from vllm.diffusion.decoding.dream import Dream, commit_shares
from vllm.diffusion.request.families import DREAM


def row_of(prompt: list[int] | None = None, **asked: Any) -> Row:
    return Row(decided(algorithm="dream", **asked), prompt or [1])


def test_the_first_step_of_one_step_per_token_commits_nothing() -> None:
    """And so it is skipped."""
    row = row_of(gen_length=8, steps=8)
    assert row.run(lambda position, _: (2, -float(position))) == 7
    assert [len(part) for part in row.committed] == [1, 1, 1, 1, 1, 1, 2]
    assert row.committed[0] == [1]
    assert all(work.rows == (0, 9) for work in row.works)


def test_steps_are_one_per_token_by_default() -> None:
    assert decided(algorithm="dream", gen_length=24).steps == 24
    assert row_of(gen_length=4, steps=11).run(lambda position, _: (2, 0.0)) == 3
    row = row_of(gen_length=4, steps=1)
    assert row.run(lambda position, _: (2, 0.0)) == 1
    assert row.committed == [[1, 2, 3, 4]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]))
def test_counts_equal_the_reference(gen_length: int, steps: int, eps: float) -> None:
    row = row_of(gen_length=gen_length, steps=steps, eps=eps)
    row.run(lambda position, _: (2, float(position)))
    schedule, left, wanted = times(steps, eps), gen_length, []
    for step in range(steps):
        wanted.append(num_commits(left, schedule, step))
        left -= wanted[-1]
    assert [len(part) for part in row.committed] == [count for count in wanted if count]
    assert left == 0


def test_shares_are_those_of_equal_steps_in_time() -> None:
    shares = commit_shares(4, 0.2)
    assert shares.dtype == np.float32
    assert shares.tolist() == pytest.approx([0.2, 0.25, 1 / 3, 1.0])


def test_ties_go_to_the_lowest_position_anywhere_in_the_sequence() -> None:
    row = row_of([1, MASK, 1], gen_length=4, steps=2, allow_infill=True)
    assert row.eligible() == [1, 3, 4, 5, 6]
    row.see([1, 3, 4, 5, 6], [-0.5] * 5, None)
    assert row.committed[-1] == [1, 3]  # half of five, rounded down
    assert row.eligible() == [4, 5, 6]


def test_proposed_masks_are_filled_after_the_last_step() -> None:
    row = row_of(gen_length=4, steps=2)
    assert row.run(lambda _, forbid_mask: (3 if forbid_mask else MASK, 0.5)) == 3
    assert row.tokens.tolist() == [1, 3, 3, 3, 3]


def rule_of(**asked: Any) -> Dream:
    return Dream(decided(algorithm="dream", gen_length=5, **asked), 1)


def select(rule: Dream, scores: list[float], draws: list[float]) -> list[int]:
    found = candidates(list(range(1, 6)), scores, draws=np.array(draws))
    chosen: list[int] = rule.select(found).tolist()
    return chosen


def test_origin_commits_each_position_by_chance() -> None:
    rule = rule_of(alg="origin", steps=4, eps=0.2)
    assert rule.draw_purpose == COMMIT
    scores = [0.0] * 5
    assert select(rule, scores, [0.19, 0.21, 0.9, 0.01, 0.5]) == [0, 3]
    assert select(rule, scores, [0.24, 0.26, 0.9, 0.25, 0.5]) == [0]  # 1/4 itself is too large
    assert select(rule, scores, [0.9] * 5) == []
    assert select(rule, scores, [0.999999] * 5) == [0, 1, 2, 3, 4]


def test_positions_are_drawn_without_replacement() -> None:
    rule = rule_of(alg="maskgit_plus", alg_temp=0.5, steps=2, eps=0.1)  # 0.45 of five
    assert rule.draw_purpose == CHOICE
    draws = [0.5, 0.2, 0.9, 0.4, 0.95]
    scores = [0.9, 0.8, 0.1, 0.7, 0.2]
    keys = [s / 0.5 - math.log(-math.log(u)) for s, u in zip(scores, draws, strict=True)]
    wanted = sorted(range(5), key=lambda i: -keys[i])[:2]
    assert select(rule, scores, draws) == wanted
    assert rule_of(alg="maskgit_plus").draw_purpose is None
    with pytest.raises(ValueError, match="draws"):
        rule.select(candidates([1, 2], [0.5, 0.4]))


def test_drawn_positions_have_the_frequencies_of_the_softmax() -> None:
    scores = torch.tensor([0.9, 0.2, 0.5, 0.1, 0.6], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    counts = torch.zeros(5)
    num_draws = 4000
    for _ in range(num_draws):
        rule = rule_of(alg="maskgit_plus", alg_temp=0.5, steps=4, eps=0.1)  # 0.225: one
        draws = torch.rand(5, generator=generator, dtype=torch.float64)
        (chosen,) = select(rule, scores.tolist(), draws.tolist())
        counts[chosen] += 1
    wanted = torch.softmax(scores / 0.5, 0) * num_draws
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 18.47  # 0.1 % point, 4 degrees


def test_unresolved_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="steps"):
        Dream(decided(threshold=0.5), 1)


@pytest.mark.parametrize(
    ("alg", "score"),
    [
        ("origin", "confidence"),
        ("maskgit_plus", "confidence"),
        ("topk_margin", "margin"),
        ("entropy", "negative_entropy"),
    ],
)
def test_what_each_alg_scores(alg: str, score: str) -> None:
    scoring = rule_of(alg=alg).scoring
    assert (scoring.score, scoring.draw) == (score, "categorical")
    assert scoring.epsilon == (1e-10 if alg == "entropy" else 0)


def test_without_an_end_of_time_every_position_is_as_likely_as_the_next() -> None:
    """DiffuLLaMA: 1 / (T - i) at forward i, which differences of times miss by their rounding."""
    for steps in (1, 3, 64, 1000):
        wanted = [1 / (steps - i) for i in range(steps)]
        shares = commit_shares(steps, 0.0, "origin")
        assert shares.dtype == np.float32
        assert shares.tolist() == torch.tensor(wanted, dtype=torch.float32).tolist()
    assert commit_shares(64, 0.0, "origin").tolist() != commit_shares(64, 0.0, "entropy").tolist()


def test_a_family_may_have_defaults_of_its_own() -> None:
    own = {"alg": "origin", "eps": 0.0, "steps": 5, "top_p": 0.9}
    family = dataclasses.replace(DREAM, defaults=own)
    params = decided(dataclasses.replace(SHIFTED, family=family), gen_length=9)
    assert (params.alg, params.eps, params.steps, params.top_p) == ("origin", 0.0, 5, 0.9)
    asked = decided(
        dataclasses.replace(SHIFTED, family=family), gen_length=9, alg="entropy", steps=2, eps=0.1
    )
    assert (asked.alg, asked.eps, asked.steps) == ("entropy", 0.1, 2)
    assert decided(dataclasses.replace(SHIFTED, family=family), algorithm="threshold").top_p is None
