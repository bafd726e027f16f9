# SPDX-License-Identifier: Apache-2.0
"""Rows of the residual stream, visited in chunks on the device or from the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.diffusion.core.stages import Buffer
from vllm.diffusion.memory import ActivationPool, HostRows, ResidualRows, chunks

NUM_ROWS, WIDTH = 23, 5
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def rows_of(
    place: str, device: str, name: str = "x"
) -> tuple[ResidualRows, torch.Tensor, ActivationPool]:
    """Return rows that hold their numbers, these numbers, and the pool of the chunks."""
    pool = ActivationPool(1 << 20, torch.device(device))
    wanted = torch.arange(NUM_ROWS * WIDTH, dtype=torch.float32).view(NUM_ROWS, WIDTH)
    if place == "device":
        return ResidualRows(wanted.clone().to(device)), wanted, pool
    on_host = wanted.clone()
    if device == "cuda":
        on_host = on_host.pin_memory()
    store = Buffer(name, (WIDTH,), wanted.dtype)
    return HostRows(on_host, pool, store, torch.device(device)), wanted, pool


def content(rows: ResidualRows, device: str) -> torch.Tensor:
    places = np.arange(NUM_ROWS)
    out = torch.empty(NUM_ROWS, WIDTH, device=device)
    rows.select(torch.from_numpy(places).to(device), places, out)
    return out.cpu()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("size", [1, 4, 11, 23, 100])
def test_every_chunk_is_seen_and_what_is_written_stays(place: str, device: str, size: int) -> None:
    rows, wanted, _ = rows_of(place, device)
    ranges = list(chunks(NUM_ROWS, size))
    for _ in range(3):  # three stages
        for part, chunk in zip(ranges, rows.visit(ranges, writes=True), strict=True):
            assert torch.equal(chunk.cpu(), wanted[part])
            chunk.mul_(2)
        wanted = 2 * wanted
    assert torch.equal(content(rows, device), wanted)
    seen = torch.cat([chunk.clone() for chunk in rows.visit(ranges)]).cpu()
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("place", ["device", "host"])
def test_rows_that_are_not_read_are_written(place: str, device: str) -> None:
    rows, _, _ = rows_of(place, device)
    ranges = list(chunks(NUM_ROWS, 4))
    for part, chunk in zip(ranges, rows.visit(ranges, reads=False, writes=True), strict=True):
        chunk.fill_(part.start)
    wanted = torch.arange(NUM_ROWS) // 4 * 4
    assert torch.equal(content(rows, device)[:, 0], wanted.float())


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("place", ["device", "host"])
def test_two_stores_are_visited_side_by_side(place: str, device: str) -> None:
    """One store is read while the other one is added to, as for groups of heads."""
    x, wanted, _ = rows_of(place, device)
    updated, _, _ = rows_of(place, device, name="updated")
    ranges = list(chunks(NUM_ROWS, 3))
    for _ in range(2):
        visits = zip(x.visit(ranges), updated.visit(ranges, writes=True), strict=True)
        for source, target in visits:
            target.add_(source)
    assert torch.equal(content(updated, device), 3 * wanted)
    assert torch.equal(content(x, device), wanted)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("place", ["device", "host"])
def test_some_rows_and_none(place: str, device: str) -> None:
    rows, wanted, pool = rows_of(place, device)
    places = np.array([22, 0, 7, 7])
    out = torch.empty(4, WIDTH, device=device)
    rows.select(torch.from_numpy(places).to(device), places, out)
    assert torch.equal(out.cpu(), wanted[places])
    assert list(rows.visit([])) == []
    with pool.scope("some"):
        visits = rows.visit([slice(4, 8), slice(20, 23)], writes=True)
        assert [len(chunk.fill_(0)) for chunk in visits] == [4, 3]
    kept = [row for row in range(NUM_ROWS) if not (4 <= row < 8 or row >= 20)]
    assert torch.equal(content(rows, device)[kept], wanted[kept])
    assert content(rows, device)[4:8].abs().sum() == 0


def test_chunks_from_the_host_take_two_buffers_of_the_pool() -> None:
    rows, _, pool = rows_of("host", "cpu")
    ranges = list(chunks(NUM_ROWS, 4))
    with pool.scope("visit"):
        taken = {chunk.data_ptr() for chunk in rows.visit(ranges)}
    assert len(taken) == 2
    assert pool.used_bytes == 0
    assert pool.peak_bytes == 2 * 512
