# SPDX-License-Identifier: Apache-2.0
"""What each rule accepts of one forward's candidates: worked by hand, in the loops and in ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.support import Case, of_ours
from tests.reference.decode import select_threshold
from tests.reference.dinfer import select_hierarchy
from tests.reference.fast_dllm import select_factor
from tests.reference.local_leap import select_local_leap
from tests.reference.sglang import select_entropy_strict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


NARROW = {"threshold": 0.9, "relaxed_threshold": 0.75}
LOW = {"threshold": 0.9, "low_threshold": 0.4}
ANCHORED = [1, 3, 4, 7, 8, 20]  # the anchor is 8
RUNS = [3, 4, 6, 8, 10]  # 3 4 | 6 | 8 | 10
SELECTIONS: dict[str, list[Case]] = {
    "threshold": [
        Case([0.2, 0.1], {0}, {"threshold": 0.9}),  # the best, always
        Case([0.2, 0.2], {0}, {"threshold": 0.9}),  # ties to the lowest
        Case([0.9, 0.89, 0.95], {0, 2}, {"threshold": 0.9}),  # reaching is enough
    ],
    "factor": [
        Case([0.1], {0}, {"factor": 1.0}),
        Case([0.1, 0.0], {0, 1}, {"factor": 1.0}),  # of two, the failure of the last is taken
        Case([0.1, 0.9, 0.8], {0, 1, 2}, {"factor": 1.0}),  # limits 2/3 and 3/4
        Case([0.9, 0.8, 0.76, 0.7, 0.1], {0, 1, 2}, {"factor": 1.0}),  # fails at rank 3 of 5
        Case([0.9, 0.8, 0.76, 0.81], {0, 1, 2, 3}, {"factor": 1.0}),  # the last fails: taken
        Case([0.9, 0.5, 0.75, 0.74], {0, 2}, {"factor": 1.0}),  # 0.74 is below 3/4
        Case([0.9, 0.6, 0.5, 0.4], {0}, {"factor": 1.0}),  # fails at rank 1: the best alone
        Case([0.9, 0.6, 0.5, 0.4], {0, 1, 2, 3}, {"factor": 3.0}),  # limits 0, 0.25, 0.4
        Case([0.5, 0.5, 0.5, 0.4, 0.1], {0, 1, 2}, {"factor": 2.0}),
        Case([0.99, 0.999, 1.0, 0.5], {2}, {"factor": 0.0}),  # limits of 1
        Case([0.7, 0.7, 0.7, 0.7], {0, 1}, {"factor": 1.0}),
    ],
    "local_leap": [
        Case([0.95, 0.8, 0.7, 0.8], {0, 1}, {"radius": 4}, [3, 4, 5, 9]),  # too far, too low
        Case([0.95, 0.8, 0.7, 0.8], {0, 1, 3}, {"radius": 4}, [3, 4, 5, 7]),  # the radius counts
        Case([0.95, 0.8, 0.7, 0.8], {0}, {"radius": 0}, [3, 4, 5, 7]),
        Case([0.8, 0.85], {1}, {"radius": 4}, [3, 4]),  # no anchor: the best alone
        Case([0.9, 0.75], {0, 1}, {"radius": 4}, [3, 4]),
        Case([0.2, 0.92, 0.76], {1, 2}, {"radius": 2}, [3, 20, 22]),
        Case([0.1, 0.1, 0.1], {0}, {"radius": 1}, [3, 4, 5]),
        Case([0.76, 0.74, 0.8, 0.75, 0.9, 0.89], {2, 3, 4}, {"radius": 4}, ANCHORED),
        Case([0.76, 0.74, 0.8, 0.75, 0.9, 0.89], {0, 2, 3, 4}, {"radius": 7}, ANCHORED),
    ],
    "entropy_threshold": [  # scores are negative entropies
        Case([-0.5, -0.3, -0.5, -0.6, -0.1], {1, 4}, {"threshold": 0.5}),  # equal is too high
        Case([-2.0, -1.0, -1.0], {1}, {"threshold": 0.0}),
    ],
    "full_attn_multi_block": [
        Case([-0.5, -0.49, -0.7, -0.2], {1, 3}, {"threshold": 0.5}),
    ],
    "hierarchy": [
        Case([0.5, 0.6, 0.45, 0.3, 0.41], {1, 2, 4}, LOW, RUNS),  # each run's best above 0.4
        Case([0.5, 0.6, 0.4, 0.3, 0.39], {1}, LOW, RUNS),  # 0.4 is not above 0.4
        Case([0.2, 0.1, 0.1, 0.3, 0.2], {3}, LOW, RUNS),  # the best, always
        Case([0.95, 0.6, 0.95, 0.92, 0.5], {0, 2, 3, 4}, LOW, RUNS),
        Case([0.9, 0.91, 0.1, 0.1, 0.1], {1}, LOW, RUNS),  # strictly above
        Case([0.6, 0.6, 0.1, 0.1, 0.1], {0, 1}, LOW, RUNS),  # all equal to the run's best
    ],
}
for _case in SELECTIONS["local_leap"]:
    _case.asked.update(NARROW)


def of_the_source(rule: str, case: Case) -> set[int]:
    """By the published loop."""
    scores, asked = case.scores, case.asked
    found: Sequence[int]
    if rule == "local_leap":
        limits = (asked["threshold"], asked["relaxed_threshold"], asked["radius"])
        found = select_local_leap(case.positions, scores, *limits)
    elif rule == "hierarchy":
        limits = (asked["threshold"], asked["low_threshold"])
        found = select_hierarchy(case.positions, scores, *limits)
    elif rule in ("entropy_threshold", "full_attn_multi_block"):
        found = select_entropy_strict([-score for score in scores], asked["threshold"])
    elif rule == "factor":
        found = select_factor(scores, asked["factor"])
    else:
        found = select_threshold(scores, asked["threshold"])
    return set(found)


@pytest.mark.parametrize("select", [of_the_source, of_ours])
@pytest.mark.parametrize("rule", SELECTIONS)
def test_selections_worked_by_hand(rule: str, select: Callable[[str, Case], set[int]]) -> None:
    for case in SELECTIONS[rule]:
        assert select(rule, case) == case.wanted, case


SCORES = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.75, 0.9, 0.95, 1.0]), min_size=1)
LIMIT = st.sampled_from([0.0, 0.5, 0.75, 0.9, 2.0])
ASKED: dict[str, Any] = {
    "threshold": st.fixed_dictionaries({"threshold": LIMIT}),
    "factor": st.fixed_dictionaries({"factor": st.sampled_from([0.0, 0.5, 1.0, 2.5])}),
    "local_leap": st.fixed_dictionaries(
        {"threshold": st.just(0.9), "relaxed_threshold": LIMIT, "radius": st.integers(0, 5)}
    ),
    "entropy_threshold": st.fixed_dictionaries({"threshold": LIMIT}),
    "hierarchy": st.fixed_dictionaries({"threshold": st.just(0.9), "low_threshold": LIMIT}),
}


@pytest.mark.parametrize("rule", ASKED)
@settings(max_examples=100, deadline=None)
@given(scores=SCORES, data=st.data())
def test_ours_equal_those_of_the_source(
    rule: str, scores: list[float], data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(1, 3), min_size=len(scores), max_size=len(scores)))
    positions = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    if rule == "entropy_threshold":
        scores = [-score for score in scores]
    case = Case(scores, set(), data.draw(ASKED[rule]), positions)
    assert of_ours(rule, case) == of_the_source(rule, case)
