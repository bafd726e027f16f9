# SPDX-License-Identifier: Apache-2.0
"""Methods of upstream's scheduler interface that do not concern steps.

Canvases have no draft models, encoder caches or connectors.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.engine.scheduler.outputs import Outbox
    from vllm.diffusion.engine.scheduler.paging import Paging
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.diffusion.engine.scheduler.waiting import WaitingLine


class CanvasSchedulerInterface(SchedulerInterface):
    """Implements upstream's interface except for requests and steps (see `DiffusionScheduler`)."""

    paging: Paging | None
    _running: dict[str, RequestState]
    _waiting: WaitingLine
    _outbox: Outbox
    _finished_req_ids: set[str]

    connector = None
    ec_connector = None
    _pause_state = PauseState.UNPAUSED

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def shutdown(self) -> None:
        pass

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        pass

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    # ---- state that upstream requests ----

    def has_request(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting.by_id

    @abstractmethod
    def _launched_step(self, turns: Mapping[str, RequestState]) -> dict[str, int]: ...

    def get_num_unfinished_requests(self) -> int:
        """Return the amount of unfinished work: 0 ends the wait of a pause.

        While all requests are paused, this counts launched steps and unsent outputs. While only new
        requests are paused, it also counts running requests.
        """
        count = self._outbox.num_outputs
        if self._pause_state == PauseState.PAUSED_ALL:
            return count + len(self._launched_step(self._running))
        if self._pause_state == PauseState.UNPAUSED:
            count += len(self._waiting)
        else:
            count += sum(item.started > 0 for item in self._waiting.requests)
        return count + len(self._running)

    def has_finished_requests(self) -> bool:
        return bool(self._finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if self.paging is None:
            return True
        return self.paging.reset(self._running.values() if reset_running_requests else ())
