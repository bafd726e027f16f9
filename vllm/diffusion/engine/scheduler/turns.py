# SPDX-License-Identifier: Apache-2.0
"""Chooses the requests of a step if their rows do not all fit into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")


class NextForward(NamedTuple):
    """Sizes of a request's next forward.

    Attributes:
        rows: number of rows.
        keeps: whether the forward uses a cache; one graph cannot serve forwards with and without a
            cache.
        is_window: whether it computes only some of the positions.
        unit: granularity, in rows, at which it can be cut; None if it cannot be cut.
    """

    rows: int
    keeps: bool
    is_window: bool = False
    unit: int | None = None


def take_turns(
    next_rows: Mapping[str, int], row_budget: int, units: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the requests of the next step, with their rows.

    Requests are taken in order as long as their rows fit. A request that does not fit waits, and
    smaller requests after it may be taken. The first request is always taken, alone if its rows
    exceed the budget. Requests that took part go to the end of the order (`move_to_end`), so no
    request waits for more steps than there are requests before it. If a forward may be computed in
    parts, the part that fits is taken.

    Args:
        next_rows: rows of the next forward of each request, in the order of their turns.
        row_budget: rows that several requests may share in one step.
        units: granularity, in rows, of each request whose forward may be computed in parts.
    """
    if sum(next_rows.values()) <= row_budget:
        return dict(next_rows)
    step: dict[str, int] = {}
    room, units = row_budget, units or {}
    for req_id, all_rows in next_rows.items():
        rows = all_rows
        if req_id in units:
            rows = min(all_rows, max(room // units[req_id], 1) * units[req_id])
        if not step or rows <= room:
            step[req_id] = rows
            room -= rows
    return step


def by_priority(turns: Mapping[str, T], priority: Callable[[T], int]) -> Mapping[str, T]:
    """Sort by priority, lowest number first; equal priorities stay in the order of their turns."""
    if len({priority(item) for item in turns.values()}) < 2:
        return turns
    return dict(sorted(turns.items(), key=lambda turn: priority(turn[1])))


def move_to_end(turns: dict[str, T], req_ids: Iterable[str]) -> None:
    """Move the requests `req_ids` to the end, in their order."""
    for req_id in req_ids:
        if req_id in turns:
            turns[req_id] = turns.pop(req_id)
