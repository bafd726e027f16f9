# SPDX-License-Identifier: Apache-2.0
"""Size of a worker's activation pool, decided when the weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.memory.plan import readable

if TYPE_CHECKING:
    from vllm.diffusion.adapters.lora_flags import SlotSizes
    from vllm.diffusion.parallel.groups import RankGroup

# Memory outside of the pool on a GPU: workspaces of libraries, kernels that are loaded later, and
# the small tensors of steps with a graph.
OUTSIDE_BYTES = 512 << 20
MIN_POOL_BYTES = 1 << 30  # bytes that slots of LoRA adapters leave to the pool
# Part of the pool that no plan uses, because PyTorch rounds its temporaries up.
ROUNDING_SHARE, MAX_ROUNDING_BYTES = 1 / 64, 128 << 20


def activation_budget(
    device: torch.device, utilization: float, ranks: RankGroup, num_replicas: int
) -> int:
    """Return the bytes of the activation pool: as configured, else the free bytes less a margin.

    Args:
        device: the device, with the weights loaded.
        utilization: share of the device's memory, upstream's `gpu_memory_utilization`.
        ranks: all ranks of the engine.
        num_replicas: engines of this server, whose ranks on a CPU share one memory.

    Returns:
        the minimum over all ranks, because all ranks follow the same plans.

    Raises:
        ServerConfigError: no memory is free.
    """
    free_bytes = free_bytes_of(device, utilization)
    if device.type != "cuda":
        free_bytes //= ranks.size * num_replicas
    budget = ranks.all_reduce_min(envs.activation_pool_size_bytes() or free_bytes)
    if budget < 1:
        raise ServerConfigError(
            f"gpu_memory_utilization: given {utilization}; no memory is left for activations "
            "after the weights; wanted a larger value, or VLLM_ACTIVATION_POOL_SIZE_BYTES"
        )
    return budget


def check_slots(
    sizes: SlotSizes, slot_bytes: int, device: torch.device, utilization: float
) -> None:
    """Refuse slots of LoRA adapters that leave no room for steps.

    Raises:
        ServerConfigError: naming the number of slots that have room.
    """
    if device.type == "cuda":
        usable_bytes = free_bytes_of(device, utilization)
    else:  # a host has room for slots even while other processes use most of its memory
        usable_bytes = int(psutil.virtual_memory().total * utilization)
    pool_bytes = envs.activation_pool_size_bytes() or MIN_POOL_BYTES
    room = max(usable_bytes - pool_bytes, 0)
    num_slots = sizes.num_slots
    if num_slots * slot_bytes > room:
        field = "max_loras" if sizes.num_requested else "draft_adapter"
        other = " with the one for drafts" if sizes.num_requested and sizes.draft else ""
        raise ServerConfigError(
            f"{field}: given {num_slots} of rank {sizes.max_rank}{other}, "
            f"{readable(num_slots * slot_bytes)}; wanted at most {room // max(slot_bytes, 1)}"
        )


def planning_budget(pool_bytes: int) -> int:
    """Return the bytes of a pool that plans may use."""
    return max(pool_bytes - min(int(pool_bytes * ROUNDING_SHARE), MAX_ROUNDING_BYTES), 1)


def free_bytes_of(device: torch.device, utilization: float) -> int:
    """Return the free bytes of a device that holds the weights, less a margin."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available * utilization)
    # cuBLAS allocates its workspace with its first product, and keeps it.
    some = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.mm(some, some)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # memory that loading the weights has left reserved
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return min(free, int(total * utilization) - used) - OUTSIDE_BYTES
