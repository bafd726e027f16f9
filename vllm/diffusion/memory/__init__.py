# SPDX-License-Identifier: Apache-2.0
"""Memory of a step: admission, chunk plans, buffers and caches.

Plans, in reading order: `shapes` (of a model, a step, a request), `plan` (the result), `footprint`
(bytes), `cost` with `rates` (seconds), `search`, `planner`, `admission` (what fits). Memory:
`activation_pool` (buffers of steps; `virtual_memory` if CUDA supports it), `page_store` (cached
keys and values) with `page_allocator` (assignment to requests), `graph_memory`; `host` and
`residual_rows` (in host memory).
"""

from vllm.diffusion.memory.activation_pool import OUT_OF_MEMORY, ActivationPool, PoolExhaustedError
from vllm.diffusion.memory.admission import Admission
from vllm.diffusion.memory.cost import Rates
from vllm.diffusion.memory.graph_memory import GraphMemory
from vllm.diffusion.memory.host import HostBuffers
from vllm.diffusion.memory.page_allocator import KeptSequence, PageAllocator
from vllm.diffusion.memory.page_store import PageStore
from vllm.diffusion.memory.plan import Plan, chunks
from vllm.diffusion.memory.planner import Planner
from vllm.diffusion.memory.rates import rates_of
from vllm.diffusion.memory.residual_rows import HostRows, ResidualRows
from vllm.diffusion.memory.shapes import (
    Demand,
    Experts,
    LinearBuffers,
    ModelShape,
    RuleMemory,
    StepShape,
)
from vllm.diffusion.memory.virtual_memory import activation_pool
from vllm.diffusion.memory.weight_memory import ArenaWeights, WeightMemory
from vllm.diffusion.memory.windowed_store import page_store_of

__all__ = [
    "OUT_OF_MEMORY",
    "ActivationPool",
    "Admission",
    "ArenaWeights",
    "Demand",
    "Experts",
    "GraphMemory",
    "HostBuffers",
    "HostRows",
    "KeptSequence",
    "LinearBuffers",
    "ModelShape",
    "PageAllocator",
    "PageStore",
    "Plan",
    "Planner",
    "PoolExhaustedError",
    "Rates",
    "ResidualRows",
    "RuleMemory",
    "StepShape",
    "WeightMemory",
    "activation_pool",
    "chunks",
    "page_store_of",
    "rates_of",
]
