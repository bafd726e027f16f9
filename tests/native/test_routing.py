# SPDX-License-Identifier: Apache-2.0
"""The choice of experts, the order of rows, and sums of terms, with and without kernels."""

import math
from itertools import pairwise

import pytest
import torch

from gather_gemm import SOFTMAX, Scoring, reference, route, route_rows, sum_terms
from tests.native.support import (
    DEPTHS,
    SCORINGS,
    SIZES,
    WINDOWED,
    awkward_logits,
    check_routing,
    check_rows,
    check_sums,
    check_windows,
    exact_rows,
    experts_of,
    window_logits,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def defined_routing(logits, num_chosen, bias, scoring):
    """Return the experts of one row, ascending, and their weights, in Python's float64."""
    logits = [logit * scoring.logit_scale for logit in logits]
    peak = max(logits)
    if scoring.is_sigmoid:
        scores = [1.0 / (1.0 + math.exp(-g)) if g > -math.inf else 0.0 for g in logits]
    else:
        total = sum(math.exp(g - peak) for g in logits)
        scores = [math.exp(g - peak) / total for g in logits]
    ranks = [score + more for score, more in zip(scores, bias, strict=True)]
    size = len(ranks) // scoring.num_groups

    def group_rank(group):
        return -sum(sorted(ranks[group * size : (group + 1) * size])[-2:])

    groups = range(scoring.num_groups)
    if scoring.num_groups > 1:
        groups = sorted(groups, key=group_rank)[: scoring.num_kept_groups]
    allowed = [e for e in range(len(ranks)) if e // size in groups]
    experts = sorted(sorted(allowed, key=lambda e: -ranks[e])[:num_chosen])
    weights = [scores[e] for e in experts]
    whole = sum(weights) + 1e-20 if scoring.is_normalised else 1.0
    return experts, [weight / whole * scoring.scale for weight in weights]


@pytest.mark.parametrize(
    ("device", "dtype", "has_bias"),
    [
        ("cpu", torch.float32, True),
        ("cpu", torch.bfloat16, False),
        pytest.param("cuda", torch.float32, True, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, False, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, True, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), SIZES)
def test_against_the_definition(
    generator, device, dtype, has_bias, num_rows, num_experts, num_chosen
):
    wide = torch.randn(num_rows, num_experts + 3, generator=generator).to(dtype).to(device)
    logits = wide[:, :num_experts]
    bias = torch.randn(num_experts, generator=generator).to(device) if has_bias else None
    routing = route(logits, num_chosen, bias)
    probabilities = logits.double().softmax(-1)
    scores = probabilities if bias is None else probabilities + bias
    assert sorted(routing.slots.tolist()) == list(range(num_rows * num_chosen))
    rows = routing.slots // num_chosen
    for start, end in pairwise([0, *routing.ends.tolist()]):
        assert (rows[start:end].diff() > 0).all()
    # Experts ascend, and each is better than the others up to fp32 rounding.
    experts = experts_of(routing, num_rows, num_chosen)
    assert (experts.diff(dim=1) > 0).all()
    others = scores.scatter(1, experts, -torch.inf).amax(dim=1)
    assert (scores.gather(1, experts).amin(dim=1) >= others - 1e-6).all()
    wanted = probabilities.gather(1, experts)
    torch.testing.assert_close(routing.weights.double(), wanted, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 9, 70])
@pytest.mark.parametrize(("num_experts", "num_chosen", "scoring"), SCORINGS, ids=str)
@pytest.mark.parametrize("is_awkward", [False, True])
def test_every_scoring_against_its_definition(
    generator, device, num_rows, num_experts, num_chosen, scoring, is_awkward
):
    if is_awkward:
        logits = awkward_logits(generator, num_rows, num_experts)
        bias = torch.randint(0, 3, (num_experts,), generator=generator) / 4
    else:
        logits = torch.randn(num_rows, num_experts, generator=generator)
        bias = torch.randn(num_experts, generator=generator)
    routing = route(logits.to(device), num_chosen, bias.to(device), scoring)
    experts = experts_of(routing, num_rows, num_chosen).tolist()
    for row, values in enumerate(logits.tolist()):
        wanted, weights = defined_routing(values, num_chosen, bias.tolist(), scoring)
        if not is_awkward or scoring.is_sigmoid:  # softmax of equal logits differs by rounding
            assert experts[row] == wanted
        if experts[row] == wanted:
            given = routing.weights[row].double().cpu()
            torch.testing.assert_close(given, torch.tensor(weights).double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_and_weights_may_stay_fp32(generator, device):
    """Two logits are equal in bf16, and a weight is rounded by bf16."""
    x = torch.ones(1, 2, dtype=torch.bfloat16, device=device)
    gate = torch.tensor([[1.0, 0.0], [1.0, 2**-10], [-9.0, 0.0]], device=device).bfloat16()
    rounded = route_rows(x, gate, 1, scoring=Scoring(is_sigmoid=True))
    exact = route_rows(x, gate, 1, scoring=Scoring(is_sigmoid=True, in_fp32=True))
    assert (rounded.ends.tolist(), exact.ends.tolist()) == ([1, 1, 1], [0, 1, 1])
    assert (rounded.weights.dtype, exact.weights.dtype) == (torch.bfloat16, torch.float32)
    wanted = torch.sigmoid(torch.tensor(1 + 2**-10, dtype=torch.float64))
    torch.testing.assert_close(exact.weights[0, 0].double().cpu(), wanted, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 3, 33, 256, 1025, 2048])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen", "scoring"), SCORINGS[:3], ids=str)
def test_kernels_against_the_reference(
    generator, num_rows, has_bias, num_experts, num_chosen, scoring
):
    """The kernel runs in one block and in many, with more slots than one program sorts at once."""
    logits = torch.randn(num_rows, num_experts, generator=generator).bfloat16().cuda()
    bias = torch.rand(num_experts, generator=generator).cuda() if has_bias else None
    check_routing(logits, num_chosen, bias, scoring)


@pytest.mark.gpu
def test_all_rows_may_go_to_the_same_experts():
    """3,000 rows choose the first 8 of 256 experts, and then the last 8."""
    logits = torch.zeros(3000, 256, device="cuda")
    check_routing(logits, 8, None)
    logits[:, -8:] = 1.0
    check_routing(logits, 8, None)


# Numbers of rows and experts, and depths; then every way to choose.
ROW_CASES = [
    *((*size, depth, SOFTMAX) for size in SIZES for depth in DEPTHS),
    *((rows, num, chosen, 600, how) for rows in (1, 33, 300) for num, chosen, how in SCORINGS),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen", "depth", "scoring"), ROW_CASES)
def test_rows_go_where_their_logits_send_them(
    generator, device, dtype, num_rows, num_experts, num_chosen, depth, scoring
):
    x, gate = exact_rows(generator, num_rows, num_experts, depth, dtype)
    bias = torch.randn(num_experts, generator=generator).to(device)
    for given_bias in (None, bias):
        check_rows(x.to(device), gate.to(device), num_chosen, given_bias, scoring)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 32, 33, 255, 256, 257, 2000])
def test_scores_of_any_numbers_are_rounded_once(generator, num_rows):
    """Scores are fp32 sums with one rounding to the dtype, compared with float64."""
    x = torch.randn(num_rows, 2048, generator=generator).bfloat16().cuda()
    gate = (torch.randn(64, 2048, generator=generator) / 2048**0.5).bfloat16().cuda()
    probabilities = (x.double() @ gate.double().t()).softmax(-1)
    routing = route_rows(x, gate, 8)
    experts = experts_of(routing, num_rows, 8)
    assert (experts.diff(dim=1) > 0).all()
    # A logit below 8 is rounded by at most 2**-6, and its probability by the same share.
    wanted = probabilities.gather(1, experts)
    torch.testing.assert_close(routing.weights.double(), wanted, rtol=2**-4, atol=0)
    best = probabilities.topk(8).values
    torch.testing.assert_close(wanted.sort(descending=True).values, best, rtol=2**-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [32, 100])
@pytest.mark.parametrize("scoring", [SOFTMAX, Scoring(True, window=32, capacity=20)], ids=str)
def test_a_graph_routes_whatever_rows_it_finds(generator, num_rows, scoring):
    x, gate = (matrix.cuda() for matrix in exact_rows(generator, num_rows, 64, 512, torch.bfloat16))
    route_rows(x, gate, 8, scoring=scoring)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = route_rows(x, gate, 8, scoring=scoring)
    for _ in range(3):
        x.copy_(x.flip(0).roll(1, dims=1))
        for tensor in given:
            tensor.zero_()
        graph.replay()
        logits = (x.float() @ gate.float().t()).to(x.dtype)
        weights, slots, ends = reference.route(logits, 8, None, scoring)
        assert torch.equal(given.slots, slots) and torch.equal(given.ends, ends)
        torch.testing.assert_close(given.weights, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 9, 300])
def test_an_expert_of_all_rows_is_the_first(generator, device, num_rows):
    """A shared expert becomes expert 0, with the last slot of each row and the weight 1."""
    logits = torch.randn(num_rows, 20, generator=generator).to(device)
    alone = route(logits, 3)
    given = route(logits, 3, has_shared=True)
    assert torch.equal(given.weights[:, :-1], alone.weights) and (given.weights[:, -1] == 1).all()
    experts = experts_of(given, num_rows, 4)
    assert (experts[:, -1] == 0).all()
    assert torch.equal(experts[:, :-1], experts_of(alone, num_rows, 3) + 1)
    for start, end in pairwise([0, *given.ends.tolist()]):
        assert (given.slots[start:end].diff() > 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [40, 200])
def test_the_lowest_expert_wins_among_equals(device, num_rows):
    routing = route(torch.zeros(num_rows, 64, device=device), 8)
    assert routing.ends.tolist() == [num_rows * min(end, 8) for end in range(1, 65)]
    assert routing.slots.view(8, num_rows)[3].tolist() == list(range(3, num_rows * 8, 8))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_numbers_still_goes_somewhere(device):
    """A row of NaN keeps valid experts and a NaN result, and does not change other rows."""
    logits = torch.arange(24.0, device=device).view(3, 8)
    logits[1, 4] = torch.nan
    routing = route(logits, 2)
    assert sorted(routing.slots.tolist()) == list(range(6))
    assert routing.ends[-1] == 6
    assert routing.weights[1].isnan().all()
    assert not routing.weights[[0, 2]].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    routing = route(torch.empty(0, 6, device=device), 2)
    assert routing.weights.shape == (0, 2) and len(routing.slots) == 0
    assert routing.ends.tolist() == [0] * 6
    routing = route_rows(torch.empty(0, 4, device=device), torch.empty(6, 4, device=device), 2)
    assert routing.weights.shape == (0, 2) and routing.ends.tolist() == [0] * 6
    routing = route(torch.empty(0, 6, device=device), 2, has_shared=True)
    assert routing.weights.shape == (0, 3) and routing.ends.tolist() == [0] * 7
    for scoring in Scoring(window=4, capacity=3), Scoring(num_groups=3, num_kept_groups=2):
        routing = route(torch.empty(0, 6, device=device), 2, None, scoring)
        assert routing.weights.shape == (0, 2) and routing.ends.tolist() == [0] * 6
    assert sum_terms(torch.empty(0, 2, 8, device=device)).shape == (0, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (9, 5, 40), (33, 8, 1500)])
def test_sums_of_terms(generator, device, dtype, shape):
    check_sums(generator, shape, dtype, device)


TERMS = torch.zeros(4, 2, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route(torch.zeros(4), 1), r"logits must be \[R, E\]"),
        (lambda: route(torch.zeros(4, 2000), 1), "E at most 1024, got 2000"),
        (lambda: route_rows(torch.zeros(4), torch.zeros(6, 8), 1), "route_rows: x must be"),
        (lambda: route_rows(torch.zeros(4, 8), torch.zeros(6, 7), 1), r"gate must be \['any', 8\]"),
        (lambda: route_rows(torch.zeros(4, 8), torch.zeros(6, 8), 7), "from 1 to 6, got 7"),
        (lambda: route_rows(torch.zeros(4, 8), torch.zeros(2000, 8), 7), "route_rows: wanted E"),
        (lambda: route(torch.zeros(4, 4, dtype=torch.int64), 1), "got torch.int64"),
        (lambda: route(torch.zeros(4, 6).t(), 1), "columns of logits must be contiguous"),
        (lambda: route(torch.zeros(4, 6), 7), "num_chosen must be from 1 to 6, got 7"),
        (lambda: route(torch.zeros(4, 6), 2, torch.zeros(5)), r"bias must be float32 \[6\]"),
        (lambda: route(torch.zeros(4, 6), 2, torch.zeros(6).half()), "got torch.float16"),
        (lambda: route(torch.zeros(4, 6), 2, None, Scoring(num_groups=4)), "1 of 4 groups"),
        (lambda: route(torch.zeros(4, 6), 2, None, Scoring(num_groups=6)), "groups of two or more"),
        (lambda: route(torch.zeros(4, 6), 3, None, Scoring(num_groups=3)), "at least 3 of 6"),
        (lambda: sum_terms(TERMS, torch.zeros(4, 3)), r"weights must be .* \[4, 2\]"),
        (lambda: sum_terms(TERMS, None, torch.zeros(4)), r"addend must be"),
        (lambda: sum_terms(torch.zeros(4, 6)), r"terms must be \[R, k, D\]"),
        (lambda: sum_terms(torch.zeros(4, 0, 6)), "at least one term"),
        (lambda: sum_terms(TERMS, out=torch.zeros(4, 5)), r"out must be .* \[4, 6\]"),
    ],
)
def test_arguments_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "num_chosen", "scoring"), WINDOWED, ids=str)
def test_rows_of_a_window_choose_among_the_same_experts(
    generator, device, num_rows, dtype, num_experts, num_chosen, scoring
):
    logits = window_logits(generator, num_rows, num_experts, scoring).to(device, dtype)
    bias = (torch.randint(0, 3, (num_experts,), generator=generator) / 8).to(device)
    for given in (None, bias):
        check_windows(logits, num_chosen, given, scoring)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 32, 100, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen", "scoring"), WINDOWED, ids=str)
def test_logits_of_windows_may_come_in_parts(
    generator, device, num_rows, dtype, in_parts, num_experts, num_chosen, scoring
):
    x, gate = exact_rows(generator, num_rows, num_experts, 600, dtype)
    bias = torch.randn(num_experts, generator=generator).to(device)
    for given in (None, bias):
        tensors = x.to(device), gate.to(device)
        check_rows(*tensors, num_chosen, given, scoring, in_parts=in_parts)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_that_no_program_holds(generator, device):
    scoring = Scoring(True, window=600, capacity=9)
    logits = window_logits(generator, 700, 40, scoring).to(device)
    check_windows(logits, 3, None, scoring)


def test_the_capacity_of_a_window_is_checked():
    scoring = Scoring(window=4, capacity=5)
    with pytest.raises(ValueError, match="capacity of a window must be from 6 to 16, got 5"):
        route(torch.zeros(4, 16), 6, None, scoring)
