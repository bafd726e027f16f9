# SPDX-License-Identifier: Apache-2.0
"""Temperature, top-p and top-k keep the tokens that a calculation by hand keeps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reference.philox import uniform_matrix
from torch import Tensor

from vllm.diffusion.core.random_streams import CATEGORICAL
from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import DREAM, LLADA22, SDAR
from vllm.diffusion.request.served_model import ServedModel, SpecialIds
from vllm.diffusion.sampling import RowGroup, sample_group
from vllm.diffusion.sampling.plain import draw_categorical

if TYPE_CHECKING:
    from vllm.diffusion import ops

MODEL = ServedModel(
    family=DREAM,
    ids=SpecialIds(mask=38, eos=37, eot=36, stop=frozenset({36, 37})),
    max_model_len=4096,
    vocab_size=40,
)


def draw(logits: Tensor, **parameters: Any) -> tuple[Tensor, Tensor]:
    """Return tokens and scores of rows at canvas positions 3, 4, ... in step 2."""
    rows = torch.arange(len(logits))
    part = RowGroup(
        params=decision.decide(fields.canonical({"seed": 77, **parameters}), MODEL, [1]),
        scoring=CandidateScoring(draw="categorical"),
        step=2,
        forbid_mask=False,
        rows=slice(0, len(logits)),
        unconditional_rows=None,
        positions=rows + 3,
    )
    return draw_categorical(logits.clone(), part)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_p": 0.45}, [0]),  # the first entry is always kept
        ({"top_p": 0.55}, [0, 1]),  # the entry that exceeds the sum is kept
        ({"top_p": 0.75}, [0, 1]),
        ({"top_p": 0.8}, [0, 1, 2]),  # 2 and 3 are equal: the lower one is kept
        ({"top_p": 0.0}, [0]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # 2 and 3 are equal: ties with the k-th are kept
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.45}, [0]),
    ],
)
def test_what_top_p_and_top_k_keep(parameters: dict[str, Any], kept: list[int]) -> None:
    p = torch.tensor([[0.5, 0.26, 0.12, 0.12]])
    tokens, scores = draw(p.log(), **parameters)
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
    """Different logits may round to the same probability."""
    logits = torch.tensor([[-30.0, 0.0, 1e-9]])
    assert draw(logits)[0].tolist() == [1]


# ---- block-causal families ---------------------------------------------------------------------

BLOCK_MODEL = dataclasses.replace(MODEL, family=SDAR)


def of_block(
    logits: Tensor, scoring: CandidateScoring, served: ServedModel = BLOCK_MODEL, **parameters: Any
) -> ops.Sampled:
    """Return the samples of rows at canvas positions 0, 1, ... in step 2."""
    params = decision.decide(fields.canonical({"seed": 77, **parameters}), served, [1])
    part = RowGroup(
        params=params,
        scoring=scoring,
        step=2,
        forbid_mask=False,
        rows=slice(0, len(logits)),
        unconditional_rows=None,
        positions=torch.arange(len(logits), device=logits.device),
    )
    model: Any = SimpleNamespace(vocab_start=0, vocab_size=logits.shape[1])
    return sample_group(logits.clone(), part, model)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("algorithm", ["low_confidence_dynamic", "entropy_bounded"])
def test_tokens_that_edit_keep_their_probability(temperature: float, algorithm: str) -> None:
    """Other tokens have the same scores as if editing tokens could be proposed."""
    ids = dataclasses.replace(MODEL.ids, edit=(7, 9))
    served = dataclasses.replace(MODEL, family=LLADA22, ids=ids)
    logits = 2 * torch.randn(200, 40, generator=torch.Generator().manual_seed(5))
    logits[:, 7] += 3
    logits[0, 7] = 1000.0  # all other tokens have a probability of 0
    kind = "negative_entropy" if algorithm == "entropy_bounded" else "confidence"
    scoring = CandidateScoring(draw="filtered", score=kind, epsilon=1e-12)  # type: ignore[arg-type]
    actual = of_block(logits, scoring, served, algorithm=algorithm, temperature=temperature)
    assert not {7, 9} & set(actual.token.tolist())
    p = torch.softmax(logits / (temperature or 1), dim=-1)
    if temperature == 0:
        allowed = logits.clone()
        allowed[:, [7, 9]] = -torch.inf
        assert actual.token.tolist() == allowed.argmax(dim=-1).tolist()
    chance = p.gather(1, actual.token[:, None])[:, 0]
    entropy = torch.special.entr(p).sum(dim=-1)
    torch.testing.assert_close(actual.score, chance if kind == "confidence" else -entropy)


def test_top_k_comes_before_top_p() -> None:
    """top_k 3 leaves 4/9, 3/9 and 2/9, of which top_p 0.75 keeps two.

    Of all tokens it keeps three.
    """
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(2000, 1)
    cut: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "top_p": 0.75}
    actual = of_block(logits, CandidateScoring(draw="filtered"), **cut)
    assert set(actual.token.tolist()) == {0, 1}
    share = {0: 4 / 7, 1: 3 / 7}
    assert actual.score.tolist() == pytest.approx([share[t] for t in actual.token.tolist()])
    before = of_block(logits, CandidateScoring(draw="filtered", scores_all=True), **cut)
    assert before.token.tolist() == actual.token.tolist()
    whole = {0: 0.4, 1: 0.3}
    assert before.score.tolist() == pytest.approx([whole[t] for t in before.token.tolist()])


def test_filters_do_nothing_at_temperature_zero() -> None:
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(1))
    plain = of_block(logits, CandidateScoring(draw="filtered"), temperature=0)
    cut = of_block(logits, CandidateScoring(draw="filtered"), temperature=0, top_k=1, top_p=0.1)
    assert torch.equal(plain.token, logits.argmax(dim=1))
    assert torch.equal(plain.score, torch.softmax(logits, dim=1).max(dim=1).values)
    assert all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True))


def test_the_greedy_token_beside_a_drawn_one() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
    actual = of_block(logits, CandidateScoring(draw="filtered", greedy=True), temperature=2.0)
    assert torch.equal(actual.greedy, logits.argmax(dim=1))
    assert not torch.equal(actual.token, actual.greedy)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_k": 9, "top_p": 0.7}], ids=str)
@pytest.mark.parametrize(
    "scoring",
    [
        CandidateScoring(draw="filtered", greedy=True),
        CandidateScoring(draw="filtered", scores_all=True),
        CandidateScoring(score="negative_entropy", epsilon=1e-12, draw="filtered", scores_all=True),
    ],
    ids=["left", "all", "entropy"],
)
def test_a_gpu_draws_as_a_cpu_does(
    scoring: CandidateScoring, cut: dict[str, Any], temperature: float
) -> None:
    logits = 3 * torch.randn(64, 40, generator=torch.Generator().manual_seed(3))
    wanted = of_block(logits, scoring, temperature=temperature, **cut)
    actual = of_block(logits.cuda(), scoring, temperature=temperature, **cut)
    assert actual.token.tolist() == wanted.token.tolist()
    torch.testing.assert_close(
        actual.score.float().cpu(), wanted.score.float(), rtol=1e-4, atol=1e-5
    )
    if scoring.greedy:
        assert actual.greedy.tolist() == wanted.greedy.tolist()
