# SPDX-License-Identifier: Apache-2.0
"""The store of cached keys and values: pages are taken and freed, contents of requests stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.diffusion.core.pages import PAGE_SIZE, in_whole_pages, num_pages
from vllm.diffusion.memory import (
    ActivationPool,
    KeptSequence,
    PageAllocator,
    PageStore,
    PoolExhaustedError,
)

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 3, 2, 4
PAGE_BYTES = PAGE_SIZE * NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 2


def pages_of(
    num_pages: int = 1000, num_layers: int = NUM_LAYERS
) -> tuple[PageAllocator, PageStore]:
    """Return a store with memory for `num_pages` pages, an old and a new buffer together."""
    pool = ActivationPool(num_pages * PAGE_BYTES, CPU)
    store = PageStore(num_layers, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, pool)
    return PageAllocator(store, pool), store


def rows_of(kept: KeptSequence) -> torch.Tensor:
    return torch.from_numpy(kept.slots)


def mark(store: PageStore, kept: KeptSequence, value: int) -> None:
    """Write numbers that identify position, layer and request."""
    marks = torch.arange(kept.length)[:, None, None] % 7 + value
    for layer in range(NUM_LAYERS):
        store.keys(layer)[rows_of(kept)] = (marks + 10 * layer).bfloat16().expand(-1, 2, 4)
        store.values(layer)[rows_of(kept)] = (-marks - 10 * layer).bfloat16().expand(-1, 2, 4)


def assert_marked(store: PageStore, kept: KeptSequence, value: int) -> None:
    """Check the numbers by the slots, and by the page table that a kernel reads."""
    marks = torch.arange(kept.length)[:, None, None] % 7 + value
    assert store.table.rows_of(kept.start, kept.keys.stop).tolist() == kept.slots.tolist()
    for layer in range(NUM_LAYERS):
        assert (store.keys(layer)[rows_of(kept)] == marks + 10 * layer).all()
        assert (store.values(layer)[rows_of(kept)] == -marks - 10 * layer).all()


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (640, 10)])
def test_positions_are_counted_in_whole_pages(positions: int, pages: int) -> None:
    assert num_pages(positions) == pages
    assert in_whole_pages(positions) == pages * PAGE_SIZE


def test_pages_are_counted_and_released() -> None:
    pages, store = pages_of()
    assert (store.num_bytes, store.reserved_bytes, len(store.table.rows)) == (0, 0, 0)
    kept = pages.allocate("a", PAGE_SIZE + 1)
    assert (kept.start, kept.length, kept.slots.size) == (0, PAGE_SIZE + 1, PAGE_SIZE + 1)
    assert store.keys(0).shape == store.values(2).shape
    assert store.keys(0).shape[1:] == (NUM_KV_HEADS, HEAD_DIM)
    assert (store.num_bytes, store.reserved_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    pages.allocate("b", 5)
    pages.release("a")
    pages.release("never there")
    assert store.num_bytes == PAGE_BYTES
    assert store.reserved_bytes == 4 * PAGE_BYTES  # growth doubles the store


def test_a_second_allocation_takes_the_place_of_the_first() -> None:
    pages, store = pages_of()
    for _ in range(5):
        pages.allocate("a", 3 * PAGE_SIZE)
    assert store.num_bytes == store.reserved_bytes == 3 * PAGE_BYTES


def test_pages_that_lie_apart_serve_one_request_without_moving_anything() -> None:
    pages, store = pages_of()
    kept = {name: pages.allocate(name, PAGE_SIZE) for name in "abcd"}
    for value, name in enumerate("abcd"):
        mark(store, kept[name], value)
    version, table = store.layout_version, store.table
    before = table.rows.tolist()
    pages.release("a")
    pages.release("c")
    joined = pages.allocate("e", 2 * PAGE_SIZE)
    mark(store, joined, 9)
    assert sorted(joined.pages.tolist()) == [0, 2]
    assert (store.layout_version, table.rows.tolist()) == (version, before)
    for name, value in (("b", 1), ("d", 3)):
        assert_marked(store, kept[name], value)
    assert_marked(store, joined, 9)


def test_growth_takes_what_there_is_where_twice_as_much_is_not() -> None:
    pages, store = pages_of(num_pages=11)  # 5 pages and the next 6 fit at once, 5 and 10 do not
    first = pages.allocate("a", 5 * PAGE_SIZE)
    mark(store, first, 1)
    second = pages.allocate("b", 1)
    assert store.reserved_bytes == 6 * PAGE_BYTES
    mark(store, second, 2)
    version = store.layout_version
    with pytest.raises(PoolExhaustedError, match="kept keys and values: wanted"):
        pages.allocate("c", 6 * PAGE_SIZE)
    assert (store.num_bytes, store.layout_version) == (6 * PAGE_BYTES, version)
    assert_marked(store, first, 1)
    assert_marked(store, second, 2)


def test_no_more_than_a_part_of_the_layers_is_there_twice() -> None:
    """Three layers are three parts: 6 pages and a third of the earlier 4 exist at once."""
    pages, store = pages_of(num_pages=9)
    first = pages.allocate("a", 4 * PAGE_SIZE)
    mark(store, first, 1)
    second = pages.allocate("b", 2 * PAGE_SIZE)
    mark(store, second, 2)
    assert store.reserved_bytes == 6 * PAGE_BYTES
    assert_marked(store, first, 1)
    pages.release("a")
    third = pages.allocate("c", 6 * PAGE_SIZE)
    mark(store, third, 3)
    assert store.reserved_bytes == 8 * PAGE_BYTES
    assert_marked(store, second, 2)
    pages.release("c")
    pages.trim()
    assert store.reserved_bytes == 2 * PAGE_BYTES
    assert_marked(store, second, 2)


def test_pages_stay_where_memory_ends_while_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have less memory than the pool counts; leftover buffers are freed later."""
    pages, store = pages_of()
    pages.allocate("gone", PAGE_SIZE)
    first = pages.allocate("a", 3 * PAGE_SIZE)
    mark(store, first, 1)
    pages.release("gone")
    keep = store._pool.keep

    def keep_all_but_the_last(
        name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if name.startswith("part 2"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return keep(name, shape, dtype)

    with monkeypatch.context() as full:
        full.setattr(store._pool, "keep", keep_all_but_the_last)
        with pytest.raises(torch.OutOfMemoryError):
            pages.allocate("b", 5 * PAGE_SIZE)
        assert_marked(store, first, 1)
    assert store.num_bytes == 3 * PAGE_BYTES
    pages.trim()
    assert store.reserved_bytes == 3 * PAGE_BYTES
    assert_marked(store, first, 1)
    pages.allocate("b", 5 * PAGE_SIZE)
    assert_marked(store, first, 1)


@pytest.mark.parametrize("within", [True, False])
def test_pages_may_come_and_move_in_inference_mode_and_outside_of_it(within: bool) -> None:
    pages, store = pages_of()
    with torch.inference_mode(within):
        pages.allocate("a", 1)
        pages.allocate("b", 1)
        pages.release("a")
        pages.trim()
    with torch.inference_mode(not within):
        pages.allocate("c", 1)
        assert store.table.rows.tolist() == [0, 2 * PAGE_SIZE]


def test_layers_in_host_memory_take_turns_on_the_device() -> None:
    """A forward pass finds every layer on the device, and the next one finds what it wrote."""
    pages, store = pages_of(num_layers=5)
    kept = pages.allocate("a", 2 * PAGE_SIZE + 5, host_layers=4)
    assert store.reserved_bytes == 3 * PAGE_BYTES  # three pages in 1 + 2 layers
    assert store.host_bytes == 3 * PAGE_BYTES * 4 // 3
    slots = rows_of(kept)

    def forward(first: int, value: int, *, reads: bool) -> list[list[float]]:
        """Write the positions from `first` on, and return each layer's keys and values."""
        seen = []
        store.begin_step(kept.slots[first:], reads=reads)
        for layer in range(5):
            store.turn_to(layer)
            store.keys(layer)[slots[first:]] = value + layer
            store.values(layer)[slots[first:]] = -value - layer
            keys, values = store.keys(layer)[slots], store.values(layer)[slots]
            assert (keys == -values).all()
            seen.append(keys[:, 1, 2].tolist())
        store.end_step()
        return seen

    forward(0, 10, reads=False)
    for first, value in ((100, 20), (60, 30)):
        wanted = forward(first, value, reads=True)
        before = 10 if value == 20 else 20
        for layer, numbers in enumerate(wanted):
            assert numbers[:60] == [10 + layer] * 60
            assert numbers[first:] == [value + layer] * (133 - first)
            assert numbers[100] == max(before, value) + layer
    with pytest.raises(RuntimeError, match="host_layers: wanted 4"):
        pages.allocate("b", 1)
    pages.release("a")
    assert (store.reserved_bytes, store.host_bytes, store.host_layers) == (0, 0, 0)
    pages.allocate("b", 1)


def test_pages_that_were_provided_do_not_move_as_requests_come() -> None:
    pages, store = pages_of(num_pages=20)
    pages.provide(10 * PAGE_SIZE)
    version = store.layout_version
    for number in range(10):
        pages.allocate(str(number), PAGE_SIZE)
    for number in range(10):
        pages.release(str(number))
    assert (store.layout_version, store.reserved_bytes) == (version, 10 * PAGE_BYTES)
    pages.trim()
    assert store.reserved_bytes == 0
    pages.provide(21 * PAGE_SIZE)  # more pages than there are
    assert store.reserved_bytes == 0


def test_pages_of_many_move_a_few_times_while_requests_come_one_by_one() -> None:
    pages, store = pages_of(num_pages=400)
    sizes = []
    for number in range(300):  # more than half of the pool, so that the store cannot double
        pages.allocate(str(number), PAGE_SIZE)
        sizes.append(store.num_pages)
    assert len(set(sizes)) < 15
    assert all(size <= max(2, number * 2) for number, size in enumerate(sizes, 1))
    assert all(size <= 5 * number // 4 for number, size in enumerate(sizes, 1) if number > 256)


def test_what_one_request_alone_kept_is_given_back_with_it() -> None:
    pages, store = pages_of(num_pages=10)
    pages.allocate("small", 1)
    pages.release("small")
    assert store.reserved_bytes == PAGE_BYTES
    pages.allocate("large", 9 * PAGE_SIZE)  # does not fit together with the earlier page
    pages.release("large")
    assert store.reserved_bytes == 0


actions = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 4 * PAGE_SIZE)),
        st.tuples(st.just("release"), st.integers(0, 100)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=30,
)


@given(actions=actions, room=st.sampled_from([8, 20, 1000]))
@settings(max_examples=60, deadline=None)
def test_contents_survive_whatever_comes_and_goes(
    actions: list[tuple[str, int]], room: int
) -> None:
    (pages, store), running, most = pages_of(room), dict[str, tuple[KeptSequence, int]](), 0
    for number, (action, amount) in enumerate(actions):
        if action == "allocate":
            used = store.num_pages - len(store.free)
            try:
                kept = pages.allocate(str(number), amount)
            except PoolExhaustedError:  # one of three layers must exist twice
                assert used + num_pages(amount) + used / 3 > room
            else:
                mark(store, kept, number)
                running[str(number)] = kept, number
        elif action == "release" and running:
            name = sorted(running)[amount % len(running)]
            del running[name]
            pages.release(name)
        elif action == "trim" and room > 2 * most:
            pages.trim()
            assert store.reserved_bytes == store.num_bytes
        for kept, value in running.values():
            assert_marked(store, kept, value)
        taken = [page for kept, _ in running.values() for page in kept.pages.tolist()]
        assert len(taken) == len(set(taken)) == store.num_pages - len(store.free)
        most = max(most, len(taken))
        assert store.reserved_bytes <= max(2 * most - 1, 0) * PAGE_BYTES


def test_assigned_pages_may_be_shared_and_come_behind_others() -> None:
    pages, store = pages_of()
    pages.fix(6, most_entries=20)
    assert (store.reserved_bytes, pages.fixed_bytes) == (6 * PAGE_BYTES, 6 * PAGE_BYTES)
    pages.assign("a", [4, 2])
    b = pages.assign("b", [4, 5, 1])
    a = pages.assign("a", [3], behind=True)
    assert pages.assign("a", [], behind=True) is a
    pages.update_table()
    assert a is not None and b is not None
    assert (a.length, b.length, a.start, b.start) == (192, 192, 0, 192)
    page_rows = 2 * PAGE_SIZE
    assert (store.table.rows // page_rows).tolist() == [4, 2, 3, 4, 5, 1]
    mark(store, a, 1)
    assert_marked(store, a, 1)
    assert (a.slots[:PAGE_SIZE] == b.slots[:PAGE_SIZE]).all()
    pages.assign("b", [0])
    assert pages.assign("a", []) is None
    pages.update_table()
    assert (store.table.rows // page_rows).tolist() == [0]
    version = store.layout_version
    pages.trim()
    pages.release("b")
    assert (store.num_pages, store.layout_version, store.most_entries) == (6, version, 20)


def test_a_request_may_read_what_another_one_keeps() -> None:
    """Whole pages are shared by both requests, and outlive the request that had them first."""
    pages, store = pages_of(num_pages=40)
    length, offset = 2 * PAGE_SIZE + 30, 3 * PAGE_SIZE
    shared = [range(PAGE_SIZE + 9), range(offset, offset + PAGE_SIZE + 9)]
    pages.provide(10 * PAGE_SIZE)
    first = pages.allocate("a", offset + length)
    mark(store, first, 1)
    version = store.layout_version
    second = pages.share("b", "a", offset + length, shared)
    assert (store.num_bytes, store.layout_version) == (10 * PAGE_BYTES, version)
    same = np.flatnonzero(first.pages == second.pages).tolist()
    assert same == [0, 3]
    read = np.concatenate([np.arange(r.start, r.stop) for r in shared])
    for layer in range(NUM_LAYERS):
        for kept in (store.keys(layer), store.values(layer)):
            assert torch.equal(kept[rows_of(first)[read]], kept[rows_of(second)[read]])
    pages.allocate("c", 6 * PAGE_SIZE)  # makes pages move
    assert store.layout_version > version
    assert first.pages[same].tolist() == second.pages[same].tolist()
    assert_marked(store, first, 1)
    pages.release("a")
    assert store.num_bytes == (6 + 6) * PAGE_BYTES
    kept = second.slots[read]
    for layer in range(NUM_LAYERS):
        assert (
            store.keys(layer)[kept][:, 0, 0] == torch.from_numpy(read % 7 + 1 + 10 * layer)
        ).all()
    pages.release("b")
    pages.release("c")
    pages.trim()
    assert store.reserved_bytes == 0


def test_a_place_has_pages_of_its_own_where_it_is_written_to() -> None:
    pages, store = pages_of(100)
    owner = pages.allocate("a", 3 * PAGE_SIZE - 5)
    mark(store, owner, 1)
    window = range(PAGE_SIZE + 3, 2 * PAGE_SIZE + 2)
    places = pages.allocate_drafts("a", [window], ["1", "2"])
    assert store.num_bytes == (3 + 2 * 2) * PAGE_BYTES
    for kept in places:
        assert_marked(store, kept, 1)  # copies around the window, the request's pages elsewhere
        assert kept.pages[0] == owner.pages[0]
        store.keys(1)[rows_of(kept)[window.start : window.stop]] = 99
    assert_marked(store, owner, 1)
    outside = np.setdiff1d(np.arange(owner.length), window)
    assert not (store.keys(1)[rows_of(places[0])[outside]] == 99).any()
    pages.allocate("b", 40 * PAGE_SIZE)  # all pages move
    assert (store.keys(1)[rows_of(places[1])[window.start : window.stop]] == 99).all()
    assert_marked(store, owner, 1)
    for name in ("a", "1", "2", "b"):
        pages.release(name)
    assert store.num_bytes == 0


def test_places_leave_steps_their_memory() -> None:
    pages, store = pages_of(100)
    pages.allocate("a", 2 * PAGE_SIZE)
    names = [str(number) for number in range(40)]
    places = pages.allocate_drafts("a", [range(3)], names)
    assert len(places) == 23  # a quarter of the pool together with the request's pages
    assert len(store.table.rows) == 2 * 24
    assert pages.allocate_drafts("a", [range(3)], names[30:]) == []
    pages.release("7")
    assert len(pages.allocate_drafts("a", [range(3)], names[30:], can_grow=False)) == 1
    assert not store.table.rows.is_inference()


def test_whatever_comes_and_goes_no_page_stays() -> None:
    pages, store = pages_of(400)
    chance, running = np.random.default_rng(3), dict[str, int]()
    for number in range(1000):
        name = str(number)
        running[name] = 0
        length = int(chance.integers(1, 4 * PAGE_SIZE))
        pages.allocate(name, length)
        if chance.random() < 0.7:
            start = int(chance.integers(length))
            window = range(start, int(chance.integers(start, length)) + 1)
            names = [f"{name}-{i}" for i in range(int(chance.integers(1, 8)))]
            running[name] = len(pages.allocate_drafts(name, [window], names))
        while len(running) > 5:  # in any order, also a request before its drafts
            gone = str(chance.choice(list(running)))
            order = chance.permutation([gone, *(f"{gone}-{i}" for i in range(running.pop(gone)))])
            for released in order.tolist():
                pages.release(released)
    for name, count in running.items():
        for released in (name, *(f"{name}-{i}" for i in range(count))):
            pages.release(released)
    assert store.num_bytes == 0
    assert sorted(store.free) == list(range(store.num_pages))
