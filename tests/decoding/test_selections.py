# SPDX-License-Identifier: Apache-2.0
"""Each rule accepts the candidates of a forward pass that a calculation by hand accepts."""

import random

import pytest

from tests.decoding.support import Case, of_ours

NARROW = {"threshold": 0.9, "relaxed_threshold": 0.75}
LOW = {"threshold": 0.9, "low_threshold": 0.4}
ANCHORED = [1, 3, 4, 7, 8, 20]  # the anchor is 8
RUNS = [3, 4, 6, 8, 10]  # 3 4 | 6 | 8 | 10
SELECTIONS: dict[str, list[Case]] = {
    "threshold": [
        Case([0.2, 0.1], {0}, {"threshold": 0.9}),  # the best one is always accepted
        Case([0.2, 0.2], {0}, {"threshold": 0.9}),  # ties go to the lowest position
        Case([0.9, 0.89, 0.95], {0, 2}, {"threshold": 0.9}),  # reaching it is enough
    ],
    "factor": [
        Case([0.1], {0}, {"factor": 1.0}),
        Case([0.1, 0.0], {0, 1}, {"factor": 1.0}),  # the last of two may fail
        Case([0.1, 0.9, 0.8], {0, 1, 2}, {"factor": 1.0}),  # limits 2/3 and 3/4
        Case([0.9, 0.8, 0.76, 0.7, 0.1], {0, 1, 2}, {"factor": 1.0}),  # fails at rank 3 of 5
        Case([0.9, 0.8, 0.76, 0.81], {0, 1, 2, 3}, {"factor": 1.0}),  # the last one fails: accepted
        Case([0.9, 0.5, 0.75, 0.74], {0, 2}, {"factor": 1.0}),  # 0.74 is below 3/4
        Case([0.9, 0.6, 0.5, 0.4], {0}, {"factor": 1.0}),  # fails at rank 1: only the best one
        Case([0.9, 0.6, 0.5, 0.4], {0, 1, 2, 3}, {"factor": 3.0}),  # limits 0, 0.25, 0.4
        Case([0.5, 0.5, 0.5, 0.4, 0.1], {0, 1, 2}, {"factor": 2.0}),
        Case([0.99, 0.999, 1.0, 0.5], {2}, {"factor": 0.0}),  # limits of 1
        Case([0.7, 0.7, 0.7, 0.7], {0, 1}, {"factor": 1.0}),
    ],
    "frechet": [
        Case([0.1], {0}, {"frechet_margin": 0.0}),  # the best one is always accepted
        Case([0.9, 0.8], {0, 1}, {"frechet_margin": 0.4}),  # 0.7 - 0.2 > 0.4
        Case([0.9, 0.8], {0}, {"frechet_margin": 0.6}),
        Case([0.8, 0.95, 0.9], {0, 1, 2}, {"frechet_margin": 0.4}),  # 0.65 - 0.2
        Case([0.8, 0.95, 0.9], {1, 2}, {"frechet_margin": 0.5}),  # 0.85 - 0.1
        Case([0.7, 0.7, 0.7, 0.7], {0, 1}, {"frechet_margin": 0.0}),  # 0.4 - 0.3, 0.1 - 0.3
    ],
    "local_leap": [
        Case([0.95, 0.8, 0.7, 0.8], {0, 1}, {"radius": 4}, [3, 4, 5, 9]),  # too far, too low
        Case([0.95, 0.8, 0.7, 0.8], {0, 1, 3}, {"radius": 4}, [3, 4, 5, 7]),  # at the radius
        Case([0.95, 0.8, 0.7, 0.8], {0}, {"radius": 0}, [3, 4, 5, 7]),
        Case([0.8, 0.85], {1}, {"radius": 4}, [3, 4]),  # no anchor: only the best one
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
        Case([0.5, 0.6, 0.45, 0.3, 0.41], {1, 2, 4}, LOW, RUNS),  # the best of each run above 0.4
        Case([0.5, 0.6, 0.4, 0.3, 0.39], {1}, LOW, RUNS),  # 0.4 is not above 0.4
        Case([0.2, 0.1, 0.1, 0.3, 0.2], {3}, LOW, RUNS),  # the best one is always accepted
        Case([0.95, 0.6, 0.95, 0.92, 0.5], {0, 2, 3, 4}, LOW, RUNS),
        Case([0.9, 0.91, 0.1, 0.1, 0.1], {1}, LOW, RUNS),  # 0.9 is not above 0.9
        Case([0.6, 0.6, 0.1, 0.1, 0.1], {0, 1}, LOW, RUNS),  # all that equal the best of a run
    ],
}
for _case in SELECTIONS["local_leap"]:
    _case.parameters.update(NARROW)


RULES = {"frechet": "factor"}  # rules under another name


@pytest.mark.parametrize("rule", SELECTIONS)
def test_selections_worked_by_hand(rule: str) -> None:
    for case in SELECTIONS[rule]:
        assert of_ours(RULES.get(rule, rule), case) == case.wanted, case


def most_within(scores: list[float], margin: float) -> set[int]:
    """Return the largest set of best candidates whose bounds leave the margin, by enumeration."""
    best = {max(range(len(scores)), key=lambda i: (scores[i], -i))}
    for count in range(1, len(scores) + 1):
        chosen = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
        lower = sum(scores[i] for i in chosen) - (count - 1)
        if lower - (1 - scores[chosen[-1]]) > margin:
            best = set(chosen)
    return best


def test_a_frechet_margin_allows_what_enumeration_finds() -> None:
    draw = random.Random(7)
    for _ in range(300):
        scores = [1 - draw.random() ** draw.choice((1, 4)) for _ in range(draw.randint(1, 12))]
        margin = draw.choice((0.0, 0.1, draw.random()))
        actual = of_ours("factor", Case(scores, set(), {"frechet_margin": margin}))
        assert actual == most_within(scores, margin), (scores, margin)


def test_no_margin_and_factor_one_agree_on_equal_confidences() -> None:
    """All of them are compared except a failure that `factor` ignores, that of the last one."""
    for count in range(1, 12):
        for score in (0.51, 0.61, 0.7, 0.77, 0.82, 0.86, 0.9, 0.95, 0.999):
            factor = of_ours("factor", Case([score] * count, set(), {"factor": 1.0}))
            margin = of_ours("factor", Case([score] * count, set(), {"frechet_margin": 0.0}))
            if len(margin) != count - 1:
                assert factor == margin, (score, count)
