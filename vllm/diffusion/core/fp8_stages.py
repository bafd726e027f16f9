# SPDX-License-Identifier: Apache-2.0
"""Buffers of stages in steps with fp8 attention; see `stages`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.stages import Buffer

if TYPE_CHECKING:
    from vllm.diffusion.core.stages import Listed

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # largest number of the format


def surveyed(dtype: torch.dtype, hidden_size: int) -> Buffer:
    """Rows of the residual stream from which scales are computed."""
    return Buffer("surveyed rows", (hidden_size,), dtype)


def keys_values(num_heads: int, head_dim: int) -> Listed:
    """Keys and values of a chunk's own rows as fp8, before ranks exchange them."""
    return tuple(Buffer(name, (num_heads, head_dim), FP8) for name in ("fp8 k", "fp8 v"))


def attending(num_heads: int, head_dim: int) -> Listed:
    """Queries as fp8, and the results of attention."""
    names = "fp8 queries", "fp8 attention"
    return tuple(Buffer(name, (num_heads, head_dim), FP8) for name in names)


def results(width: int) -> Buffer:
    """Results of attention in fp8, the input rows of the next product."""
    return Buffer("fp8 results", (width,), FP8)
