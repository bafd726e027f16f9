# SPDX-License-Identifier: Apache-2.0
"""Patches of upstream's `EngineCore` for trainers' calls (weight version, sleep, adapters)."""

from __future__ import annotations

import functools
from typing import Any

from vllm.diffusion.core.errors import ServerConfigError
from vllm.v1.engine import UtilityResult
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder

# Worker methods whose results cannot be sent between processes.
_RETURN_OBJECTS = frozenset({"get_model"})
DEFAULT = "default"  # upstream's label of weights before a trainer sets one


def patch_engine_core() -> None:
    """Make `sleep` and `collective_rpc` fail early, and exchange facts with our scheduler."""
    set_version, sleep = EngineCore.set_weight_version, EngineCore.sleep
    if hasattr(set_version, "__wrapped__"):
        return

    @functools.wraps(set_version)
    def set_and_record(engine: Any, weight_version: str) -> None:
        set_version(engine, weight_version)
        if hasattr(engine.scheduler, "labels"):
            (generation, *_) = engine.model_executor.collective_rpc("weight_generation")
            engine.scheduler.labels[generation] = weight_version

    @functools.wraps(sleep)
    def check_and_sleep(engine: Any, level: int = 1, mode: Any = "abort") -> Any:
        if level not in range(3):
            raise ServerConfigError(f"sleep: given level {level}; wanted 0, 1 or 2")
        if level and not engine.vllm_config.model_config.enable_sleep_mode:
            raise ServerConfigError(f"sleep: given level {level}; wanted --enable-sleep-mode, or 0")
        return sleep(engine, level, mode)

    call_all = EngineCore.collective_rpc

    @functools.wraps(call_all)
    def call_and_check(engine: Any, method: Any, *args: Any, **options: Any) -> Any:
        if isinstance(method, str) and (method.startswith("_") or method in _RETURN_OBJECTS):
            raise ServerConfigError(f"method: given {method!r}; wanted one whose result is data")
        results = call_all(engine, method, *args, **options)
        # A result that cannot be encoded would end the thread that sends all other results.
        MsgpackEncoder().encode(UtilityResult(results))
        return results

    remove = EngineCore.remove_lora

    @functools.wraps(remove)
    def await_and_remove(engine: Any, lora_id: int) -> bool:
        if hasattr(engine.scheduler, "awaited_adapters"):
            # Workers do not know requests that wait; they keep the adapter.
            awaited = list(engine.scheduler.awaited_adapters)
            engine.model_executor.collective_rpc("await_adapters", args=(awaited,))
        is_removed: bool = remove(engine, lora_id)
        return is_removed

    EngineCore.remove_lora = await_and_remove
    EngineCore.set_weight_version, EngineCore.sleep = set_and_record, check_and_sleep
    EngineCore.collective_rpc = call_and_check
