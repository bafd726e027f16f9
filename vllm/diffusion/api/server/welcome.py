# SPDX-License-Identifier: Apache-2.0
"""Log lines at start: arguments without effect, the served model, and a command to try."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import psutil

from vllm.diffusion.process import prestart
from vllm.entrypoints.common.startup import get_non_default_args
from vllm.logger import init_logger

if TYPE_CHECKING:
    from argparse import Namespace

logger = init_logger(__name__)

_QUESTION = "What is the capital of France?"
_EVERYWHERE = frozenset({None, "0.0.0.0", "::"})
WITHOUT_EFFECT = frozenset(
    {
        # Mosaic chooses attention backends by shape.
        *("attention_backend", "attention_config", "disable_cascade_attn"),
        # Mosaic has its own pages.
        *("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "kv_offloading_size"),
        # The planner divides steps.
        *("enable_chunked_prefill", "long_prefill_token_threshold", "async_scheduling"),
        *("max_num_scheduled_tokens", "scheduling_policy"),
        # Nothing is compiled, and Mosaic has its own CUDA graphs.
        *("compilation_config", "optimization_level", "cudagraph_capture_sizes"),
        *("max_cudagraph_capture_size", "cudagraph_metrics"),
    }
)
# Families without block-causal attention cannot share prefixes, because keys depend on later
# tokens.
OF_PREFIXES = frozenset(
    {"enable_prefix_caching", "prefix_caching_hash_algo", "num_gpu_blocks_override"}
)


def warn_about_unused_arguments(args: Namespace, *, has_prefixes: bool = False) -> None:
    """Log one line with the arguments without effect that were set.

    `has_prefixes` is whether requests of the model's family can share prefixes.
    """
    without = WITHOUT_EFFECT if has_prefixes else WITHOUT_EFFECT | OF_PREFIXES
    given = sorted(without & get_non_default_args(args).keys())
    if given:
        logger.warning(
            "without effect on a diffusion language model: %s",
            ", ".join(f"--{name.replace('_', '-')}" for name in given),
        )


def log_welcome(
    args: Namespace,
    family: str,
    longest: int,
    *,
    limits: tuple[int, int],
    own_length: int | None,
    has_template: bool,
    has_page: bool,
    engine_ready_at: float,
) -> None:
    """Log five lines; the last one is a command that sends a request.

    Args:
        longest: prompt and canvas of the longest request, in tokens.
        limits: maximum number of concurrent requests, and of rows of a shared step.
        own_length: length in tokens from the checkpoint's config.json.
        engine_ready_at: time.time() when the engine had started.
    """
    logger.info("started in %s", durations(engine_ready_at))
    url, name = address(args), (args.served_model_name or [args.model])[0]
    is_beyond = own_length is not None and longest > own_length
    logger.info(
        "serving %s (%s): prompt and canvas up to %d tokens%s",
        *(name, family, longest),
        f" (config.json has {own_length})" if is_beyond else "",
    )
    logger.info(
        "limits: %d requests at a time (--max-num-seqs), and %d rows in a step that requests share "
        "(--max-num-batched-tokens), if memory allows",
        *limits,
    )
    if has_page:
        logger.info(
            "open %s/ to send requests and watch the canvas, %s/status for the state of the server",
            url,
            url,
        )
    logger.info("or run: %s", curl(url, has_template=has_template, has_key=bool(args.api_key)))


def durations(engine_ready_at: float) -> str:
    """Describe how long the parts of the start took."""
    begun, now = psutil.Process().create_time(), time.time()
    engine_at = prestart.engine_started_at()
    parts = [(engine_ready_at - begun, "until the engine was ready")]
    if engine_at is not None:
        parts = [(engine_at - begun, "of imports"), (engine_ready_at - engine_at, "of the engine")]
    parts_text = [f"{seconds:.1f} s {what}" for seconds, what in parts]
    return (
        f"{now - begun:.1f} s: {', '.join(parts_text)}, {now - engine_ready_at:.1f} s of the routes"
    )


def address(args: Namespace) -> str:
    """Return the URL of the server for a client on this machine."""
    host = "127.0.0.1" if args.host in _EVERYWHERE else args.host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if args.ssl_certfile else "http"
    return f"{scheme}://{host}:{args.port}{args.root_path or ''}"


def curl(url: str, *, has_template: bool, has_key: bool) -> str:
    """Return a command that sends one request."""
    body: dict[str, Any] = {"prompt": _QUESTION, "gen_length": 32}
    if has_template:
        body["apply_chat_template"] = True
    key = "-H 'Authorization: Bearer KEY' " if has_key else ""
    return (
        f"curl -s {url}/generate {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
