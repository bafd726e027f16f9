# SPDX-License-Identifier: Apache-2.0
"""Hidden states become candidates as by plain formulas with the reference's random numbers."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from reference.philox import uniform_matrix
from torch import Tensor

from tests.sampling.support import (
    EOS,
    EOT,
    MASK,
    NUM_COLUMNS,
    GivenLogits,
    HeadModel,
    decided,
    group,
    head_model,
    hidden_rows,
)
from vllm.diffusion import ops
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.dream import SCORINGS
from vllm.diffusion.ops import exact_scores, named_tokens
from vllm.diffusion.ops import sampling as ops_sampling
from vllm.diffusion.sampling import (
    LogitEditor,
    RowGroup,
    sample,
    sample_group,
    sampler,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def chosen(
    logits: Tensor,
    part: RowGroup,
    start: int = 0,
    vocab_size: int | None = None,
) -> ops.Sampled:
    """Call `sample_group` on whole rows, or on the columns from `start` of `vocab_size`."""
    model = HeadModel(torch.empty(0, 16), start, vocab_size or logits.shape[1])
    return sample_group(logits.clone(), part, model)


def sampled(
    model: HeadModel,
    hidden: Tensor,
    groups: list[RowGroup],
    rows_per_chunk: int = 1000,
) -> tuple[Tensor, Tensor]:
    parts = packed_parts(hidden, groups, rows_per_chunk)
    actual = Samples.joined([sample(model, *part) for part in parts]).table
    assert (actual.shape[0], actual.dtype) == (3, torch.float64)
    return actual[0].long(), actual[1]


def packed_parts(
    hidden: Tensor, groups: list[RowGroup], rows_per_part: int
) -> Iterator[tuple[Tensor, list[RowGroup]]]:
    """Return the rows of the groups in order, in parts of at most `rows_per_part` rows."""
    rows: list[Tensor] = []
    pieces: list[RowGroup] = []
    for part in groups:
        for row in range(part.rows.stop - part.rows.start):
            own = [hidden[part.rows][row]]
            if part.unconditional_rows is not None:
                own.append(hidden[part.unconditional_rows][row])
            if rows and len(rows) + len(own) > rows_per_part:
                yield torch.stack(rows), pieces
                rows, pieces = [], []
            start = len(rows)
            rows += own
            unconditional = None if len(own) == 1 else slice(start + 1, start + 2)
            position = part.positions[row : row + 1]
            edits = None if part.edits is None else part.edits.piece(slice(row, row + 1))
            piece = {"rows": slice(start, start + 1), "unconditional_rows": unconditional}
            pieces.append(dataclasses.replace(part, positions=position, edits=edits, **piece))
    if rows:
        yield torch.stack(rows), pieces


def logits_of(model: HeadModel, hidden: Tensor, rows: slice) -> Tensor:
    return model.final_norm(hidden[rows]) @ model.weight.T


def formula(logits: Tensor, part: RowGroup) -> tuple[Tensor, Tensor]:
    """Return tokens and scores of [R, V] logits, step by step as in the published loop."""
    params = part.params
    assert params.seed is not None
    positions = part.positions.tolist()
    logits = logits.clone()
    if params.logits_eos_inf:
        logits[:, EOS] = -torch.inf
    if part.forbid_mask:
        logits[:, MASK] = -torch.inf
    noised = logits
    if params.temperature > 0:
        u = uniform_matrix(params.seed, 0, part.step, positions, NUM_COLUMNS)
        noised = logits.double().exp() / (-u.log()) ** params.temperature
    tokens = noised.argmax(dim=1)
    if params.confidence_eos_eot_inf:
        logits = logits.clone()
        logits[:, EOT] = -torch.inf
        if params.temperature == 0:
            logits[:, EOS] = -torch.inf
    if params.remasking == "random":
        return tokens, uniform_matrix(params.seed, 1, part.step, positions, 1)[:, 0]
    dtype = {"float64": torch.float64, "float32": torch.float32, "logits": logits.dtype}
    probabilities = torch.softmax(logits.to(dtype[params.confidence_dtype]), dim=1)
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
    actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float = 1e-5
) -> None:
    assert actual[0].dtype == torch.int64
    assert actual[0].tolist() == wanted[0].tolist()
    torch.testing.assert_close(actual[1].double(), wanted[1], rtol=tolerance, atol=1e-12)


# ---- one request -------------------------------------------------------------------------------


@pytest.mark.parametrize("forbid_mask", [False, True])
@pytest.mark.parametrize("parameters", SETTINGS, ids=[str(s) for s in SETTINGS])
def test_candidates_follow_the_formulas(parameters: dict[str, Any], forbid_mask: bool) -> None:
    model, hidden = head_model(), hidden_rows(64)
    part = group(list(range(20, 52)), step=5, forbid_mask=forbid_mask, **parameters)
    wanted = formula(logits_of(model, hidden, part.rows), part)
    actual = sampled(model, hidden, [part])
    assert actual[1].dtype == torch.float64
    assert_candidates(actual, wanted)
    assert not forbid_mask or MASK not in actual[0].tolist()


def test_the_special_columns_are_met() -> None:
    """If special tokens were never the best, the other tests would not detect ignored options."""
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
    token, score, _ = chosen(logits, cold)
    assert token.tolist() == [EOS, EOT, 3, EOS]
    assert score[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]
    assert score[2] == pytest.approx(math.exp(5) / (math.exp(5) + NUM_COLUMNS - 3), rel=1e-6)


def test_ties_go_to_the_lowest_token() -> None:
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[1, [7, 9, 30]] = 2.0
    for dtype in ("float32", "float64", "logits"):
        token = chosen(logits, group([0, 1], confidence_dtype=dtype)).token
        assert token.tolist() == [0, 7]


def test_confidence_saturates_as_its_dtype_says() -> None:
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[0, 1], logits[1, 2] = 25.0, 30.0
    narrow = chosen(logits, group([0, 1])).score
    wide = chosen(logits, group([0, 1], confidence_dtype="float64")).score
    assert narrow.tolist() == [1.0, 1.0]
    assert wide.dtype == torch.float64
    assert wide[0] < wide[1] < 1.0
    bf16 = logits.bfloat16()
    bf16[:, :20] += 1.0
    own = chosen(bf16, group([0, 1], confidence_dtype="logits")).score
    assert own.dtype == torch.bfloat16
    assert torch.equal(own, torch.softmax(bf16, 1).amax(1))


def test_guidance() -> None:
    """Logits are n + (s + 1)(c - n) in their own dtype, and all other steps follow."""
    model, hidden = head_model(), hidden_rows(40)
    for parameters in ({}, {"temperature": 0.9}, {"confidence_eos_eot_inf": True}):
        part = group(list(range(20)), unconditional=20, cfg_scale=1.5, **parameters)
        assert part.unconditional_rows is not None
        own = logits_of(model, hidden, part.rows)
        free = logits_of(model, hidden, part.unconditional_rows)
        wanted = formula(free + 2.5 * (own - free), part)
        assert_candidates(sampled(model, hidden, [part], 7), wanted)
        assert wanted[0].tolist() != formula(own, part)[0].tolist()


# ---- chunks and neighbours ---------------------------------------------------------------------


def mixed_groups() -> list[RowGroup]:
    return [
        group([0, 1, 2, 3, 4], step=1),
        group([10, 11], step=3),
        group([13, 14, 15], step=0, confidence_dtype="float64"),
        group([20, 21, 22], step=2, temperature=1.0),
        group([23], step=2),
        group([24, 25], step=4, remasking="random"),
        group([26, 27, 28], step=0, forbid_mask=True),
        group([30, 31, 32, 33], unconditional=10, cfg_scale=1.0),
        group([34, 35], step=9, confidence_dtype="float64"),
        edited_group([36, 37, 38], presence_penalty=1.0, min_tokens=40),
        edited_group([39, 40], repetition_penalty=1.5, temperature=0.7, top_k=3),
        group([41, 42], temperature=0.7, top_p=0.6),
        group([43, 44, 45], temperature=0.9, min_p=0.2),
        edited_group([46, 47], unconditional=2, cfg_scale=1.0, logit_bias={"7": 3}),
    ]


def edited_group(rows: list[int], **parameters: Any) -> RowGroup:
    """Return rows of a request whose canvas has two tokens."""
    part = group(rows, **parameters)
    tokens = np.full(201, MASK)
    tokens[[0, 100, 101]] = 1, 7, 9
    editor = LogitEditor(part.params, tokens, 1)
    return dataclasses.replace(part, edits=editor.of(tokens, part.positions.numpy() + 1))


@pytest.mark.parametrize("rows_per_chunk", [2, 3, 7, 1000])
def test_neighbours_and_chunks_change_nothing(rows_per_chunk: int) -> None:
    model, hidden, groups = head_model(), hidden_rows(50), mixed_groups()
    alone = [sampled(model, hidden, [part]) for part in groups]
    model.most_rows = 0
    tokens, scores = sampled(model, hidden, groups, rows_per_chunk)
    assert model.most_rows <= rows_per_chunk
    assert tokens.tolist() == torch.cat([token for token, _ in alone]).tolist()
    wanted = torch.cat([score for _, score in alone])
    # Products of other shapes round differently.
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 3])
def test_rows_whose_logits_are_copied_go_a_few_at_a_time(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden, seen = head_model(), hidden_rows(50), []

    def adjust(logits: Tensor, positions: Tensor) -> Tensor:
        seen.append(len(logits))
        return logits + 0.01 * positions[:, None] * logits

    def candidates(part: RowGroup) -> Tensor:
        first = dataclasses.replace(part, rows=slice(0, len(part.positions)))
        return sample(model, hidden[part.rows], [first]).table

    plain = group(list(range(7)), temperature=0.8)
    groups = [
        dataclasses.replace(plain, params=dataclasses.replace(plain.params, logprobs=2)),
        group(list(range(5)), confidence_dtype="float64"),
        dataclasses.replace(group(list(range(10, 17))), adjust=adjust),
        dream(list(range(20, 27)), temperature=0.5, top_p=0.9),
    ]
    wanted = [candidates(part) for part in groups]
    assert seen == [7]
    seen.clear()
    copies = sampler.BYTES_OF_COPIES * NUM_COLUMNS * rows_at_a_time
    monkeypatch.setattr(sampler, "COPIES_BYTES", copies)
    for part, whole in zip(groups, wanted, strict=True):
        assert torch.equal(candidates(part), whole)
    assert sum(seen) == 7 and max(seen) == rows_at_a_time


def test_plain_requests_share_a_product() -> None:
    model, hidden = head_model(), hidden_rows(20)
    sampled(model, hidden, [group([0, 1]), group([2]), group([5, 6, 7])])
    assert model.most_rows == 6


@pytest.mark.parametrize("groups", [[], [group([])], [group([]), group([], temperature=1.0)]])
def test_no_rows(groups: list[RowGroup]) -> None:
    tokens, scores = sampled(head_model(), hidden_rows(3), groups, 4)
    assert (tokens.shape, tokens.dtype) == ((0,), torch.int64)
    assert (scores.shape, scores.dtype) == ((0,), torch.float64)


def test_empty_groups_among_others() -> None:
    model, hidden = head_model(), hidden_rows(5)
    groups = [group([]), group([1, 2]), group([]), group([4], temperature=1.0)]
    tokens, _ = sampled(model, hidden, groups, 4)
    assert tokens.numel() == 3


# ---- random numbers ----------------------------------------------------------------------------


def test_noise_is_the_published_counter_generator() -> None:
    positions = torch.tensor([0, 1, 7, 1000, -2])
    for seed in (0, 1, 2**32 + 5, 2**63 + 9, 2**64 - 1):
        whole = ops.philox_uniform(seed, 0, 3, positions, range(30))
        wanted = uniform_matrix(seed, 0, 3, positions.tolist(), 30)
        assert torch.equal(whole, wanted)
        part = ops.philox_uniform(seed, 0, 3, positions, range(13, 22))
        assert torch.equal(part, wanted[:, 13:22])


def test_the_largest_number_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column with U near 1 has nearly infinite noise, so it is chosen."""

    def uniform(seed: int, purpose: int, step: int, positions: Tensor, columns: range) -> Tensor:
        assert (seed, step) == (77, 6)
        u = torch.full((positions.numel(), len(columns)), 0.5, dtype=torch.float64)
        if purpose == 1:
            return u * positions[:, None] / 10
        u[:, positions % 7] = 1 - 1e-15
        return u

    monkeypatch.setattr(ops, "philox_uniform", uniform)
    parameters = {"temperature": 1.0, "remasking": "random", "confidence_dtype": "float64"}
    part = group([0, 1, 2], step=6, **parameters)
    tokens, scores = sampled(head_model(), hidden_rows(3) / 100, [part], 1)
    assert tokens.tolist() == [3, 4, 5]
    assert scores.tolist() == pytest.approx([0.15, 0.2, 0.25])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    """Chi-square is computed over many canvas positions that all have the same logits."""
    num_draws = 20_000
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    part = dataclasses.replace(
        group([], temperature=temperature), positions=torch.arange(num_draws)
    )
    tokens, scores, _ = chosen(row.repeat(num_draws, 1), part)
    wanted = torch.softmax(row.double() / temperature, 0) * num_draws
    counts = torch.bincount(tokens, minlength=5)
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    assert chi_square < 18.47  # 0.1 % point of four degrees of freedom
    # The score does not depend on noise or temperature.
    torch.testing.assert_close(scores, torch.softmax(row, 0)[tokens], rtol=1e-6, atol=0)


def test_draws_of_steps_seeds_and_purposes_differ() -> None:
    logits = torch.zeros(64, NUM_COLUMNS)

    def tokens(**changes: Any) -> list[int]:
        part = group(list(range(64)), **{"temperature": 1.0, **changes})
        actual: list[int] = chosen(logits, part).token.tolist()
        return actual

    assert tokens() == tokens()
    assert len({tuple(tokens()), tuple(tokens(step=1)), tuple(tokens(seed=78))}) == 3


def test_later_draws_are_those_of_the_steps_that_follow() -> None:
    """Extra draws equal later steps, for random scores too, with a group that has fewer draws."""
    model, hidden = head_model(), hidden_rows(8)
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "cfg_scale": 0.0, "step": 4},
        {"temperature": 0.5, "confidence_dtype": "float64", "remasking": "random"},
        {"temperature": 0.8, "forbid_mask": True, "logits_eos_inf": True},
    ]
    for count, parameters in enumerate(settings):
        groups = [
            group([0, 1, 2, 3], **parameters),
            group([4, 5, 6, 7], **{**parameters, "seed": 5}),
        ]
        later = [dataclasses.replace(groups[0], num_extra_draws=count), groups[1]]
        actual = sample(model, hidden, later).table
        assert len(actual) == 3 * (1 + count)
        for number in range(1 + count):
            moved = [dataclasses.replace(g, step=g.step + number) for g in groups]
            wanted = sample(model, hidden, moved).table
            own = slice(0, 8) if number == 0 else slice(0, 4)
            assert torch.equal(actual[3 * number : 3 * number + 3, own], wanted[:, own])


def test_a_seed_must_have_been_drawn() -> None:
    part = dataclasses.replace(
        group([0]), params=dataclasses.replace(decided(temperature=1.0), seed=None)
    )
    with pytest.raises(ValueError, match="seed"):
        chosen(torch.zeros(1, NUM_COLUMNS), part)


# ---- vocabulary in parts -----------------------------------------------------------------------


def on_two_ranks(
    logits: Tensor,
    boundary: int,
    work: Callable[[Tensor, int], tuple[Tensor, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Tensor, ...]:
    """Return the results of two ranks, run by two threads that wait for each other to exchange.

    `work` receives the columns of a rank and the number of its first column.
    """
    shards = ((0, logits[:, :boundary]), (boundary, logits[:, boundary:]))
    meeting = threading.Barrier(2, timeout=20)
    rank = threading.local()
    sent: list[Tensor] = [torch.empty(0)] * 2

    def gather(mine: Tensor) -> Tensor:
        sent[rank.number] = mine
        meeting.wait()
        whole = torch.stack(sent)
        meeting.wait()
        return whole

    def run(number: int) -> tuple[Tensor, ...]:
        rank.number = number
        start, columns = shards[number]
        return work(columns, start)

    monkeypatch.setattr(ops_sampling, "get_tensor_model_parallel_world_size", lambda: 2)
    for module in (ops_sampling, exact_scores, named_tokens):
        monkeypatch.setattr(module, "tensor_parallel", lambda: SimpleNamespace(gather=gather))
    widest = max(boundary, logits.shape[1] - boundary)
    monkeypatch.setattr(ops_sampling, "pad_vocab_size", lambda _: 2 * widest)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    for mine, others in zip(first, second, strict=True):
        # All ranks have the same result.
        torch.testing.assert_close(mine, others, rtol=0, atol=0, equal_nan=True)
    return first


def sharded(
    logits: Tensor, part: RowGroup, boundary: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Return tokens and scores of `sample_group` on two ranks."""

    def work(columns: Tensor, start: int) -> tuple[Tensor, ...]:
        return chosen(columns, part, start=start, vocab_size=logits.shape[1])

    token, score, _ = on_two_ranks(logits, boundary, work, monkeypatch)
    return token, score


@pytest.mark.parametrize("boundary", [1, 17, 20, 37, 39])
@pytest.mark.parametrize("parameters", SETTINGS, ids=[str(s) for s in SETTINGS])
def test_two_ranks_choose_as_one(
    parameters: dict[str, Any], boundary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden = head_model(), hidden_rows(64)
    part = group(list(range(20, 52)), step=5, forbid_mask=True, **parameters)
    logits = logits_of(model, hidden, part.rows)
    wanted = formula(logits, part)
    actual = sharded(logits, part, boundary, monkeypatch)
    assert actual[0].tolist() == wanted[0].tolist()
    torch.testing.assert_close(actual[1].double(), wanted[1], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("parameters", [{}, {"confidence_dtype": "float64"}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_of_rows_without_numbers(
    ranks: int, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of -inf has the score zero, and one with NaN has NaN, so that the request fails."""
    logits = torch.zeros(4, NUM_COLUMNS)
    logits[0], logits[1, 2], logits[2, 30] = -torch.inf, torch.nan, torch.inf
    part = group([0, 1, 2, 3], **parameters)
    if ranks == 1:
        _, scores, _ = chosen(logits, part)
    else:
        _, scores = sharded(logits.clone(), part, 17, monkeypatch)
    assert scores[0] == 0 and scores[1].isnan() and scores[2].isnan()
    assert scores[3] == pytest.approx(1 / NUM_COLUMNS)


def test_ties_across_ranks_go_to_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[1, [15, 30]] = 3.0
    assert sharded(logits, group([0, 1]), 20, monkeypatch)[0].tolist() == [0, 15]


def test_a_rank_of_excluded_columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maximum of that rank is -inf, which must not become NaN elsewhere."""
    logits = torch.zeros(2, NUM_COLUMNS)
    logits[0, 3] = logits[1, EOS] = 4.0
    part = group([0, 1], confidence_eos_eot_inf=True)
    first = logits[:, : EOT + 2]
    token, score = sharded(first, part, EOT, monkeypatch)
    assert token.tolist() == [3, EOS]
    assert score[0] == pytest.approx(math.exp(4) / (math.exp(4) + EOT - 1), rel=1e-6)
    assert score[1] == 0.0


@pytest.mark.parametrize("boundary", [1, 17, 39, NUM_COLUMNS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_tokens_are_exact(
    boundary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are those of fp32 on one rank or two, whichever rank has the token."""
    logits = (8 * torch.randn(32, NUM_COLUMNS, generator=torch.Generator().manual_seed(3))).to(
        dtype
    )
    logits[3, ::2] = -torch.inf
    token_ids = torch.stack([torch.randperm(NUM_COLUMNS)[:5] for _ in range(32)])
    wanted = torch.log_softmax(logits.double(), dim=-1).gather(1, token_ids).float()

    def scored(columns: Tensor, start: int) -> tuple[Tensor, ...]:
        actual = ops.token_logprobs(columns, token_ids, first_column=start, vocab_size=NUM_COLUMNS)
        return (actual,)

    if boundary == NUM_COLUMNS:
        (actual,) = scored(logits, 0)
    else:
        (actual,) = on_two_ranks(logits, boundary, scored, monkeypatch)
    assert torch.equal(actual.float(), wanted)


@pytest.mark.parametrize("boundary", [1, 17, 39, NUM_COLUMNS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_entropies_leave_out_what_is_forbidden(
    boundary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two ranks may have no finite column, and each row forbids other tokens."""
    logits = (8 * torch.randn(32, NUM_COLUMNS, generator=torch.Generator().manual_seed(4))).to(
        dtype
    )
    logits[3, :17] = logits[4, 1:] = -torch.inf
    kept = logits.double()
    kept[::2, 5] = kept[1::2, 30] = -torch.inf
    masks = torch.tensor([1, 2], dtype=torch.int32).repeat(16)
    token_ids = kept.topk(2).indices
    wanted = torch.log_softmax(kept, dim=-1)

    def scored(columns: Tensor, start: int) -> tuple[Tensor, ...]:
        rows = ops.Rows(columns=(5, 30), forbidden=masks)
        return ops.logprobs_and_entropies(
            columns, token_ids, rows, first_column=start, vocab_size=NUM_COLUMNS
        )

    if boundary == NUM_COLUMNS:
        logprobs, entropies = scored(logits, 0)
    else:
        logprobs, entropies = on_two_ranks(logits, boundary, scored, monkeypatch)
    torch.testing.assert_close(logprobs, wanted.gather(1, token_ids), rtol=1e-6, atol=1e-6)
    own = torch.special.entr(wanted.exp()).sum(dim=1)
    torch.testing.assert_close(entropies, own, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 33, 300])
def test_log_probabilities_and_entropies_of_a_gpu(num_rows: int, dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(num_rows, 126_464, device="cuda")).to(dtype)
    logits[:, 9::10] = -torch.inf
    kept = logits.double()
    kept[:, 3] = -torch.inf
    wanted, token_ids = torch.log_softmax(kept, dim=-1), kept.topk(3).indices
    logprobs, entropies = ops.logprobs_and_entropies(
        logits, token_ids, ops.Rows(columns=(3,), forbidden=1), first_column=0, vocab_size=126_464
    )
    torch.testing.assert_close(logprobs, wanted.gather(1, token_ids), rtol=1e-5, atol=1e-5)
    own = torch.special.entr(wanted.exp()).sum(dim=1)
    torch.testing.assert_close(entropies, own, rtol=1e-5, atol=1e-5)


# ---- other scores ------------------------------------------------------------------------------


def entropies(logits: Tensor, epsilon: float) -> Tensor:
    p = torch.softmax(logits.double(), dim=1)
    return (p * torch.log(p + epsilon)).sum(dim=1)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_entropy_is_that_of_the_noise_free_logits(epsilon: float, temperature: float) -> None:
    scoring = CandidateScoring(score="negative_entropy", epsilon=epsilon)
    model, hidden = head_model(), hidden_rows(32)
    part = group(list(range(32)), scoring=scoring, temperature=temperature)
    logits = logits_of(model, hidden, part.rows)
    tokens, scores, greedy = chosen(logits, part)
    assert tokens.tolist() == formula(logits, part)[0].tolist()
    torch.testing.assert_close(scores.double(), entropies(logits, epsilon), rtol=1e-5, atol=1e-7)
    assert torch.equal(greedy, tokens)


def test_random_remasking_replaces_entropy() -> None:
    """The random number replaces the entropy, so that the smallest one is the most certain."""
    scoring = CandidateScoring(score="negative_entropy", epsilon=1e-12)
    part = group([0, 1], scoring=scoring, remasking="random")
    scores = chosen(torch.zeros(2, NUM_COLUMNS), part).score
    wanted = -uniform_matrix(77, 1, 0, part.positions.tolist(), 1)[:, 0]
    assert scores.tolist() == pytest.approx(wanted.tolist())


def test_the_greedy_token_has_no_noise() -> None:
    part = group(list(range(64)), scoring=CandidateScoring(greedy=True), temperature=2.0)
    logits = logits_of(head_model(), hidden_rows(64), part.rows)
    tokens, _, greedy = chosen(logits, part)
    assert greedy.tolist() == logits.argmax(dim=1).tolist()
    assert tokens.tolist() != greedy.tolist()


@pytest.mark.parametrize("boundary", [20, 39])  # only the last rank has fewer columns
@pytest.mark.parametrize(
    "scoring",
    [
        CandidateScoring(score="negative_entropy", epsilon=1e-12, greedy=True),
        CandidateScoring(draw="categorical"),
        CandidateScoring(score="margin", draw="categorical"),
        CandidateScoring(score="negative_entropy", epsilon=1e-10, draw="categorical"),
        CandidateScoring(draw="filtered", greedy=True),
        CandidateScoring(score="negative_entropy", epsilon=1e-12, draw="filtered", scores_all=True),
    ],
    ids=["entropy", "probability", "margin", "categorical-entropy", "filtered", "filtered-entropy"],
)
def test_two_ranks_score_as_one(
    scoring: CandidateScoring, boundary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for temperature in (0.0, 0.9):
        part = group(list(range(20)), scoring=scoring, temperature=temperature)
        logits = logits_of(head_model(), hidden_rows(20), part.rows)
        wanted = chosen(logits, part)
        with monkeypatch.context() as ranks:
            actual = sharded(logits, part, boundary, ranks)
        assert torch.equal(actual[0], wanted.token)
        torch.testing.assert_close(actual[1], wanted.score, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("boundary", [20, 39])  # only the last rank has fewer columns
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 5, "min_p": 0.01, "confidence_dtype": "float64"},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"3": 2, "30": 1}},
        {"allowed_token_ids": [2, 25, 30], "min_tokens": 3, "logprobs": 2},
        {"temperature": 0.7, "frequency_penalty": 0.9, "top_p": 0.5, "logprobs": 0},
    ],
)
def test_two_ranks_shape_as_one(
    parameters: dict[str, Any], boundary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = parameters.get("logprobs")
    part = group(list(range(20)), **{k: v for k, v in parameters.items() if k != "logprobs"})
    params = dataclasses.replace(part.params, logprobs=report)
    edits = None
    if params.edits is not None:
        tokens = np.full(101, MASK)
        tokens[[0, 8, 9]] = 1, 5, 30
        edits = LogitEditor(params, tokens, 1).of(tokens, part.positions.numpy() + 1)
    part = dataclasses.replace(part, params=params, edits=edits)
    logits = 2 * logits_of(head_model(), hidden_rows(20), part.rows)

    def work(columns: Tensor, start: int) -> tuple[Tensor, ...]:
        model = GivenLogits(start)
        return tuple(sample(model, columns, [part]).table)

    wanted = work(logits, 0)
    with monkeypatch.context() as ranks:
        actual = on_two_ranks(logits, boundary, work, ranks)
    assert torch.equal(actual[0], wanted[0])
    for own, other in zip(actual[1:], wanted[1:], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)


# ---- Dream's draw ------------------------------------------------------------------------------


def dream(rows: list[int], alg: str = "maskgit_plus", **parameters: Any) -> RowGroup:
    return group(rows, scoring=SCORINGS[alg], algorithm="dream", alg=alg, **parameters)


def kept(logits: Tensor, top_p: float | None, top_k: int | None) -> list[set[int]]:
    """Return the tokens that top-p and then top-k leave in each row, found token by token."""
    results = []
    for row in logits.double():
        order = sorted(range(row.numel()), key=lambda i: (-float(row[i]), i))
        probabilities = torch.softmax(row, 0)
        left, total = [], 0.0
        for token in order:
            left.append(token)  # also the token that exceeds the limit
            total += float(probabilities[token])
            if top_p is not None and total > top_p:
                break
        if top_k is not None and len(left) > top_k:
            least = float(row[left[top_k - 1]])
            left = [token for token in left if float(row[token]) >= least]
        results.append(set(left))
    return results


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(None, None), (0.5, None), (0.9, None), (None, 3), (0.8, 4), (1e-6, None)]
)
@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
def test_dream_scores_what_is_left(alg: str, top_p: float | None, top_k: int | None) -> None:
    limits = {k: v for k, v in {"top_p": top_p, "top_k": top_k}.items() if v is not None}
    part = dream(list(range(24)), alg, temperature=0.7, **limits)
    logits = logits_of(head_model(), hidden_rows(24), part.rows)
    tokens, scores, _ = chosen(logits, part)
    for row, left in enumerate(kept(logits / 0.7, top_p, top_k)):
        assert int(tokens[row]) in left
        mine = torch.full((NUM_COLUMNS,), -torch.inf, dtype=torch.float64)
        index = sorted(left)
        mine[index] = logits[row].double()[index] / 0.7
        p = torch.softmax(mine, 0)
        best = p.sort(descending=True).values
        wanted = {
            "maskgit_plus": p[tokens[row]],
            "topk_margin": best[0] - best[1],
            "entropy": (p * torch.log(p + 1e-10)).sum(),
        }[alg]
        assert float(scores[row]) == pytest.approx(float(wanted), rel=1e-4, abs=1e-6)


def test_dream_is_greedy_at_temperature_zero() -> None:
    part = dream(list(range(24)), top_p=0.3)
    logits = logits_of(head_model(), hidden_rows(24), part.rows)
    assert chosen(logits, part).token.tolist() == logits.argmax(dim=1).tolist()


def test_dream_draws_with_the_frequencies_of_what_is_left() -> None:
    num_draws = 20_000
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    part = dataclasses.replace(
        dream([], temperature=0.8, top_k=4), positions=torch.arange(num_draws)
    )
    tokens = chosen(row.repeat(num_draws, 1), part).token
    counts = torch.bincount(tokens, minlength=5)
    assert counts[2] == 0
    left = torch.tensor([0, 1, 3, 4])
    wanted = torch.softmax(row[left].double() / 0.8, 0) * num_draws
    assert float(((counts[left] - wanted) ** 2 / wanted).sum()) < 16.27  # 0.1 %, 3 degrees


# ---- logits that a rule adjusts ----------------------------------------------------------------


def test_adjusted_logits_replace_the_models() -> None:
    seen: list[Tensor] = []

    def adjust(logits: Tensor, positions: Tensor) -> Tensor:
        seen.append(positions)
        changed = logits.clone()
        changed[:, 11] = 50.0
        return changed

    part = dataclasses.replace(group([4, 5, 6]), adjust=adjust)
    tokens, scores = sampled(head_model(), hidden_rows(8), [part], 2)
    assert tokens.tolist() == [11, 11, 11]
    assert scores.tolist() == [1.0, 1.0, 1.0]
    assert torch.cat(seen).tolist() == part.positions.tolist()
