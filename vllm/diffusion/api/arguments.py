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
        # pages are ours
        *("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "kv_offloading_size"),
        # steps are cut by the planner
        *("enable_chunked_prefill", "long_prefill_token_threshold", "async_scheduling"),
        *("max_num_scheduled_tokens", "scheduling_policy"),
        # nothing is compiled; CUDA graphs are ours
        *("compilation_config", "optimization_level", "cudagraph_capture_sizes"),
        *("max_cudagraph_capture_size", "cudagraph_metrics"),
    }
)
# Where prefixes cannot be shared, as keys depend on what comes after them.
OF_PREFIXES = frozenset(
    {"enable_prefix_caching", "prefix_caching_hash_algo", "num_gpu_blocks_override"}
)


def warn_of_arguments_without_effect(args: Namespace, *, has_prefixes: bool = False) -> None:
    """One line that names those that were given another value than their default.

    Args:
        args: of the server.
        has_prefixes: the model is of a family whose requests can share prefixes.
    """
    without = WITHOUT_EFFECT if has_prefixes else WITHOUT_EFFECT | OF_PREFIXES
    given = sorted(without & get_non_default_args(args).keys())
    if given:
        logger.warning(
            "without effect on a diffusion language model: %s",
            ", ".join(f"--{name.replace('_', '-')}" for name in given),
        )
