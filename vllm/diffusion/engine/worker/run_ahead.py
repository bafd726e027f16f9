# SPDX-License-Identifier: Apache-2.0
"""Choice of the step that is launched behind those under way, before their results are there."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from vllm.diffusion.engine.scheduler.turns import by_priority, take_turns

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.diffusion.engine.scheduler.turns import NextForward, StepLimits
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner


def next_behind(
    runner: DiffusionModelRunner,
    in_flight: Collection[str],
    apart: Collection[str],
    limits: StepLimits,
) -> dict[str, int]:
    """Return the requests of the step that can follow without waiting, with their rows.

    A step in chunks launches more kernels than a GPU's queue holds, so launching would wait for it.

    Args:
        runner: owner of the requests.
        in_flight: requests whose step has been launched.
        apart: requests that are kept apart.
        limits: limits above which a step takes only some requests.
    """
    canvases = by_priority(runner.canvases, lambda canvas: canvas.params.priority or 0)
    sizes = {
        req_id: canvas.next_size
        for req_id, canvas in canvases.items()
        if req_id not in apart and not canvas.is_complete
    }
    taken = step_behind(in_flight, sizes, runner.planner.row_budget, limits)
    return taken if taken and runner.runs_whole(sum(taken.values())) else {}


def step_behind(
    in_flight: Collection[str],
    forwards: Mapping[str, NextForward],
    row_budget: int,
    limits: StepLimits,
) -> dict[str, int]:
    """Return the requests of the step that follows those under way, with their rows; maybe none.

    Requests that keep keys and values share steps, and so do the others; windows have their own
    where a graph does not hold them beside the rest. Where one step does not hold all of a kind, it
    takes a share of them, so that the host can take in the results of one share while the device
    computes another. Where it does, nobody steps before those under way are back, and all go
    together.

    Args:
        in_flight: requests whose step has been launched.
        forwards: next forwards of all requests, in the order of their turns; of those under way,
            the launched ones.
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
        alike = kinds.pop((forward.keeps, are_windows), None)
        if alike is None:
            continue  # looked at already
        all_rows = sum([forwards[req_id].rows for req_id in alike])
        rows = min(row_budget, max(limits.rows, 0 if are_windows else -(-all_rows // 2)))
        max_requests = max(limits.requests, -(-len(alike) // 2))
        all_fit = all_rows <= rows and len(alike) <= max_requests
        if not all_fit or set(alike).isdisjoint(in_flight):
            taken = list(islice(filter(waiting.__contains__, alike), max_requests))
            units = {r: unit for r in taken if (unit := waiting[r].unit) is not None}
            return take_turns({r: waiting[r].rows for r in taken}, rows, units)
    return {}
