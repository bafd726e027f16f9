# SPDX-License-Identifier: Apache-2.0
"""The door by which guests of the scheduler have a say in who starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor


class AdmissionGate:
    """The door of a guest of the scheduler; this one takes in nobody, and guests override it.

    A request hears only of the gates that took it in when it arrived.
    """

    def arrived(self, item: RequestState) -> bool:
        """Look at a request that has arrived; return whether this gate is to hear of it again.

        Raises:
            ActivationBudgetError: it can never start.
        """
        return False

    def prepare(self, item: RequestState) -> None:
        """Update what a waiting request would need if it started now. Called once a step."""

    def waits_for(self, item: RequestState) -> WaitsFor | None:
        """Return what a request waits for other than room, None if for nothing.

        Later requests that start meanwhile do not count as overtaking it.
        """
        return None

    def reserve(self, item: RequestState) -> bool:
        """Reserve what a request needs that fits beside the others; False if there is too little.

        Where all gates return True, the request starts.
        """
        return True

    def started(self, item: RequestState) -> None:
        """Take in that a request starts."""

    def advanced(self, item: RequestState) -> None:
        """Take in that a step of a running request is over."""

    def weights_changed(self, items: Sequence[RequestState], generation: int) -> None:
        """Handle a weight update: all requests, running and waiting, go on with this generation."""

    def left(self, item: RequestState) -> None:
        """Take in that a request is over, whether it has started or not."""
