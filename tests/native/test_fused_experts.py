# SPDX-License-Identifier: Apache-2.0
"""fused_ops' kernels for experts match float64 and the Triton kernels of gather_gemm."""

import pytest
import torch

from gather_gemm import SOFTMAX, Routing, Scoring, reference, route_rows, weighted_gemm
from tests.native.support import (
    ERROR,
    as_fp8,
    ends_of,
    exact_rows,
    experts_of,
    gated_wanted,
    relative_error,
    weighted_wanted,
)
from vllm_add_llada.cuda_kernels import fused_ops

# Rows of each of 7 groups: one row, adjacent empty groups, all rows in one group, both sides of
# every width of a tile, and more than a tile.
STREAMED = [
    [0, 0, 1, 0, 0, 0, 0],
    [1, 8, 9, 16, 17, 32, 33],
    [64, 65, 96, 97, 128, 129, 160],
    [0, 0, 0, 0, 0, 0, 1001],
    [200, 0, 320, 161, 0, 130, 5],
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", STREAMED, ids=str)
@pytest.mark.parametrize("early", [False, True])
# Less than a tile of columns with fewer steps than stages, a last step that is not full, and more
# tiles than multiprocessors with less than a step.
@pytest.mark.parametrize(("num_columns", "depth"), [(16, 64), (96, 200), (2048, 1024), (4112, 8)])
def test_streams_against_float64(generator, sizes, early, num_columns, depth):
    """The compiled product matches float64 for every launch choice, with strided rows."""
    num_slots = sum(sizes)
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    x = torch.randn(num_slots, depth + 8, generator=generator).bfloat16().cuda()[:, 8:]
    shape = (len(sizes), num_columns, depth + 16)
    weight = torch.randn(shape, generator=generator).bfloat16().cuda()[:, :, :depth]
    weights = torch.rand(num_slots, 1, generator=generator).bfloat16().cuda()
    ends = ends_of(sizes, "cuda")
    assert fused_ops.has_grouped_gemm(x, weight)
    terms = fused_ops.weighted_gemm(x, weight, ends, slots, weights, early=early)
    wanted = weighted_wanted(x, weight, sizes, slots, weights)
    assert relative_error(terms, wanted) <= ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", STREAMED, ids=str)
# Less than a tile of columns, a part of a second tile and of a step, and a released model's sizes.
@pytest.mark.parametrize(("width", "depth"), [(8, 64), (136, 200), (512, 2048)])
def test_gated_streams_against_float64(generator, sizes, width, depth):
    """Strided rows are gathered for three groups each, with the same result every time."""
    num_chosen = 3
    sizes = [size * num_chosen for size in sizes]
    num_slots = sum(sizes)
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    x = torch.randn(num_slots // num_chosen, depth + 8, generator=generator).bfloat16().cuda()
    x = x[:, 8:]
    shape = (len(sizes), 2 * width, depth + 16)
    weight = (torch.randn(shape, generator=generator) / depth**0.5).bfloat16().cuda()[:, :, :depth]
    ends = ends_of(sizes, "cuda")
    assert fused_ops.has_grouped_gemm(x, weight)
    for is_gelu in (True, False):
        given = fused_ops.gated_gemm(x, slots, num_chosen, weight, ends, is_gelu=is_gelu)
        wanted = gated_wanted(x, slots, num_chosen, weight, sizes, is_gelu=is_gelu)
        # A few numbers do not average their roundings.
        assert relative_error(given, wanted) <= 1.5 * ERROR[torch.bfloat16]
    for _ in range(5):
        assert torch.equal(fused_ops.gated_gemm(x, slots, num_chosen, weight, ends), given)


def quantised(x):
    """Return rows as fp8, and their values in float64."""
    rows = fused_ops.QuantisedRows(
        torch.empty(x.shape, dtype=fused_ops.FP8, device=x.device),
        torch.empty(len(x), device=x.device),
    )
    fused_ops.quantise_rows(x, rows)
    return rows, rows.values.double() * rows.scales.double()[:, None]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", STREAMED, ids=str)
@pytest.mark.parametrize(("width", "depth"), [(16, 128), (136, 384), (704, 400), (2048, 512)])
def test_fp8_streams_against_float64(generator, sizes, width, depth):
    """Both fp8 products match float64, with rows of all magnitudes and one row of zeros."""
    num_chosen = 3
    sizes = [size * num_chosen for size in sizes]
    num_slots = sum(sizes)
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    magnitudes = 10 ** torch.empty(num_slots // num_chosen, 1).uniform_(-6, 4, generator=generator)
    magnitudes[0] = 0
    x = torch.randn(num_slots // num_chosen, depth, generator=generator) * magnitudes
    rows, meant = quantised(x.bfloat16().cuda())
    ends = ends_of(sizes, "cuda")
    gates = torch.randn(len(sizes), 2 * width, depth, generator=generator).cuda() / depth**0.5
    gates, scales, wanted_gates = as_fp8(gates)
    assert fused_ops.has_grouped_gemm(rows, gates)
    inner = fused_ops.gated_gemm(rows, slots, num_chosen, gates, ends, scales)
    wanted = gated_wanted(meant, slots, num_chosen, wanted_gates, sizes)
    row_error = (inner.double() - wanted).norm(dim=1) - 0.01 * wanted.norm(dim=1)
    assert inner.isfinite().all() and (row_error <= 1e-9).all()
    again = fused_ops.gated_gemm(rows, slots, num_chosen, gates, ends, scales)
    assert torch.equal(again, inner)
    if width % 16:  # not whole vectors of 16 bytes
        assert not fused_ops.has_grouped_gemm(quantised(inner)[0], gates[:, :, :width])
        return
    rows, meant = quantised(inner)
    matrices = torch.randn(len(sizes), depth, width, generator=generator).cuda()
    matrices, scales, wanted_matrices = as_fp8(matrices)
    weights = torch.rand(len(x), num_chosen, generator=generator).bfloat16().cuda()
    for early in (False, True):
        terms = fused_ops.weighted_gemm(
            rows, matrices, ends, slots, weights, early=early, weight_scales=scales
        )
        wanted = weighted_wanted(meant, wanted_matrices, sizes, slots, weights)
        row_error = (terms.double() - wanted).norm(dim=2) - 0.01 * wanted.norm(dim=2)
        assert terms.isfinite().all() and (row_error <= 1e-9).all()


@pytest.mark.gpu
def test_streams_are_rounded_as_the_reference_rounds(generator):
    """bf16 inputs with exact sums show only the rounding. Many of the 256 groups are empty."""
    are_there = torch.rand(256, generator=generator) < 0.6
    sizes = torch.randint(0, 40, (256,), generator=generator).mul(are_there).tolist()
    num_slots, ends = sum(sizes), ends_of(sizes, "cuda")
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    x = torch.randint(-4, 5, (num_slots, 128), generator=generator).bfloat16().cuda()
    weight = (torch.randint(-4, 5, (256, 64, 128), generator=generator) / 64).bfloat16().cuda()
    given = fused_ops.gated_gemm(x, slots, 1, weight, ends)
    wanted = reference.gated(reference.grouped_gemm(x[slots.long()], weight, ends))
    # Both exponentials differ in their last bits, which may change a rounding.
    torch.testing.assert_close(given, wanted, rtol=2**-7, atol=0)
    weights = torch.rand(num_slots, 1, generator=generator).bfloat16().cuda()
    terms = fused_ops.weighted_gemm(x, weight, ends, slots, weights)
    wanted = reference.weighted_terms(reference.grouped_gemm(x, weight, ends), slots, weights)
    assert torch.equal(terms, wanted)


@pytest.mark.gpu
def test_streams_without_weights_are_the_products(generator):
    """256 experts of width 512 are used, many without rows; fp32 weights only give the shape."""
    num_rows, num_chosen = 40, 8
    sizes = [0] * 256
    for expert in torch.randint(0, 256, (num_rows * num_chosen,), generator=generator).tolist():
        sizes[expert] += 1
    num_slots = num_rows * num_chosen
    x = torch.randn(num_slots, 512, generator=generator).bfloat16().cuda()
    weight = torch.randn(256, 128, 512, generator=generator).bfloat16().cuda()
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    shape = torch.full((num_rows, num_chosen), torch.nan, device="cuda")
    ends = ends_of(sizes, "cuda")
    wanted = weighted_wanted(x, weight, sizes, slots, torch.ones_like(shape))
    for product in (fused_ops.weighted_gemm, weighted_gemm):
        terms = product(x, weight, ends, slots, shape, is_weighted=False)
        assert relative_error(terms, wanted) <= ERROR[torch.bfloat16]


@pytest.mark.gpu
def test_a_graph_of_the_streams_holds_for_any_routing(generator):
    num_slots, num_columns, depth = 320, 256, 1024
    rows = torch.randn(num_slots, 256, generator=generator).bfloat16().cuda()
    gates = (torch.randn(8, 2 * depth, 256, generator=generator) / 16).bfloat16().cuda()
    weight = torch.randn(8, num_columns, depth, generator=generator).bfloat16().cuda()
    weights = torch.rand(num_slots, 1, generator=generator).bfloat16().cuda()
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    ends = ends_of([40] * 8, "cuda")
    torch.cuda.synchronize()  # the kernel may read the weight before its writer has ended
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = fused_ops.gated_gemm(rows, slots, 1, gates, ends)
        terms = fused_ops.weighted_gemm(x, weight, ends, slots, weights, early=True)
    for sizes in ([320] + [0] * 7, [0] * 7 + [320], [1] * 7 + [313], [40] * 8):
        ends.copy_(ends_of(sizes))
        terms.fill_(torch.nan)
        graph.replay()
        inner = gated_wanted(rows, slots, 1, gates, sizes)
        assert relative_error(x, inner) <= ERROR[torch.bfloat16]
        wanted = weighted_wanted(x, weight, sizes, slots, weights)
        assert relative_error(terms, wanted) <= ERROR[torch.bfloat16]


GATE = torch.zeros(64, 512, dtype=torch.bfloat16)


def test_without_a_kernel_they_refuse():
    """`ops` queries the packages before it calls them."""
    x, weight = torch.zeros(9, 512, dtype=torch.bfloat16), torch.zeros(2, 64, 512).bfloat16()
    assert not fused_ops.has_router(x, GATE) and not fused_ops.has_grouped_gemm(x, weight)
    with pytest.raises(ValueError, match=r"route_rows: no kernel for x torch.bfloat16 \[9, 512\]"):
        fused_ops.route_rows(x, GATE, 8)
    slots = torch.arange(9, dtype=torch.int32)
    weights = torch.zeros(9, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weighted_gemm: no kernel for x torch.bfloat16"):
        fused_ops.weighted_gemm(x, weight, ends_of([4, 5]), slots, weights)
    with pytest.raises(ValueError, match=r"gated_gemm: no kernel for x torch.bfloat16"):
        fused_ops.gated_gemm(x, slots, 1, weight, ends_of([4, 5]))


@pytest.mark.gpu
def test_arguments_are_checked():
    x, gate = torch.zeros(9, 512).bfloat16().cuda(), GATE.cuda()
    with pytest.raises(ValueError, match="num_chosen must be from 1 to 64, got 65"):
        fused_ops.route_rows(x, gate, 65)
    with pytest.raises(ValueError, match=r"bias must be float32 \[64\]"):
        fused_ops.route_rows(x, gate, 8, torch.zeros(63, device="cuda"))
    weight, ends = torch.zeros(2, 64, 512).bfloat16().cuda(), ends_of([4, 5], "cuda")
    slots = torch.arange(9, dtype=torch.int32, device="cuda")
    weights = torch.zeros(9, 1, device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"slots must be int32 \[9\]"):
        fused_ops.weighted_gemm(x, weight, ends, slots[:8], weights)
    with pytest.raises(ValueError, match=r"weights must be \[R, k\] with R \* k = 9"):
        fused_ops.weighted_gemm(x, weight, ends, slots, weights[:8])
    with pytest.raises(ValueError, match=r"slots must be int32 \[18\]"):
        fused_ops.gated_gemm(x, slots, 2, weight, ends)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 8, 33, 64])
@pytest.mark.parametrize("num_experts", [64, 128])
@pytest.mark.parametrize(
    ("num_chosen", "scoring"),
    [
        *((num, SOFTMAX) for num in (1, 8, 64)),
        (8, Scoring(is_normalised=True)),
        (8, Scoring(True, 8, 4, is_normalised=True, scale=2.5, in_fp32=True)),
        (1, Scoring(True, 32, 3, in_fp32=True)),
        (9, Scoring(num_groups=2, num_kept_groups=1, scale=0.5)),
        (64, Scoring(True, 4, 4)),
    ],
    ids=str,
)
def test_routers_agree_on_every_scoring(generator, num_rows, num_experts, num_chosen, scoring):
    """The compiled kernel and Triton's kernel sum the same parts in the same order.

    Logits are exact and many are equal. One row has zeros, and one has NaN.
    """
    x, gate = (
        matrix.cuda()
        for matrix in exact_rows(generator, num_rows, num_experts, 2048, torch.bfloat16)
    )
    bias = torch.randn(num_experts, generator=generator).cuda()
    x[-1] = 0.0
    x[num_rows // 2, 3] = torch.nan
    assert fused_ops.has_router(x, gate)
    for given_bias in (None, bias):
        given = fused_ops.route_rows(x, gate, num_chosen, given_bias, **scoring.of_rows())
        wanted = route_rows(x, gate, num_chosen, given_bias, scoring)
        assert torch.equal(given[1], wanted.slots) and torch.equal(given[2], wanted.ends)
        assert given[0].dtype == wanted.weights.dtype
        torch.testing.assert_close(given[0], wanted.weights, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 32, 64])
def test_a_router_as_of_llada2_against_float64(generator, num_rows):
    """For any numbers, experts are those of float64 unless their ranks differ by rounding."""
    x = torch.randn(num_rows, 2048, generator=generator).bfloat16().cuda()
    gate = (torch.randn(128, 2048, generator=generator) / 2048**0.5).bfloat16().cuda()
    bias = (torch.randn(128, generator=generator) / 10).cuda()
    options = Scoring(True, 8, 4, is_normalised=True, scale=2.5, in_fp32=True)
    given = Routing(*fused_ops.route_rows(x, gate, 8, bias, **options.of_rows()))
    scores = (x.double() @ gate.double().t()).sigmoid()
    ranks = scores + bias
    groups = ranks.view(num_rows, 8, 16)
    kept = groups.topk(2, dim=-1).values.sum(-1).topk(4).indices
    masked = torch.full_like(groups, -torch.inf).scatter(
        1,
        kept[:, :, None].expand(-1, -1, 16),
        groups.gather(1, kept[:, :, None].expand(-1, -1, 16)),
    )
    chosen = masked.flatten(1).topk(8).indices.sort(dim=-1).values
    same = (experts_of(given, num_rows, 8) == chosen).all(dim=1)
    assert same.float().mean() > 0.95
    weights = scores.gather(1, chosen)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(given.weights[same].double(), weights[same], rtol=1e-5, atol=1e-6)
