# SPDX-License-Identifier: Apache-2.0
"""State of the native packages, and the command that builds them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import flash_sample
import gather_gemm
import vmm_allocator
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.ops.build_stamp import stamp_of
from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    from types import ModuleType

_ROOT = Path(__file__).resolve().parents[3]
_IS_CLONE = (_ROOT / "setup.py").is_file()
BUILD = (
    "python setup.py build_ext --inplace"  # at the root of the repository
    if _IS_CLONE
    else "pip install --force-reinstall --no-deps PLACE_OF_THE_REPOSITORY, with nvcc on PATH"
)


class NativePackage(NamedTuple):
    """A native package.

    Attributes:
        name: name of the package.
        is_built: whether a GPU can run its kernels.
        remedy: the command that builds it.
        is_stale: whether it was built from sources with another interface.
    """

    name: str
    is_built: bool
    remedy: str = BUILD
    is_stale: bool = False


def native_packages() -> tuple[NativePackage, ...]:
    """Return all native packages and their current state."""
    return (
        _compiled("flash_sample", flash_sample),
        _compiled("vllm_add_llada/cuda_kernels/fused_ops", fused_ops),
        NativePackage("gather_gemm", gather_gemm.is_built()),
        _compiled("vmm_allocator", vmm_allocator),
    )


def _compiled(folder: str, package: ModuleType) -> NativePackage:
    """Return the native package in a folder of the repository."""
    is_built, stamp = package.is_built(), stamp_of(_ROOT, folder)
    is_stale = is_built and stamp not in (None, package.build_stamp())
    return NativePackage(Path(folder).name, is_built, is_stale=is_stale)


def check_builds() -> None:
    """Refuse compiled modules of another version, which would crash at their first use.

    Raises:
        ServerConfigError: naming the package, and the command that builds it.
    """
    for package in native_packages():
        if package.is_stale:
            reason = "the compiled module does not match these sources"
            raise ServerConfigError(f"{package.name}: {reason}; build it again with: {BUILD}")
