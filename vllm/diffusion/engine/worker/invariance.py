# SPDX-License-Identifier: Apache-2.0
"""What a batch-invariant engine promises, and the fingerprint of everything the promise rests on.

Answers of engines with equal fingerprints have equal bits (docs/batch_invariance.md).
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion import __version__
from vllm.diffusion.config import settings_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.diffusion.models.base import DiffusionModel

logger = init_logger(__name__)

_DIGITS = 16
_PACKAGES = ("vllm", "torch", "triton")


def promise_of(model: DiffusionModel, vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the fields that status and reports have; none without the promise.

    The promise is logged.
    """
    if not settings_of(vllm_config).batch_invariant:
        return {}
    fingerprint = fingerprint_of(model, vllm_config)
    dtype = str(model.dtype).removeprefix("torch.")
    logger.info("batch invariant: yes; %s; fingerprint %s", dtype, fingerprint)
    return {"batch_invariant": True, "fingerprint": fingerprint}


def fingerprint_of(model: DiffusionModel, vllm_config: VllmConfig) -> str:
    """Return 16 hexadecimal digits over build, GPU, dtype and the weights' shapes."""
    device, parallel = model.rotary_frequencies.device, vllm_config.parallel_config
    facts = {
        "mosaic": __version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "device": _describe(device),
        "dtype": str(model.dtype),
        "quantization": vllm_config.model_config.quantization,
        "ranks": parallel.tensor_parallel_size,
        "weights": sorted(
            {f"{weight.dtype} {list(weight.shape)}" for weight in model.parameters()}
        ),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:_DIGITS]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe(device: torch.device) -> tuple[str, int]:
    if device.type != "cuda":
        return device.type, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count
