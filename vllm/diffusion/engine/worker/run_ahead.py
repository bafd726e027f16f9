# SPDX-License-Identifier: Apache-2.0
"""Chooses the step to launch after the steps in flight, before their results are collected."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.engine.scheduler.turns import by_priority, take_turns

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.diffusion.engine.scheduler.turns import NextForward
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner


class StepLimits(NamedTuple):
    """Limits above which a step takes only some of the waiting requests.

    Two such steps then alternate.

    Attributes:
        rows: maximum rows of windows that one graph serves; larger steps are not faster per row.
        requests: number of requests above which the host takes longer than a device needs for a
            second step.
        holds_for_all: whether `rows` also limits steps that contain other rows than windows.
            Without this, such a step takes at least half of the rows that wait.
    """

    rows: int
    requests: int = 128
    holds_for_all: bool = False


def next_behind(
    runner: DiffusionModelRunner,
    in_flight: Collection[str],
    apart: Collection[str],
    limits: StepLimits,
) -> dict[str, int]:
    """Return the requests of the next step that can be launched without waiting, with their rows.

    A step in chunks is never launched ahead: it launches more kernels than a GPU's queue holds, so
    the launch would wait.

    Args:
        runner: owner of the requests.
        in_flight: requests whose step has been launched.
        apart: requests that never join such steps.
        limits: limits on the sizes of such steps; larger batches are split.
    """
    canvases = by_priority(runner.canvases, lambda canvas: canvas.params.priority or 0)
    sizes = {
        req_id: canvas.measure_next_forward()
        for req_id, canvas in canvases.items()
        if req_id not in apart and canvas.has_next
    }
    step = step_behind(in_flight, sizes, runner.planner.row_budget, limits)
    return step if step and runner.runs_whole(sum(step.values())) else {}


def step_behind(
    in_flight: Collection[str],
    forwards: Mapping[str, NextForward],
    row_budget: int,
    limits: StepLimits,
) -> dict[str, int]:
    """Return the requests of the step after the steps in flight, with their rows; may be empty.

    Requests with a cache share steps, and requests without a cache share steps. Windows have
    separate steps if one graph cannot hold them together with all other rows of requests with a
    cache. If one step cannot hold all requests of a kind, it takes a share of them, so that the
    host can process the results of one share while the device computes another. If one step can
    hold all of them, they wait until the steps in flight are collected, and step together.

    Args:
        in_flight: requests whose step has been launched.
        forwards: next forwards of all requests, in the order of their turns; for requests in
            flight, the launched forwards.
        row_budget: rows that several requests may share in one step.
        limits: limits above which a step takes a share.
    """
    waiting = {r: forward for r, forward in forwards.items() if forward.rows and r not in in_flight}
    if not waiting:
        return {}
    kept_rows = sum([forward.rows for forward in forwards.values() if forward.keeps])
    fit_a_graph = kept_rows <= limits.rows
    kinds: dict[tuple[bool, bool], list[str]] = {}
    for req_id, forward in forwards.items():
        kinds.setdefault((forward.keeps, forward.is_window and not fit_a_graph), []).append(req_id)
    for forward in waiting.values():
        are_windows = forward.is_window and not fit_a_graph
        same_kind = kinds.pop((forward.keeps, are_windows), None)
        if same_kind is None:
            continue  # this kind has been handled already
        all_rows = sum([forwards[req_id].rows for req_id in same_kind])
        is_limited = are_windows or limits.holds_for_all
        rows = min(row_budget, max(limits.rows, 0 if is_limited else -(-all_rows // 2)))
        max_requests = max(limits.requests, -(-len(same_kind) // 2))
        all_fit = all_rows <= rows and len(same_kind) <= max_requests
        if not all_fit or set(same_kind).isdisjoint(in_flight):
            chosen = list(islice(filter(waiting.__contains__, same_kind), max_requests))
            units = {r: unit for r in chosen if (unit := waiting[r].unit) is not None}
            return take_turns({r: waiting[r].rows for r in chosen}, rows, units)
    return {}
