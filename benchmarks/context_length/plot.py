# SPDX-License-Identifier: Apache-2.0
"""Time and memory against length, as a picture."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.context_length.records import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.context_length.records import Point

TIMES = {"first_ms": "first step", "median_ms": "median step", "last_ms": "last step"}
MEMORY = {
    "gpu_peak_bytes": "GPU",
    "activation_peak_bytes": "activations",
    "activation_average_bytes": "activations, average",
}
HOST = {"host_peak_bytes": "host", "host_idle_bytes": "host, before the request"}


def plot(path: Path, points: Sequence[Point], title: str) -> None:
    """Write a PNG of two panels; failures are lines across both. Nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.stderr.write("no plot: matplotlib is missing\n")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time_axis, memory_axis) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    _draw(time_axis, points, TIMES, 1e-3)
    time_axis.set_ylabel("time of a denoise step, s")
    time_axis.set_yscale("log")
    on_gpu = any(point.gpu_peak_bytes is not None for point in points)
    _draw(memory_axis, points, MEMORY if on_gpu else MEMORY | HOST, 1 / GIB)
    memory_axis.set_ylabel("peak memory, GiB")
    memory_axis.set_ylim(0, 1.1 * memory_axis.get_ylim()[1])
    for axis in (time_axis, memory_axis):
        _mark_failures(axis, points)
        axis.set_xlabel("prompt and canvas, tokens")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(axis="x", rotation=30)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="x-small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: Any, points: Sequence[Point], columns: dict[str, str], scale: float) -> None:
    for name, label in columns.items():
        known = [
            (point.length, scale * getattr(point, name))
            for point in points
            if point.runs and getattr(point, name) is not None
        ]
        if known:
            axis.plot(*zip(*known, strict=True), marker="o", markersize=3, label=label)


def _mark_failures(axis: Any, points: Sequence[Point]) -> None:
    """A dotted line at each failure, in a colour for each kind."""
    kinds = list(dict.fromkeys(point.status for point in points if not point.runs))
    for number, kind in enumerate(kinds):
        for index, point in enumerate(p for p in points if p.status == kind):
            axis.axvline(
                point.length,
                color=f"C{(number + 3) % 10}",
                linestyle=":",
                label=kind if index == 0 else None,
            )
