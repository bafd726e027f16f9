# SPDX-License-Identifier: Apache-2.0
"""Choice of the requests that take part in a step when not all their rows fit."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

T = TypeVar("T")


class NextForward(NamedTuple):
    """Sizes of a request's next forward.

    Attributes:
        rows: number of rows.
        keeps: whether it keeps keys and values; one graph serves no mixture of both.
        is_window: whether it computes only some of the positions.
        unit: granularity, in rows, at which it can be cut; None if it cannot be cut.
    """

    rows: int
    keeps: bool
    is_window: bool = False
    unit: int | None = None


class StepLimits(NamedTuple):
    """Limits above which a step takes only some of the waiting requests, so that two steps
    alternate.

    Attributes:
        rows: rows of windows that one graph serves; more would not cost less each.
        requests: number of requests beyond which the host takes longer than a device for a second
            step.
    """

    rows: int
    requests: int = 128


def step_behind(
    under_way: Collection[str],
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
        under_way: requests whose step has been launched.
        forwards: next forwards of all requests, in the order of their turns; of those under way,
            the launched ones.
        row_budget: rows that several requests may share in one step.
        limits: limits above which a step takes a share.
    """
    waiting = {r: forward for r, forward in forwards.items() if forward.rows and r not in under_way}
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
        most = max(limits.requests, -(-len(alike) // 2))
        all_fit = all_rows <= rows and len(alike) <= most
        if not all_fit or set(alike).isdisjoint(under_way):
            taken = list(islice(filter(waiting.__contains__, alike), most))
            units = {r: unit for r in taken if (unit := waiting[r].unit) is not None}
            return take_turns({r: waiting[r].rows for r in taken}, rows, units)
    return {}


def take_turns(
    next_rows: Mapping[str, int], row_budget: int, units: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the requests of the next step, with their rows.

    They are taken in order as long as their rows fit; one that does not fit waits, and smaller ones
    behind it may go. The first always goes, alone if its rows are beyond the budget. Whoever took
    part goes to the end of the order (`to_the_end`), so nobody waits for more steps than there are
    requests before it. Where a forward may be computed in parts, the part that fits is taken.

    Args:
        next_rows: rows of the next forward of each request, in the order of their turns.
        row_budget: rows that several requests may share in one step.
        units: granularity, in rows, of each request whose forward may be computed in parts.
    """
    if sum(next_rows.values()) <= row_budget:
        return dict(next_rows)
    taken: dict[str, int] = {}
    room, units = row_budget, units or {}
    for req_id, wanted in next_rows.items():
        rows = wanted
        if req_id in units:
            rows = min(wanted, max(room // units[req_id], 1) * units[req_id])
        if not taken or rows <= room:
            taken[req_id] = rows
            room -= rows
    return taken


def by_priority(turns: Mapping[str, T], priority: Callable[[T], int]) -> Mapping[str, T]:
    """Sort by priority, lowest number first; equal ones stay in the order of their turns."""
    if len({priority(item) for item in turns.values()}) < 2:
        return turns
    return dict(sorted(turns.items(), key=lambda turn: priority(turn[1])))


def to_the_end(turns: dict[str, T], req_ids: Iterable[str]) -> None:
    """Move the requests `req_ids` behind all others, in their order."""
    for req_id in req_ids:
        if req_id in turns:
            turns[req_id] = turns.pop(req_id)
