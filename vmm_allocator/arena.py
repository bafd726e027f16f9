# SPDX-License-Identifier: Apache-2.0
"""Arena on CUDA virtual memory: one address range, of which parts are backed by memory."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._errors import VmmError
from ._native import native

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Self

    import torch

DEFAULT_CHUNK_BYTES = 2 * 1024 * 1024
CHUNK_SIZE_VARIABLE = "VLLM_VMM_CHUNK_SIZE"
NO_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Statistics:
    """State of an arena.

    Every ``_bytes`` is a number of bytes. Every ``num_`` and ``_seconds`` (host time inside the
    driver) is a total since the arena was created.
    """

    reserved_bytes: int  # size of the address range
    chunk_bytes: int
    granularity_bytes: int  # granularity of the driver
    front_bytes: int  # mapped without a hole from the base on
    mapped_bytes: int  # mapped anywhere
    spare_bytes: int  # physical memory that is kept without an address
    in_use_bytes: int  # mapped chunks that tensors or pools refer to
    num_chunks_mapped: int
    num_chunks_created: int
    num_chunks_released: int
    create_seconds: float
    map_seconds: float
    access_seconds: float  # time to give the device access to mapped memory
    unmap_seconds: float
    release_seconds: float
    wait_seconds: float  # time to wait for the device before unmapping

    @property
    def held_bytes(self) -> int:
        """Physical memory of the arena in bytes, mapped or spare."""
        return self.mapped_bytes + self.spare_bytes


class Arena:
    """Reserved range of device addresses, parts of which are backed by chunks of memory.

    The front of the range grows and shrinks in whole chunks. Memory keeps its address and its
    contents until it is unmapped, so tensors and captured graphs on it stay valid. Chunks that are
    unmapped with ``keep=True`` become spares: the next mapping anywhere in the range uses them
    before it creates new chunks. A `TorchPool` takes addresses from the end of the range and chunks
    from the same spares, under the same limit.

    Teardown:

    * A tensor of `tensor` keeps its memory. Unmapping memory under a tensor raises `InUseError`.
      `close` with living tensors takes effect when the last of them is gone.
    * A captured graph keeps nothing by itself: code that keeps the graph must keep the tensors that
      it was captured over. Replaying a graph into unmapped memory is a device fault, which the
      process does not survive.
    * Teardown then runs in this order: wait for the device, unmap, release the chunks, free the
      addresses, release the primary context. Failures are written to stderr and never raised. At
      the end of the process nothing needs to be closed.
    * In a child made by fork every method raises `ForkedArenaError`, and teardown does nothing.

    Methods may be called from several threads, and release the GIL. Mapping is allowed while a
    stream is being captured; `shrink`, which waits for the device, is not.
    """

    def __init__(
        self,
        reserve_bytes: int,
        *,
        chunk_bytes: int | None = None,
        limit_bytes: int = NO_LIMIT,
        device: int = 0,
    ) -> None:
        """Reserve addresses; nothing is mapped yet.

        Args:
            reserve_bytes: Size of the address range, rounded up to whole chunks. Addresses cost no
                device memory (16 host bytes per chunk), so reserve far more than the card has.
            chunk_bytes: Unit of physical memory; None takes the environment variable
                VLLM_VMM_CHUNK_SIZE, or 2 MiB without it. Rounded up, with a warning, to a multiple
                of the driver's granularity.
            limit_bytes: Maximum physical memory of the arena.
            device: CUDA ordinal.

        Raises:
            ValueError: An argument, or the variable, is out of range.
            NotBuiltError: The compiled module is missing.
            DriverUnavailableError: There is no CUDA driver, or no GPU.
            DriverError: The device does not exist or the addresses cannot be reserved.
        """
        check_count("Arena", "reserve_bytes", reserve_bytes, 1)
        if chunk_bytes is None:
            chunk_bytes = _default_chunk_bytes()
        check_count("Arena", "chunk_bytes", chunk_bytes, 1)
        check_count("Arena", "limit_bytes", limit_bytes, 0)
        check_count("Arena", "device", device, 0)
        self._arena = native().Arena(device, reserve_bytes, chunk_bytes, limit_bytes)
        self._device = device
        self._base = int(self._arena.base)
        actual = self._arena.statistics()
        if actual.chunk_bytes != chunk_bytes:
            warnings.warn(
                f"Arena: chunk_bytes {chunk_bytes} is rounded up to {actual.chunk_bytes}, "
                f"a multiple of the driver's granularity of {actual.granularity_bytes}",
                stacklevel=2,
            )

    @property
    def device(self) -> int:
        """CUDA ordinal of the device."""
        return self._device

    @property
    def base_address(self) -> int:
        """Device address of the first byte."""
        return self._base

    @property
    def front_bytes(self) -> int:
        """Bytes that are backed by memory, without a hole, from the base on."""
        return int(self._arena.statistics().front_bytes)

    def grow(self, num_bytes: int) -> int:
        """Map chunks until the first ``num_bytes`` are mapped; never unmaps.

        New memory holds arbitrary bytes. A chunk takes tens of microseconds to map, so do not call
        this for every small step.

        Returns:
            `front_bytes`.

        Raises:
            ValueError: ``num_bytes`` is negative.
            OutOfMemoryError, LimitError, ReservationError, DriverError: Nothing has been mapped.
            ClosedArenaError: The arena is closed.
        """
        check_count("Arena", "num_bytes", num_bytes, 0)
        self._arena.grow(num_bytes)
        return self.front_bytes

    def shrink(self, num_bytes: int, *, keep: bool = False) -> int:
        """Wait for the device, then unmap the front's chunks that lie entirely beyond a size.

        Args:
            num_bytes: Bytes that stay mapped.
            keep: Whether the chunks become spares; otherwise they are returned to the device.

        Returns:
            `front_bytes`.

        Raises:
            ValueError: ``num_bytes`` is negative.
            InUseError: A tensor refers to a chunk beyond ``num_bytes``; nothing has changed.
            DriverError: Waiting for the device or unmapping a chunk failed.
            ClosedArenaError: The arena is closed.
        """
        check_count("Arena", "num_bytes", num_bytes, 0)
        self._arena.shrink(num_bytes, keep)
        return self.front_bytes

    def trim(self, num_bytes: int = 0) -> None:
        """Return spare chunks to the device until at most ``num_bytes`` of spares are left."""
        check_count("Arena", "num_bytes", num_bytes, 0)
        self._arena.trim(num_bytes)

    def tensor(
        self,
        offset_bytes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        holds: bool = True,
    ) -> torch.Tensor:
        """Make a contiguous tensor on the arena's memory; nothing is copied or initialised.

        With `holds`, the memory stays mapped as long as the tensor or a view of it lives. Without
        it, the caller may unmap the memory under the tensor and map it again. Nothing may access
        the tensor meanwhile, and its contents are lost.

        Args:
            offset_bytes: Offset from the base; a multiple of the dtype's size.
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
            holds: Whether the tensor keeps its memory mapped, and the arena open.

        Raises:
            ValueError: The range is not mapped, or the offset is not aligned.
            ClosedArenaError: The arena is closed.
        """
        import torch

        check_count("Arena", "offset_bytes", offset_bytes, 0)
        num_bytes = math.prod(shape) * dtype.itemsize
        if offset_bytes % dtype.itemsize:
            raise ValueError(
                f"Arena: offset_bytes must be a multiple of {dtype.itemsize}, got {offset_bytes}"
            )
        device = torch.device("cuda", self._device)
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=device)
        view = native().View(self._arena, offset_bytes, num_bytes)
        # The CUDA array interface has no bf16, so PyTorch imports the memory as bytes.
        # Creating the view has checked the range even if it is not kept.
        kept = view if holds else None
        memory = torch.as_tensor(_Memory(kept, self._base + offset_bytes, num_bytes), device=device)
        if memory.data_ptr() != self._base + offset_bytes:
            raise VmmError("Arena: PyTorch copied the memory instead of referring to it")
        return memory.view(dtype).view(shape)

    def statistics(self) -> Statistics:
        """Return the current state; works for a closed arena too."""
        actual = self._arena.statistics()
        return Statistics(**{name: getattr(actual, name) for name in Statistics.__annotations__})

    def close(self) -> None:
        """Release all memory and addresses: now, or when the last tensor and segment are gone.

        May be called again. Never raises.
        """
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Memory:
    """Bytes of an arena in the form that PyTorch imports; a storage keeps this object alive."""

    def __init__(self, view: Any, address: int, num_bytes: int) -> None:
        self._view = view
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def check_count(owner: str, argument: str, value: int, minimum: int) -> None:
    """Raise ValueError unless ``value`` is an integer from ``minimum`` to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise ValueError(f"{owner}: {argument} must be an integer >= {minimum}, got {value!r}")


def _default_chunk_bytes() -> int:
    value = os.environ.get(CHUNK_SIZE_VARIABLE, "")
    if not value:
        return DEFAULT_CHUNK_BYTES
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise ValueError(f"{CHUNK_SIZE_VARIABLE} must be a number of bytes >= 1, got {value!r}")
    return int(value)
