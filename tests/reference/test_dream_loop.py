# SPDX-License-Identifier: Apache-2.0
"""Dream's loop: its times, and which forwards it makes."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.reference.decode import SpecialIds
from tests.reference.dream import (
    diffusion_generate,
    times,
)

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


# ---- a model that predicts the mask ------------------------------------------------------------


def test_predicted_masks_stay_unless_guarded() -> None:
    rows = table(*[{15: 5.0, 4: 1.0 + i} for i in range(3)])
    plain = generate(rows, steps=3, alg="maskgit_plus")
    assert (plain.ids, plain.num_forwards) == ([15] * 3, 3)
    guarded = generate(rows, steps=8, alg="maskgit_plus", guard_mask_token=True)
    assert guarded.num_forwards == 8
    assert guarded.ids.count(4) >= 1
    assert any(step.guarded for step in guarded.trace)
