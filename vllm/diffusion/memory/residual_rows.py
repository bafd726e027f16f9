# SPDX-License-Identifier: Apache-2.0
"""The rows of the residual stream, on the device or in host memory, visited chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.stages import NUM_STREAM_BUFFERS, visiting

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from vllm.diffusion.core.stages import Buffer
    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.ops import Array

    Chunks = Sequence[slice]


class ResidualRows:
    """T rows of D numbers on the device, visited chunk by chunk; chunks are views."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def visit(
        self, chunks: Chunks, *, reads: bool = True, writes: bool = False
    ) -> Generator[torch.Tensor]:
        """Yield each chunk of rows in turn, [R, D] on the device.

        A chunk is valid until the next one is requested. The changes of the last chunk are lost
        unless the generator is exhausted. Closing the generator releases the device's memory for
        other uses.

        Args:
            chunks: ranges of rows.
            reads: whether the contents are needed; otherwise chunks are uninitialised.
            writes: whether the changes of chunks are stored.
        """
        for rows in chunks:
            yield self._x[rows]

    def select(self, rows: torch.Tensor, host_rows: Array, out: torch.Tensor) -> None:
        """Copy single rows [R] int64, given on the device and on the host, to `out` [R, D]."""
        torch.index_select(self._x, 0, rows, out=out)


class HostRows(ResidualRows):
    """Rows in host memory; the next chunk is fetched while the current one is processed.

    Copies run on separate streams, one per direction, so that they overlap with computation and
    with each other. On the CPU they are plain copies.

    Args:
        x: [T, D] on the host; pinned if there is a GPU.
        pool: memory of the device, for the chunks.
        store: buffer that describes the rows of the chunks.
        device: device of the pool.
    """

    def __init__(
        self, x: torch.Tensor, pool: ActivationPool, store: Buffer, device: torch.device
    ) -> None:
        super().__init__(x)
        self._pool, self._chunks = pool, visiting(store)
        self._copies = CopyStreams(device)

    def visit(
        self, chunks: Chunks, *, reads: bool = True, writes: bool = False
    ) -> Generator[torch.Tensor]:
        if not chunks:
            return
        longest = max(rows.stop - rows.start for rows in chunks)
        buffers = [chunk.take(self._pool, longest) for chunk in self._chunks[: len(chunks)]]
        copies, number = self._copies, len(buffers)

        def fetch(index: int) -> torch.Tensor:
            rows = chunks[index]
            chunk = buffers[index % number][: rows.stop - rows.start]
            if reads:
                copies.fetch(self._x[rows], chunk, index % number)
            else:
                copies.claim(index % number)
            return chunk

        copies.begin()
        try:
            ahead = fetch(0)
            for index, rows in enumerate(chunks):
                chunk = ahead
                if number > 1 and index + 1 < len(chunks):
                    copies.wait_until_free((index + 1) % number)
                    ahead = fetch(index + 1)
                copies.wait_until_fetched(index % number)
                yield chunk
                if writes:
                    copies.store(chunk, self._x[rows], index % number)
                else:
                    copies.release(index % number)
        finally:
            copies.end()

    def select(self, rows: torch.Tensor, host_rows: Array, out: torch.Tensor) -> None:
        self._copies.finish()
        out.copy_(self._x.index_select(0, torch.from_numpy(host_rows)))


class CopyStreams:
    """Streams for copies between host and device, with the events that order them.

    A buffer is fetched into, processed, stored from, and then free again.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_async = device.type == "cuda"
        if self._is_async:
            self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
            events = (torch.cuda.Event() for _ in range(2 * NUM_STREAM_BUFFERS))
            self._fetched = [next(events) for _ in range(NUM_STREAM_BUFFERS)]
            self._free = [next(events) for _ in range(NUM_STREAM_BUFFERS)]

    def begin(self) -> None:
        """Order all computations and stores so far before later fetches."""
        if self._is_async:
            self._inward.wait_stream(torch.cuda.current_stream())
            self._inward.wait_stream(self._outward)
            for event in self._free:
                event.record(self._inward)

    def fetch(self, source: torch.Tensor, chunk: torch.Tensor, buffer: int) -> None:
        """Start to copy rows to the device, into a free buffer."""
        if not self._is_async:
            chunk.copy_(source)
            return
        with torch.cuda.stream(self._inward):
            chunk.copy_(source, non_blocking=True)
            self._fetched[buffer].record(self._inward)

    def claim(self, buffer: int) -> None:
        """Make the current stream wait until `buffer` is free, to write it without a fetch."""
        if self._is_async:
            torch.cuda.current_stream().wait_event(self._free[buffer])

    def wait_until_fetched(self, buffer: int) -> None:
        """Make the current stream wait for the rows in a buffer."""
        if self._is_async:
            torch.cuda.current_stream().wait_event(self._fetched[buffer])

    def store(self, chunk: torch.Tensor, target: torch.Tensor, buffer: int) -> None:
        """Copy rows back after all launches so far; their buffer is then free."""
        if not self._is_async:
            target.copy_(chunk)
            return
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            target.copy_(chunk, non_blocking=True)
            self._free[buffer].record(self._outward)

    def release(self, buffer: int) -> None:
        """Mark a buffer as free after all launches so far."""
        if self._is_async:
            self._free[buffer].record(torch.cuda.current_stream())

    def wait_until_free(self, buffer: int) -> None:
        """Make later fetches wait until a buffer is free."""
        if self._is_async:
            self._inward.wait_event(self._free[buffer])

    def end(self) -> None:
        """Make the current stream wait for all copies, so that launches can reuse the buffers."""
        if self._is_async:
            torch.cuda.current_stream().wait_stream(self._inward)
            torch.cuda.current_stream().wait_stream(self._outward)

    def finish(self) -> None:
        """Wait, on the host, for all copies."""
        if self._is_async:
            self._inward.synchronize()
            self._outward.synchronize()
