# SPDX-License-Identifier: Apache-2.0
"""The activation pool uses PyTorch's allocator or, on a GPU, virtual memory."""

import random
from types import SimpleNamespace

import pytest
import torch

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.memory.activation_pool import ActivationPool, PoolExhaustedError
from vllm.diffusion.memory.graph_memory import GraphMemory
from vllm.diffusion.memory.virtual_memory import ArenaPool, activation_pool

MIB = 1024 * 1024
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
BACKINGS = ["torch", pytest.param("torch-cuda", marks=pytest.mark.gpu)]
BACKINGS.append(pytest.param("arena", marks=pytest.mark.gpu))


def make(backing, budget=64 * MIB):
    if backing == "arena":
        return ArenaPool(budget, CUDA)
    return ActivationPool(budget, CPU if backing == "torch" else CUDA)


@pytest.fixture(params=BACKINGS)
def pool(request):
    pool = make(request.param)
    yield pool
    if isinstance(pool, ArenaPool):
        pool.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_buffers_have_the_shape_and_memory_of_their_own(pool, dtype):
    first = pool.take("first", (3, 5), dtype)
    second = pool.take("second", (7,), dtype)
    empty = pool.take("empty", (0, 4), dtype)
    assert (first.shape, first.dtype, empty.shape) == ((3, 5), dtype, (0, 4))
    assert first.is_contiguous()
    first.fill_(1)
    second.fill_(0)
    assert (first == 1).all() and (second == 0).all()


def test_a_name_is_the_same_memory_while_it_is_large_enough(pool):
    first = pool.take("x", (8, 16), torch.float32)
    assert pool.take("x", (8, 16), torch.float32).data_ptr() == first.data_ptr()
    smaller = pool.take("x", (100,), torch.bfloat16)
    assert smaller.data_ptr() == first.data_ptr() and smaller.dtype == torch.bfloat16
    with pool.scope("inside"):
        assert pool.take("x", (8, 16), torch.float32).data_ptr() == first.data_ptr()
    assert pool.used_bytes == 512


def test_the_last_buffer_grows_where_it_is_others_leave_a_gap(pool):
    pool.take("x", (1024,), torch.uint8)
    pool.take("x", (2048,), torch.uint8)
    assert pool.used_bytes == 2048
    pool.take("y", (1,), torch.uint8)
    pool.take("x", (4096,), torch.uint8)
    assert pool.used_bytes == 2048 + 512 + 4096


def test_a_scope_gives_back_what_was_taken_in_it(pool):
    with pool.scope("step"):
        x = pool.take("x", (1000,), torch.float32).fill_(7)
        outside = pool.used_bytes
        with pool.scope("attend"):
            pool.take("q", (50_000,), torch.float32).fill_(1)
            assert pool.used_bytes == outside + 200_192
        with pool.scope("feed-forward"):
            pool.take("q", (60_000,), torch.float32).fill_(2)
            with pytest.raises(KeyError), pool.scope("fails"):
                pool.take("z", (10,), torch.float32)
                raise KeyError
        assert pool.used_bytes == outside
        assert (x == 7).all()
    assert pool.used_bytes == 0


def test_a_name_larger_than_outside_is_a_buffer_of_its_own(pool):
    with pool.scope():
        x = pool.take("x", (10,), torch.float32).fill_(7)
        with pool.scope():
            pool.take("x", (1000,), torch.float32).fill_(8)
        assert pool.take("x", (10,), torch.float32).data_ptr() == x.data_ptr()
        assert (x == 7).all()


def test_the_budget_is_kept_and_named(pool):
    pool.take("x", (48 * MIB,), torch.uint8)
    with pytest.raises(PoolExhaustedError, match="logits: wanted 71303168 bytes") as caught:
        pool.take("logits", (20 * MIB,), torch.uint8)
    assert caught.value.required_bytes == 68 * MIB
    assert caught.value.available_bytes == 64 * MIB
    assert pool.used_bytes == 48 * MIB
    pool.take("logits", (16 * MIB,), torch.uint8).fill_(1)


def test_a_budget_is_positive():
    with pytest.raises(ValueError, match="budget_bytes must be at least 1, got 0"):
        ActivationPool(0, CPU)


def test_random_steps_keep_every_buffer(pool):
    draw = random.Random(0)
    for step in range(50):
        with pool.scope("step"):
            taken = {}
            for index in range(draw.randrange(1, 12)):
                shape = (draw.randrange(1, 300), draw.randrange(1, 300))
                taken[index] = pool.take(str(index), shape, torch.float32)
                taken[index].fill_(1000 * step + index)
            for index, tensor in taken.items():
                assert (tensor == 1000 * step + index).all()
        if step % 10 == 9:
            taken.clear()
            del tensor
            pool.trim()
    assert pool.used_bytes == 0


def test_without_virtual_memory_pytorch_serves():
    for device, use_vmm in ((CPU, True), (CPU, False)):
        pool = activation_pool(MIB, device, use_vmm=use_vmm)
        assert pool.graph_pool() is None
        with pool.temporaries():
            assert pool.take("x", (4,), torch.float32).device == device


@pytest.mark.parametrize(("samples_often", "peak"), [(False, 1024), (True, 1024 + 700)])
def test_memory_of_pytorch_is_counted_with_every_scope_where_that_is_asked_for(samples_often, peak):
    class Temporaries(ActivationPool):
        other_bytes = 0

    pool = Temporaries(MIB, CPU)
    pool.reset_peak(samples_often=samples_often)
    with pool.scope("step"):
        pool.take("x", (1024,), torch.uint8)
        with pool.scope("attend"):
            pool.other_bytes = 700
        pool.other_bytes = 0
    assert pool.peak_bytes == peak


@pytest.fixture
def arena_pool():
    pool = make("arena")
    yield pool
    pool.close()


@pytest.mark.gpu
def test_the_next_step_lies_on_the_same_memory(arena_pool):
    with arena_pool.scope():
        first = arena_pool.take("x", (1000, 1000), torch.float32).data_ptr()
        arena_pool.take("y", (2000, 2000), torch.float32)
    held = arena_pool.num_bytes
    with arena_pool.scope():
        assert arena_pool.take("z", (4 * MIB,), torch.float32).data_ptr() == first
    assert arena_pool.num_bytes == held == 20 * MIB
    arena_pool.trim()
    assert arena_pool.num_bytes == 0


@pytest.mark.gpu
def test_a_graph_keeps_its_buffers_through_trimming(arena_pool):
    with arena_pool.scope():
        x = arena_pool.take("x", (1000,), torch.float32).fill_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=arena_pool.graph_pool()):
            doubled = x * 2
    assert arena_pool.used_bytes == 2 * MIB  # the memory of the graph
    with arena_pool.scope():
        arena_pool.take("other", (30 * MIB,), torch.uint8).fill_(255)
    arena_pool.trim()
    assert arena_pool.num_bytes == 4 * MIB
    x.fill_(3)
    graph.replay()
    assert (doubled == 6).all()


@pytest.mark.gpu
def test_temporaries_and_buffers_share_the_budget(arena_pool):
    with arena_pool.scope():
        arena_pool.take("x", (40 * MIB,), torch.uint8)
        with arena_pool.temporaries():
            temporary = torch.ones(20 * MIB, dtype=torch.uint8, device="cuda")
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(20 * MIB, dtype=torch.uint8, device="cuda")
        assert arena_pool.used_bytes == 60 * MIB
        with pytest.raises(PoolExhaustedError):
            arena_pool.take("y", (8 * MIB,), torch.uint8)
        del temporary
    arena_pool.trim()
    assert arena_pool.take("y", (60 * MIB,), torch.uint8).fill_(1).float().mean().item() == 1


@pytest.mark.gpu
def test_spares_of_temporaries_serve_buffers(arena_pool):
    with arena_pool.temporaries():
        torch.ones(40 * MIB, dtype=torch.uint8, device="cuda")
    # PyTorch still caches the segment; growing buffers take its chunks.
    arena_pool.take("x", (60 * MIB,), torch.uint8)
    assert arena_pool.num_bytes == 60 * MIB


@pytest.mark.gpu
def test_virtual_memory_is_taken_where_it_is_wanted():
    with_vmm = activation_pool(8 * MIB, CUDA, use_vmm=True, chunk_bytes=4 * MIB)
    assert with_vmm.graph_pool() is not None
    with_vmm.take("x", (1,), torch.uint8)
    assert with_vmm.num_bytes == 4 * MIB
    with_vmm.close()
    assert activation_pool(8 * MIB, CUDA, use_vmm=False).graph_pool() is None


def test_the_environment_chooses_the_allocator_and_the_chunk(monkeypatch):
    for name in ("VLLM_USE_VMM", "VLLM_VMM_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert envs.use_vmm() is True and envs.vmm_chunk_size() is None
    monkeypatch.setenv("VLLM_USE_VMM", "0")
    monkeypatch.setenv("VLLM_VMM_CHUNK_SIZE", "33554432")
    assert envs.use_vmm() is False and envs.vmm_chunk_size() == 32 * MIB
    assert {"VLLM_USE_VMM", "VLLM_VMM_CHUNK_SIZE"} <= set(envs.VARIABLES)
    monkeypatch.setenv("VLLM_USE_VMM", "yes")
    with pytest.raises(ServerConfigError, match="VLLM_USE_VMM: given 'yes'; wanted 0 or 1"):
        envs.use_vmm()


def test_what_pytorch_will_allocate_is_counted_to_the_end_of_the_scope():
    pool = make("torch", budget=4096)
    with pool.scope("attend"):
        pool.take("q", (256,), torch.float32)
        pool.expect("attention", 1000)
        assert pool.used_bytes == 2024
        with pytest.raises(PoolExhaustedError, match="statistics: wanted 4524 bytes"):
            pool.expect("statistics", 2500)
        assert pool.used_bytes == 2024
    assert pool.used_bytes == 0
    assert pool.peak_bytes == 2024
    pool.reset_peak()
    assert pool.peak_bytes == 0


def test_what_is_kept_replaces_what_was_kept_before(pool):
    outside = pool.used_bytes
    first = pool.keep("caches", (1000, 100), torch.float32).fill_(3)
    second = pool.keep("caches", (2000, 100), torch.float32)
    second[:1000] = first
    del first
    assert (second[:1000] == 3).all()
    assert pool.used_bytes >= outside + second.nbytes
    with pool.scope("step"):
        pool.take("x", (100,), torch.float32)
    with pytest.raises((PoolExhaustedError, torch.OutOfMemoryError)):
        pool.keep("caches", (65 * MIB,), torch.uint8)
    assert (second[:1000] == 3).all()


def test_only_what_is_taken_outside_of_all_scopes_stays(pool):
    pool.take("x", (1024,), torch.uint8)
    with pool.scope("step"):
        pool.take("y", (1024,), torch.uint8)
        assert pool.outermost_bytes == 1024
        with pool.scope("attend"):
            pool.take("q", (1024,), torch.uint8)
            assert pool.outermost_bytes == 1024
    assert pool.outermost_bytes == 1024


# ---- a paused step ----


def test_a_frame_keeps_its_buffers_while_other_steps_run(pool):
    pool.take("x", (64,), torch.float32).fill_(1)
    outside = pool.used_bytes
    pool.begin_frame()
    steps = steps_in_frame(pool)
    with pool.within_frame():
        x = next(steps)
    held = pool.frame_bytes
    assert held == 512 + 4096 and pool.used_bytes == outside + held
    for size in (100, 5000):
        with pool.scope("step"):
            other = pool.take("x", (size,), torch.float32).fill_(9)
            own = pool.take("y", (8,), torch.float32).fill_(9)
            assert {other.data_ptr(), own.data_ptr()}.isdisjoint({x.data_ptr()})
        assert pool.used_bytes == outside + held
    assert pool.outermost_bytes == outside
    with pool.within_frame():
        y = next(steps)
    assert (x == 3).all() and (y == 4).all()
    with pool.within_frame():
        steps.close()
    assert pool.frame_bytes == 0
    pool.end_frame()
    assert pool.used_bytes == outside and not pool.has_frame


def steps_in_frame(pool):
    with pool.scope("step"):
        x = pool.take("x", (16,), torch.float32).fill_(3)
        with pool.scope("attend"):
            y = pool.take("y", (1024,), torch.float32).fill_(4)
            yield x
            yield y


def test_a_frame_shares_no_name_with_what_lies_in_front_of_it(pool):
    """A captured graph writes in front of the frame at every replay."""
    front = pool.take("x", (4096,), torch.float32)
    pool.begin_frame()
    with pool.within_frame(), pool.scope("step"):
        assert pool.take("x", (16,), torch.float32).data_ptr() != front.data_ptr()
    pool.end_frame()


def test_above_a_frame_nothing_is_taken_to_stay(pool):
    pool.begin_frame()
    with pytest.raises(RuntimeError, match="graph: taken outside all scopes"):
        pool.take("graph", (8,), torch.float32)
    with pytest.raises(RuntimeError, match="alone"):
        pool.begin_frame()
    pool.end_frame()
    with pool.scope("step"), pytest.raises(RuntimeError, match="outside all scopes"):
        pool.begin_frame()


def test_no_graph_takes_what_is_for_all(monkeypatch):
    """Graphs of many rows are captured first; one that is too large leaves memory for others."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100 << 30))
    pool = SimpleNamespace(budget_bytes=16 << 20, graph_bytes=0)
    memory = GraphMemory(CUDA, pool)
    assert memory.budget_bytes == 1 << 20
    assert not memory.has_room_for((1 << 20) + 1)
    assert memory.has_room_for(1 << 20)
    pool.graph_bytes = 1 << 20
    assert not memory.has_room_for(1)
