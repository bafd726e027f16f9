# SPDX-License-Identifier: Apache-2.0
"""The memory of a step: named buffers laid out one after the other in one address range.

Buffers are placed like frames of a stack, within one budget. The end of a scope releases all
buffers that were allocated in it, so buffers of stages that do not run at the same time share
memory. A step therefore needs the memory of its largest stage, not the sum of all buffers. The next
step lays out its own buffers over the same physical memory, so requests of different lengths do not
fragment it.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm.diffusion.core.errors import ActivationBudgetError, DiffusionError, RankMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

ALIGNMENT = 512  # bytes, as in PyTorch's own allocator


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


# Errors of a step or request that lacks memory, on this rank or on another one.
OUT_OF_MEMORY = (
    torch.OutOfMemoryError,
    PoolExhaustedError,
    ActivationBudgetError,
    RankMemoryError,
)


class PoolSlice:
    """A buffer's bytes, and the tensors created in them so far."""

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


# Pair of the scope's start and its buffers by name.
_Scope: TypeAlias = "tuple[int, dict[str, PoolSlice]]"


class ActivationPool:
    """Named scratch buffers on one device, within one budget; PyTorch's allocator gives the bytes.

    ::

        with pool.scope("step"):
            x = pool.take("x", (rows, hidden), dtype)
            for layer in layers:
                with pool.scope("feed-forward"):
                    gate_up = pool.take("gate_up", (rows, 2 * width), dtype)

    The contents of a buffer are undefined when it is taken, so its user must write it first. A
    tensor of an ended scope may share its memory with later buffers; buffers taken outside all
    scopes stay. The owner of a CUDA graph must keep the tensors that the graph uses. Then they stay
    mapped, and share memory with the buffers of other steps, which do not run at the same time.

    ```
    taken outside all scopes | frame of a paused step | step | a stage of the step | free
                                                                                   ^ end
    ```

    Args:
        budget_bytes: maximum bytes in use at a time.
        device: device of the buffers.
    """

    backing_name = "torch"  # source of the bytes, as reported in metrics

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        if budget_bytes < 1:
            raise ValueError(f"ActivationPool: budget_bytes must be at least 1, got {budget_bytes}")
        self.budget_bytes, self._device = budget_bytes, device
        self._scopes: list[_Scope] = [(0, {})]
        self._frame: list[_Scope] | None = None  # scopes of an interrupted step
        self._end = 0  # end of the taken buffers
        self._peak = 0  # peak of the bytes in use since the last reset
        self._samples_often = False  # whether PyTorch's memory is sampled with every scope
        self._others = 0  # last sampled `other_bytes`
        self._kept: dict[str, int] = {}

    # ---- buffers ----

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [shape], contiguous, at a multiple of 512 bytes.

        A second take of `name` in this or an inner scope reuses the memory if it is large enough.

        Raises:
            PoolExhaustedError: the budget or the card has no room; the pool is unchanged.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        for _, slices in reversed(self._scopes):
            pool_slice = slices.get(name)
            if pool_slice is not None and pool_slice.num_bytes >= num_bytes:
                return pool_slice.view(shape, dtype)
        return self._add(name, num_bytes).view(shape, dtype)

    def _add(self, name: str, num_bytes: int) -> PoolSlice:
        is_above = self._frame is not None and self._frame is not self._scopes
        if is_above and len(self._scopes) == 1:
            raise RuntimeError(f"activation pool: {name}: taken outside all scopes above a frame")
        _, slices = self._scopes[-1]
        outgrown = slices.get(name)
        # The last buffer grows in place; any other buffer leaves a gap until the scope ends.
        in_place = outgrown is not None and outgrown.end == self._end
        offset = outgrown.offset if outgrown is not None and in_place else self._end
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._check_room(name, offset + size)
        pool_slice = slices[name] = self._slice_at(offset, size)
        self._grow(offset + size)
        return pool_slice

    def expect(self, name: str, num_bytes: int) -> None:
        """Announce that PyTorch itself will allocate `num_bytes` before the scope ends.

        They are counted here only if the pool cannot measure PyTorch's memory.

        Raises:
            PoolExhaustedError: the budget has no room.
        """
        self._check_room(name, self._end + num_bytes)
        self._grow(self._end + num_bytes)

    def keep(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [shape] that outlives steps, for one owner.

        It replaces the tensor kept under this name, from which the owner may still copy.

        Raises:
            PoolExhaustedError: the budget has no room for both; nothing has changed.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        self.check_room(name, num_bytes)
        kept = self._keep(name, num_bytes).view(dtype).view(shape)
        self._update_other_bytes()
        return kept

    def check_room(self, name: str, num_bytes: int) -> None:
        """Raise PoolExhaustedError if the budget has no room to keep `num_bytes` more."""
        self._update_other_bytes()
        self._check_room(name, self._end + num_bytes)

    def _grow(self, end: int) -> None:
        self._end = end
        self._peak = max(self._peak, end + self._others)

    def _check_room(self, name: str, end: int) -> None:
        """Raise PoolExhaustedError if the buffers cannot end at `end`."""
        if len(self._scopes) == 1:
            self._others = self.other_bytes
        if end + self._others > self.budget_bytes:
            self.drop_unused()
            self._others = self.other_bytes
        if end + self._others > self.budget_bytes:
            raise PoolExhaustedError(name, end + self._others, self.budget_bytes)

    def _update_other_bytes(self) -> None:
        """Update the bytes that are not buffers. This is too slow to run with every buffer."""
        self._others = self.other_bytes
        self._grow(self._end)

    # ---- scopes ----

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        """Return a context whose buffers are released at its end; `stage` names its purpose."""
        return self

    def __enter__(self) -> None:
        if self._samples_often or len(self._scopes) == 1:
            self._update_other_bytes()
        self._scopes.append((self._end, {}))

    def __exit__(self, *_: object) -> None:
        if self._samples_often or len(self._scopes) == 2:
            self._update_other_bytes()
        self._end = self._scopes.pop()[0]

    def begin_frame(self) -> None:
        """Begin the frame of a step that other steps may interrupt; `end_frame` ends it.

        Its scopes stay open between the blocks of `within_frame`, and steps that run in the
        meantime place their buffers behind the frame. Until the frame ends, nothing may be taken
        outside all scopes.

        Raises:
            RuntimeError: a scope is open, or there already is a frame.
        """
        if self.has_frame or len(self._scopes) > 1:
            raise RuntimeError("activation pool: a frame begins outside all scopes, and alone")
        self._frame = [(self._end, {})]

    @contextmanager
    def within_frame(self) -> Iterator[None]:
        """Use the frame's scopes and buffers in the block."""
        if self._frame is None:
            raise RuntimeError("activation pool: no frame has begun")
        others, self._scopes = self._scopes, self._frame
        try:
            yield
        finally:
            self._scopes = others

    def end_frame(self) -> None:
        """Release the frame's buffers; only outside all scopes and after `within_frame`."""
        self._end, self._frame = self.outermost_bytes, None

    @property
    def has_frame(self) -> bool:
        return self._frame is not None

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame's buffers, which other steps cannot use; invalid within the frame."""
        return self._front_bytes - self.outermost_bytes

    @property
    def outermost_bytes(self) -> int:
        """Bytes of buffers taken outside all scopes, which stay."""
        return self._front_bytes if self._frame is None else self._frame[0][0]

    @property
    def _front_bytes(self) -> int:
        """Bytes in front of the current step."""
        return self._scopes[1][0] if len(self._scopes) > 1 else self._end

    # ---- bytes in use ----

    def reset_peak(self, *, samples_often: bool = False) -> None:
        """Reset the peak to the bytes now in use.

        Args:
            samples_often: whether to count PyTorch's memory whenever a scope begins or ends, from
                now on, instead of only with the outermost scope. This costs host time, too much for
                small steps.
        """
        self._samples_often, self._peak = samples_often, 0
        self._update_other_bytes()

    @property
    def peak_bytes(self) -> int:
        """Peak of the bytes in use since `reset_peak`."""
        return self._peak

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers, including alignment and gaps, and `other_bytes`."""
        return self._end + self.other_bytes

    # ---- source of the bytes; a pool on virtual memory overrides these methods ----

    @property
    def other_bytes(self) -> int:
        """Bytes of kept tensors, temporaries and graphs, if the pool can measure them."""
        return sum(self._kept.values())

    @property
    def graph_bytes(self) -> int | None:
        """Bytes of graphs within `other_bytes`; None if graphs are not counted there."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool holds of the device, if it can measure them."""
        return self.used_bytes

    def _slice_at(self, offset: int, num_bytes: int) -> PoolSlice:
        """Return memory for a buffer. Raises PoolExhaustedError if the card has none."""
        return PoolSlice(offset, torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def _keep(self, name: str, num_bytes: int) -> torch.Tensor:
        """Return bytes [num_bytes] that stay, replacing those kept under this name."""
        self._kept[name] = num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def temporaries(self) -> AbstractContextManager[None]:
        """Return a context in which PyTorch's allocations count against the budget, if possible.

        Beyond the budget PyTorch raises `torch.OutOfMemoryError`.
        """
        return nullcontext()

    def graph_pool(self) -> tuple[int, int] | None:
        """Return the argument `pool` of `torch.cuda.graph` with which graphs count, or None."""
        return None

    def drop_unused(self) -> None:
        """Release PyTorch's unused cached memory; a step with other buffers may need it."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def trim(self) -> None:
        """Release memory that no buffer, tensor or graph refers to. Waits for the device."""
        self.drop_unused()
