# SPDX-License-Identifier: Apache-2.0
"""What the status page shows beside `/metrics`: requests that run or wait, and the pool."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

_PATIENCE_S = 2.0  # with an engine that is inside a step


class Status:
    """Asks the engine, once at a time; while it is busy its last answer serves.

    Args:
        engine: the engine's client.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine: Any = engine
        self._question: asyncio.Task[list[dict[str, Any]]] | None = None
        self._answer: dict[str, Any] = {}
        self._answered_at = time.time()

    async def now(self) -> dict[str, Any]:
        """Requests in order of arrival, and the pool of the first rank; ranks are alike."""
        if self._question is None:
            self._question = asyncio.ensure_future(self._engine.collective_rpc("status"))
        done, _ = await asyncio.wait([self._question], timeout=_PATIENCE_S)
        if done:
            question, self._question = self._question, None
            self._answer, *_ = question.result()
            self._answered_at = time.time()
        running = {found["id"]: found for found in self._answer.get("requests", [])}
        return {
            "pool_bytes": self._answer.get("pool_bytes"),
            "host_bytes": self._answer.get("host_bytes"),
            "age_s": time.time() - self._answered_at,
            "requests": [
                _request(state, running.get(key))
                for key, state in list(self._engine.output_processor.request_states.items())
            ],
        }


def _request(state: Any, found: dict[str, Any] | None) -> dict[str, Any]:
    """A request that the server waits for; `found` is what the engine says of it, if it runs."""
    since = None if state.stats is None else time.time() - state.stats.arrival_time
    known = {"prompt_tokens": state.prompt_len} if found is None else found
    name = state.external_req_id or state.request_id
    return {**known, "id": name, "state": "running" if found else "waiting", "seconds": since}
