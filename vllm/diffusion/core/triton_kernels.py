# SPDX-License-Identifier: Apache-2.0
"""Access to the modules of this package that contain Triton kernels."""

from __future__ import annotations

import functools
import importlib
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch import Tensor

# Triton reads this variable when a kernel is decorated, that is, when its module is imported.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def load_kernels(name: str) -> ModuleType | None:
    """Import a module of kernels; return None without Triton."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError):
        return None


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`; faster than Triton's own."""
    return 1 << max(number - 1, 0).bit_length()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because a kernel is launched on the current device."""
    return torch.cuda.device(x.get_device()) if x.is_cuda else nullcontext()
