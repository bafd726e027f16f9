# SPDX-License-Identifier: Apache-2.0
"""Arguments of upstream's server that cannot act on a diffusion language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.entrypoints.serve.utils.api_utils import get_non_default_args
from vllm.logger import init_logger

if TYPE_CHECKING:
    from argparse import Namespace

logger = init_logger(__name__)

WITHOUT_EFFECT = frozenset(
    {
        # attention backends are chosen by shape
        *("attention_backend", "attention_config", "disable_cascade_attn"),
        # there is no paged KV cache
        *("block_size", "enable_prefix_caching", "prefix_caching_hash_algo", "kv_cache_dtype"),
        *("kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_offloading_size"),
        # steps are cut by the planner
        *("enable_chunked_prefill", "long_prefill_token_threshold", "async_scheduling"),
        *("max_num_scheduled_tokens", "scheduling_policy"),
        # nothing is compiled; CUDA graphs are ours
        *("compilation_config", "optimization_level", "cudagraph_capture_sizes"),
        *("max_cudagraph_capture_size", "cudagraph_metrics"),
    }
)


def warn_of_arguments_without_effect(args: Namespace) -> None:
    """One line that names those that were given another value than their default."""
    given = sorted(WITHOUT_EFFECT & get_non_default_args(args).keys())
    if given:
        logger.warning(
            "without effect on a diffusion language model: %s",
            ", ".join(f"--{name.replace('_', '-')}" for name in given),
        )
