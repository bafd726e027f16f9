# SPDX-License-Identifier: Apache-2.0
"""Products of few rows on every card of compute capability 8.0 or later."""

from functools import cache

import torch
from torch import Tensor

from ._packed import Packed
from ._support import capability_of, launch, native, takes_pairs

_COLUMNS = 16  # The number of rows of the weight must be a multiple of this.
_STRIP = 128
_GROUP = 32
_DTYPES = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
_FP8 = torch.float8_e4m3fn
_BLOCKS = 3  # blocks per multiprocessor, at most
_PARTS_BYTES = 4 * 128 * 128 * 4  # bytes per multiprocessor: two tiles for each of its blocks
# KiB of shared memory per multiprocessor
_SHARED = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}
_MIN_SHARED_KIB = 100  # KiB per multiprocessor of all other cards
_MAX_TILES = 1 << 16


def has_portable(*matrices: Tensor) -> bool:
    """Whether the portable kernels can read these matrices: bf16, fp16 or, from 8.9 on, fp8.

    All matrices must have the same dtype. Rows must start on 16 bytes, and their size must be a
    multiple of 16 bytes.
    """
    first = matrices[0]
    if native is None or not first.is_cuda:
        return False
    least = (8, 9) if first.dtype == _FP8 else (8, 0)
    return capability_of(first.device.index) >= least and all(
        (matrix.dtype in _DTYPES or matrix.dtype == _FP8)
        and matrix.dtype == first.dtype
        and matrix.stride(1) == 1
        and matrix.stride(0) * matrix.itemsize % 16 == 0
        and matrix.shape[1] * matrix.itemsize % 16 == 0
        and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )


def has_portable_packed(x: Tensor, weight: Packed) -> bool:
    """Whether the portable kernels can multiply rows x [R, K] by a 4-bit matrix [N, K].

    A matrix with a table requires bf16 rows.
    """
    values, scales = weight.values, weight.scales
    return (
        has_portable(x)
        and x.dtype != _FP8
        and (weight.table is None or x.dtype == torch.bfloat16)
        and values.dtype == torch.uint8
        and weight.group % _GROUP == 0
        and (_STRIP % weight.group == 0 or weight.group % _STRIP == 0)
        and weight.shape[1] % _STRIP == 0
        and len(values) % _COLUMNS == 0
        and values.stride(1) == 1
        and values.stride(0) % 16 == 0
        and values.data_ptr() % 16 == 0
        and scales.data_ptr() % 16 == 0
        and (weight.zeros is None or weight.zeros.data_ptr() % 4 == 0)
    )


def takes_columns(weight: Tensor, out: Tensor | None) -> bool:
    """Whether the portable kernels support the weight's columns and the strides of `out`."""
    return len(weight) % _COLUMNS == 0 and (out is None or takes_pairs(out))


def launch_portable(
    x: Tensor,
    weight: Tensor | Packed,
    out: Tensor,
    bias: Tensor | None,
    epilogue: int,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    look_up: tuple[int, ...] = (),
) -> None:
    """Enqueue the product on checked tensors; `scales` are those of fp8 x and weight."""
    assert native is not None
    multiprocessors, parts, counts = _workspace(x.device)
    packed = weight if isinstance(weight, Packed) else None
    values = weight.values if isinstance(weight, Packed) else weight
    of_x, of_weight = (0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())
    zeros = None if packed is None else packed.zeros
    launch(
        native.portable,
        out,
        dtype=getattr(native, _DTYPES[out.dtype]),
        x=x.data_ptr(),
        weight=values.data_ptr(),
        x_scales=of_x,
        weight_scales=of_weight,
        scales=0 if packed is None else packed.scales.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        table=look_up or (0,) * 8,
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        parts=parts.data_ptr(),
        counts=counts.data_ptr(),
        parts_bytes=parts.nbytes,
        num_counts=counts.numel(),
        x_stride=x.stride(0),
        weight_stride=values.stride(0),
        scales_stride=0 if packed is None else packed.scales.stride(0),
        out_stride=out.stride(0),
        num_rows=len(x),
        num_columns=len(values),
        depth=x.shape[1],
        group=0 if packed is None else packed.group,
        multiprocessors=multiprocessors,
        most_blocks=_BLOCKS,
        shared_bytes=_shared_bytes(x.device.index),
        epilogue=epilogue,
    )


@cache
def _shared_bytes(device: int) -> int:
    """Return the bytes of shared memory per multiprocessor for which kernels are chosen."""
    return _SHARED.get(capability_of(device), _MIN_SHARED_KIB) * 1024


@cache
def _workspace(device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Return the number of multiprocessors, memory for partial sums of tiles, and their counters.

    Consecutive products share this memory.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = torch.empty(multiprocessors * _PARTS_BYTES, dtype=torch.uint8, device=device)
    return multiprocessors, parts, torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
