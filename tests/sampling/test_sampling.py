# SPDX-License-Identifier: Apache-2.0
"""From hidden states to candidates, against plain formulas and the reference random numbers."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.philox import uniform, uniform_matrix
from vllm.diffusion import params
from vllm.diffusion.families import LLADA
from vllm.diffusion.ops import sampling as ops_sampling
from vllm.diffusion.params import DiffusionParams, ServedModel, SpecialIds
from vllm.diffusion.sampling import Choice, NoiseSource, PhiloxNoise, RowGroup, choose, sample
from vllm.diffusion.scoring import Scoring

MASK, EOS, EOT = 38, 37, 36
NUM_COLUMNS = 40
MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK, eos=EOS, eot=EOT, stop=frozenset({EOS, EOT})),
    max_model_len=4096,
    vocab_size=NUM_COLUMNS,
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process groups: upstream would have to be told of one rank."""
    monkeypatch.setattr(ops_sampling, "get_tensor_model_parallel_world_size", lambda: 1)


class HeadModel:
    """The part of a model that sampling sees: a norm and a head over some columns."""

    def __init__(self, weight: Tensor, vocab_start: int = 0) -> None:
        self.weight = weight
        self.vocab_start = vocab_start
        self.vocab_size = NUM_COLUMNS
        self.most_rows = 0

    def final_norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        self.most_rows = max(self.most_rows, hidden_states.shape[0])
        return hidden_states @ self.weight.T


def head_model(seed: int = 0) -> HeadModel:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.8 * torch.randn(NUM_COLUMNS, 16, generator=generator)
    weight[[MASK, EOS, EOT]] *= 2  # so that the tokens with rules of their own are often the best
    return HeadModel(weight)


def hidden_rows(num_rows: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(seed))


def decided(**asked: Any) -> DiffusionParams:
    return params.resolve(params.canonical({"seed": 77, **asked}), MODEL, [1])


class Columns:
    """The part of a model that `choose` sees: which columns of how many are given."""

    def __init__(self, vocab_start: int = 0, vocab_size: int = NUM_COLUMNS) -> None:
        self.vocab_start = vocab_start
        self.vocab_size = vocab_size

    def final_norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


WHOLE = Columns()


def group(
    rows: list[int],
    step: int = 0,
    forbid_mask: bool = False,
    twin: int | None = None,
    scoring: Scoring | None = None,
    **asked: Any,
) -> RowGroup:
    """Rows of one request; its canvas positions are the rows plus 3."""
    index = torch.tensor(rows, dtype=torch.int64)
    return RowGroup(
        params=decided(**asked),
        scoring=scoring or Scoring(),
        step=step,
        forbid_mask=forbid_mask,
        rows=index,
        unconditional_rows=None if twin is None else index + twin,
        positions=index + 3,
    )


def logits_of(model: HeadModel, hidden: Tensor, rows: Tensor) -> Tensor:
    return model.final_norm(hidden[rows]) @ model.weight.T


def formula(logits: Tensor, part: RowGroup) -> tuple[Tensor, Tensor]:
    """Tokens and scores of [R, V] logits, step by step as the published loop computes them."""
    asked = part.params
    assert asked.seed is not None
    positions = part.positions.tolist()
    logits = logits.clone()
    if asked.logits_eos_inf:
        logits[:, EOS] = -torch.inf
    if part.forbid_mask:
        logits[:, MASK] = -torch.inf
    noised = logits
    if asked.temperature > 0:
        u = uniform_matrix(asked.seed, 0, part.step, positions, NUM_COLUMNS)
        noised = logits.double().exp() / (-u.log()) ** asked.temperature
    tokens = noised.argmax(dim=1)
    if asked.confidence_eos_eot_inf:
        logits = logits.clone()
        logits[:, EOT] = -torch.inf
        if asked.temperature == 0:
            logits[:, EOS] = -torch.inf
    if asked.remasking == "random":
        scores = [uniform(asked.seed, 1, part.step, p, 0) for p in positions]
        return tokens, torch.tensor(scores, dtype=torch.float64)
    dtype = {"float64": torch.float64, "float32": torch.float32, "logits": logits.dtype}
    probabilities = torch.softmax(logits.to(dtype[asked.confidence_dtype]), dim=1)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].double()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"confidence_dtype": "float64"},
    {"confidence_dtype": "logits"},
    {"logits_eos_inf": True},
    {"confidence_eos_eot_inf": True},
    {"logits_eos_inf": True, "confidence_eos_eot_inf": True},
    {"remasking": "random"},
    {"temperature": 1.0},
    {"temperature": 0.2, "confidence_dtype": "float64"},
    {"temperature": 1.5, "confidence_eos_eot_inf": True},
    {"temperature": 1.5, "logits_eos_inf": True},
    {"temperature": 0.7, "remasking": "random"},
    {"temperature": 0.7, "seed": 2**64 - 1},
]


def assert_candidates(
    found: Tensor, wanted: tuple[Tensor, Tensor], tolerance: float = 1e-5
) -> None:
    assert (found.dtype, found.shape) == (torch.float64, (3, wanted[0].numel()))
    assert found[0].tolist() == wanted[0].tolist()
    torch.testing.assert_close(found[1], wanted[1], rtol=tolerance, atol=1e-12)


# ---- one request -------------------------------------------------------------------------------


@pytest.mark.parametrize("forbid_mask", [False, True])
@pytest.mark.parametrize("asked", SETTINGS, ids=[str(s) for s in SETTINGS])
def test_candidates_follow_the_formulas(asked: dict[str, Any], forbid_mask: bool) -> None:
    model, hidden = head_model(), hidden_rows(64)
    part = group(list(range(0, 64, 2)), step=5, forbid_mask=forbid_mask, **asked)
    wanted = formula(logits_of(model, hidden, part.rows), part)
    found = sample(model, hidden, [part], 1000, PhiloxNoise())
    assert_candidates(found, wanted)
    assert not forbid_mask or MASK not in found[0].tolist()


def test_the_special_columns_are_met() -> None:
    """Else the tests above would not see that an option is ignored."""
    model, hidden = head_model(), hidden_rows(64)
    rows = torch.arange(0, 64, 2)
    best = logits_of(model, hidden, rows).argmax(dim=1).tolist()
    assert {MASK, EOS, EOT} <= set(best)


def test_demoted_tokens_are_chosen_with_confidence_zero() -> None:
    logits = torch.zeros(4, NUM_COLUMNS)
    for row, best in enumerate((EOS, EOT, 3)):
        logits[row, best] = 5.0
    logits[3, EOS], logits[3, 4] = 5.0, 4.0
    cold = group([0, 1, 2, 3], confidence_eos_eot_inf=True)
    token, score, _ = choose(logits.clone(), cold, WHOLE, PhiloxNoise())
    assert token.tolist() == [EOS, EOT, 3, EOS]
    assert score[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]
    assert score[2] == pytest.approx(math.exp(5) / (math.exp(5) + NUM_COLUMNS - 3), rel=1e-6)


def test_ties_go_to_the_lowest_token() -> None:
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[1, [7, 9, 30]] = 2.0
    for dtype in ("float32", "float64", "logits"):
        part = group([0, 1], confidence_dtype=dtype)
        token = choose(logits.clone(), part, WHOLE, PhiloxNoise()).tokens
        assert token.tolist() == [0, 7]


def test_confidence_saturates_as_its_dtype_says() -> None:
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[0, 1], logits[1, 2] = 25.0, 30.0
    narrow = choose(logits.clone(), group([0, 1]), WHOLE, PhiloxNoise())[1]
    wide = choose(logits.clone(), group([0, 1], confidence_dtype="float64"), WHOLE, PhiloxNoise())[
        1
    ]
    assert narrow.tolist() == [1.0, 1.0]
    assert wide.dtype == torch.float64
    assert wide[0] < wide[1] < 1.0
    bf16 = logits.bfloat16()
    bf16[:, :20] += 1.0
    own = choose(bf16.clone(), group([0, 1], confidence_dtype="logits"), WHOLE, PhiloxNoise())[1]
    assert own.dtype == torch.bfloat16
    assert torch.equal(own, torch.softmax(bf16, 1).amax(1))


def test_guidance() -> None:
    """n + (s + 1)(c - n), in the dtype of the logits; then everything else."""
    model, hidden = head_model(), hidden_rows(40)
    for asked in ({}, {"temperature": 0.9}, {"confidence_eos_eot_inf": True}):
        part = group(list(range(20)), twin=20, cfg_scale=1.5, **asked)
        assert part.unconditional_rows is not None
        own = logits_of(model, hidden, part.rows)
        free = logits_of(model, hidden, part.unconditional_rows)
        wanted = formula(free + 2.5 * (own - free), part)
        assert_candidates(sample(model, hidden, [part], 7, PhiloxNoise()), wanted)
        assert wanted[0].tolist() != formula(own, part)[0].tolist()


# ---- chunks and neighbours ---------------------------------------------------------------------


def mixed_groups() -> list[RowGroup]:
    return [
        group([0, 3, 4, 5, 9], step=1),
        group([10, 12], step=3),
        group([13, 14, 15], step=0, confidence_dtype="float64"),
        group([20, 21, 22], step=2, temperature=1.0),
        group([23], step=2),
        group([24, 25], step=4, remasking="random"),
        group([26, 27, 28], step=0, forbid_mask=True),
        group([30, 31, 32, 33], twin=10, cfg_scale=1.0),
        group([34, 35], step=9, confidence_dtype="float64"),
    ]


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 3, 7, 1000])
def test_neighbours_and_chunks_change_nothing(rows_per_chunk: int) -> None:
    model, hidden, groups = head_model(), hidden_rows(50), mixed_groups()
    alone = [sample(model, hidden, [part], 1000, PhiloxNoise()) for part in groups]
    model.most_rows = 0
    tokens, scores, _ = sample(model, hidden, groups, rows_per_chunk, PhiloxNoise())
    assert model.most_rows <= rows_per_chunk
    assert tokens.tolist() == torch.cat([found[0] for found in alone]).tolist()
    wanted = torch.cat([found[1] for found in alone])
    # Products of other shapes round differently.
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-12)


def test_plain_requests_share_a_product() -> None:
    model, hidden = head_model(), hidden_rows(20)
    sample(model, hidden, [group([0, 1]), group([2]), group([5, 6, 7])], 1000, PhiloxNoise())
    assert model.most_rows == 6


@pytest.mark.parametrize("groups", [[], [group([])], [group([]), group([], temperature=1.0)]])
def test_no_rows(groups: list[RowGroup]) -> None:
    found = sample(head_model(), hidden_rows(3), groups, 4, PhiloxNoise())
    assert (found.shape, found.dtype) == ((3, 0), torch.float64)


def test_empty_groups_among_others() -> None:
    model, hidden = head_model(), hidden_rows(5)
    groups = [group([]), group([1, 2]), group([]), group([4], temperature=1.0)]
    assert sample(model, hidden, groups, 4, PhiloxNoise()).shape == (3, 3)


# ---- random numbers ----------------------------------------------------------------------------


def test_noise_is_the_published_counter_generator() -> None:
    positions = torch.tensor([0, 1, 7, 1000, -2])
    for seed in (0, 1, 2**32 + 5, 2**63 + 9, 2**64 - 1):
        whole = PhiloxNoise().uniform(seed, 0, 3, positions, range(30))
        wanted = uniform_matrix(seed, 0, 3, positions.tolist(), 30)
        assert torch.equal(whole, wanted)
        part = PhiloxNoise().uniform(seed, 0, 3, positions, range(13, 22))
        assert torch.equal(part, wanted[:, 13:22])


def test_injected_numbers_are_used() -> None:
    """One column with U near 1 has nearly infinite noise, so it is chosen."""

    class OneColumn:
        def uniform(
            self, seed: int, purpose: int, step: int, positions: Tensor, columns: range
        ) -> Tensor:
            assert (seed, step) == (77, 6)
            u = torch.full((positions.numel(), len(columns)), 0.5, dtype=torch.float64)
            if purpose == 1:
                return u * positions[:, None] / 10
            u[:, positions % 7] = 1 - 1e-15
            return u

    noise: NoiseSource = OneColumn()
    part = group([0, 1, 2], step=6, temperature=1.0, remasking="random")
    tokens, scores, _ = sample(head_model(), hidden_rows(3) / 100, [part], 1, noise)
    assert tokens.tolist() == [3, 4, 5]
    assert scores.tolist() == pytest.approx([0.15, 0.2, 0.25])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    """Chi-square over many canvas positions that all have the same logits."""
    num_draws = 20_000
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    part = dataclasses.replace(
        group([], temperature=temperature), positions=torch.arange(num_draws)
    )
    five = Columns(vocab_size=5)
    tokens, scores, _ = choose(row.repeat(num_draws, 1), part, five, PhiloxNoise())
    wanted = torch.softmax(row.double() / temperature, 0) * num_draws
    counts = torch.bincount(tokens, minlength=5)
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    assert chi_square < 18.47  # 0.1 % point of four degrees of freedom
    # The score is free of noise and of temperature.
    torch.testing.assert_close(scores, torch.softmax(row, 0)[tokens], rtol=1e-6, atol=0)


def test_draws_of_steps_seeds_and_purposes_differ() -> None:
    logits = torch.zeros(64, NUM_COLUMNS)
    noise = PhiloxNoise()

    def tokens(**changes: Any) -> list[int]:
        part = group(list(range(64)), **{"temperature": 1.0, **changes})
        found: list[int] = choose(logits.clone(), part, WHOLE, noise)[0].tolist()
        return found

    assert tokens() == tokens()
    assert len({tuple(tokens()), tuple(tokens(step=1)), tuple(tokens(seed=78))}) == 3


def test_a_seed_must_have_been_drawn() -> None:
    part = dataclasses.replace(
        group([0]), params=dataclasses.replace(decided(temperature=1.0), seed=None)
    )
    with pytest.raises(ValueError, match="seed"):
        choose(torch.zeros(1, NUM_COLUMNS), part, WHOLE, PhiloxNoise())


# ---- vocabulary in parts -----------------------------------------------------------------------


def sharded(
    logits: Tensor, part: RowGroup, boundary: int, monkeypatch: pytest.MonkeyPatch
) -> Choice:
    """`choose` on two ranks, which are two threads that meet at every collective."""
    shards = ((0, logits[:, :boundary]), (boundary, logits[:, boundary:]))
    meeting = threading.Barrier(2, timeout=60)
    rank = threading.local()
    sent: dict[int, Tensor] = {}

    def gather(mine: Tensor, dim: int = -1) -> Tensor:
        sent[rank.number] = mine.clone()
        meeting.wait()
        whole = torch.cat([sent[0], sent[1]], dim=dim)
        meeting.wait()
        return whole

    def run(number: int) -> Choice:
        rank.number = number
        start, columns = shards[number]
        return choose(columns.clone(), part, Columns(start, logits.shape[1]), PhiloxNoise())

    monkeypatch.setattr(ops_sampling, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(ops_sampling, "tensor_model_parallel_all_gather", gather)
    with ThreadPoolExecutor(2) as ranks:
        results = list(ranks.map(run, range(2)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)  # all ranks come to the same
    return results[0]


@pytest.mark.parametrize("boundary", [1, 17, 20, 37, 39])
@pytest.mark.parametrize("asked", SETTINGS, ids=[str(s) for s in SETTINGS])
def test_two_ranks_choose_as_one(
    asked: dict[str, Any], boundary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden = head_model(), hidden_rows(64)
    part = group(list(range(0, 64, 2)), step=5, forbid_mask=True, **asked)
    logits = logits_of(model, hidden, part.rows)
    wanted = formula(logits, part)
    found = sharded(logits, part, boundary, monkeypatch)
    assert found[0].tolist() == wanted[0].tolist()
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-12)


def test_ties_across_ranks_go_to_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[1, [15, 30]] = 3.0
    assert sharded(logits, group([0, 1]), 20, monkeypatch)[0].tolist() == [0, 15]


def test_a_rank_of_excluded_columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maximum is -inf, which must not spread as NaN."""
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[0, 3] = logits[1, EOS] = 4.0
    part = group([0, 1], confidence_eos_eot_inf=True)
    first = logits[:, : EOT + 2]
    token, score, _ = sharded(first, part, EOT, monkeypatch)
    assert token.tolist() == [3, EOS]
    assert score[0] == pytest.approx(math.exp(4) / (math.exp(4) + EOT - 1), rel=1e-6)
    assert score[1] == 0.0


# ---- other scores ------------------------------------------------------------------------------

ENTROPY = Scoring(score="negative_entropy", epsilon=1e-12)


def negative_entropy(logits: Tensor, epsilon: float) -> Tensor:
    p = torch.softmax(logits.double(), dim=1)
    return (p * (p + epsilon).log()).sum(dim=1)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-8, 1e-2])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8}, {"confidence_dtype": "float64"}])
def test_entropies_are_free_of_noise(asked: dict[str, Any], epsilon: float) -> None:
    model, hidden = head_model(), hidden_rows(40)
    scoring = Scoring(score="negative_entropy", epsilon=epsilon)
    part = group(list(range(40)), scoring=scoring, **asked)
    logits = logits_of(model, hidden, part.rows)
    found = sample(model, hidden, [part], 7, PhiloxNoise())
    assert found[0].tolist() == formula(logits, part)[0].tolist()
    torch.testing.assert_close(found[1], negative_entropy(logits, epsilon), rtol=1e-5, atol=1e-6)


def test_entropies_of_tables() -> None:
    logits = torch.full((3, 4), -torch.inf)
    logits[0, 2] = 1.0  # certain
    logits[1, [0, 3]] = 5.0  # one of two
    logits[2] = 0.0  # one of four
    part = group([0, 1, 2], scoring=ENTROPY)
    scores = choose(logits, part, Columns(vocab_size=4), PhiloxNoise()).scores
    assert scores.tolist() == pytest.approx([0.0, -math.log(2), -math.log(4)], abs=1e-6)


def test_random_remasking_stands_for_the_entropy() -> None:
    part = group([0, 1, 2], scoring=ENTROPY, remasking="random", step=4)
    scores = choose(torch.zeros(3, NUM_COLUMNS), part, WHOLE, PhiloxNoise()).scores
    assert scores.tolist() == [-uniform(77, 1, 4, position, 0) for position in (3, 4, 5)]


def test_the_greedy_token_is_free_of_noise() -> None:
    scoring = Scoring(greedy=True)
    logits = torch.randn(64, NUM_COLUMNS, generator=torch.Generator().manual_seed(3))
    part = group(list(range(64)), scoring=scoring, temperature=1.0)
    tokens, _, greedy = choose(logits.clone(), part, WHOLE, PhiloxNoise())
    assert greedy.tolist() == logits.argmax(dim=1).tolist()
    assert tokens.tolist() == formula(logits, part)[0].tolist() != greedy.tolist()


@pytest.mark.parametrize("scoring", [ENTROPY, Scoring(greedy=True), Scoring(draw="categorical")])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_two_ranks_score_as_one(
    scoring: Scoring, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(head_model(), hidden_rows(20), torch.arange(20))
    part = group(list(range(20)), scoring=scoring, temperature=temperature)
    one = choose(logits.clone(), part, WHOLE, PhiloxNoise())
    two = sharded(logits, part, 20, monkeypatch)
    assert two.tokens.tolist() == one.tokens.tolist()
    assert two.greedy.tolist() == one.greedy.tolist()
    torch.testing.assert_close(two.scores.double(), one.scores.double(), rtol=1e-5, atol=1e-7)


def test_a_rule_may_adjust_whole_rows() -> None:
    """Each row once, in chunks; the mask is forbidden afterwards."""
    seen: list[int] = []

    def adjust(logits: Tensor, positions: Tensor) -> Tensor:
        seen.extend(positions.tolist())
        logits[:, MASK] = 100.0
        logits[:, 5] = 50.0
        return logits

    model, hidden = head_model(), hidden_rows(10)
    part = dataclasses.replace(group(list(range(10)), forbid_mask=True), adjust=adjust)
    tokens, scores, _ = sample(model, hidden, [part], 3, PhiloxNoise())
    assert seen == list(range(3, 13))
    assert tokens.tolist() == [5] * 10
    assert scores.tolist() == pytest.approx([1.0] * 10)


# ---- Dream's draw ------------------------------------------------------------------------------

CONFIDENCE = Scoring(draw="categorical")


def dream_choice(logits: Tensor, scoring: Scoring = CONFIDENCE, **asked: Any) -> Choice:
    part = group(list(range(len(logits))), scoring=scoring, algorithm="dream", **asked)
    return choose(logits.clone(), part, Columns(vocab_size=logits.shape[1]), PhiloxNoise())


def test_the_best_probability_and_what_else_is_scored() -> None:
    p = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]])
    tokens, scores, _ = dream_choice(p.log())
    assert tokens.tolist() == [1, 0]
    assert scores.tolist() == pytest.approx([0.6, 0.4])
    margins = dream_choice(p.log(), Scoring(score="margin", draw="categorical")).scores
    assert margins.tolist() == pytest.approx([0.3, 0.0], abs=1e-6)
    entropy = Scoring(score="negative_entropy", epsilon=1e-10, draw="categorical")
    wanted = [0.1 * math.log(0.1) + 0.6 * math.log(0.6) + 0.3 * math.log(0.3)]
    assert dream_choice(p.log(), entropy).scores[0].tolist() == pytest.approx(wanted[0])


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
    scores = dream_choice(p.log(), **asked).scores
    assert float(scores[0]) == pytest.approx(0.5 / float(p[0, kept].sum()), rel=1e-5)


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the best of (0.64, 0.36) has 4/7, so both are within a top_p of 0.6."""
    logits = torch.tensor([[0.64, 0.36]]).log().repeat(2000, 1)
    tokens, scores, _ = dream_choice(logits, temperature=2.0, top_p=0.6)
    assert set(tokens.tolist()) == {0, 1}
    for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
        assert score == pytest.approx((4 / 7, 3 / 7)[token], rel=1e-5)
    assert set(dream_choice(logits, temperature=1.0, top_p=0.6).tokens.tolist()) == {0}


def test_drawn_tokens_have_the_frequencies_of_what_is_left() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    num_draws = 20_000
    tokens = dream_choice(p.log().repeat(num_draws, 1), temperature=1.0, top_k=3).tokens
    counts = torch.bincount(tokens, minlength=4)
    assert counts[3] == 0
    wanted = p[:3] / 0.9 * num_draws
    assert float(((counts[:3] - wanted) ** 2 / wanted).sum()) < 13.82  # 0.1 % point, 2 degrees


def test_dreams_draw_is_the_published_formula() -> None:
    logits = torch.randn(30, 40, generator=torch.Generator().manual_seed(5))
    tokens = dream_choice(logits, temperature=0.7).tokens
    u = uniform_matrix(77, 2, 0, list(range(3, 33)), 40)
    p = torch.softmax(logits / 0.7, dim=1).double()
    assert tokens.tolist() == (p.log() - (-u.log()).log()).argmax(dim=1).tolist()
