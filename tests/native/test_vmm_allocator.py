# SPDX-License-Identifier: Apache-2.0
"""vmm_allocator: argument checks everywhere, the arena itself on a GPU."""

import gc

import pytest
import torch

import vmm_allocator
from vmm_allocator import (
    Arena,
    ClosedArenaError,
    DriverError,
    DriverUnavailableError,
    NotBuiltError,
    OutOfMemoryError,
    ReservationError,
    VmmError,
    arena,
)

MIB = 1024 * 1024
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reserve_bytes": 0}, "reserve_bytes must be an integer >= 1, got 0"),
        ({"reserve_bytes": 1.5}, "reserve_bytes must be an integer >= 1, got 1.5"),
        ({"reserve_bytes": 2**63}, "reserve_bytes must be an integer"),
        ({"reserve_bytes": GIB, "chunk_bytes": -2}, "chunk_bytes must be an integer >= 1, got -2"),
        ({"reserve_bytes": GIB, "device": -1}, "device must be an integer >= 0, got -1"),
        ({"reserve_bytes": GIB, "device": True}, "device must be an integer >= 0, got True"),
    ],
)
def test_arguments_are_checked_first(arguments, message):
    with pytest.raises(ValueError, match=message):
        Arena(**arguments)


def test_unbuilt_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(arena, "_native", None)
    assert not vmm_allocator.is_built()
    with pytest.raises(NotBuiltError, match=r"setup\.py build_ext --inplace"):
        Arena(GIB)


@pytest.mark.skipif(not vmm_allocator.is_built(), reason="vmm_allocator is not built")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver")
def test_no_driver_is_a_typed_error():
    for _ in range(2):  # the second try opens the library again
        with pytest.raises(DriverUnavailableError, match=r"libcuda|cuInit"):
            Arena(GIB)


def test_errors_share_a_base():
    for error in (DriverError, DriverUnavailableError, NotBuiltError, OutOfMemoryError):
        assert issubclass(error, VmmError)


@pytest.mark.gpu
def test_grow_and_shrink_move_the_mapped_end():
    with Arena(GIB) as memory:
        assert memory.mapped_bytes == 0
        assert memory.grow(1) == 2 * MIB
        assert memory.grow(1) == 2 * MIB
        assert memory.grow(10 * MIB + 1) == 12 * MIB
        assert memory.grow(4 * MIB) == 12 * MIB  # never unmaps
        assert memory.shrink(4 * MIB + 1) == 6 * MIB
        assert memory.shrink(8 * MIB) == 6 * MIB  # never maps
        statistics = memory.statistics()
        assert statistics.reserved_bytes == GIB
        assert statistics.mapped_bytes == 6 * MIB
        assert statistics.peak_mapped_bytes == 12 * MIB
        assert statistics.chunk_bytes % statistics.granularity_bytes == 0
        assert (statistics.num_grows, statistics.num_shrinks) == (2, 1)
        assert memory.shrink(0) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_tensors_keep_their_contents_while_the_end_moves(dtype):
    with Arena(64 * GIB) as memory:
        memory.grow(4 * MIB)
        tensor = memory.tensor(256, (300, 1000), dtype)
        assert tensor.data_ptr() == memory.base_address + 256
        assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cuda
        wanted = (torch.arange(300_000) % 113).to(dtype).view(300, 1000)
        tensor.copy_(wanted)
        memory.grow(100 * MIB)
        tail = memory.tensor(50 * MIB, (10 * MIB,), torch.uint8)
        tail.fill_(7)
        memory.shrink(4 * MIB)
        memory.grow(100 * MIB)
        assert torch.equal(tensor.cpu(), wanted)
        left = torch.randn(64, 64, device="cuda")
        product = memory.tensor(60 * MIB, (64, 64), torch.float32)
        torch.mm(left, left, out=product)
        assert torch.equal(product, left @ left)


@pytest.mark.gpu
def test_tensor_must_be_mapped_and_aligned():
    with Arena(GIB) as memory:
        memory.grow(2 * MIB)
        assert memory.tensor(2 * MIB, (0, 5), torch.float32).shape == (0, 5)
        with pytest.raises(ValueError, match=r"must be mapped, got 2097152 mapped bytes"):
            memory.tensor(MIB, (MIB + 1,), torch.uint8)
        with pytest.raises(ValueError, match="multiple of 4, got 2"):
            memory.tensor(2, (4,), torch.float32)


@pytest.mark.gpu
def test_a_tensor_keeps_its_arena():
    memory = Arena(GIB)
    memory.grow(2 * MIB)
    tensor = memory.tensor(0, (1000,), torch.float32).fill_(3)
    del memory
    gc.collect()
    assert tensor.sum().item() == 3000


@pytest.mark.gpu
def test_out_of_memory_changes_nothing():
    total = torch.cuda.get_device_properties(0).total_memory
    with Arena(4 * total, chunk_bytes=GIB) as memory:
        memory.grow(GIB)
        first = memory.tensor(0, (1000,), torch.float32).fill_(5)
        with pytest.raises(OutOfMemoryError, match="bytes free") as caught:
            memory.grow(2 * total)
        assert caught.value.requested_bytes >= 2 * total
        assert caught.value.mapped_bytes == GIB
        assert 0 < caught.value.free_bytes < total
        assert memory.mapped_bytes == GIB
        with pytest.raises(ReservationError) as reservation:
            memory.grow(5 * total)
        assert reservation.value.requested_bytes == 5 * total
        assert reservation.value.reserved_bytes >= 4 * total
        assert memory.grow(2 * GIB) == 2 * GIB
        assert first.sum().item() == 5000


@pytest.mark.gpu
def test_closing_gives_the_memory_back():
    torch.zeros(1, device="cuda")
    free_before, _ = torch.cuda.mem_get_info()
    memory = Arena(64 * GIB)
    memory.grow(4 * GIB)
    assert torch.cuda.mem_get_info()[0] <= free_before - 4 * GIB
    memory.close()
    memory.close()
    assert torch.cuda.mem_get_info()[0] >= free_before - 64 * MIB
    for call in (memory.grow, memory.shrink):
        with pytest.raises(ClosedArenaError):
            call(GIB)
    torch.zeros(1, device="cuda")  # PyTorch's context lives on


@pytest.mark.gpu
def test_chunks_are_rounded_up_with_a_warning():
    with (
        pytest.warns(UserWarning, match="chunk_bytes 3000000 is rounded up to 4194304"),
        Arena(GIB, chunk_bytes=3_000_000) as memory,
    ):
        assert memory.statistics().chunk_bytes == 4 * MIB
        assert memory.grow(1) == 4 * MIB


@pytest.mark.gpu
def test_unknown_device_is_a_typed_error():
    with pytest.raises(DriverError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE") as caught:
        Arena(GIB, device=1000)
    assert caught.value.code == 101


@pytest.mark.gpu
def test_a_graph_survives_unmapping_beyond_it():
    with Arena(GIB) as memory:
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
        torch.cuda.synchronize()
        del graph
