# SPDX-License-Identifier: Apache-2.0
"""Platforms for machines that upstream's platforms do not support.

The released upstream wheel is compiled for CUDA. On a machine without a GPU it has no platform,
and its CUDA platform requires its compiled kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.request.families import ARCHITECTURES
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# Rows of a shared step of a server, upstream's value for a large GPU.
CPU_ROW_BUDGET = 8192


class _EagerPlatform(Platform):
    """Platform without upstream's kernels and without a compiler."""

    simple_compile_backend = "eager"
    has_compiled_kernels = False

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing, because there are no kernels."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        # Our models have set their worker by now.
        if model is not None and vllm_config.parallel_config.worker_cls == "auto":
            raise ServerConfigError(
                f"model {model.model}: given {', '.join(model.architectures)}; wanted one of "
                f"{', '.join(sorted(ARCHITECTURES))}: vLLM's own models need its compiled "
                "kernels, for a GPU or for a CPU, and this installation has none"
            )
        vllm_config.parallel_config.disable_custom_all_reduce = True
        vllm_config.compilation_config.cudagraph_capture_sizes = []
        # Threads and devices do not survive a fork.
        envs.set_default("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

    def is_sleep_mode_available(self) -> bool:
        """Return True, because our worker can release memory without support from upstream."""
        return True

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode(mode=True)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return (
            "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        )


class DiffusionCpuPlatform(_EagerPlatform):
    """Platform of a machine without an accelerator."""

    # The value is not OOT: upstream's shutdown would then call accelerator functions that CPUs
    # lack.
    _enum = PlatformEnum.CPU
    device_name = "cpu"
    device_type = "cpu"
    # Ray counts ranks as GPUs: `ray start --num-gpus 2`.
    ray_device_key = "GPU"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "DLLM_CPU_VISIBLE_DEVICES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        # Upstream casts float32 checkpoints to the first dtype; float32 keeps answers
        # reproducible.
        return [torch.float32, torch.bfloat16]

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        # Upstream's default for a server, 2,048, would not let two canvases of 1,024 tokens share
        # a step.
        if parser is not None:
            parser.set_defaults(max_num_batched_tokens=CPU_ROW_BUDGET)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        # Several workers on a machine with one NUMA node cannot each be bound to a node of their
        # own.
        envs.set_default("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing, because there is only one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False


class DiffusionCudaPlatform(_EagerPlatform):
    """Platform of a CUDA machine without upstream's compiled kernels."""

    # The value is not CUDA: upstream would then query its compiled kernels, which are missing
    # here.
    _enum = PlatformEnum.OOT
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        major, minor = torch.cuda.get_device_capability(device_id)
        return DeviceCapability(major=major, minor=minor)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.cuda.get_device_name(device_id)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(torch.cuda.get_device_properties(device_id).total_memory)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        capability = cls.get_device_capability()
        if dtype == torch.bfloat16 and capability is not None and capability.major < 8:
            raise ServerConfigError(
                f"dtype: given bfloat16; wanted float16 or float32 on a GPU of compute capability "
                f"{capability.as_version_str()}"
            )

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(torch.cuda.max_memory_allocated(device))

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return False
