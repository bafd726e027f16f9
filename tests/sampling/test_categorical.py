# SPDX-License-Identifier: Apache-2.0
"""What temperature, top-p and top-k leave of a distribution, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.philox import uniform_matrix
from vllm.diffusion import decision, fields
from vllm.diffusion.families import DREAM
from vllm.diffusion.params import ServedModel, SpecialIds
from vllm.diffusion.sampling import PhiloxNoise, RowGroup
from vllm.diffusion.sampling.categorical import draw_categorical
from vllm.diffusion.scoring import CATEGORICAL, Scoring

MODEL = ServedModel(
    family=DREAM,
    ids=SpecialIds(mask=38, eos=37, eot=36, stop=frozenset({36, 37})),
    max_model_len=4096,
    vocab_size=40,
)


def draw(logits: Tensor, **asked: Any) -> tuple[Tensor, Tensor]:
    """Tokens and scores of rows at canvas positions 3, 4, ... in step 2."""
    rows = torch.arange(len(logits))
    part = RowGroup(
        params=decision.decide(fields.canonical({"seed": 77, **asked}), MODEL, [1]),
        scoring=Scoring(draw="categorical"),
        step=2,
        forbid_mask=False,
        rows=slice(0, len(logits)),
        unconditional_rows=None,
        positions=rows + 3,
    )
    return draw_categorical(logits.clone(), part, PhiloxNoise())


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"top_p": 0.45}, [0]),  # the first entry always stays
        ({"top_p": 0.55}, [0, 1]),  # the one that exceeds the sum stays
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # 2 and 3 are equal: ties with the k-th stay
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.45}, [0]),
    ],
)
def test_what_top_p_and_top_k_keep(asked: dict[str, Any], kept: list[int]) -> None:
    p = torch.tensor([[0.5, 0.26, 0.12, 0.12]])
    tokens, scores = draw(p.log(), **asked)
    assert tokens.tolist() == [0]
    assert float(scores[0]) == pytest.approx(0.5 / float(p[0, kept].sum()), rel=1e-5)


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the better of (0.64, 0.36) has 4/7, so a top_p of 0.6 keeps both."""
    logits = torch.tensor([[0.64, 0.36]]).log().repeat(2000, 1)
    tokens, scores = draw(logits, temperature=2.0, top_p=0.6)
    assert set(tokens.tolist()) == {0, 1}
    for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
        assert score == pytest.approx((4 / 7, 3 / 7)[token], rel=1e-5)
    assert set(draw(logits, temperature=1.0, top_p=0.6)[0].tolist()) == {0}


def test_tokens_are_drawn_by_the_gumbel_max_method() -> None:
    logits = torch.randn(30, 40, generator=torch.Generator().manual_seed(5))
    u = uniform_matrix(77, CATEGORICAL, 2, list(range(3, 33)), 40)
    p = torch.softmax(logits / 0.7, dim=1).double()
    wanted = (p.log() - (-u.log()).log()).argmax(dim=1)
    assert draw(logits, temperature=0.7)[0].tolist() == wanted.tolist()


def test_equal_probabilities_go_to_the_lowest_token() -> None:
    """Logits that differ may round to one probability."""
    logits = torch.tensor([[-30.0, 0.0, 1e-9]])
    assert draw(logits)[0].tolist() == [1]
