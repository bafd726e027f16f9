# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Programmatic dependent launch: a kernel is scheduled while the previous kernel ends.

It then waits until everything that the earlier kernel wrote is visible, so nothing is read or
written too early. This saves the launch latency, which many short kernels would each pay.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Wait for the previous kernels, then allow the next kernel to start; first call of a kernel.

    The next kernel can read, without waiting, data that was written before the previous kernel.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_open(OVERLAPS: tl.constexpr):
    """Allow the next kernel to start at once, then wait for the previous kernels.

    If the next kernel calls this too, the kernel after it may also start. Meant for a short kernel
    in front of one that reads weights while it waits.
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
