# SPDX-License-Identifier: Apache-2.0
"""Peak and time-weighted average of the bytes in use over the stages of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Usage:
    """Bytes in use from the start of a measurement to its last mark.

    Attributes:
        peak_bytes: the most in use at any time.
        average_bytes: weighted by time; a stage counts with its own peak throughout.
        seconds: time from start to last mark; on a CUDA device, of its current stream.
        stage_peak_bytes: the most in use in each stage, by name.
    """

    peak_bytes: int
    average_bytes: float
    seconds: float
    stage_peak_bytes: dict[str, int] = field(default_factory=dict)


class _Mark(NamedTuple):
    stage: str
    peak_bytes: int
    time: float | torch.cuda.Event


class UsageMeter:
    """Collects marks; between two marks a stage ran.

    Args:
        device: where the stages run. On a CUDA device times are those of events on the current
            stream, so marks cost no synchronisation; `usage` waits for the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.start()

    def start(self) -> None:
        """Forget all marks; time runs from here."""
        self._marks: list[_Mark] = [_Mark("", 0, self._now())]

    def mark(self, stage: str, peak_bytes: int) -> None:
        """A stage, or a part of one, ends here; `peak_bytes` is the most it had in use."""
        self._marks.append(_Mark(stage, peak_bytes, self._now()))

    def usage(self) -> Usage:
        """What has been measured since `start`."""
        stages: dict[str, int] = {}
        weighted = seconds = 0.0
        for before, mark in zip(self._marks, self._marks[1:], strict=False):
            stages[mark.stage] = max(stages.get(mark.stage, 0), mark.peak_bytes)
            elapsed = _seconds_between(before.time, mark.time)
            weighted += elapsed * mark.peak_bytes
            seconds += elapsed
        peak = max(stages.values(), default=0)
        return Usage(peak, weighted / seconds if seconds else float(peak), seconds, stages)

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
