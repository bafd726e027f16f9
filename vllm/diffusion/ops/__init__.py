# SPDX-License-Identifier: Apache-2.0
"""The only door to the native rooms, and the products with upstream's matrices."""

from vllm.diffusion.ops.experts import mix_experts
from vllm.diffusion.ops.fused import apply_rotary, rms_norm, silu_mul
from vllm.diffusion.ops.linear import is_plain, linear, plain_weight
from vllm.diffusion.ops.sampling import (
    gather_columns,
    most_likely,
    negative_entropy,
    philox_uniform,
)

__all__ = [
    "apply_rotary",
    "gather_columns",
    "is_plain",
    "linear",
    "mix_experts",
    "most_likely",
    "negative_entropy",
    "philox_uniform",
    "plain_weight",
    "rms_norm",
    "silu_mul",
]
