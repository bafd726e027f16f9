# SPDX-License-Identifier: Apache-2.0
"""Time and memory against length, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.context_length.records import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.context_length.records import Point

TIMES = {"first_ms": "first step", "median_ms": "median step", "last_ms": "last step"}
MEMORY = {
    "gpu_peak_bytes": "GPU",
    "activation_peak_bytes": "activations",
    "activation_average_bytes": "activations, average",
}
HOST = {"host_peak_bytes": "host", "host_idle_bytes": "host, before the request"}


def paint(points: Sequence[Point], title: str, time_axis: Any, memory_axis: Any) -> None:
    """Two panels; failures are lines across both."""
    _draw(time_axis, points, TIMES, 1e-3)
    time_axis.set_ylabel("time of a denoise step, s")
    time_axis.set_yscale("log")
    on_gpu = any(point.gpu_peak_bytes is not None for point in points)
    _draw(memory_axis, points, MEMORY if on_gpu else MEMORY | HOST, 1 / GIB)
    memory_axis.set_ylabel("peak memory, GiB")
    memory_axis.set_ylim(0, 1.1 * memory_axis.get_ylim()[1])
    kinds = list(dict.fromkeys(point.status for point in points if not point.runs))
    for axis in (time_axis, memory_axis):
        for point in (point for point in points if not point.runs):
            colour = f"C{(kinds.index(point.status) + 3) % 10}"
            axis.axvline(point.length, color=colour, linestyle=":", label=point.status)
        axis.set_xlabel("prompt and canvas, tokens")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(axis="x", rotation=30)
        lines, labels = axis.get_legend_handles_labels()
        if labels:
            once = dict(zip(labels, lines, strict=True))  # of each kind of failure
            axis.legend(once.values(), once.keys(), fontsize="x-small")
    time_axis.figure.suptitle(title)


def _draw(axis: Any, points: Sequence[Point], columns: dict[str, str], scale: float) -> None:
    for name, label in columns.items():
        known = [
            (point.length, scale * getattr(point, name))
            for point in points
            if point.runs and getattr(point, name) is not None
        ]
        if known:
            axis.plot(*zip(*known, strict=True), marker="o", markersize=3, label=label)
