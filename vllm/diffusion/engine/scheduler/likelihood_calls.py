# SPDX-License-Identifier: Apache-2.0
"""Likelihood calls: all requests of a call start together, to share a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.engine.scheduler.gates import AdmissionGate

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor

# Seconds after the first request of a call; then its requests start without the missing ones.
LONGEST_WAIT_S = 0.05


class _Call(NamedTuple):
    """A likelihood call with missing requests."""

    num_arrived: int
    since: float


class LikelihoodCalls(AdmissionGate):
    """Gate of likelihood requests: they wait until all requests of their call have arrived.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._incomplete: dict[str, _Call] = {}

    def arrived(self, item: RequestState) -> bool:
        """Count a request toward its call; return False if it is the only one of its call."""
        score = item.params.score
        if score is None or score.group_size == 1:
            return False
        self._forget_late()
        call = self._incomplete.pop(score.group, _Call(0, self._clock()))
        if call.num_arrived + 1 < score.group_size:
            self._incomplete[score.group] = call._replace(num_arrived=call.num_arrived + 1)
        return True

    def waits_for(self, item: RequestState) -> WaitsFor | None:
        """Return "call" while requests of the same call are missing, `LONGEST_WAIT_S` at most."""
        self._forget_late()
        score = item.params.score
        return "call" if score is not None and score.group in self._incomplete else None

    def _forget_late(self) -> None:
        late = self._clock() - LONGEST_WAIT_S
        self._incomplete = {name: c for name, c in self._incomplete.items() if c.since > late}
