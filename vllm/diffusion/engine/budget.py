# SPDX-License-Identifier: Apache-2.0
"""How much memory a worker's activation pool may take."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from vllm.diffusion import envs
from vllm.diffusion.errors import ServerConfigError

if TYPE_CHECKING:
    from vllm.diffusion.ranks import Peers

# What runs outside of the pool on a GPU: libraries' workspaces, kernels loaded later, the small
# tensors of steps that a graph runs.
OUTSIDE_BYTES = 512 << 20
# Part of the pool that no plan uses: what PyTorch rounds its temporaries up to.
ROUNDING_SHARE, MAX_ROUNDING_BYTES = 1 / 64, 128 << 20
# Where a container's memory is bounded, for both versions of control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def activation_budget(device: torch.device, utilization: float, ranks: Peers) -> int:
    """Bytes of the activation pool of this rank: as set, else what is free now less a margin.

    Args:
        device: with the weights loaded.
        utilization: of the device's memory, upstream's `gpu_memory_utilization`.
        ranks: all of the engine.

    Returns:
        the least that any rank has, as all of them follow the same plans.

    Raises:
        ServerConfigError: nothing is free.
    """
    free_bytes = _free_bytes(device, utilization)
    budget = ranks.least(envs.activation_pool_size_bytes() or free_bytes)
    if budget < 1:
        raise ServerConfigError(
            f"gpu_memory_utilization: given {utilization}; no memory is left for activations "
            "beside the weights: wanted more, or VLLM_ACTIVATION_POOL_SIZE_BYTES"
        )
    return budget


def planning_budget(pool_bytes: int) -> int:
    """The part of a pool that plans may use."""
    return max(pool_bytes - min(int(pool_bytes * ROUNDING_SHARE), MAX_ROUNDING_BYTES), 1)


def host_cache_budget(num_ranks: int) -> int:
    """Host memory of each rank for kept keys and values; all processes reach the same number."""
    if not envs.use_host_residual():
        return 0
    return envs.host_cache_size_bytes() or _host_memory() // 2 // num_ranks


@functools.cache
def _host_memory() -> int:
    """Bytes of memory of this machine, or of the part of it that the process may use."""
    total = int(psutil.virtual_memory().total)
    for path in map(Path, LIMITS):
        limit = path.read_text().strip() if path.exists() else ""
        total = min(total, int(limit)) if limit.isdigit() else total
    return total


def _free_bytes(device: torch.device, utilization: float) -> int:
    if device.type != "cuda":
        return int(psutil.virtual_memory().available * utilization)
    # cuBLAS allocates its workspace with its first product, and keeps it.
    some = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.mm(some, some)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what loading the weights has left behind
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free
    return min(free, int(total * utilization) - taken) - OUTSIDE_BYTES
