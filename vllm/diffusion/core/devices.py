# SPDX-License-Identifier: Apache-2.0
"""Properties of a GPU, cached per device."""

from __future__ import annotations

import functools

import torch

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError

MIN_CAPABILITY = (8, 0)


def check_card(device: torch.device) -> None:
    """Refuse a GPU whose compute capability is too low for our kernels."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        raise ServerConfigError(
            f"GPU: given {torch.cuda.get_device_name(device)} of compute capability "
            f"{major}.{minor}; wanted 8.0 or later"
        )


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or the one that `VLLM_DLLM_KERNELS` names."""
    return envs.kernels() or torch.cuda.get_device_capability(device)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel can start while the previous one ends: on Hopper and later GPUs.

    This depends on the real GPU, not on `VLLM_DLLM_KERNELS`.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
