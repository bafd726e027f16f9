# SPDX-License-Identifier: Apache-2.0
"""Which requests may share a step, how stages are cut, and what caches hold."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from vllm.diffusion import params
from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.families import LLADA
from vllm.diffusion.memory import BufferPool, CachePool, CacheRange, Demand, Planner, chunks
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


def pool_of(num_layers: int = 3) -> CachePool:
    return CachePool(num_layers, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16, device=CPU)


def mark(pool: CachePool, taken: CacheRange, value: float) -> None:
    for layer in range(3):
        pool.keys(layer)[taken.start : taken.end] = value + layer
        pool.values(layer)[taken.start : taken.end] = -value - layer


def assert_marked(pool: CachePool, taken: CacheRange, value: float) -> None:
    for layer in range(3):
        assert (pool.keys(layer)[taken.start : taken.end] == value + layer).all()
        assert (pool.values(layer)[taken.start : taken.end] == -value - layer).all()


def test_caches_are_counted_and_released() -> None:
    pool, row_bytes = pool_of(), 3 * 2 * 2 * 4 * 2
    taken = pool.allocate("a", 10)
    assert pool.keys(0).shape == pool.values(2).shape == (10, 2, 4)
    assert (taken.start, taken.end, pool.num_bytes) == (0, 10, 10 * row_bytes)
    pool.allocate("b", 5)
    pool.release("a")
    pool.release("never there")
    assert pool.num_bytes == 5 * row_bytes
    assert pool.reserved_bytes >= 15 * row_bytes


def test_a_released_range_is_used_again_without_moving_anything() -> None:
    pool = pool_of()
    taken = {name: pool.allocate(name, 10) for name in "abc"}
    generation = pool.generation
    pool.release("b")
    assert pool.allocate("d", 4).start == 10
    assert pool.allocate("e", 6).start == 14
    assert (taken["c"].start, pool.generation) == (20, generation)


def test_ranges_keep_their_contents_when_gaps_close_and_the_buffer_grows() -> None:
    """Random requests come and go; every one finds what it wrote."""
    pool, rng = pool_of(), random.Random(5)
    running: dict[str, tuple[CacheRange, float]] = {}
    most = 0
    for number in range(200):
        if len(running) > 4 or (running and rng.random() < 0.4):
            name = rng.choice(sorted(running))
            running.pop(name)
            pool.release(name)
        taken = pool.allocate(str(number), rng.randint(1, 30))
        mark(pool, taken, float(number % 100))
        running[str(number)] = taken, float(number % 100)
        most = max(most, pool.used_rows)
        for held, value in running.values():
            assert_marked(pool, held, value)
        ranges = sorted((held.start, held.end) for held, _ in running.values())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert len(pool.keys(0)) <= 2 * most  # gaps are closed before the buffer grows
