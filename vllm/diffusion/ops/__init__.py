# SPDX-License-Identifier: Apache-2.0
"""Operations of the engine: the only way to the native rooms, and to upstream's weights."""

from flash_sample import Filters, Rows, Sampled, Score
from vllm.diffusion.ops.collectives import Collectives, align_ranks, join_ranks, tensor_parallel
from vllm.diffusion.ops.exact_scores import most_likely, negative_entropy, token_logprobs
from vllm.diffusion.ops.experts import (
    SOFTMAX,
    ExpertWeights,
    Matrices,
    PackedExperts,
    Routing,
    Scoring,
    add_experts,
    route_rows,
)
from vllm.diffusion.ops.fp8 import Fp8Projection, quantise_weight
from vllm.diffusion.ops.kinds import (
    SchemeConfig,
    adopt_scheme,
    kind_of,
    kind_of_head,
    kinds_of,
    projection_of,
)
from vllm.diffusion.ops.loading import StreamedParameter
from vllm.diffusion.ops.packed import PackedProjection, empty_packed, quantise_packed, reserve
from vllm.diffusion.ops.packed_checkpoints import OrderedProjection
from vllm.diffusion.ops.projection import (
    Matrix,
    PlainProjection,
    Projection,
    Use,
    Workspace,
    embed_rows,
)
from vllm.diffusion.ops.quantised_projection import QuantisedProjection
from vllm.diffusion.ops.sampling import (
    candidates,
    gather_columns,
    kept_columns,
    most_likely_in_head,
    philox_uniform,
    samples_in_head,
)
from vllm.diffusion.ops.transfer import Array, GraphInputs, HostCopy, to_device
from vllm_add_llada.cuda_kernels.fused_ops import (
    ATTENTION_PAGE,
    Attended,
    Kept,
    Packed,
    QuantisedRows,
    apply_rotary,
    attention,
    has_attention,
    norm_rotary,
    rms_norm,
    rms_norm_quantised,
    rotary_tables,
    silu_mul,
    store_keys_values,
)

__all__ = [
    "ATTENTION_PAGE",
    "SOFTMAX",
    "Array",
    "Attended",
    "Collectives",
    "ExpertWeights",
    "Filters",
    "Fp8Projection",
    "GraphInputs",
    "HostCopy",
    "Kept",
    "Matrices",
    "Matrix",
    "OrderedProjection",
    "Packed",
    "PackedExperts",
    "PackedProjection",
    "PlainProjection",
    "Projection",
    "QuantisedProjection",
    "QuantisedRows",
    "Routing",
    "Rows",
    "Sampled",
    "SchemeConfig",
    "Score",
    "Scoring",
    "StreamedParameter",
    "Use",
    "Workspace",
    "add_experts",
    "adopt_scheme",
    "align_ranks",
    "apply_rotary",
    "attention",
    "candidates",
    "embed_rows",
    "empty_packed",
    "gather_columns",
    "has_attention",
    "join_ranks",
    "kept_columns",
    "kind_of",
    "kind_of_head",
    "kinds_of",
    "most_likely",
    "most_likely_in_head",
    "negative_entropy",
    "norm_rotary",
    "philox_uniform",
    "projection_of",
    "quantise_packed",
    "quantise_weight",
    "reserve",
    "rms_norm",
    "rms_norm_quantised",
    "rotary_tables",
    "route_rows",
    "samples_in_head",
    "silu_mul",
    "store_keys_values",
    "tensor_parallel",
    "to_device",
    "token_logprobs",
]
