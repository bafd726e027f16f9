# SPDX-License-Identifier: Apache-2.0
"""Patches of upstream's `EngineCore` for trainers' calls (weight version, sleep, adapters)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import ServerConfigError
from vllm.v1.engine import UtilityResult
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

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
            raise ServerConfigError(
                f"method: given {method!r}; wanted a method whose result can be sent"
            )
        results = call_all(engine, method, *args, **options)
        # A result that cannot be encoded would end the thread that sends all other results.
        MsgpackEncoder().encode(UtilityResult(results))
        return results

    EngineCore.add_lora = _settling(EngineCore.add_lora)
    EngineCore.remove_lora = _settling(EngineCore.remove_lora)
    EngineCore.set_weight_version, EngineCore.sleep = set_and_record, check_and_sleep
    EngineCore.collective_rpc = call_and_check


def _settling(call: Callable[..., bool]) -> Callable[..., bool]:
    """Tell workers first which adapters waiting requests have, and which requests have ended."""

    @functools.wraps(call)
    def settle_and_call(engine: Any, *args: Any, **options: Any) -> bool:
        scheduler = engine.scheduler
        if hasattr(scheduler, "awaited_adapters"):
            known = list(scheduler.awaited_adapters), list(scheduler.ended)
            engine.model_executor.collective_rpc("settle_adapters", args=known)
        return call(engine, *args, **options)

    return settle_and_call
