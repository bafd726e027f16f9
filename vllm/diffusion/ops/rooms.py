# SPDX-License-Identifier: Apache-2.0
"""Native packages: which are built, and the command that builds the others."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import flash_sample
import gather_gemm
import vmm_allocator
from vllm_add_llada.cuda_kernels import fused_ops

_IS_CLONE = (Path(__file__).resolve().parents[3] / "setup.py").is_file()
BUILD = (
    "python setup.py build_ext --inplace"  # at the root of the repository
    if _IS_CLONE
    else "pip install --force-reinstall --no-deps PLACE_OF_THE_REPOSITORY, with nvcc on PATH"
)


class Room(NamedTuple):
    """A native package.

    Attributes:
        name: name of the package.
        is_built: whether a GPU can run its kernels.
        remedy: the command that builds it.
    """

    name: str
    is_built: bool
    remedy: str = BUILD


def rooms() -> tuple[Room, ...]:
    """Return all native packages and their current state."""
    return (
        Room("flash_sample", flash_sample.is_built()),
        Room("fused_ops", fused_ops.is_built()),
        Room("gather_gemm", gather_gemm.is_built()),
        Room("vmm_allocator", vmm_allocator.is_built()),
    )
