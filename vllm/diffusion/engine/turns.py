# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a step when not everybody's rows fit into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T")


def take_turns(next_rows: Mapping[str, int], row_budget: int) -> dict[str, int]:
    """The requests of the next step, with their rows.

    They are taken in order as long as their rows fit; one that does not fit waits, and smaller ones
    behind it may go. The first always goes, alone if its rows are beyond the budget. Whoever took
    part goes to the end of the order (`to_the_end`), so nobody waits for more steps than there are
    requests before it.

    Args:
        next_rows: rows of the next forward of each request, in the order of their turns.
        row_budget: rows that several requests may share in one step.
    """
    taken: dict[str, int] = {}
    room = row_budget
    for req_id, rows in next_rows.items():
        if not taken or rows <= room:
            taken[req_id] = rows
            room -= rows
    return taken


def to_the_end(turns: dict[str, T], req_ids: Iterable[str]) -> None:
    """Put those who took part behind all others, in the order of `req_ids`."""
    for req_id in req_ids:
        if req_id in turns:
            turns[req_id] = turns.pop(req_id)
