# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Programmatic dependent launch: a kernel gets onto the GPU while the one before it ends.

It waits there until everything that the earlier kernel wrote is visible, so nothing is read or
written too early; this saves the time of a launch, which many short kernels would each pay.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Wait for the kernels before this one, then let the next get ready; first in a kernel.

    Data written before the kernel before this one is visible to the next at once.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_open(OVERLAPS: tl.constexpr):
    """Let the next kernel get ready at once, then wait for the kernels before this one.

    The kernel after the next gets ready, too, if that one does this. For a short kernel before one
    that reads weights while it waits.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines that hold these addresses into L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can overlap: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
