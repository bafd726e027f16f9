# SPDX-License-Identifier: Apache-2.0
"""Average of the bytes in use over the stages of a step, weighted by time."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """End of a stage, or of a part of one."""

    stage: str
    peak_bytes: int  # the most that it had in use
    time: float | torch.cuda.Event


class UsageMeter:
    """Collects marks; a stage ran between any two.

    Args:
        device: device of the stages. On CUDA, times are those of events on the current stream, so
            marks cost no synchronisation; the average waits for the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.start()

    def start(self) -> None:
        """Forget all marks, and start the clock."""
        self.marks = [Mark("", 0, self._now())]

    def mark(self, stage: str, peak_bytes: int) -> None:
        """End a stage, or a part of one, that had at most `peak_bytes` in use."""
        self.marks.append(Mark(stage, peak_bytes, self._now()))

    def average_bytes(self) -> float:
        """Average over all stages since `start`; each counts with its own peak throughout."""
        weighted = seconds = 0.0
        for before, mark in pairwise(self.marks):
            elapsed = _seconds_between(before.time, mark.time)
            weighted += elapsed * mark.peak_bytes
            seconds += elapsed
        return weighted / seconds if seconds else max(mark.peak_bytes for mark in self.marks)

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert not isinstance(first, float) and not isinstance(second, float)
    second.synchronize()
    milliseconds: float = first.elapsed_time(second)
    return milliseconds / 1000
