# SPDX-License-Identifier: Apache-2.0
"""Parts of upstream's scheduler interface that canvases have no use for, and the pause state.

Canvases know no drafts, encoder caches or connectors.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface


class CanvasSchedulerInterface(SchedulerInterface):
    """Upstream's interface without what canvases have no use for."""

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
