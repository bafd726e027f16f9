# SPDX-License-Identifier: Apache-2.0
"""The parts of upstream's scheduler interface that have little or no meaning for canvases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import DraftTokenIds


class CanvasInterface(SchedulerInterface):
    """Upstream's interface without drafts, grammars, connectors and encoder caches."""

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

    def get_grammar_bitmask(self, scheduler_output: Any) -> GrammarOutput | None:
        return None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        pass

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: Any
    ) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass
