# SPDX-License-Identifier: Apache-2.0
"""Log lines of a start: arguments without effect, what is served, and how to ask."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import psutil

from vllm.diffusion.process import prestart
from vllm.entrypoints.serve.utils.api_utils import get_non_default_args
from vllm.logger import init_logger

if TYPE_CHECKING:
    from argparse import Namespace

logger = init_logger(__name__)

_QUESTION = "What is the capital of France?"
_EVERYWHERE = frozenset({None, "0.0.0.0", "::"})
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


def warn_about_unused_arguments(args: Namespace, *, has_prefixes: bool = False) -> None:
    """Log one line with the arguments without effect that were set.

    Args:
        args: arguments of the server.
        has_prefixes: whether requests of the model's family can share prefixes.
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
    """Log five lines, the last one a command that works.

    Args:
        args: arguments of the server.
        family: family of the served model.
        longest: prompt and canvas of the longest request, in tokens.
        own_length: length in tokens that the checkpoint's config.json gives.
        has_template: whether there is a chat template.
        has_page: whether the server has its pages.
        limits: requests, and rows of a shared step, that may run at once.
        engine_ready_at: time.time() when the server went on after its engine's start.
    """
    logger.info("started in %s", durations(engine_ready_at))
    url, name = address(args), (args.served_model_name or [args.model])[0]
    is_beyond = own_length is not None and longest > own_length
    logger.info(
        "serving %s (%s): prompt and canvas up to %d tokens%s",
        *(name, family, longest),
        f" (its config.json says {own_length})" if is_beyond else "",
    )
    logger.info(
        "at once: up to %d requests (--max-num-seqs), and %d rows of those with short steps "
        "(--max-num-batched-tokens), as far as memory reaches",
        *limits,
    )
    if has_page:
        logger.info("open %s/ to ask and watch, %s/status for what the server does", url, url)
    logger.info("or: %s", curl(url, has_template=has_template, has_key=bool(args.api_key)))


def durations(engine_ready_at: float) -> str:
    """Describe how long the parts of a start took."""
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
    """Return the URL under which a client on this machine finds the server."""
    host = "127.0.0.1" if args.host in _EVERYWHERE else args.host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if args.ssl_certfile else "http"
    return f"{scheme}://{host}:{args.port}{args.root_path or ''}"


def curl(url: str, *, has_template: bool, has_key: bool) -> str:
    """Return a command that asks one question."""
    body: dict[str, Any] = {"prompt": _QUESTION, "gen_length": 32}
    if has_template:
        body["apply_chat_template"] = True
    key = "-H 'Authorization: Bearer KEY' " if has_key else ""
    return (
        f"curl -s {url}/generate {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
