# SPDX-License-Identifier: Apache-2.0
"""Memory of a step: admission, chunk plans, buffers and caches."""

from vllm.diffusion.memory.caches import CachePool, KeyValueCache
from vllm.diffusion.memory.planner import Demand, Plan, Planner, chunks
from vllm.diffusion.memory.pool import BufferPool

__all__ = ["BufferPool", "CachePool", "Demand", "KeyValueCache", "Plan", "Planner", "chunks"]
