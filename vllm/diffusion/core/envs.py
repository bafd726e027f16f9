# SPDX-License-Identifier: Apache-2.0
"""Environment variables of Mosaic; this module is the only reader of `os.environ`.

`register()` adds them to upstream's own table, `vllm.envs.environment_variables`, so that upstream
accepts their names and copies them to worker processes.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import ServerConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping


_CAPABILITIES = {"8.0": (8, 0), "8.6": (8, 6), "8.9": (8, 9), "9.0": (9, 0)}


def _flag(name: str, default: str = "0") -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise ServerConfigError(f"{name}: given {value!r}; wanted 0 or 1")
    return value == "1"


def _positive_int(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None or value == "":
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ServerConfigError(f"{name}: given {value!r}; wanted a whole number of at least 1")
    return int(value)


_UNITS = {"": 1, "B": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("", 1024), ("IB", 1024), ("B", 1000))
}


def _size(name: str) -> int | None:
    """Return bytes, such as 2097152, 2MiB, 2M (the same) or 2MB (2,000,000); None if not set."""
    value = os.environ.get(name)
    if value is None or value == "":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", value.strip(), re.ASCII)
    unit = None if match is None else _UNITS.get(match[2].upper())
    num_bytes = 0 if match is None or unit is None else int(Fraction(match[1]) * unit)
    if num_bytes < 1:
        raise ServerConfigError(
            f"{name}: given {value!r}; wanted a number of bytes, such as 12884901888, 12GiB, 12G "
            "or 12GB"
        )
    return num_bytes


def log_diffusion_steps() -> bool:
    """VLLM_LOG_DIFFUSION_STEPS=1: log the time of every denoising step at INFO."""
    return _flag("VLLM_LOG_DIFFUSION_STEPS")


def default_steps() -> int | None:
    """DLLM_DIFFUSION_STEPS: denoising steps of requests that set none (default: one per token)."""
    return _positive_int("DLLM_DIFFUSION_STEPS")


def activation_pool_size_bytes() -> int | None:
    """VLLM_ACTIVATION_POOL_SIZE_BYTES: bytes for steps and for what requests keep between steps."""
    return _size("VLLM_ACTIVATION_POOL_SIZE_BYTES")


def use_chunkwise_graph() -> bool:
    """VLLM_USE_CHUNKWISE_GRAPH=0: never run the layers as CUDA graphs, even for few rows."""
    return _flag("VLLM_USE_CHUNKWISE_GRAPH", default="1")


def use_vmm() -> bool:
    """VLLM_USE_VMM=0: allocate activations with PyTorch instead of in virtual memory."""
    return _flag("VLLM_USE_VMM", "1")


def use_host_residual() -> bool:
    """VLLM_USE_HOST_RESIDUAL=0: make no plans that use host memory."""
    return _flag("VLLM_USE_HOST_RESIDUAL", "1")


def host_cache_size_bytes() -> int | None:
    """VLLM_HOST_CACHE_SIZE_BYTES: host memory of each rank for keys and values that requests keep.

    The default is the rank's share of half of the machine's memory.
    """
    return _size("VLLM_HOST_CACHE_SIZE_BYTES")


def fuses_commits() -> bool:
    """VLLM_DLLM_COMMIT_FUSION=0: store keys and values of a finished block in its own forward pass.

    By default, block-causal families store them in the first forward pass of the next block.
    """
    return _flag("VLLM_DLLM_COMMIT_FUSION", "1")


def kernels() -> tuple[int, int] | None:
    """VLLM_DLLM_KERNELS: compute capability for which kernels are chosen (default: the GPU's).

    `fused_ops` reads the variable, too, and refuses a value above the GPU's.
    """
    value = os.environ.get("VLLM_DLLM_KERNELS")
    if not value:
        return None
    if value not in _CAPABILITIES:
        wanted = ", ".join(_CAPABILITIES)
        raise ServerConfigError(f"VLLM_DLLM_KERNELS: given {value!r}; wanted one of {wanted}")
    return _CAPABILITIES[value]


def vmm_chunk_size() -> int | None:
    """VLLM_VMM_CHUNK_SIZE: bytes of physical memory per mapping (default 2 MiB).

    `vmm_allocator` reads the variable, too, as plain bytes, if it is used without Mosaic.
    """
    return _size("VLLM_VMM_CHUNK_SIZE")


def max_request_bytes() -> int:
    """DLLM_MAX_REQUEST_BYTES: the largest body of an HTTP request (default 32 MiB)."""
    return _size("DLLM_MAX_REQUEST_BYTES") or 32 << 20


def max_answers() -> int:
    """DLLM_MAX_ANSWERS: maximum number of answers of one HTTP request (default 1024)."""
    return _positive_int("DLLM_MAX_ANSWERS") or 1024


def receive_timeout_s() -> int:
    """DLLM_RECEIVE_TIMEOUT_S: seconds within which an HTTP request must arrive (default 60)."""
    return _positive_int("DLLM_RECEIVE_TIMEOUT_S") or 60


def max_silence_s() -> int:
    """DLLM_MAX_SILENCE_S: seconds without an engine's answer until not ready (default 30)."""
    return _positive_int("DLLM_MAX_SILENCE_S") or 30


def serves_as_autoregressive() -> bool:
    """VLLM_DLLM_SERVE_AS_AR=1: serve a Qwen checkpoint with a mask token as a plain Qwen."""
    return _flag("VLLM_DLLM_SERVE_AS_AR")


def leaves_gemma() -> bool:
    """VLLM_DLLM_UPSTREAM_GEMMA=1: serve DiffusionGemma with vLLM's own model and loop."""
    return _flag("VLLM_DLLM_UPSTREAM_GEMMA")


def set_default(name: str, value: str) -> None:
    """Set an environment variable for this process and its children unless the user set it."""
    os.environ.setdefault(name, value)


VARIABLES: dict[str, Callable[[], Any]] = {
    "VLLM_LOG_DIFFUSION_STEPS": log_diffusion_steps,
    "DLLM_DIFFUSION_STEPS": default_steps,
    "VLLM_ACTIVATION_POOL_SIZE_BYTES": activation_pool_size_bytes,
    "VLLM_USE_CHUNKWISE_GRAPH": use_chunkwise_graph,
    "VLLM_USE_VMM": use_vmm,
    "VLLM_USE_HOST_RESIDUAL": use_host_residual,
    "VLLM_HOST_CACHE_SIZE_BYTES": host_cache_size_bytes,
    "VLLM_DLLM_COMMIT_FUSION": fuses_commits,
    "VLLM_DLLM_KERNELS": kernels,
    "VLLM_DLLM_SERVE_AS_AR": serves_as_autoregressive,
    "VLLM_DLLM_UPSTREAM_GEMMA": leaves_gemma,
    "VLLM_VMM_CHUNK_SIZE": vmm_chunk_size,
    "DLLM_MAX_REQUEST_BYTES": max_request_bytes,
    "DLLM_MAX_ANSWERS": max_answers,
    "DLLM_RECEIVE_TIMEOUT_S": receive_timeout_s,
    "DLLM_MAX_SILENCE_S": max_silence_s,
}


def check() -> None:
    """Read every variable; refuse the first one with an unusable value."""
    for read in VARIABLES.values():
        read()


def register(table: MutableMapping[str, Callable[[], Any]]) -> None:
    """Add our variables to upstream's table. Calling it again changes nothing."""
    for name, read in VARIABLES.items():
        table.setdefault(name, read)
