# SPDX-License-Identifier: Apache-2.0
"""Dream's schedule, counts and draws."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.decoding.support import MASK, Row, candidates, decided
from vllm.diffusion.core.random_streams import CHOICE, COMMIT
from vllm.diffusion.decoding.dream import Dream


def row_of(prompt: list[int] | None = None, **parameters: Any) -> Row:
    return Row(decided(algorithm="dream", **parameters), prompt or [1])


def test_steps_are_one_per_token_by_default() -> None:
    assert decided(algorithm="dream", gen_length=24).steps == 24
    assert row_of(gen_length=4, steps=11).run(lambda position, _: (2, 0.0)) == 3
    row = row_of(gen_length=4, steps=1)
    assert row.run(lambda position, _: (2, 0.0)) == 1
    assert row.committed == [[1, 2, 3, 4]]


def test_proposed_masks_are_filled_after_the_last_step() -> None:
    row = row_of(gen_length=4, steps=2)
    assert row.run(lambda _, forbid_mask: (3 if forbid_mask else MASK, 0.5)) == 3
    assert row.tokens.tolist() == [1, 3, 3, 3, 3]


def rule_of(**parameters: Any) -> Dream:
    return Dream(decided(algorithm="dream", gen_length=5, **parameters), 1)


def select(rule: Dream, scores: list[float], draws: list[float]) -> list[int]:
    actual = candidates(list(range(1, 6)), scores, draws=np.array(draws))
    chosen: list[int] = rule.select(actual).tolist()
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
    rule = rule_of(alg="maskgit_plus", alg_temp=0.5, steps=2, eps=0.1)  # commits 0.45 of five
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
        rule = rule_of(alg="maskgit_plus", alg_temp=0.5, steps=4, eps=0.1)  # commits 0.225: one
        draws = torch.rand(5, generator=generator, dtype=torch.float64)
        (chosen,) = select(rule, scores.tolist(), draws.tolist())
        counts[chosen] += 1
    wanted = torch.softmax(scores / 0.5, 0) * num_draws
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 18.47  # 0.1 % point, 4 degrees
