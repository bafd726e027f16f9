# SPDX-License-Identifier: Apache-2.0
"""Base class of gates: guests of the scheduler that take part in admission."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor


class AdmissionGate:
    """Base class of gates, which accepts no requests; gates override its methods.

    A gate's methods are called only for requests that it accepted on arrival.

    Attributes:
        lacks: what a request waits for if `reserve` returns False.
        outlasts_growth: whether a request stays with the gate when its canvas grows and it waits
            again.
    """

    lacks: WaitsFor = "memory"
    outlasts_growth = False

    def arrived(self, item: RequestState) -> bool:
        """Handle the arrival of a request; return whether this gate takes part in its admission.

        Raises:
            ActivationBudgetError: the request can never start.
        """
        return False

    def prepare(self, item: RequestState) -> None:
        """Update what a waiting request would need if it started now. Called once per step."""

    def waits_for(self, item: RequestState) -> WaitsFor | None:
        """Return what a request waits for, except memory; None if it does not wait.

        Later requests that start meanwhile do not count as overtaking it.
        """
        return None

    def reserve(self, item: RequestState) -> bool:
        """Reserve what a request needs in addition to running requests; return False if it cannot.

        The request starts if all its gates return True.
        """
        return True

    def started(self, item: RequestState) -> None:
        """Handle the start of a request."""

    def advanced(self, item: RequestState) -> None:
        """Handle the end of a step of a running request."""

    def results_dropped(self, items: Sequence[RequestState], epoch: int) -> None:
        """Handle new weights: all running and waiting requests lose their cached results."""

    def adapters_renewed(self, items: Sequence[RequestState]) -> None:
        """Handle new tensors of the adapters of these requests, which lose their results."""

    def left(self, item: RequestState) -> None:
        """Handle the end of a request, whether it has started or not."""
