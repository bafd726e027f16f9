# SPDX-License-Identifier: Apache-2.0
"""Which requests' steps are handed out in slices, and what may run beside them.

The workers only do what they are told here, so that all ranks do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.engine.messages import Paused, Slice
from vllm.diffusion.errors import ActivationBudgetError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.diffusion.engine.scheduled import Scheduled
    from vllm.diffusion.memory import Planner


class Slicing:
    """Names the next slice of a long step.

    Attributes:
        seconds: of work, as the planner predicts it: what longer steps are cut into; None cuts
            none. Nothing but tests sets it yet.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._paused: Paused | None = None

    def learn(self, paused: Paused | None) -> None:
        """The step that waits for its next slice, as the workers say."""
        self._paused = paused

    def long(
        self,
        running: Mapping[str, Scheduled],
        launched: Collection[str],
        planner: Planner | None,
    ) -> list[str]:
        """Requests whose next step takes longer than a slice, in the order of their turns.

        Args:
            running: in the order of their turns.
            launched: those whose next step is under way already, as a whole.
            planner: None while it is not known what memory there is.
        """
        seconds = self.seconds
        if seconds is None or planner is None:
            return []
        return [
            req_id
            for req_id, item in running.items()
            if req_id not in launched and planner.seconds_of(item.demand, item.next_rows) > seconds
        ]

    def next_slice(self, long: list[str]) -> Slice | None:
        """One long step at a time, to its end."""
        if self.seconds is None or not long:
            return None
        paused = None if self._paused is None else self._paused.req_id
        return Slice(paused if paused in long else long[0], self.seconds)

    def fits_beside(
        self, rows: Mapping[str, int], running: Mapping[str, Scheduled], planner: Planner | None
    ) -> bool:
        """Whether a step of these requests fits into what a paused step leaves of the pool."""
        if self._paused is None or planner is None or not rows:
            return True
        demands = [running[req_id].demand for req_id in rows]
        kept_bytes = planner.kept_bytes(item.demand for item in running.values())
        kept_bytes += self._paused.held_bytes
        try:
            planner.plan_of(demands, kept_bytes)
        except ActivationBudgetError:
            return False
        return True
