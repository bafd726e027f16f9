# SPDX-License-Identifier: Apache-2.0
"""Measurements at each length, and the folder that keeps them from one run to the next."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from benchmarks.harness import BenchmarkError, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OK = "ok"
REFUSED = "refused"
OUT_OF_MEMORY = "out of memory"
TIMEOUT = "timeout"
SERVER_DIED = "server died"
FAILED = "failed"
NOT_STARTED = "not started"

NAME = "context_length"
GIB = 2**30
JSON_ONLY = ("diffusion",)
MAX_REASON_LENGTH = 160  # characters of a reason in the table
COLUMNS = {"length": ">9", "prompt": ">9", "canvas": ">9", "steps": ">5", "first ms": ">11.2f"}
COLUMNS |= {"median ms": ">11.2f", "last ms": ">11.2f", "GPU GiB": ">8.2f", "host GiB": ">8.2f"}
COLUMNS |= {"act. GiB": ">8.2f", "KiB/token": ">9.2f", "peak/avg": ">8.2f", "status": "<6"}
ATTRIBUTES = (
    "length prompt_tokens gen_tokens num_steps first_ms median_ms last_ms gpu_gib host_gib "
    "activation_gib kib_per_token peak_over_average summary"
)


class SettingsDiffer(BenchmarkError):
    """A folder holds measurements with other settings; the message is one line for the user."""


@dataclass(frozen=True)
class Point:
    """Result of one length, for which a server is started, sent one request, and stopped.

    Attributes:
        length: prompt and canvas together, in tokens.
        status: "ok", or how it failed: "refused" (HTTP 4xx), "out of memory", "timeout", "server
            died", "failed" (any other answer), "not started".
        reason: reason of a failure, as the server reports it.
        num_steps: denoising steps that the server logged.
        first_ms, median_ms, last_ms: milliseconds of the first, median and last of these steps.
        request_s: seconds from sending the request to its answer.
        startup_s: seconds from starting the server to its first successful /health.
        gpu_idle_bytes, host_idle_bytes: memory of the server before the request.
        gpu_peak_bytes, host_peak_bytes: largest memory seen during the request.
        activation_peak_bytes, activation_average_bytes, activation_budget_bytes: peak, average and
            budget of the server's activation pool, as it reports them.
        plan: how the server divides the step into chunks, as it logs it.
        diffusion: the complete report of the server.
    """

    length: int
    prompt_tokens: int
    gen_tokens: int
    status: str
    reason: str = ""
    num_steps: int = 0
    first_ms: float | None = None
    median_ms: float | None = None
    last_ms: float | None = None
    request_s: float | None = None
    startup_s: float | None = None
    gpu_idle_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    host_idle_bytes: int | None = None
    host_peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    activation_average_bytes: int | None = None
    activation_budget_bytes: int | None = None
    plan: str = ""
    diffusion: dict[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether the request succeeded."""
        return self.status == OK

    @property
    def is_final(self) -> bool:
        """Whether the status depends on the length, which is so if the server has started."""
        return self.status != NOT_STARTED

    @property
    def gpu_gib(self) -> float | None:
        return ratio(self.gpu_peak_bytes, GIB)

    @property
    def host_gib(self) -> float | None:
        return ratio(self.host_peak_bytes, GIB)

    @property
    def activation_gib(self) -> float | None:
        return ratio(self.activation_peak_bytes, GIB)

    @property
    def kib_per_token(self) -> float | None:
        return ratio(self.activation_peak_bytes, 1024 * self.length)

    @property
    def peak_over_average(self) -> float | None:
        return ratio(self.activation_peak_bytes, self.activation_average_bytes)

    @property
    def summary(self) -> str:
        """Status, with the start of the reason of a failure."""
        short = len(self.reason) <= MAX_REASON_LENGTH
        reason = self.reason if short else f"{self.reason[: MAX_REASON_LENGTH - 3]}..."
        return self.status if self.runs else f"{self.status}: {reason}"


class Results:
    """Points of a folder, which is rewritten after each point.

    Args:
        folder: gets context_length.json and context_length.csv.
        settings: settings on which the points depend, as JSON represents them.
        run: record of machine and software.

    Raises:
        SettingsDiffer: the folder holds points with other settings, or points that cannot be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        self._folder, self._settings, self._run = folder, dict(settings), dict(run)
        self._points: dict[int, Point] = {}
        self.commit_before: str | None = None  # commit of the points that existed before
        if self.path("json").exists():
            self._read(self.path("json"))

    def path(self, suffix: str) -> Path:
        """Return the file of a kind: json, csv or png."""
        return self._folder / f"{NAME}.{suffix}"

    def points(self) -> list[Point]:
        """Return all points, the shortest first."""
        return [self._points[length] for length in sorted(self._points)]

    def final(self, length: int) -> Point | None:
        """Return the point of a length if it does not have to be measured again."""
        point = self._points.get(length)
        return point if point is not None and point.is_final else None

    def add(self, point: Point) -> None:
        """Keep a point and write the files."""
        self._points[point.length] = point
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [asdict(point) for point in self.points()]
        content = {"run": self._run, "kind": NAME, "settings": self._settings, "points": rows}
        # Replace the file atomically, because the run may be ended at any time.
        draft = self.path("json.draft")
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, self.path("json"))
        with self.path("csv").open("w", newline="", encoding="utf-8") as file:
            columns = [f.name for f in fields(Point) if f.name not in JSON_ONLY]
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            before = content["settings"]
            points = [Point(**row) for row in content["points"]]
            self.commit_before = content["run"].get("commit")
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsDiffer(f"{path}: it is no result of this benchmark: {error!r}") from None
        now = json.loads(json.dumps(self._settings))
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            changes = ", ".join(f"{n}: {before.get(n)!r} then, {now.get(n)!r} now" for n in changed)
            raise SettingsDiffer(
                f"{path} was measured with other settings ({changes}); wanted the same, or another "
                "--output-dir"
            )
        self._points = {point.length: point for point in points}


TIMES = {"first_ms": "first step", "median_ms": "median step", "last_ms": "last step"}
MEMORY = {
    "gpu_peak_bytes": "GPU",
    "activation_peak_bytes": "activations",
    "activation_average_bytes": "activations, average",
}
HOST = {"host_peak_bytes": "host", "host_idle_bytes": "host, before the request"}


def paint(points: Sequence[Point], title: str, time_axis: Any, memory_axis: Any) -> None:
    """Draw two panels; failures are lines across both."""
    _draw(time_axis, points, TIMES, 1e-3)
    time_axis.set_ylabel("time of a denoising step, s")
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
            once = dict(zip(labels, lines, strict=True))  # one entry per kind of failure
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
