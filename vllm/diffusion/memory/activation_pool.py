# SPDX-License-Identifier: Apache-2.0
"""The memory of a step: named buffers laid out one after the other in one address range.

Buffers are placed like frames of a stack, within one budget. A scope ends with everything taken in
it, so buffers of stages that do not run at the same time share memory, and a step needs the largest
sum along the stages, not the sum of all. The next step lays out its own buffers over the same
physical memory, so no sequence of request lengths can fragment it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.errors import DiffusionError
from vllm.diffusion.ops import arena as vmm
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

logger = init_logger(__name__)

ALIGNMENT = 512  # bytes; what PyTorch's own allocator gives
MAX_KNOWN_PLACES = 4096


class PoolExhaustedError(DiffusionError):
    """A step needs more memory than the pool's budget, or the card, has.

    Attributes:
        required_bytes: bytes that would be in use with the buffer.
        available_bytes: bytes of the budget or card.
    """

    def __init__(self, what: str, required_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"activation pool: {what}: wanted {required_bytes} bytes in all, "
            f"got {available_bytes} bytes"
        )
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class Backing:
    """Source of a pool's bytes; this one is PyTorch's allocator, with a tensor for every buffer."""

    name = "torch"  # as metrics have it
    keeps_places = False  # the same offset is the same memory for as long as it is held
    sees_temporaries = False  # what PyTorch allocates within `temporaries` is in `temporary_bytes`

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, int] = {}

    def memory(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return bytes [num_bytes] at an offset, uninitialised. Raises PoolExhaustedError."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def keep(self, name: str, num_bytes: int) -> torch.Tensor:
        """Return bytes [num_bytes] that stay, replacing those kept under this name before."""
        self._kept[name] = num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def temporaries(self) -> AbstractContextManager[None]:
        """Context in which PyTorch's own allocations count against the budget, where possible."""
        return nullcontext()

    def drop_unused(self) -> None:
        """Give back memory that PyTorch caches unused."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def graph_pool(self) -> tuple[int, int] | None:
        """Argument `pool` of a graph's capture; None leaves the choice to PyTorch."""
        return None

    @property
    def graph_bytes(self) -> int | None:
        """Memory of graphs; None where the backing does not see it."""
        return None

    def trim(self, num_bytes: int) -> None:
        """Give back memory beyond the first `num_bytes`, and all that nothing refers to."""
        self.drop_unused()

    def close(self) -> None:
        """Give everything back; memory of tensors and graphs when these are gone."""
        self._kept.clear()
        self.trim(0)

    @property
    def held_bytes(self) -> int:
        """Physical memory taken from the device; 0 where PyTorch counts it."""
        return 0

    @property
    def temporary_bytes(self) -> int:
        """Bytes of kept tensors and, where the backing sees them, of temporaries and graphs."""
        return sum(self._kept.values())


class ArenaBacking(Backing):
    """CUDA virtual memory: buffers at the front of one arena, PyTorch's memory in pools behind.

    Args:
        device: a CUDA device.
        budget_bytes: most physical memory of buffers, temporaries and graphs together.
        chunk_bytes: unit of physical memory; None for the allocator's default.
    """

    name = "vmm"
    keeps_places = True
    sees_temporaries = True

    def __init__(
        self, device: torch.device, budget_bytes: int, chunk_bytes: int | None = None
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        card = torch.cuda.get_device_properties(index).total_memory
        # Addresses cost next to nothing: each of the three regions could hold the whole card.
        self._arena = vmm.Arena(
            4 * card, chunk_bytes=chunk_bytes, limit_bytes=budget_bytes, device=index
        )
        self._temporaries = vmm.TorchPool(self._arena, card)
        self._graphs = vmm.TorchPool(self._arena, card)

    def _grow_or_say_why(self, num_bytes: int) -> None:
        try:
            self._arena.grow(num_bytes)
        except vmm.LimitError as error:
            raise PoolExhaustedError(
                "budget", error.held_bytes + error.requested_bytes, error.limit_bytes
            ) from error
        except vmm.OutOfMemoryError as error:
            raise PoolExhaustedError(
                "device memory",
                error.held_bytes + error.requested_bytes,
                error.held_bytes + error.free_bytes,
            ) from error

    def memory(self, offset: int, num_bytes: int) -> torch.Tensor:
        try:
            self._arena.grow(offset + num_bytes)
        except (vmm.LimitError, vmm.OutOfMemoryError):
            self.drop_unused()  # comes back as spares
            self._grow_or_say_why(offset + num_bytes)
        return self._arena.tensor(offset, (num_bytes,), torch.uint8)

    def keep(self, name: str, num_bytes: int) -> torch.Tensor:
        with self._temporaries.use():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def temporaries(self) -> AbstractContextManager[None]:
        return self._temporaries.use()

    def drop_unused(self) -> None:
        self._temporaries.trim()
        torch.cuda.empty_cache()

    def graph_pool(self) -> tuple[int, int] | None:
        return self._graphs.id

    @property
    def graph_bytes(self) -> int:
        return self._graphs.in_use_bytes

    def trim(self, num_bytes: int) -> None:
        for pool in (self._temporaries, self._graphs):
            pool.trim()
        try:
            self._arena.shrink(num_bytes)
        except vmm.InUseError as error:  # a graph's buffers, for instance
            self._arena.shrink(error.end_bytes)
        self._arena.trim()

    def close(self) -> None:
        for pool in (self._temporaries, self._graphs):
            pool.close()
        self._arena.close()

    @property
    def held_bytes(self) -> int:
        return self._arena.statistics().held_bytes

    @property
    def temporary_bytes(self) -> int:
        pools = (self._temporaries, self._graphs)
        return sum(pool.in_use_bytes for pool in pools)


class _Place:
    """A buffer's bytes, with the tensors made of them so far."""

    def __init__(self, offset: int, memory: torch.Tensor) -> None:
        self.offset = offset
        self.num_bytes = memory.numel()
        self._memory = memory
        self._views: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        view = self._views.get((shape, dtype))
        if view is None:
            num_bytes = math.prod(shape) * dtype.itemsize
            view = self._memory[:num_bytes].view(dtype).view(shape)
            self._views[shape, dtype] = view
        return view


class _Scope:
    """Buffers taken since a stage began."""

    __slots__ = ("places", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.places: dict[str, _Place] = {}


class Frame:
    """Buffers of a step that is set aside while others run; see `ActivationPool.new_frame`."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.scopes = [_Scope(start)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, with alignment and gaps."""
        return self.end - self.start


class _Guard:
    """A scope of a pool as a context."""

    __slots__ = ("_pool",)

    def __init__(self, pool: ActivationPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._pool._begin_scope()

    def __exit__(self, *_: object) -> None:
        self._pool._end_scope()


class ActivationPool:
    """Named scratch buffers on one device, within one budget.

    ::

        with pool.scope("step"):
            x = pool.take("x", (rows, hidden), dtype)
            for layer in layers:
                with pool.scope("feed-forward"):
                    gate_up = pool.take("gate_up", (rows, 2 * width), dtype)

    The contents are undefined when a buffer is taken: whoever takes it writes it first. A tensor of
    an ended scope may share its memory with later buffers; what is taken outside all scopes stays.
    Whoever keeps a captured graph keeps the tensors that it was captured over: then they stay
    mapped, and share memory with the buffers of other steps, which do not run at the same time.

    Args:
        budget_bytes: most bytes in use at a time.
        backing: source of the bytes.
    """

    def __init__(self, budget_bytes: int, backing: Backing) -> None:
        if budget_bytes < 1:
            raise ValueError(f"ActivationPool: budget_bytes must be at least 1, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self._backing = backing
        self._scopes = [_Scope(0)]
        self._end = 0  # of what is taken
        self._peak = 0  # of the bytes in use since it was last reset
        self._looks_often = False  # at PyTorch's memory, with every scope
        self._elsewhere = 0  # bytes of what is kept, of temporaries and graphs, when last seen
        self._known: dict[tuple[int, int], _Place] = {}
        self._frame: Frame | None = None  # of the step that is not run at once

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [shape], contiguous, at a multiple of 512 bytes.

        A second take of `name` in this scope, or one inside it, reuses the memory if it is large
        enough.

        Raises:
            PoolExhaustedError: the budget or the card has no room; the pool is as before.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        for scope in reversed(self._scopes):
            place = scope.places.get(name)
            if place is not None and place.num_bytes >= num_bytes:
                return place.view(shape, dtype)
        return self._add(name, num_bytes).view(shape, dtype)

    def _add(self, name: str, num_bytes: int) -> _Place:
        frame = self._frame
        if len(self._scopes) == 1 and frame is not None and self._scopes is not frame.scopes:
            raise RuntimeError(f"activation pool: {name}: taken outside all scopes above a frame")
        places = self._scopes[-1].places
        outgrown = places.get(name)
        # The last buffer grows where it is; another one leaves a gap until the scope ends.
        in_place = outgrown is not None and outgrown.end == self._end
        offset = outgrown.offset if outgrown is not None and in_place else self._end
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        in_use = self._room_until(name, offset + size)
        place = self._place(offset, size)
        places[name] = place
        self._end = offset + size
        self._count(in_use)
        return place

    def _count(self, in_use: int) -> None:
        self._peak = max(self._peak, in_use)

    def _room_until(self, name: str, end: int) -> int:
        """Return the bytes in use if the buffers end at `end`. Raises PoolExhaustedError."""
        if len(self._scopes) == 1:
            self._elsewhere = self._backing.temporary_bytes
        if end + self._elsewhere > self.budget_bytes:
            self._backing.drop_unused()
            self._elsewhere = self._backing.temporary_bytes
        in_use = end + self._elsewhere
        if in_use > self.budget_bytes:
            raise PoolExhaustedError(name, in_use, self.budget_bytes)
        return in_use

    def _place(self, offset: int, num_bytes: int) -> _Place:
        if not self._backing.keeps_places:
            return _Place(offset, self._backing.memory(offset, num_bytes))
        place = self._known.get((offset, num_bytes))
        if place is None:
            if len(self._known) >= MAX_KNOWN_PLACES:
                self._known.clear()
            place = _Place(offset, self._backing.memory(offset, num_bytes))
            self._known[offset, num_bytes] = place
        return place

    def expect(self, name: str, num_bytes: int) -> None:
        """Announce that PyTorch itself will allocate `num_bytes` before the scope ends.

        They are counted here only where the backing does not see PyTorch's memory.

        Raises:
            PoolExhaustedError: the budget has no room.
        """
        if self._backing.sees_temporaries:
            return
        end = self._end + num_bytes
        self._count(self._room_until(name, end))
        self._end = end

    def keep(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [shape] that outlives steps, for one owner.

        It replaces the one kept under this name, which the owner may still copy from.

        Raises:
            PoolExhaustedError: the budget has no room for both; nothing has changed.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        self._look_elsewhere()
        self._room_until(name, self._end + num_bytes)
        kept = self._backing.keep(name, num_bytes).view(dtype).view(shape)
        self._look_elsewhere()
        return kept

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        """Context whose buffers are given back at its end; `stage` tells readers what it is for."""
        return _Guard(self)

    def _begin_scope(self) -> None:
        if self._looks_often or len(self._scopes) == 1:
            self._look_elsewhere()
        self._scopes.append(_Scope(self._end))

    def _end_scope(self) -> None:
        if self._looks_often or len(self._scopes) == 2:
            self._look_elsewhere()
        self._end = self._scopes.pop().start

    def new_frame(self) -> Frame:
        """Make room, until `end_frame`, for one step that is interrupted by others.

        Its scopes stay open between the blocks of `within`, and steps that run meanwhile lay out
        their buffers behind its own. Nothing may be taken outside all scopes before it ends.

        Raises:
            RuntimeError: a scope is open, or there is a frame.
        """
        if self.has_frame or len(self._scopes) > 1:
            raise RuntimeError("activation pool: a frame begins outside all scopes, and alone")
        self._frame = Frame(self._end)
        return self._frame

    @contextmanager
    def within(self, frame: Frame) -> Iterator[None]:
        """Use the frame's scopes and buffers in the block."""
        others, self._scopes = self._scopes, frame.scopes
        try:
            yield
        finally:
            frame.end, self._scopes = self._end, others

    def end_frame(self) -> None:
        """Give back the frame's buffers; only outside all scopes and after `within`."""
        if self._frame is not None:
            self._end = self._frame.start
            self._frame = None

    @property
    def has_frame(self) -> bool:
        return self._frame is not None

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame's buffers, which other steps cannot use."""
        return 0 if self._frame is None else self._frame.num_bytes

    def _look_elsewhere(self) -> None:
        """Update the bytes in use besides the buffers. Too slow to do with every buffer."""
        self._elsewhere = self._backing.temporary_bytes
        self._count(self._end + self._elsewhere)

    def temporaries(self) -> AbstractContextManager[None]:
        """Context in which PyTorch's allocations count against the budget, where possible.

        Beyond the budget PyTorch raises `torch.OutOfMemoryError`.
        """
        return self._backing.temporaries()

    def graph_pool(self) -> tuple[int, int] | None:
        """Argument `pool` of `torch.cuda.graph`, so that graphs count against the budget."""
        return self._backing.graph_pool()

    def drop_unused(self) -> None:
        """Give back memory that PyTorch caches unused; a step with other buffers may need it."""
        self._backing.drop_unused()

    def trim(self) -> None:
        """Give back memory that no buffer, tensor or graph refers to. Waits for the device."""
        self._known.clear()
        self._backing.trim(self._end)

    def close(self) -> None:
        """Forget all buffers and give everything back."""
        self._known.clear()
        self._scopes, self._frame = [_Scope(0)], None
        self._end = self._peak = self._elsewhere = 0
        self._backing.close()

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers, with alignment and gaps, and of temporaries and graphs."""
        return self._end + self._backing.temporary_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use since `reset_peak`."""
        return self._peak

    def reset_peak(self, *, looks_often: bool = False) -> None:
        """Let the peak start again from the bytes in use now.

        Args:
            looks_often: from now on count PyTorch's memory whenever a scope begins or ends, not
                only the outermost one. That takes the host a moment, too long for small steps.
        """
        self._looks_often = looks_often
        self._elsewhere = self._backing.temporary_bytes
        self._peak = self._end + self._elsewhere

    @property
    def graph_bytes(self) -> int | None:
        """Bytes of graphs within `used_bytes`; None where these are not counted there."""
        return self._backing.graph_bytes

    @property
    def outermost_bytes(self) -> int:
        """Bytes of buffers taken outside all scopes, which stay."""
        if self._frame is not None:
            return self._frame.start
        return self._scopes[1].start if len(self._scopes) > 1 else self._end

    @property
    def backing_name(self) -> str:
        """Source of the pool's bytes: "vmm" or "torch"."""
        return self._backing.name

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool holds of the device, as far as its backing knows them."""
        return max(self._backing.held_bytes, self.used_bytes)


def activation_pool(
    budget_bytes: int, device: torch.device, *, use_vmm: bool, chunk_bytes: int | None = None
) -> ActivationPool:
    """Make a pool, on virtual memory if that is wanted, built and the device is CUDA's.

    Args:
        budget_bytes: most bytes in use at a time.
        device: device of the buffers.
        use_vmm: False uses PyTorch's allocator everywhere.
        chunk_bytes: unit of physical memory; None for the allocator's default.
    """
    backing = None
    if use_vmm and device.type == "cuda" and vmm.is_built():
        try:
            backing = ArenaBacking(device, budget_bytes, chunk_bytes)
        except vmm.VmmError as error:
            logger.warning("activation pool on PyTorch's allocator: %s", error)
    return ActivationPool(budget_bytes, backing or Backing(device))
