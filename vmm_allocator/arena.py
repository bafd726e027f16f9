# SPDX-License-Identifier: Apache-2.0
"""An arena on CUDA virtual memory: one address range, physical memory at its front."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ._errors import NotBuiltError, VmmError

if TYPE_CHECKING:
    from types import ModuleType, TracebackType
    from typing import Self

    import torch

_native: ModuleType | None
_reason = "vmm_allocator is not built: run `python setup.py build_ext --inplace`"
try:
    _native = import_module("._vmm_allocator", __package__)
except ModuleNotFoundError:
    _native = None
except ImportError as error:
    _reason = f"vmm_allocator: the compiled module does not load: {error}"
    warnings.warn(_reason, stacklevel=2)
    _native = None

DEFAULT_CHUNK_BYTES = 2 * 1024 * 1024


def is_built() -> bool:
    """Whether the compiled module is there; without it no arena can be made."""
    return _native is not None


@dataclass(frozen=True)
class Statistics:
    """State of an arena; every ``_bytes`` is a count of bytes."""

    reserved_bytes: int
    mapped_bytes: int
    peak_mapped_bytes: int
    chunk_bytes: int
    granularity_bytes: int  # the driver's
    num_grows: int  # calls that mapped something
    num_shrinks: int  # calls that unmapped something


class Arena:
    """A reserved range of device addresses whose front part is backed by memory.

    Growing and shrinking move the mapped end in whole chunks; what lies below keeps its address and
    its contents, so tensors and captured graphs there stay good.

    Teardown order: drop captured graphs and tensors that reach into a range, then shrink or
    close. Both wait for the device, then unmap, release the chunks, (close) free the addresses and
    let go of the primary context. Touching memory that is no longer mapped, by a replayed graph for
    instance, is a device fault that the process does not survive. A tensor of `tensor` keeps
    its arena from being collected, but not from being closed.

    Methods may be called from several threads, and let other Python threads run meanwhile. None may
    be called while a stream of the device is being captured.
    """

    def __init__(
        self, reserve_bytes: int, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, device: int = 0
    ) -> None:
        """Reserve addresses; nothing is mapped yet.

        Args:
            reserve_bytes: Size of the address range, rounded up to whole chunks. Addresses cost no
                memory: take far more than the card has.
            chunk_bytes: Unit of physical memory; rounded up, with a warning, to a multiple of the
                driver's granularity.
            device: CUDA ordinal.

        Raises:
            ValueError: An argument is out of range.
            NotBuiltError: The compiled module is missing.
            DriverUnavailableError: There is no CUDA driver, or no GPU.
            DriverError: The device does not exist or the addresses cannot be reserved.
        """
        _check_count("reserve_bytes", reserve_bytes, 1)
        _check_count("chunk_bytes", chunk_bytes, 1)
        _check_count("device", device, 0)
        if _native is None:
            raise NotBuiltError(_reason)
        self._arena = _native.Arena(device, reserve_bytes, chunk_bytes)
        self._device = device
        actual = self._arena.statistics()
        if actual.chunk_bytes != chunk_bytes:
            warnings.warn(
                f"Arena: chunk_bytes {chunk_bytes} is rounded up to {actual.chunk_bytes}, "
                f"a multiple of the driver's granularity of {actual.granularity_bytes}",
                stacklevel=2,
            )

    @property
    def device(self) -> int:
        """CUDA ordinal."""
        return self._device

    @property
    def base_address(self) -> int:
        """Device address of the first byte."""
        return int(self._arena.base)

    @property
    def mapped_bytes(self) -> int:
        """Bytes from the base that are backed by memory."""
        return int(self._arena.statistics().mapped_bytes)

    def grow(self, num_bytes: int) -> int:
        """Map chunks until at least ``num_bytes`` from the base are mapped; never unmaps.

        New memory holds arbitrary bytes. Costs tens of microseconds a chunk: keep it off the path
        of a small step.

        Returns:
            The mapped bytes.

        Raises:
            ValueError: ``num_bytes`` is negative.
            OutOfMemoryError, ReservationError, DriverError: Nothing has been mapped.
            ClosedArenaError: The arena is closed.
        """
        _check_count("num_bytes", num_bytes, 0)
        self._arena.grow(num_bytes)
        return self.mapped_bytes

    def shrink(self, num_bytes: int) -> int:
        """Wait for the device, then give back the chunks that lie wholly beyond ``num_bytes``.

        Returns:
            The mapped bytes.

        Raises:
            ValueError: ``num_bytes`` is negative.
            DriverError: The device cannot be waited for, or a chunk cannot be unmapped.
            ClosedArenaError: The arena is closed.
        """
        _check_count("num_bytes", num_bytes, 0)
        self._arena.shrink(num_bytes)
        return self.mapped_bytes

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the arena's memory; nothing is copied or initialised.

        Args:
            offset_bytes: From the base; a multiple of the dtype's size.
            shape: Of the tensor.
            dtype: Of the tensor.

        Raises:
            ValueError: The range is not mapped, or the offset is not aligned.
        """
        import torch

        _check_count("offset_bytes", offset_bytes, 0)
        num_bytes = math.prod(shape) * dtype.itemsize
        if offset_bytes % dtype.itemsize:
            raise ValueError(
                f"Arena: offset_bytes must be a multiple of {dtype.itemsize}, got {offset_bytes}"
            )
        if offset_bytes + num_bytes > self.mapped_bytes:
            raise ValueError(
                f"Arena: bytes {offset_bytes} to {offset_bytes + num_bytes} must be mapped, "
                f"got {self.mapped_bytes} mapped bytes"
            )
        device = torch.device("cuda", self._device)
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=device)
        # The interface knows no bf16, so the memory travels as bytes.
        memory = torch.as_tensor(_Memory(self, offset_bytes, num_bytes), device=device)
        if memory.data_ptr() != self.base_address + offset_bytes:
            raise VmmError("Arena: PyTorch copied the memory instead of referring to it")
        return memory.view(dtype).view(shape)

    def statistics(self) -> Statistics:
        """The present state."""
        native = self._arena.statistics()
        return Statistics(**{name: getattr(native, name) for name in Statistics.__annotations__})

    def close(self) -> None:
        """Wait for the device and give everything back; may be called again. Never raises."""
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
    """Bytes of an arena, as PyTorch takes them in; holds the arena while a tensor refers to it."""

    def __init__(self, arena: Arena, offset_bytes: int, num_bytes: int) -> None:
        self._arena = arena
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (arena.base_address + offset_bytes, False),
            "strides": None,
            "version": 3,
        }


def _check_count(argument: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise ValueError(f"Arena: {argument} must be an integer >= {minimum}, got {value!r}")
