# SPDX-License-Identifier: Apache-2.0
"""The draft budget: the number of drafts that is expected to save the most time."""

from vllm.diffusion.engine.speculation.budget import (
    AcceptanceRates,
    DraftOffer,
    choose_num_drafts,
)
from vllm.diffusion.engine.step_times import StepTimes

# Milliseconds per step of an 8B model by number of rows, measured on an H200.
TIMES = StepTimes.of({32: 4.3, 64: 4.7, 128: 5.0, 256: 7.0, 512: 12.0})


def chain(chance: float, count: int = 15) -> DraftOffer:
    return DraftOffer([chance**depth for depth in range(1, count + 1)], 32)


def test_guesses_stand_where_rows_cost_less_than_they_save() -> None:
    assert choose_num_drafts([chain(0.7)], 1, 32, TIMES) == [3]
    assert choose_num_drafts([chain(0.95)], 1, 32, TIMES) == [7]
    assert choose_num_drafts([chain(0.05)], 1, 32, TIMES) == [0]
    assert choose_num_drafts([chain(0.7, 2)], 1, 32, TIMES) == [2]
    assert choose_num_drafts([chain(0.7), chain(0.2)], 2, 64, TIMES) == [2, 0]
    assert choose_num_drafts([chain(0.7)] * 8, 8, 256, TIMES) == [0] * 8
    assert choose_num_drafts([], 3, 96, TIMES) == []


def test_rates_are_learned_by_kind_count_and_depth() -> None:
    rates = AcceptanceRates()
    assert rates.chance("a", None, 1) == rates.chance("a", None, 9) == 0.5
    assert [rates.chance("a", count, 1) for count in (1, 2, 3)] == [0.5, 0.25, 0.125]
    for _ in range(32):
        rates.learn("a", None, 1, is_accepted=False)
    assert rates.chance("a", None, 1) < 0.04
    assert rates.chance("a", None, 4) == rates.chance("a", None, 1)  # depth 4 was never tried
    assert rates.chance("b", None, 1) == 0.5
    for _ in range(500):
        rates.learn("a", None, 1, is_accepted=True)
    assert rates.chance("a", None, 1) > 0.9
    rates.clear()
    assert rates.chance("a", None, 1) == 0.5


def test_a_step_counts_as_the_next_larger_one() -> None:
    assert TIMES.at(33) == TIMES.at(64) == 4.7
    assert TIMES.at(513) == StepTimes.of({}).at(1) == float("inf")
    assert choose_num_drafts([chain(1.0)], 1, 32, StepTimes.of({})) == [0]
