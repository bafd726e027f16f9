# SPDX-License-Identifier: Apache-2.0
"""The fused element-wise ops of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    return fused_ops.rms_norm(x, weight, eps, out)


def apply_rotary(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    fused_ops.rotary(q, k, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    return fused_ops.silu_mul(gate_up)
