# SPDX-License-Identifier: Apache-2.0
"""Access to Triton: loading modules of kernels, and the tensors that the kernels support."""

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

# Triton reads the variable when a kernel is decorated, which is when its module is imported.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def load_kernels(name: str) -> ModuleType | None:
    """Import a module of kernels of this package; None if Triton is missing or does not load."""
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError:
        return None
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"gather_gemm: Triton does not load: {error}", stacklevel=2)
        return None


def can_take(x: Tensor) -> bool:
    """Whether the kernels run on this tensor: on CUDA, and under the interpreter anywhere.

    The interpreter does not support bf16: its dot product reads the bit patterns as integers.
    """
    return x.dtype != torch.bfloat16 if _IS_INTERPRETED else x.is_cuda


def guard(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because a kernel is launched on the current device."""
    return torch.cuda.device(x.get_device()) if x.is_cuda else nullcontext()
