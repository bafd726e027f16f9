# SPDX-License-Identifier: Apache-2.0
"""Labels of weights, which trainers give upstream's engine, told to its scheduler, too."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.core import EngineCore

DEFAULT = "default"  # upstream's, before anybody has given one


def follow() -> None:
    """Let a scheduler of ours know the label whenever its engine is given one."""
    set_version = EngineCore.set_weight_version
    if hasattr(set_version, "__wrapped__"):
        return

    @functools.wraps(set_version)
    def set_and_tell(engine: Any, weight_version: str) -> None:
        set_version(engine, weight_version)
        if hasattr(engine.scheduler, "weight_version"):
            engine.scheduler.weight_version = weight_version

    EngineCore.set_weight_version = set_and_tell
