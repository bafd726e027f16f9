# SPDX-License-Identifier: Apache-2.0
"""The compiled module, and what all of its kernels want of a card and of a matrix."""

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

native: ModuleType | None
try:
    native = import_module("._gather_gemm", __package__)
except ModuleNotFoundError:
    native = None
except ImportError as error:
    warnings.warn(f"gather_gemm: the compiled module does not load: {error}", stacklevel=2)
    native = None


@cache
def hopper_multiprocessors(device: int) -> int:
    """Multiprocessors of a card of compute capability 9.0; 0 of any other."""
    properties = torch.cuda.get_device_properties(device)
    is_hopper = (properties.major, properties.minor) == (9, 0)
    return int(properties.multi_processor_count) if is_hopper else 0


def is_describable(matrix: Tensor) -> bool:
    """Whether tiles of it can be copied 16 bytes at a time, as the copy engine does."""
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) % 8 == 0
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.data_ptr() % 16 == 0
    )
