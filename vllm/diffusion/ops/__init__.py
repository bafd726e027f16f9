# SPDX-License-Identifier: Apache-2.0
"""The only door to the native rooms, and the products with upstream's matrices."""

from flash_sample import Rows, Sampled, Score
from vllm.diffusion.ops.experts import Routing, add_experts, route_rows
from vllm.diffusion.ops.fused import (
    apply_rotary,
    norm_rotary,
    rms_norm,
    rotary_tables,
    silu_mul,
    store_keys_values,
)
from vllm.diffusion.ops.linear import (
    add_linear,
    adds_in_place,
    gated_linear,
    is_plain,
    linear,
    plain_weight,
)
from vllm.diffusion.ops.sampling import (
    candidates,
    gather_columns,
    most_likely,
    negative_entropy,
    philox_uniform,
    token_logprobs,
)
from vllm.diffusion.ops.transfer import Array, HostCopy, Staging, to_device

__all__ = [
    "Array",
    "HostCopy",
    "Routing",
    "Rows",
    "Sampled",
    "Score",
    "Staging",
    "add_experts",
    "add_linear",
    "adds_in_place",
    "apply_rotary",
    "candidates",
    "gated_linear",
    "gather_columns",
    "is_plain",
    "linear",
    "most_likely",
    "negative_entropy",
    "norm_rotary",
    "philox_uniform",
    "plain_weight",
    "rms_norm",
    "rotary_tables",
    "route_rows",
    "silu_mul",
    "store_keys_values",
    "to_device",
    "token_logprobs",
]
