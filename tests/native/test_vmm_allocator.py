# SPDX-License-Identifier: Apache-2.0
"""vmm_allocator: argument checks on every machine, and the arena on a GPU."""

import gc
import random

import pytest
import torch

import vmm_allocator
from tests.programs import run_python
from vmm_allocator import (
    Arena,
    ClosedArenaError,
    DriverError,
    DriverUnavailableError,
    ForkedArenaError,
    InUseError,
    LimitError,
    NotBuiltError,
    OutOfMemoryError,
    ReservationError,
    TorchPool,
    VmmError,
    _native,
)

MIB = 1024 * 1024
GIB = 1024 * MIB
CHUNK = 2 * MIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reserve_bytes": 0}, "reserve_bytes must be an integer >= 1, got 0"),
        ({"reserve_bytes": 1.5}, "reserve_bytes must be an integer >= 1, got 1.5"),
        ({"reserve_bytes": 2**63}, "reserve_bytes must be an integer"),
        ({"reserve_bytes": GIB, "chunk_bytes": -2}, "chunk_bytes must be an integer >= 1, got -2"),
        ({"reserve_bytes": GIB, "limit_bytes": -1}, "limit_bytes must be an integer >= 0, got -1"),
        ({"reserve_bytes": GIB, "device": -1}, "device must be an integer >= 0, got -1"),
        ({"reserve_bytes": GIB, "device": True}, "device must be an integer >= 0, got True"),
    ],
)
def test_arguments_are_checked_first(arguments, message):
    with pytest.raises(ValueError, match=message):
        Arena(**arguments)


@pytest.mark.parametrize("value", ["2M", "-1", "0", "1.5"])
def test_the_chunk_size_of_the_environment_is_checked(monkeypatch, value):
    monkeypatch.setenv("VLLM_VMM_CHUNK_SIZE", value)
    with pytest.raises(ValueError, match=f"VLLM_VMM_CHUNK_SIZE must be .*, got '{value}'"):
        Arena(GIB)


@pytest.mark.parametrize("arguments", [(0,), (1.5,), ("1",)])
def test_a_pool_checks_its_arguments_first(arguments):
    with pytest.raises(ValueError, match="TorchPool: reserve_bytes must be an integer >= 1"):
        TorchPool(None, *arguments)


@pytest.mark.skipif(not vmm_allocator.is_built(), reason="vmm_allocator is not built")
@pytest.mark.parametrize(
    ("function", "arguments"),
    [("View", (None, 0, CHUNK)), ("SegmentPool", (None, CHUNK)), ("attach_hooks", (None,))],
)
def test_nothing_is_no_arena_and_no_pool(function, arguments):
    with pytest.raises(TypeError, match="incompatible"):
        getattr(_native.native(), function)(*arguments)


def test_unbuilt_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(_native, "_module", None)
    assert not vmm_allocator.is_built()
    with pytest.raises(NotBuiltError, match=r"setup\.py build_ext --inplace"):
        Arena(GIB)


@pytest.mark.skipif(not vmm_allocator.is_built(), reason="vmm_allocator is not built")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver")
def test_no_driver_is_a_typed_error():
    for _ in range(2):  # the second call opens the library again
        with pytest.raises(DriverUnavailableError, match=r"libcuda|cuInit"):
            Arena(GIB)


def test_errors_share_a_base():
    for name in vmm_allocator.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(vmm_allocator, name), VmmError)


@pytest.fixture
def memory():
    with Arena(64 * GIB) as arena:
        yield arena


def pattern(count, seed=0):
    """Return numbers in which a shifted or stale copy is visible."""
    return (torch.arange(count, device="cuda", dtype=torch.int64) * 2654435761 + seed).int()


@pytest.mark.gpu
def test_grow_and_shrink_move_the_front():
    with Arena(GIB) as memory:
        assert memory.front_bytes == 0
        assert memory.grow(1) == 2 * MIB
        assert memory.grow(1) == 2 * MIB
        assert memory.grow(10 * MIB + 1) == 12 * MIB
        assert memory.grow(4 * MIB) == 12 * MIB  # grow never unmaps
        assert memory.shrink(4 * MIB + 1) == 6 * MIB
        assert memory.shrink(8 * MIB) == 6 * MIB  # shrink never maps
        statistics = memory.statistics()
        assert statistics.reserved_bytes == GIB
        assert statistics.mapped_bytes == statistics.front_bytes == 6 * MIB
        assert statistics.chunk_bytes % statistics.granularity_bytes == 0
        assert (statistics.num_chunks_created, statistics.num_chunks_released) == (6, 3)
        assert statistics.num_chunks_mapped == 6
        for name in ("create", "map", "access", "unmap", "release", "wait"):
            assert getattr(statistics, f"{name}_seconds") > 0
        assert memory.shrink(0) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_tensors_keep_their_contents_while_the_front_moves(memory, dtype):
    memory.grow(4 * MIB)
    tensor = memory.tensor(256, (300, 1000), dtype)
    assert tensor.data_ptr() == memory.base_address + 256
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cuda
    wanted = (torch.arange(300_000) % 113).to(dtype).view(300, 1000)
    tensor.copy_(wanted)
    memory.grow(100 * MIB)
    memory.tensor(50 * MIB, (10 * MIB,), torch.uint8).fill_(7)
    memory.shrink(4 * MIB)
    memory.grow(100 * MIB)
    assert torch.equal(tensor.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_written_into_the_arena(memory, dtype):
    left, right = (torch.randn(512, 512, device="cuda", dtype=dtype) for _ in range(2))
    memory.grow(GIB)
    product = memory.tensor(60 * MIB + 512, (512, 512), dtype).fill_(float("nan"))
    torch.mm(left, right, out=product)
    assert torch.equal(product, left @ right)


@pytest.mark.gpu
def test_tensor_must_be_mapped_and_aligned(memory):
    memory.grow(2 * MIB)
    assert memory.tensor(2 * MIB, (0, 5), torch.float32).shape == (0, 5)
    with pytest.raises(ValueError, match=r"must be mapped, got 2097152 mapped bytes"):
        memory.tensor(MIB, (MIB + 1,), torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4, got 2"):
        memory.tensor(2, (4,), torch.float32)
    assert memory.statistics().in_use_bytes == 0


@pytest.mark.gpu
def test_random_cycles_keep_contents(memory):
    """Memory that stays mapped keeps its contents over 200 grows and shrinks, also from spares."""
    draw = random.Random(0)
    filled = {}  # chunk index -> seed
    for cycle in range(200):
        wanted = draw.randrange(48)
        if wanted * CHUNK > memory.front_bytes:
            memory.grow(wanted * CHUNK)
        else:
            memory.shrink(wanted * CHUNK, keep=draw.random() < 0.5)
            if draw.random() < 0.2:
                memory.trim(draw.randrange(8) * CHUNK)
            filled = {index: seed for index, seed in filled.items() if index < wanted}
        for index in draw.sample(range(wanted), min(wanted, 4)):
            filled[index] = cycle * 1000 + index
            memory.tensor(index * CHUNK, (CHUNK // 4,), torch.int32).copy_(
                pattern(CHUNK // 4, filled[index])
            )
        for index, seed in filled.items():
            actual = memory.tensor(index * CHUNK, (CHUNK // 4,), torch.int32)
            assert torch.equal(actual, pattern(CHUNK // 4, seed)), (cycle, index)
            del actual
    statistics = memory.statistics()
    assert statistics.num_chunks_created < statistics.num_chunks_mapped  # spares were used
    assert statistics.held_bytes == CHUNK * (
        statistics.num_chunks_created - statistics.num_chunks_released
    )


@pytest.mark.gpu
def test_spares_are_mapped_before_any_chunk_is_created(memory):
    memory.grow(16 * CHUNK)
    memory.shrink(0, keep=True)
    assert memory.statistics().spare_bytes == 16 * CHUNK
    memory.grow(10 * CHUNK)
    statistics = memory.statistics()
    assert statistics.num_chunks_created == 16 and statistics.spare_bytes == 6 * CHUNK
    assert statistics.mapped_bytes == statistics.front_bytes == 10 * CHUNK
    memory.trim(4 * CHUNK)
    assert memory.statistics().spare_bytes == 4 * CHUNK
    memory.trim()
    assert memory.statistics().held_bytes == 10 * CHUNK


@pytest.mark.gpu
def test_what_a_tensor_refers_to_is_not_unmapped(memory):
    memory.grow(8 * CHUNK)
    low = memory.tensor(CHUNK, (CHUNK,), torch.uint8)
    high = memory.tensor(3 * CHUNK + 5, (CHUNK,), torch.uint8)[7:9]  # a view keeps memory in use
    assert memory.statistics().in_use_bytes == 3 * CHUNK
    with pytest.raises(InUseError) as caught:
        memory.shrink(0)
    assert (caught.value.first_bytes, caught.value.end_bytes) == (CHUNK, 5 * CHUNK)
    assert memory.front_bytes == 8 * CHUNK
    assert memory.shrink(caught.value.end_bytes) == 5 * CHUNK
    del high
    assert memory.shrink(2 * CHUNK) == 2 * CHUNK
    del low
    assert memory.statistics().in_use_bytes == 0


@pytest.mark.gpu
def test_a_tensor_keeps_its_arena():
    memory = Arena(GIB)
    memory.grow(2 * MIB)
    tensor = memory.tensor(0, (1000,), torch.float32).fill_(3)
    del memory
    gc.collect()
    assert tensor.sum().item() == 3000


@pytest.mark.alone
@pytest.mark.gpu
def test_closing_waits_for_the_last_tensor():
    memory = Arena(64 * GIB)
    memory.grow(4 * GIB)
    tensor = memory.tensor(0, (1000,), torch.float32).fill_(3)
    free_before, _ = torch.cuda.mem_get_info()
    memory.close()
    assert tensor.sum().item() == 3000
    assert memory.statistics().mapped_bytes == 4 * GIB
    with pytest.raises(ClosedArenaError):
        memory.tensor(0, (1,), torch.float32)
    del tensor
    assert memory.statistics().held_bytes == 0
    assert torch.cuda.mem_get_info()[0] >= free_before + 4 * GIB - 64 * MIB


@pytest.mark.alone
@pytest.mark.gpu
def test_closing_gives_the_memory_back():
    torch.zeros(1, device="cuda")
    free_before, _ = torch.cuda.mem_get_info()
    memory = Arena(64 * GIB)
    memory.grow(4 * GIB)
    assert torch.cuda.mem_get_info()[0] <= free_before - 4 * GIB
    memory.shrink(GIB, keep=True)
    memory.close()
    memory.close()
    assert torch.cuda.mem_get_info()[0] >= free_before - 64 * MIB
    for call in (memory.grow, memory.shrink, memory.trim):
        with pytest.raises(ClosedArenaError):
            call(GIB)
    torch.zeros(1, device="cuda")  # PyTorch's context is still valid


@pytest.mark.alone
@pytest.mark.gpu
def test_out_of_memory_changes_nothing():
    total = torch.cuda.get_device_properties(0).total_memory
    with Arena(4 * total, chunk_bytes=GIB) as memory:
        memory.grow(GIB)
        first = memory.tensor(0, (1000,), torch.float32).fill_(5)
        with pytest.raises(OutOfMemoryError, match="bytes free") as caught:
            memory.grow(2 * total)
        assert caught.value.requested_bytes >= 2 * total - GIB
        assert caught.value.held_bytes == GIB
        assert 0 < caught.value.free_bytes < total
        assert memory.statistics().held_bytes == GIB
        with pytest.raises(ReservationError) as reservation:
            memory.grow(5 * total)
        assert reservation.value.requested_bytes == 5 * total
        assert reservation.value.reserved_bytes >= 4 * total
        assert memory.grow(2 * GIB) == 2 * GIB
        assert first.sum().item() == 5000


@pytest.mark.gpu
def test_the_limit_counts_mapped_and_spare_chunks():
    with Arena(GIB, limit_bytes=5 * CHUNK + 1) as memory:
        memory.grow(4 * CHUNK)
        with pytest.raises(LimitError, match="at most 10485761 bytes") as caught:
            memory.grow(6 * CHUNK)
        assert caught.value.requested_bytes == 2 * CHUNK
        assert caught.value.held_bytes == 4 * CHUNK
        assert caught.value.limit_bytes == 5 * CHUNK + 1
        assert memory.front_bytes == 4 * CHUNK
        memory.shrink(CHUNK, keep=True)
        memory.grow(5 * CHUNK)  # uses three spares and one new chunk
        with pytest.raises(LimitError):
            memory.grow(6 * CHUNK)


@pytest.mark.gpu
@pytest.mark.parametrize("by_argument", [True, False])
def test_chunks_are_rounded_up_with_a_warning(monkeypatch, by_argument):
    monkeypatch.setenv("VLLM_VMM_CHUNK_SIZE", str(MIB) if by_argument else "3000000")
    with (
        pytest.warns(UserWarning, match="chunk_bytes 3000000 is rounded up to 4194304"),
        Arena(GIB, chunk_bytes=3_000_000 if by_argument else None) as memory,
    ):
        assert memory.statistics().chunk_bytes == 4 * MIB
        assert memory.grow(1) == 4 * MIB


@pytest.mark.gpu
def test_the_chunk_size_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_VMM_CHUNK_SIZE", str(32 * MIB))
    with Arena(GIB) as memory:
        assert memory.grow(1) == 32 * MIB


@pytest.mark.gpu
def test_unknown_device_is_a_typed_error():
    with pytest.raises(DriverError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE") as caught:
        Arena(GIB, device=1000)
    assert caught.value.code == 101


@pytest.mark.gpu
def test_a_graph_survives_unmapping_beyond_it(memory):
    memory.grow(64 * MIB)
    values = memory.tensor(0, (1000,), torch.float32).fill_(1)
    total = memory.tensor(4096, (1000,), torch.float32).fill_(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(values)
    graph.replay()
    memory.shrink(2 * MIB)
    values.fill_(2)
    graph.replay()
    assert (total == 3).all()
    with pytest.raises(InUseError):  # tensors hold the memory that the graph needs
        memory.shrink(0)
    torch.cuda.synchronize()
    del graph


@pytest.mark.gpu
def test_memory_is_mapped_during_a_capture(memory):
    memory.grow(CHUNK)
    values = memory.tensor(0, (1000,), torch.float32).fill_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memory.grow(16 * CHUNK)
        doubled = memory.tensor(15 * CHUNK, (1000,), torch.float32)
        torch.mul(values, 2, out=doubled)
    graph.replay()
    assert (doubled == 2).all()


@pytest.fixture
def pool(memory):
    pool = TorchPool(memory, 16 * GIB)
    yield pool
    pool.close()


def lies_in(tensor, arena):
    offset = tensor.data_ptr() - arena.base_address
    return 0 <= offset < arena.statistics().reserved_bytes


@pytest.mark.gpu
def test_pytorch_allocates_from_the_pool(memory, pool):
    memory.grow(4 * CHUNK)
    with pool.use():
        large = torch.full((100, MIB // 4), 3.0, device="cuda")
        small = torch.arange(100, device="cuda")
    outside = torch.zeros(100, device="cuda")
    assert lies_in(large, memory) and lies_in(small, memory)
    assert not lies_in(outside, memory)
    in_use = pool.in_use_bytes
    assert 100 * MIB < in_use <= 124 * MIB
    assert memory.statistics().mapped_bytes == 4 * CHUNK + in_use
    assert memory.statistics().in_use_bytes == in_use
    assert large.sum().item() == 3.0 * large.numel()
    memory.shrink(0)  # the pool does not use the front of the arena
    del large
    pool.trim()
    assert pool.in_use_bytes < 24 * MIB
    assert memory.statistics().spare_bytes >= 100 * MIB
    assert small.sum().item() == 4950
    del small
    with pool.use():
        again = torch.ones(50, MIB // 4, device="cuda")
    assert memory.statistics().num_chunks_created <= 4 + 124 * MIB // CHUNK  # spares were used
    assert again.sum().item() == again.numel()


@pytest.mark.gpu
def test_a_limit_is_an_out_of_memory_error_of_pytorch():
    memory = Arena(64 * GIB, limit_bytes=256 * MIB)
    pool = TorchPool(memory, 16 * GIB)
    with pool.use():
        first = torch.full((200, MIB // 4), 1.0, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(100, MIB // 4, device="cuda")
        more = torch.full((20, MIB // 4), 2.0, device="cuda")
    assert pool.in_use_bytes <= memory.statistics().held_bytes <= 256 * MIB
    assert (first == 1).all() and (more == 2).all()
    torch.empty(100, MIB // 4, device="cuda")  # ordinary allocations have no limit
    del first, more
    pool.trim()
    with pool.use():
        assert torch.ones(200, MIB // 4, device="cuda").sum().item() == 200 * MIB // 4
    pool.close()
    memory.close()


@pytest.mark.gpu
def test_a_graph_keeps_its_memory_in_the_pool(memory, pool):
    # There is no matrix product here, because cuBLAS's workspace would stay in the pool.
    source = torch.randn(1000, 1000, device="cuda")
    identity = torch.eye(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        hidden = source * 2
        result = hidden + source
    assert lies_in(hidden, memory) and lies_in(result, memory)
    source.copy_(identity)
    graph.replay()
    assert torch.equal(result, 3 * identity)
    pool.trim()  # the graph outlives PyTorch's pool, this pool and the arena
    pool.close()
    memory.close()
    source.mul_(3)
    graph.replay()
    assert torch.equal(result, 9 * identity)
    assert pool.in_use_bytes > 0
    del graph, hidden, result
    gc.collect()
    torch.cuda.empty_cache()
    assert pool.in_use_bytes == 0
    assert memory.statistics().held_bytes == 0


@pytest.mark.gpu
def test_tensors_outlive_pool_and_arena(memory):
    pool = TorchPool(memory, GIB)
    with pool.use():
        tensor = torch.full((1000,), 2.0, device="cuda")
    pool.close()
    memory.close()
    del pool
    gc.collect()
    assert tensor.sum().item() == 2000
    del tensor
    torch.cuda.empty_cache()
    assert memory.statistics().held_bytes == 0


@pytest.mark.gpu
def test_pools_are_given_again_when_they_are_done(memory):
    for _ in range(40):
        pool = TorchPool(memory, 64 * MIB)
        with pool.use():
            torch.ones(1000, device="cuda")
        pool.close()
    open_pools = []
    with pytest.raises(VmmError, match="16 pools"):
        for _ in range(17):
            open_pools.append(TorchPool(memory, 64 * MIB))
    open_pools.clear()
    TorchPool(memory, 64 * MIB).close()
    with pytest.raises(ReservationError):
        TorchPool(memory, 64 * GIB)


def run(program):
    return run_python("-W", "ignore", "-c", program)


EXIT = """
import torch
from vmm_allocator import Arena, TorchPool
arena = Arena(1 << 36)
arena.grow(1 << 24)
pool = TorchPool(arena, 1 << 34)
values = arena.tensor(0, (1000,), torch.float32).fill_(1)
with pool.use():
    kept = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    out = values * 2
graph.replay()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "arena.close(); pool.close()",
        "del arena, pool",
        "import builtins; builtins.kept = [arena, pool, values, kept, graph, out]",
        "raise SystemExit(0)",
    ],
)
def test_a_process_ends_well_with_living_tensors_and_graphs(ending):
    result = run(EXIT + ending)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.gpu
def test_a_forked_child_is_told_and_ends_well():
    program = EXIT + (
        """
import os, sys
from vmm_allocator import ForkedArenaError
child = os.fork()
if child == 0:
    for call in (arena.grow, arena.shrink, arena.trim):
        try:
            call(0)
        except ForkedArenaError:
            continue
        os._exit(3)
    arena.close()
    del values, kept, graph, out, pool, arena
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert values.sum().item() == 1000 and kept.sum().item() == 1 << 20
graph.replay()
assert out.sum().item() == 2000
"""
    )
    assert issubclass(ForkedArenaError, VmmError)
    result = run(program)
    assert result.returncode == 0, result.stderr


FAULT = """
import ctypes, torch
from vmm_allocator import Arena, VmmError
arena = Arena(1 << 36)
arena.grow(1 << 22)
values = arena.tensor(0, (1000,), torch.float32).fill_(1)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    values.add_(1)
del values  # against the rule: the graph is replayed without its tensors
arena.shrink(0)
graph.replay()
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("fault", "illegal memory access" in str(error))
try:
    arena.grow(1 << 22)
    arena.shrink(0)
except VmmError as error:
    print(type(error).__name__)
arena.close()
"""


@pytest.mark.gpu
def test_a_device_fault_is_an_error_not_an_abort():
    result = run(FAULT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "fault True", result
    assert "Error" in result.stdout.splitlines()[1]
