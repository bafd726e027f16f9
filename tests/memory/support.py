# SPDX-License-Identifier: Apache-2.0
"""The shape of a model as the planner's input."""

from __future__ import annotations

import torch

from vllm.diffusion.core import stages
from vllm.diffusion.memory import LinearBuffers, ModelShape

BF16 = torch.bfloat16


def in_place(mlp_width: int, most_gated_rows: int | None = None) -> tuple[LinearBuffers, ...]:
    """Return the buffers of plain weights on an undivided GPU."""
    return (LinearBuffers((), (stages.gate_up(BF16, 2 * mlp_width),), (), most_gated_rows),)


# LLaDA-8B, bf16, one rank.
LLADA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_width=12288,
    num_columns=126464,
    dtype=BF16,
    rotary_dim=128,
    rotary_dtype=torch.float32,
    products=in_place(12288),
)
