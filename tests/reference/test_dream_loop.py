# SPDX-License-Identifier: Apache-2.0
"""Dream's loop: schedules, samplers and draws worked by hand."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.reference.decode import SpecialIds
from tests.reference.dream import (
    diffusion_generate,
    filter_logits,
    times,
)
from tests.reference.philox import uniform_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tests.reference.decode import Decoded

IDS = SpecialIds(mask=15, eos=14)


class ShiftedTable:
    """Raw logits: row i of the canvas is given at the position before it."""

    logit_shift = 1

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def logits(self, ids: Tensor) -> Tensor:
        length, num_rows = ids.shape[1], len(self.rows)
        raw = torch.zeros(*ids.shape, self.rows.shape[1], dtype=self.rows.dtype)
        raw[:, length - num_rows - 1 : length - 1] = self.rows
        raw[:, -1] = 7.0 * torch.eye(self.rows.shape[1])[15]  # of the token behind the row
        return raw


def table(*rows: dict[int, float]) -> Tensor:
    logits = torch.zeros(len(rows), 16)
    for row, entries in zip(logits, rows, strict=True):
        for token, value in entries.items():
            row[token] = value
    return logits


def generate(rows: Tensor, prompt: Sequence[int] = (1,), **options: Any) -> Decoded:
    return diffusion_generate(ShiftedTable(rows), prompt, gen_length=len(rows), ids=IDS, **options)


def accepted(decoded: Decoded, prompt_len: int = 1) -> list[list[int]]:
    return [[p - prompt_len for p in step.accepted] for step in decoded.trace]


# ---- the schedule ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 32, 100, 512])
def test_times_are_rounded_once(steps: int) -> None:
    """Each is the fp32 number nearest to start + i x step or, in the upper half, end - ..."""
    start, end = np.float32(1), np.float32(1e-3)
    step = Fraction(float((end - start) / np.float32(steps)))
    for i, value in enumerate(times(steps, 1e-3).tolist()):
        exact = 1 + step * i
        if i >= (steps + 1) // 2:
            exact = Fraction(float(end)) - step * (steps - i)
        assert value == float(np.float32(float(exact)))


def test_every_step_makes_a_forward_unless_idle_ones_are_left_out() -> None:
    rows = table(*[{i: 5.0 + i} for i in range(4)])
    whole = generate(rows, steps=16)
    assert whole.num_forwards == 16
    short = generate(rows, steps=16, skip_idle_steps=True)
    assert short.num_forwards == 3  # the last step commits two
    assert short.ids == whole.ids == [0, 1, 2, 3]
    assert accepted(short) == [step for step in accepted(whole) if step]


def test_masks_of_the_prompt_are_decided_too() -> None:
    rows = table({1: 3.0}, {2: 4.0}, {3: 5.0})
    decoded = diffusion_generate(
        ShiftedTable(rows), [1, 15], gen_length=2, steps=1, ids=IDS, alg="maskgit_plus"
    )
    assert accepted(decoded, prompt_len=2) == [[1, 0, -1]]
    assert decoded.ids == [2, 3]


# ---- filters -----------------------------------------------------------------------------------

LOWEST = torch.finfo(torch.float32).min


def kept(logits: Tensor, top_p: float | None, top_k: int | None) -> list[list[int]]:
    filtered = filter_logits(logits, top_p, top_k)
    assert torch.equal(filtered[filtered != LOWEST], logits[filtered != LOWEST])
    return [row.nonzero()[:, 0].tolist() for row in filtered != LOWEST]


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]).log()
    assert kept(logits, 0.35, None)[0] == [1]
    assert kept(logits, 0.45, None) == [[1, 2], [0, 1]]
    assert kept(logits, 0.75, None)[0] == [1, 2, 3]
    assert kept(logits, 0.01, None) == [[1], [0]]
    assert kept(torch.zeros(1, 2), 0.5, None) == [[0, 1]]  # reaching it is not crossing
    assert kept(logits, 1.0, None) == [[0, 1, 2, 3]] * 2


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    assert kept(logits, None, 1) == [[1], [3]]
    assert kept(logits, None, 2) == [[1, 2, 3], [0, 1, 2, 3]]
    assert kept(logits, None, 99) == [[0, 1, 2, 3]] * 2


def test_top_p_comes_before_top_k_and_after_the_temperature() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of 0.4 and 0.3, the first alone: top_k on the filtered logits.
    assert kept(logits, 0.5, 1) == [[0]]
    rows = table({3: 2.0, 4: 1.8, 5: 1.0})
    decoded = generate(
        rows,
        steps=1,
        alg="maskgit_plus",
        temperature=0.1,
        top_p=0.9,
        uniform_tokens=lambda step, positions, columns: torch.full((1, 16), 0.5),
    )
    p = math.exp(20) / (math.exp(20) + math.exp(18))  # tokens 3 and 4 are left
    assert p < 0.9
    assert decoded.trace[0].candidates.scores == pytest.approx([p], rel=1e-5)


# ---- confidences -------------------------------------------------------------------------------


def test_confidences_of_the_algs() -> None:
    rows = table({1: 3.0, 2: 2.5}, {3: 2.0})
    parts = [sorted(torch.softmax(row.double(), 0).tolist())[::-1] for row in rows]
    wanted = {
        "maskgit_plus": [p[0] for p in parts],
        "topk_margin": [p[0] - p[1] for p in parts],
        "entropy": [sum(x * math.log(x + 1e-10) for x in p) for p in parts],
    }
    for alg, scores in wanted.items():
        decoded = generate(rows, steps=1, alg=alg)
        assert decoded.trace[0].candidates.scores == pytest.approx(scores, rel=1e-5)
        assert decoded.ids == [1, 3]
    # The first row is the likelier, the second one the clearer.
    assert accepted(generate(rows, steps=1, alg="maskgit_plus")) == [[0, 1]]
    assert accepted(generate(rows, steps=1, alg="topk_margin")) == [[1, 0]]


def test_tokens_are_compared_as_probabilities() -> None:
    """Two logits of one rounded probability: the first wins, though the second is larger."""
    logits = torch.zeros(1, 16, dtype=torch.bfloat16)
    logits[0, 4], logits[0, 5] = 0.125, 0.1255
    assert logits[0, 4] < logits[0, 5]
    p = torch.softmax(logits, dim=1)
    assert p[0, 4] == p[0, 5]
    assert generate(logits, steps=1).ids == [4]


# ---- draws -------------------------------------------------------------------------------------


def test_token_draws_are_gumbel_max_over_log_probabilities() -> None:
    rows = table({1: 1.0, 2: 0.5}, {3: 2.0}, {4: 0.1})
    asked = []

    def tokens(step: int, positions: Sequence[int], columns: Sequence[int]) -> Tensor:
        asked.append((step, list(positions), len(columns)))
        return uniform_matrix(11, 2, step, positions, len(columns))

    decoded = generate(rows, steps=3, temperature=0.7, alg="entropy", uniform_tokens=tokens)
    assert asked[0] == (0, [0, 1, 2], 16)
    uniform = uniform_matrix(11, 2, 0, [0, 1, 2], 16)
    keys = torch.log_softmax(rows.double() / 0.7, 1) - (-uniform.log()).log()
    assert decoded.trace[0].candidates.tokens == keys.argmax(1).tolist()


def test_token_draws_have_the_probabilities_of_the_softmax() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(400):
        decoded = generate(
            table({3: 3.0, 4: 2.0}),
            steps=1,
            temperature=1.0,
            top_k=2,
            uniform_tokens=lambda step, positions, columns, seed=seed: uniform_matrix(
                seed, 2, step, positions, len(columns)
            ),
        )
        drawn[decoded.ids[0]] += 1
    assert set(drawn) == {3, 4}
    expected = 1 / (1 + math.exp(-1))  # 0.73, standard error 0.022
    assert drawn[3] / 400 == pytest.approx(expected, abs=0.09)


# ---- a model that predicts the mask ------------------------------------------------------------


def test_predicted_masks_stay_unless_guarded() -> None:
    rows = table(*[{15: 5.0, 4: 1.0 + i} for i in range(3)])
    plain = generate(rows, steps=3, alg="maskgit_plus")
    assert (plain.ids, plain.num_forwards) == ([15] * 3, 3)
    guarded = generate(rows, steps=8, alg="maskgit_plus", guard_mask_token=True)
    assert guarded.num_forwards == 8
    assert guarded.ids.count(4) >= 1
    assert any(step.guarded for step in guarded.trace)
