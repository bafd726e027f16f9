# SPDX-License-Identifier: Apache-2.0
"""The place of an answer in an expected text."""

import numpy as np
import pytest

from vllm.diffusion.decoding.prediction import Prediction

TEXT = tuple(range(10, 50))


def expected(answers: list[list[int]], text: tuple[int, ...] = TEXT, count: int = 4) -> list[int]:
    """Return the tokens that are expected after the last of growing answers."""
    prediction = Prediction(text)
    for answer in answers:
        result = prediction.after(np.array(answer, dtype=np.int64), count)
    return result.tolist()


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ([], [10, 11, 12, 13]),
        ([10, 11], [12, 13, 14, 15]),
        ([*TEXT[:38]], [48, 49]),
        ([*TEXT], []),
        ([10, 99], [12, 13, 14, 15]),  # a replaced token
        ([10, 99, 98], []),  # the answer has left the text
        ([10, 99, 98, 97, 20, 21, 22], [23, 24, 25, 26]),  # and is found again
        ([99, 10, 11, 12], [13, 14, 15, 16]),  # an inserted token
        ([10, 11, 12, 15, 16, 17], [18, 19, 20, 21]),  # deleted tokens
    ],
)
def test_the_place_after_an_answer(answer: list[int], wanted: list[int]) -> None:
    assert expected([answer]) == wanted
    assert expected([answer[:n] for n in range(len(answer) + 1)]) == wanted


def test_the_nearest_of_several_places() -> None:
    text = (1, 2, 3, 4, *range(20, 40), 1, 2, 3, 5)
    assert expected([[9, 8, 1, 2, 3]], text, 1) == [4]
    assert expected([[*text[:20], 9, 8, 1, 2, 3]], text, 1) == [5]


def test_longer_matches_come_first() -> None:
    text = (7, 1, 2, 3, 4, 0, 8, 1, 2, 3, 5, 0)
    assert expected([[9, 9, 8, 1, 2, 3]], text, 1) == [5]
