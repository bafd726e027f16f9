# SPDX-License-Identifier: Apache-2.0
"""Products with low-rank matrices match float64, on a GPU and under Triton's interpreter."""

from itertools import product

import pytest
import torch

from gather_gemm import (
    MAX_SPLIT_ROWS,
    LowRank,
    Piece,
    Tiles,
    expand,
    gated_expand,
    low_rank_splits,
    low_rank_tile,
    reference,
    shrink,
)
from tests.native.support import (
    ERROR,
    RANKS,
    RUNS,
    LowRankCase,
    check_low_rank,
    relative_error,
    tiles_of,
)
from vllm_add_llada.cuda_kernels.fused_ops import silu_mul

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_against_float64(generator, device, dtype, runs, size, num_splits):
    check_low_rank(generator, runs, RANKS, dtype, device, size, num_splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [1, 8, 64, 65, 320, 512])
def test_every_rank(generator, device, rank):
    """Also where the slots have room for more ranks than one of them uses."""
    ranks = [[rank], [1], [max(rank - 1, 1)]]
    for size in (16, 64):
        for dtype in (torch.float16, torch.bfloat16):
            check = LowRankCase(generator, RUNS[2], ranks, [72], 136, dtype, device, max_rank=512)
            tiles = tiles_of(generator, RUNS[2], size, device)
            base = check.base(generator, 72)
            out = base.clone()
            expand(check.low(tiles, 2), check.matrices, tiles, out, (Piece(0, 0, 0, 72),))
            assert relative_error(out, base.double() + check.delta) <= ERROR[dtype]
            by_slot = check.by_slot(tiles, 2)
            assert relative_error(by_slot, check.scaled) <= ERROR[dtype]
            assert not by_slot[check.scaled == 0].any()


@pytest.mark.gpu
def test_64_slots_and_large_matrices(generator):
    ranks = [[1 + 5 * slot % 40, 16, slot % 3] for slot in range(64)]
    runs = [(slot if slot % 5 else -1, 1 + slot % 7) for slot in range(64)]
    case = LowRankCase(
        generator, runs, ranks, [4096, 1024, 1024], 4096, torch.bfloat16, "cuda", max_rank=128
    )
    size = low_rank_tile(case.num_rows)
    tiles = tiles_of(generator, runs, size, "cuda")
    out = torch.zeros(case.num_rows, 6144, dtype=torch.bfloat16, device="cuda")
    low = case.low(tiles, low_rank_splits(case.num_rows, 4096, 3 * 128))
    pieces = Piece(0, 0, 0, 4096), Piece(1, 4096, 4096, 1024), Piece(2, 5120, 5120, 1024)
    expand(low, case.matrices, tiles, out, pieces)
    assert relative_error(out, case.delta) <= ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_kernels_round_as_the_references(generator, size):
    """Small integers have exact sums in any order, so that only the roundings show."""
    runs, dtype = RUNS[2], torch.bfloat16
    case = LowRankCase(generator, runs, RANKS, [128, 128], 64, dtype, "cuda")
    down, up, ranks, scales = case.matrices
    for matrix in (down, up):
        matrix.copy_(torch.randint(-3, 4, matrix.shape, generator=generator) / 8)
    x = torch.randint(-3, 4, (case.num_rows, 64), generator=generator).to(dtype).cuda()
    scales.fill_(1.25)
    tiles = tiles_of(generator, runs, size, "cuda")
    base = case.base(generator, 256).contiguous()
    case.x = x
    low = case.low(tiles, 2)
    pieces = Piece(0, 0, 0, 128), Piece(1, 128, 128, 128)
    out, wanted = base.clone(), base.clone()
    expand(low, case.matrices, tiles, out, pieces)
    wanted_low = torch.zeros(1, len(x), 1, case.matrices.num_ranks, device="cuda")
    reference.shrink(x, down, ranks, tiles, wanted_low)
    reference.expand(wanted_low[0], case.matrices, tiles, wanted, pieces)
    assert torch.equal(out, wanted)
    gated = torch.empty(case.num_rows, 128, dtype=dtype, device="cuda")
    gated_expand(low, case.matrices, tiles, base, gated)
    # The exponentials differ in their last bits, which may change a rounding.
    torch.testing.assert_close(gated, silu_mul(wanted), rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_a_graph_holds_for_any_slots_ranks_and_contents(generator):
    """Slots, ranks and matrices are data, and padded tiles cost nothing but their launch."""
    depth, width, size, num_tiles = 512, 640, 16, 12
    runs = [(0, 20), (-1, 12), (1, 30)]
    case = LowRankCase(generator, runs, RANKS, [width], depth, torch.bfloat16, "cuda")
    x, table = case.x.clone(), torch.full((num_tiles, 3), -1, dtype=torch.int32, device="cuda")
    matrices = LowRank(*(tensor.clone() for tensor in case.matrices))
    low = torch.empty(4, len(x), 1, matrices.num_ranks, device="cuda")
    out = torch.empty(len(x), width, dtype=torch.bfloat16, device="cuda")
    tiles = Tiles(table, torch.zeros(len(x), dtype=torch.int32, device="cuda"), size)

    def run():
        shrink(x, matrices, tiles, low)
        out.zero_()
        expand(low[0], matrices, tiles, out, (Piece(0, 0, 0, width),))

    run()
    assert not out.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number, runs in enumerate(
        ([(0, 62)], [(-1, 62)], [(2, 1), (1, 1), (0, 60)], [(1, 30), (-1, 2), (2, 30)])
    ):
        ranks = [[16 - 5 * number], [7], [number]]
        other = LowRankCase(
            generator, runs, ranks, [width], depth, torch.bfloat16, "cuda", max_rank=16
        )
        x.copy_(other.x)
        for tensor, new in zip(matrices, other.matrices, strict=True):
            tensor.copy_(new)
        own = tiles_of(generator, runs, size, "cuda", num_empty=0)
        tiles.rows.copy_(own.rows)
        table.fill_(-1)
        table[: len(own.table)] = own.table
        graph.replay()
        assert relative_error(out, other.delta) <= ERROR[torch.bfloat16]


@pytest.mark.gpu
def test_against_vllm(generator):
    """vLLM's own kernels add the same for the rows of one slot."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    num_rows, rank, depth, width = 60, 16, 1024, 1536
    runs, dtype = [(0, 40), (1, 20)], torch.bfloat16
    case = LowRankCase(generator, runs, [[rank], [rank]], [width], depth, dtype, "cuda")
    down, up, _, scales = case.matrices
    scales.fill_(0.5)  # vLLM multiplies by it before it rounds; a power of two rounds equally
    size = low_rank_tile(num_rows)
    tiles = tiles_of(generator, runs, size, "cuda")
    base = case.base(generator, width).contiguous()
    out, wanted = base.clone(), base.clone()
    low = case.low(tiles, low_rank_splits(num_rows, depth, rank))
    expand(low, case.matrices, tiles, out, (Piece(0, 0, 0, width),))
    meta = LoRAKernelMeta.make(2, num_rows, device="cuda")
    meta.prepare_tensors(torch.tensor([0] * 40 + [1] * 20, device="cuda"))
    theirs = torch.zeros(1, num_rows, rank, dtype=torch.float32, device="cuda")
    arguments = meta.meta_args(num_rows, False)
    lora_shrink(case.x.contiguous(), [down], theirs, *arguments, 0.5)
    columns = up.transpose(1, 2).contiguous()[:, None]
    lora_expand(theirs, [columns], wanted, *arguments, offset_start=0, add_inputs=True)
    torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-6)


def test_parts_of_the_sum_take_bounded_memory():
    for num_rows in (0, 1, 16, 33, 256, 257, 500, 1024, 1025, 2048, 2049, 100_000):
        for depth, num_ranks in product((1, 300, 4096, 12288), (1, 16, 48, 384, 1536)):
            num_splits = low_rank_splits(num_rows, depth, num_ranks)
            assert num_splits == 1 or num_splits * num_rows <= MAX_SPLIT_ROWS
            assert low_rank_tile(num_rows) in (16, 32, 64)


MATRICES = LowRank(
    torch.zeros(2, 2, 4, 8), torch.zeros(2, 4, 12), torch.zeros(2, 2).int(), torch.zeros(2, 2)
)
TILES = Tiles(torch.zeros(1, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 16)
ARGUMENTS = {
    "x": torch.zeros(3, 8),
    "low": torch.zeros(1, 3, 1, 8),
    "matrices": MATRICES,
    "tiles": TILES,
    "out": torch.zeros(3, 12),
    "pieces": (Piece(0, 0, 0, 6), Piece(1, 6, 6, 6)),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 7)}, r"shrink: down must be .* 7\]"),
        ({"low": torch.zeros(1, 3, 1, 7)}, r"low must be float32 \[1, 3, 1, 8\]"),
        ({"low": torch.zeros(3, 3, 1, 8)}, "low must have a power of two of parts, got 3"),
        ({"out": torch.zeros(4, 12)}, r"expand: low must be float32 \[4, 1, 8\]"),
        ({"base": torch.zeros(3, 11)}, r"expand: base must be \[3, 12\]"),
        ({"adds": False}, "expand: base must be given without adds"),
        ({"out": torch.zeros(3, 12).half()}, "expand: out must be"),
        ({"pieces": (Piece(0, 0, 8, 6),)}, "pieces must be within 12 columns of up and 12 of out"),
        ({"pieces": (Piece(0, 0, 0, 1),) * 4}, "at most 3, got 4"),
        ({"tiles": TILES._replace(table=torch.zeros(1, 3))}, "tiles must be int32"),
        ({"tiles": TILES._replace(rows=torch.zeros(3))}, "rows of tiles must be int32"),
        ({"tiles": TILES._replace(size=8)}, "must have 16, 32 or 64 rows, got 8"),
        ({"matrices": MATRICES._replace(ranks=torch.zeros(2, 2))}, "ranks must be int32"),
        ({"matrices": MATRICES._replace(scales=torch.zeros(1, 2))}, "scales must be float32"),
    ],
)
def test_arguments_are_checked(changes, message):
    given = ARGUMENTS | changes
    with pytest.raises(ValueError, match=message):
        shrink(given["x"], given["matrices"], given["tiles"], given["low"])
        low, options = given["low"][0], {"base": None, "adds": True}
        options = {name: given.get(name, value) for name, value in options.items()}
        expand(low, given["matrices"], given["tiles"], given["out"], given["pieces"], **options)


def test_gated_halves_are_checked():
    out = torch.zeros(3, 6)
    low, matrices, tiles, gate_up = (
        ARGUMENTS[name] for name in ("low", "matrices", "tiles", "out")
    )
    low = low[0]
    gated_expand(low, matrices, tiles, gate_up, out)
    with pytest.raises(ValueError, match=r"up must be \[slots, r, 6\] in 1 parts"):
        gated_expand(low, matrices, tiles, gate_up, out, has_gate=False)
