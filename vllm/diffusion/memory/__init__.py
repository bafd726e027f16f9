# SPDX-License-Identifier: Apache-2.0
"""Memory of a step: admission, chunk plans and buffers."""

from vllm.diffusion.memory.planner import Plan, Planner, chunks
from vllm.diffusion.memory.pool import BufferPool

__all__ = ["BufferPool", "Plan", "Planner", "chunks"]
