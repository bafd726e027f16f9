# SPDX-License-Identifier: Apache-2.0
"""Readings of one call start together: they arrive one by one and are to share a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.engine.scheduled import Scheduled

LONGEST_WAIT_S = 0.05  # of those that are here for those that are not


class _Group(NamedTuple):
    """One that is not complete."""

    num_arrived: int
    since: float


class Gathering:
    """Says which requests still wait for others of their call.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: dict[str, _Group] = {}

    def arrived(self, item: Scheduled) -> None:
        """A request waits."""
        score = item.params.score
        if score is None or score.group_size == 1:
            return
        self._forget_late()
        group = self._groups.pop(score.group, _Group(0, self._clock()))
        if group.num_arrived + 1 < score.group_size:
            self._groups[score.group] = group._replace(num_arrived=group.num_arrived + 1)

    def waits(self, item: Scheduled) -> bool:
        """Whether somebody is missing, and has not been for too long."""
        self._forget_late()
        return item.params.score is not None and item.params.score.group in self._groups

    def _forget_late(self) -> None:
        late = self._clock() - LONGEST_WAIT_S
        self._groups = {name: g for name, g in self._groups.items() if g.since > late}
