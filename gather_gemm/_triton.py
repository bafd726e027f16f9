# SPDX-License-Identifier: Apache-2.0
"""Triton here: its kernels, and the tensors that they can take."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch import Tensor

# Triton reads it when a kernel is decorated, that is when its module is imported.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def load_kernels(name: str) -> ModuleType | None:
    """Import a module of kernels of this room; None if Triton is missing or does not load."""
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError:
        return None
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"gather_gemm: Triton does not load: {error}", stacklevel=2)
        return None


def can_take(x: Tensor) -> bool:
    """Whether the kernels run on this tensor: on CUDA, and under the interpreter anywhere.

    The interpreter's dot product takes the bit patterns of bf16 for integers.
    """
    return x.dtype != torch.bfloat16 if _IS_INTERPRETED else x.is_cuda


def guard(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, as a kernel is launched on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
