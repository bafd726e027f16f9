# SPDX-License-Identifier: Apache-2.0
"""Memory of a step: admission, chunk plans, buffers and caches."""

from vllm.diffusion.memory.caches import CachePool, CacheRange
from vllm.diffusion.memory.footprint import Experts, ModelShape, StepShape
from vllm.diffusion.memory.graphs import GraphMemory
from vllm.diffusion.memory.planner import Demand, Plan, Planner, chunks
from vllm.diffusion.memory.pool import BufferPool

__all__ = [
    "BufferPool",
    "CachePool",
    "CacheRange",
    "Demand",
    "Experts",
    "GraphMemory",
    "ModelShape",
    "Plan",
    "Planner",
    "StepShape",
    "chunks",
]
