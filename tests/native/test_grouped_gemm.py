# SPDX-License-Identifier: Apache-2.0
"""Grouped products match float64, on a GPU and under Triton's interpreter."""

import pytest
import torch

from gather_gemm import (
    gated_gemm,
    is_built,
    reference,
    route_rows,
    sum_terms,
    weighted_gemm,
)
from gather_gemm.launch import (
    choose_gated,
    choose_product,
    max_tiles,
)
from tests.native.support import ERROR, check_experts, ends_of, gated_wanted, relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Slots of each expert for rows with 2 experts: one row, empty experts, and all rows on two experts.
SLOTS = [[1, 0, 1], [0, 9, 0, 3, 5, 1], [70, 0, 70]]


# 7 and 5 fill no tile and no vector of 16 bytes. 64 and 136 exceed a tile and are whole vectors.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("sizes", SLOTS)
@pytest.mark.parametrize(("width", "depth"), [(64, 32), (7, 5), (72, 136)])
def test_experts_against_float64(generator, device, dtype, sizes, width, depth):
    check_experts(generator, sizes, 2, width, depth, dtype, device, early=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [8, 64, 500, 1000, 3000, 12000, 20000])
@pytest.mark.parametrize("is_even", [True, False])
def test_every_tile_against_float64(generator, num_slots, is_even):
    """Row counts are on both sides of each launch choice, in even groups or mostly in one."""
    num_groups, depth, width = 64, 256, 192
    shares = torch.rand(num_groups, generator=generator) + (10 if is_even else 0)
    if not is_even:
        shares[::3] = 0
        shares[17] = shares.sum()
    group = torch.multinomial(shares, num_slots, replacement=True, generator=generator)
    sizes = torch.bincount(group, minlength=num_groups).tolist()
    check_experts(generator, sizes, 4, width, depth, torch.bfloat16, "cuda", early=False)


@pytest.mark.gpu
@pytest.mark.skipif(not is_built(), reason="Triton is not installed")
def test_results_are_rounded_as_the_reference_rounds(generator):
    """bf16 inputs have exact sums in any order, so that only the rounding shows."""
    sizes, device = [3, 0, 14, 1], "cuda"
    x = torch.randint(-4, 5, (9, 64), generator=generator).bfloat16().to(device)
    w1 = (torch.randint(-4, 5, (4, 96, 64), generator=generator) / 64).bfloat16().to(device)
    w2 = (torch.randint(-4, 5, (4, 64, 48), generator=generator) / 8).bfloat16().to(device)
    slots = torch.randperm(18, generator=generator).to(torch.int32).to(device)
    weights = torch.rand(9, 2, generator=generator).bfloat16().to(device)
    ends = ends_of(sizes, device)
    inner = gated_gemm(x, slots, 2, w1, ends)
    gate_up = reference.grouped_gemm(x[slots // 2], w1, ends)
    # Both exponentials differ in their last bits, which may change a rounding.
    torch.testing.assert_close(inner, reference.gated(gate_up), rtol=2**-7, atol=0)
    whole = torch.randint(-4, 5, (18, 48), generator=generator).bfloat16().to(device)
    terms = weighted_gemm(whole, w2, ends, slots, weights)
    down = reference.grouped_gemm(whole, w2, ends)
    assert torch.equal(terms, reference.weighted_terms(down, slots, weights))


@pytest.mark.gpu
def test_a_graph_holds_for_any_routing(generator):
    """Launches depend on shapes alone, so that a captured graph serves any groups."""
    device, num_rows = "cuda", 40
    x = torch.randn(num_rows, 64, generator=generator).bfloat16().to(device)
    w1 = torch.randn(8, 64, 64, generator=generator).bfloat16().to(device)
    slots = torch.randperm(2 * num_rows, generator=generator).to(torch.int32).to(device)
    ends = ends_of([10] * 8, device)
    gated_gemm(x, slots, 2, w1, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = gated_gemm(x, slots, 2, w1, ends)
    for sizes in ([80] + [0] * 7, [0] * 7 + [80], [1] * 7 + [73], [10] * 8):
        ends.copy_(ends_of(sizes))
        given.fill_(torch.nan)
        graph.replay()
        wanted = gated_wanted(x, slots, 2, w1, sizes)
        assert relative_error(given, wanted) <= ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 32, 200])
def test_layers_in_a_graph_read_their_own_routing(generator, num_rows):
    """Kernels start before earlier kernels have ended, and replays equal the layers one by one.

    Each layer has another routing, in memory that the previous layer used.
    """
    width, num_experts, num_chosen, num_layers = 512, 64, 8, 4
    shapes = ((num_experts, width), (num_experts, 2 * width, width), (num_experts, width, width))
    gates, w1, w2 = (
        (torch.randn(num_layers, *shape, generator=generator) / width**0.5).bfloat16().cuda()
        for shape in shapes
    )
    x = torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda")

    def run(wait):
        for layer in range(num_layers):
            weights, slots, ends = route_rows(x, gates[layer], num_chosen)
            wait()
            inner = gated_gemm(x, slots, num_chosen, w1[layer], ends)
            wait()
            terms = weighted_gemm(inner, w2[layer], ends, slots, weights, early=True)
            wait()
            sum_terms(terms, out=x, adds=True)
            wait()

    x.normal_()
    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(3):
        given = torch.randn(num_rows, width, generator=generator).bfloat16()
        x.copy_(given)
        run(torch.cuda.synchronize)
        wanted = x.clone()
        x.copy_(given)
        graph.replay()
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("choose", [choose_gated, choose_product])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("shared_bytes", [96 * 1024, 226 * 1024])
def test_tiles_fit_the_shared_memory(choose, element_bytes, shared_bytes):
    num_weights = 2 if choose is choose_gated else 1
    for num_rows in (1, 64, 512, 513, 1024, 4096, 4097, 65536):
        config = choose(num_rows, 64, element_bytes, shared_bytes)
        given = config.num_stages * config.stage_bytes(element_bytes, num_weights)
        assert given <= shared_bytes and config.num_stages >= 1
        assert config.rows >= 16 and config.depth >= 16


@pytest.mark.parametrize("tile_rows", [1, 16, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 63, 64, 65, 200])
def test_the_launch_has_a_tile_for_any_split(generator, num_rows, tile_rows):
    num_groups, worst = 6, 0
    splits = [[num_rows] + [0] * 5]
    splits += [
        torch.bincount(
            torch.randint(0, num_groups, (num_rows,), generator=generator), minlength=num_groups
        ).tolist()
        for _ in range(50)
    ]
    if num_rows >= num_groups:  # the most tiles: one row in every group but one
        splits.append([1] * (num_groups - 1) + [num_rows - num_groups + 1])
    worst = max(sum(-(-size // tile_rows) for size in split) for split in splits)
    assert worst <= max_tiles(num_rows, num_groups, tile_rows) <= worst + num_groups


BOTH = {"slots": torch.arange(4, dtype=torch.int32), "ends": ends_of([1, 3])}
GATED = {"x": torch.zeros(2, 8), "num_chosen": 2, "weight": torch.zeros(2, 6, 8)}
WEIGHTED = {"x": torch.zeros(4, 8), "weights": torch.zeros(2, 2), "weight": torch.zeros(2, 5, 8)}


@pytest.mark.parametrize(
    ("product", "changes", "message"),
    [
        (gated_gemm, {"x": torch.zeros(2, 7)}, r"gated_gemm: weight must be \['any', 'any', 7\]"),
        (gated_gemm, {"weight": torch.zeros(2, 5, 8)}, r"gated_gemm: weight must be \[E, 2I, D\]"),
        (gated_gemm, {"slots": torch.zeros(4)}, r"gated_gemm: slots must be int32 \[4\]"),
        (gated_gemm, {"num_chosen": 3}, r"gated_gemm: slots must be int32 \[6\]"),
        (gated_gemm, {"ends": ends_of([1])}, r"gated_gemm: ends must be int32 \[2\]"),
        (weighted_gemm, {"x": torch.zeros(8, 4).t()}, "columns of x must be contiguous"),
        (weighted_gemm, {"weight": torch.zeros(5, 8)}, r"weight must be \['any', 'any', 8\]"),
        (weighted_gemm, {"weight": torch.zeros(2, 5, 8).half()}, "got torch.float16"),
        (weighted_gemm, {"ends": ends_of([1, 2, 3])}, r"ends must be int32 \[2\]"),
        (
            weighted_gemm,
            {"weights": torch.zeros(3, 2)},
            r"\[R, k\] contiguous with R \* k = 4",
        ),
        (weighted_gemm, {"weights": torch.zeros(2, 2).t()}, "contiguous"),
        (weighted_gemm, {"weights": torch.zeros(2, 2).half()}, "got torch.float16"),
        (weighted_gemm, {"slots": ends_of([1, 2, 3])}, r"slots must be int32 \[4\]"),
    ],
)
def test_arguments_are_checked(product, changes, message):
    arguments = BOTH | (GATED if product is gated_gemm else WEIGHTED) | changes
    with pytest.raises(ValueError, match=message):
        product(**arguments)
