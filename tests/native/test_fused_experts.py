# SPDX-License-Identifier: Apache-2.0
"""fused_ops' kernels for experts: against float64, and beside the Triton kernels of gather_gemm."""

import pytest
import torch

from gather_gemm import grouped_reference as reference
from gather_gemm import route_rows
from tests.native.test_grouped_gemm import ERROR, ends_of, relative_error, weighted_wanted
from tests.native.test_routing import exact_rows
from vllm_add_llada.cuda_kernels import fused_ops

# Rows of each of 7 groups: one row, empty groups beside each other, all in one, more than a tile.
STREAMED = [
    [0, 0, 1, 0, 0, 0, 0],
    [1, 8, 9, 16, 17, 32, 33],
    [0, 0, 0, 0, 0, 0, 256],
    [200, 0, 64, 65, 0, 130, 5],
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", STREAMED, ids=str)
@pytest.mark.parametrize("early", [False, True])
# less than a tile of columns and fewer steps than stages; more tiles than multiprocessors
@pytest.mark.parametrize(("num_columns", "depth"), [(24, 64), (96, 192), (2048, 1024), (4104, 64)])
def test_streams_against_float64(generator, sizes, early, num_columns, depth):
    """The compiled product whatever the launch choice, of rows that lie apart in memory."""
    num_slots, num_groups = sum(sizes), len(sizes)
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    x = torch.randn(num_slots, depth + 8, generator=generator).bfloat16().cuda()[:, 8:]
    shape = (num_groups, num_columns, depth + 16)
    weight = torch.randn(shape, generator=generator).bfloat16().cuda()[:, :, :depth]
    weights = torch.rand(num_slots, 1, generator=generator).bfloat16().cuda()
    ends = ends_of(sizes, "cuda")
    assert fused_ops.has_weighted_gemm(x, weight)
    terms = fused_ops.weighted_gemm(x, weight, ends, slots, weights, early=early)
    wanted = weighted_wanted(x, weight, sizes, slots, weights)
    assert relative_error(terms, wanted) <= ERROR[torch.bfloat16]


@pytest.mark.gpu
def test_streams_are_rounded_as_the_reference_rounds(generator):
    """bf16 with exact sums, so that only the rounding shows."""
    sizes, device = [3, 0, 14, 40, 1], "cuda"
    x = torch.randint(-4, 5, (58, 128), generator=generator).bfloat16().to(device)
    weight = (torch.randint(-4, 5, (5, 64, 128), generator=generator) / 8).bfloat16().to(device)
    slots = torch.randperm(58, generator=generator).to(torch.int32).to(device)
    weights = torch.rand(29, 2, generator=generator).bfloat16().to(device)
    ends = ends_of(sizes, device)
    terms = fused_ops.weighted_gemm(x, weight, ends, slots, weights)
    wanted = reference.weighted_terms(reference.grouped_gemm(x, weight, ends), slots, weights)
    assert torch.equal(terms, wanted)


@pytest.mark.gpu
def test_a_graph_of_the_stream_holds_for_any_routing(generator):
    num_slots, num_columns, depth = 320, 256, 1024
    x = torch.randn(num_slots, depth, generator=generator).bfloat16().cuda()
    weight = torch.randn(8, num_columns, depth, generator=generator).bfloat16().cuda()
    weights = torch.rand(num_slots, 1, generator=generator).bfloat16().cuda()
    slots = torch.randperm(num_slots, generator=generator).to(torch.int32).cuda()
    ends = ends_of([40] * 8, "cuda")
    torch.cuda.synchronize()  # the kernel may read the weight before the one that writes it ends
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        terms = fused_ops.weighted_gemm(x, weight, ends, slots, weights, early=True)
    for sizes in ([320] + [0] * 7, [0] * 7 + [320], [1] * 7 + [313], [40] * 8):
        ends.copy_(ends_of(sizes))
        terms.fill_(torch.nan)
        graph.replay()
        wanted = weighted_wanted(x, weight, sizes, slots, weights)
        assert relative_error(terms, wanted) <= ERROR[torch.bfloat16]


GATE = torch.zeros(64, 512, dtype=torch.bfloat16)


def test_without_a_kernel_they_refuse():
    """`ops` asks the rooms first."""
    x, weight = torch.zeros(9, 512, dtype=torch.bfloat16), torch.zeros(2, 64, 512).bfloat16()
    assert not fused_ops.has_router(x, GATE) and not fused_ops.has_weighted_gemm(x, weight)
    with pytest.raises(ValueError, match=r"route_rows: no kernel for x torch.bfloat16 \[9, 512\]"):
        fused_ops.route_rows(x, GATE, 8)
    slots = torch.arange(9, dtype=torch.int32)
    weights = torch.zeros(9, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weighted_gemm: no kernel for x torch.bfloat16"):
        fused_ops.weighted_gemm(x, weight, ends_of([4, 5]), slots, weights)


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


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 8, 33, 64])
@pytest.mark.parametrize("num_chosen", [1, 8, 64])
def test_routers_agree(generator, num_rows, num_chosen):
    """The compiled kernel and Triton's, which sum the same parts in the same order."""
    x, gate = (
        matrix.cuda() for matrix in exact_rows(generator, num_rows, 64, 2048, torch.bfloat16)
    )
    bias = torch.randn(64, generator=generator).cuda()
    x[num_rows // 2, 3] = torch.nan
    assert fused_ops.has_router(x, gate)
    weights, slots, ends = fused_ops.route_rows(x, gate, num_chosen, bias)
    wanted = route_rows(x, gate, num_chosen, bias)
    assert torch.equal(slots, wanted.slots) and torch.equal(ends, wanted.ends)
    torch.testing.assert_close(weights, wanted.weights, equal_nan=True)
