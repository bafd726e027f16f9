# SPDX-License-Identifier: Apache-2.0
"""Memory of a server's processes, on the host and on the GPU, during some work."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

INTERVAL_S = 0.5
MIB = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use; GPU bytes are None without a GPU.

    Attributes:
        host_bytes: resident memory of all processes together; shared pages count in every process.
        gpu_bytes: see `GpuMemory`.
    """

    host_bytes: int = 0
    gpu_bytes: int | None = None

    def most(self, other: MemoryUse) -> MemoryUse:
        """Return the larger value of each field."""
        known = [n for n in (self.gpu_bytes, other.gpu_bytes) if n is not None]
        return MemoryUse(max(self.host_bytes, other.host_bytes), max(known, default=None))


class GpuMemory:
    """GPU memory as `nvidia-smi` reports it.

    If `nvidia-smi` lists the processes, this is their memory. Inside a container the driver's
    process ids are not visible. Then it is the growth of memory in use since this object was
    created.

    Args:
        gpu: index or UUID of the GPU, several separated by commas; None: all.
    """

    def __init__(self, gpu: str | None) -> None:
        self._select = [] if gpu is None else ["-i", gpu]
        self._before = self._in_use()

    def used_by(self, process_ids: Sequence[int]) -> int | None:
        """Return the bytes used by processes; None without a GPU."""
        if self._before is None:
            return None
        own = [
            mib
            for process_id, mib in self._query("compute-apps=pid,used_gpu_memory")
            if process_id in process_ids
        ]
        if own:
            return sum(own) * MIB
        in_use = self._in_use()
        return None if in_use is None else max(0, in_use - self._before)

    def _in_use(self) -> int | None:
        cards = self._query("gpu=memory.used")
        return sum(mib for (mib,) in cards) * MIB if cards else None

    def _query(self, what: str) -> list[list[int]]:
        """Return rows of integers; none if nvidia-smi is missing, hangs or fails."""
        command = ["nvidia-smi", *self._select, f"--query-{what}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            return [[int(cell) for cell in line.split(",")] for line in done.stdout.splitlines()]
        except (OSError, subprocess.SubprocessError, ValueError):
            return []


def memory_of(processes: Sequence[psutil.Process], gpu: GpuMemory) -> MemoryUse:
    """Return the memory of processes, some of which may end meanwhile."""
    host_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            host_bytes += process.memory_info().rss
    return MemoryUse(host_bytes, gpu.used_by([process.pid for process in processes]))


class PeakMemory:
    """Peak of the memory in use while the block runs, sampled every half second and at its end.

    Args:
        measure: returns the memory in use now.
        tick: called after every sample.
    """

    def __init__(self, measure: Callable[[], MemoryUse], tick: Callable[[], None]) -> None:
        self._measure, self._tick = measure, tick
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = MemoryUse()

    def _watch(self) -> None:
        while not self._has_ended.wait(INTERVAL_S):
            self._look()
            self._tick()

    def _look(self) -> None:
        self.peak = self.peak.most(self._measure())

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        self._look()
