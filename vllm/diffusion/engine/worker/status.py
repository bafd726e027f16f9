# SPDX-License-Identifier: Apache-2.0
"""Reports which kernels a worker uses, and the state of its requests.

No fallback is silent: the log lists the features of the machine. The status page of the server
requests plain values between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.core import envs
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.native_packages import native_packages
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
    from vllm.diffusion.memory import ActivationPool, PageStore

logger = init_logger(__name__)

# For each tier: the kernels that multiply up to 256 rows, and what would be faster.
_PRODUCTS = {
    dispatch.KernelTier.HOPPER: "kernels",
    dispatch.KernelTier.PORTABLE: "kernels, products by those for every card; "
    "compute capability 9.0 has faster ones of its own",
    dispatch.KernelTier.NONE: "PyTorch's products; kernels, once built, are for a GPU of compute "
    "capability 8.0 or later",
}


def status_of(runner: DiffusionModelRunner) -> dict[str, Any]:
    """Return the bytes in use by each part of a rank's pool, and the progress of its requests.

    `pages` counts the pages of cached keys and values, and `used_pages` the pages that requests
    hold. `graphs` is never released. `paused` is held by a step between two slices. Steps use all
    other bytes. `products` states which kernels multiply few rows. `batch_invariant` states whether
    answers have the same bits alone and next to other requests; then there is a `fingerprint`.
    """
    caches = runner.caches
    return {
        "pool_bytes": {
            "budget": runner.planner.budget_bytes,
            "graphs": runner.planner.budget_bytes - runner.budget_bytes,
            "pages": caches.reserved_bytes,
            "used_pages": caches.num_bytes,
            "paused": runner.pool.frame_bytes,
        },
        "host_bytes": caches.host_bytes,
        "products": _PRODUCTS[dispatch.card_of(runner.device).tier],
        "batch_invariant": False,
        **runner.promise,
        **{name: value for guest in runner.guests for name, value in guest.status().items()},
        "requests": [_of_request(canvas, caches) for canvas in runner.canvases.values()],
    }


def _of_request(canvas: Canvas, caches: PageStore) -> dict[str, Any]:
    params, window = canvas.params, canvas.window
    num_pages = 0 if window.cache is None else len(window.cache.pages)
    return {
        "id": canvas.req_id,
        "algorithm": params.algorithm,
        "cache": params.cache,
        "prompt_tokens": canvas.prompt_length,
        "canvas_tokens": params.gen_length,
        "committed": canvas.count_committed(),
        "forwards": canvas.num_forwards,
        "states_drafted": canvas.num_drafts,
        "states_accepted": canvas.num_accepted_drafts,
        "steps": params.steps,
        "kept_bytes": caches.bytes_of(num_pages, window.num_kept) if num_pages else 0,
    }


def build_info(
    device: torch.device, attention_backends: Sequence[str], pool: ActivationPool, has_graphs: bool
) -> dict[str, str]:
    """Return the values of the labels of `dllm:build_info`, by label."""
    on_gpu = device.type == "cuda"
    builds = {
        package.name: "kernels" if on_gpu and package.is_built else "reference"
        for package in native_packages()
        if package.name != "vmm_allocator"
    }
    builds["fused_ops"] = dispatch.card_of(device).tier.value
    return {
        **builds,
        "activation_pool": pool.backing_name,
        "attention": "+".join(attention_backends),
        "graphs": "on" if has_graphs else "off",
    }


def log_build_info(
    info: dict[str, str], device: torch.device, budget_bytes: int, why_no_graphs: str | None
) -> None:
    """Log one line for each part; warn of packages that are not built for this GPU."""
    on_gpu = device.type == "cuda"
    for package in native_packages():
        if on_gpu and not package.is_built:
            logger.warning(
                "%s: not built, so slower PyTorch code replaces it; build it with: %s",
                package.name,
                package.remedy,
            )
        elif on_gpu:
            is_shown = package.name == "fused_ops" and "fused_ops" in info
            which = _PRODUCTS[dispatch.KernelTier(info["fused_ops"])] if is_shown else "kernels"
            logger.info("%s: %s", package.name, which)
        else:
            logger.info("%s: PyTorch reference (no GPU)", package.name)
    is_mapped = info["activation_pool"] == "vmm"
    kind = "virtual memory" if is_mapped else f"PyTorch's allocator ({_why_no_vmm(on_gpu)})"
    logger.info("activation pool: %.2f GiB, %s", budget_bytes / 2**30, kind)
    logger.info("attention: %s", info["attention"].replace("+", ", "))
    logger.info("CUDA graphs: %s", why_no_graphs or "captured before the first request")


def _why_no_vmm(on_gpu: bool) -> str:
    if not on_gpu:
        return "no GPU"
    return "no vmm_allocator" if envs.use_vmm() else "VLLM_USE_VMM=0"
