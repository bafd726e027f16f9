# SPDX-License-Identifier: Apache-2.0
"""Which requests may share a step, how stages are cut, and what caches hold."""

from __future__ import annotations

import pytest
import torch

from vllm.diffusion import params
from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.families import LLADA
from vllm.diffusion.memory import BufferPool, CachePool, Demand, Planner, chunks
from vllm.diffusion.params import ServedModel, SpecialIds

CPU = torch.device("cpu")


def test_a_lone_request_may_have_any_number_of_rows() -> None:
    assert Planner(row_budget=100, vocab_size=256).admits([], Demand(rows=10_000))


def test_requests_share_a_step_within_the_row_budget() -> None:
    planner = Planner(row_budget=100, vocab_size=256)
    running = [Demand(40), Demand(30)]
    assert planner.admits(running, Demand(30))
    assert not planner.admits(running, Demand(31))


def test_kept_keys_and_values_have_a_budget_of_their_own() -> None:
    planner = Planner(row_budget=1000, vocab_size=256, cached_positions=150)
    running = [Demand(100, cached_positions=100)]
    assert planner.admits(running, Demand(50, cached_positions=50))
    assert not planner.admits(running, Demand(51, cached_positions=51))
    assert planner.admits(running, Demand(500))
    assert not planner.admits([], Demand(151, cached_positions=151))


def test_a_cache_that_never_fits_is_refused_with_the_numbers() -> None:
    ids = SpecialIds(mask=15, eos=14, eot=13, stop=frozenset({13, 14}))
    model = ServedModel(LLADA, ids, max_model_len=512, vocab_size=16, cached_positions=100)
    asked = {"gen_length": 96, "cache": "dual"}
    assert params.resolve(params.canonical(asked), model, [1] * 4).cache == "dual"
    with pytest.raises(InvalidParameterError, match=r"cache: given 'dual'; .* 101 .* holds 100"):
        params.resolve(params.canonical(asked), model, [1] * 5)
    assert params.resolve(params.canonical({"gen_length": 96}), model, [1] * 5).cache == "none"


@pytest.mark.parametrize(("num_rows", "size"), [(0, 3), (1, 3), (6, 3), (7, 3), (2, 100)])
def test_chunks_cover_all_rows_once(num_rows: int, size: int) -> None:
    parts = list(chunks(num_rows, size))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.stop - part.start <= size for part in parts)


def test_buffers_are_reused_and_grow() -> None:
    pool = BufferPool(CPU)
    small = pool.take("x", (4, 8), torch.float32)
    large = pool.take("x", (8, 8), torch.float32)
    again = pool.take("x", (2, 3), torch.float32)
    assert (small.shape, large.shape, again.shape) == ((4, 8), (8, 8), (2, 3))
    assert again.data_ptr() == large.data_ptr()
    assert pool.take("y", (8, 8), torch.float32).data_ptr() != large.data_ptr()
    assert pool.num_bytes == 2 * 8 * 8 * 4


def test_caches_are_counted_and_released() -> None:
    pool = CachePool(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16, device=CPU)
    cache = pool.allocate("a", 10)
    assert cache.k.shape == cache.v.shape == (3, 10, 2, 4)
    assert pool.num_bytes == cache.num_bytes == 2 * 3 * 10 * 2 * 4 * 2
    pool.allocate("b", 5)
    pool.release("a")
    pool.release("never there")
    assert pool.num_bytes == 2 * 3 * 5 * 2 * 4 * 2
