# SPDX-License-Identifier: Apache-2.0
"""Base of the operations: the compiled module, its arguments, and checks of tensors."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

native: ModuleType | None
try:
    native = import_module("._fused_ops", __package__)
except ModuleNotFoundError:
    native = None
except ImportError as error:
    warnings.warn(f"fused_ops: the compiled module does not load: {error}", stacklevel=2)
    native = None

_KERNEL_DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}

NO_ROWS = (0, 0, 0, 0)  # the result of `rows_of` for no tensor
NO_INTEGERS = (0, False)  # the result of `integers_of` for no tensor


def launch(function: Callable[..., None], tensor: Tensor, **arguments: Any) -> None:
    """Call a launcher on the device of ``tensor`` and its current stream."""
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    function(**arguments, device=tensor.device.index, stream=stream)


def rows_of(tensor: Tensor) -> tuple[int, int, int, int]:
    """Convert a tensor [R, D] or [R, H, D] for the kernels: address, H, strides of R and H."""
    if tensor.dim() == 2:
        return tensor.data_ptr(), 1, tensor.stride(0), 0
    return tensor.data_ptr(), tensor.shape[1], tensor.stride(0), tensor.stride(1)


def dtype_of(tensor: Tensor) -> int:
    return int(getattr(native, _KERNEL_DTYPES[tensor.dtype]))


def integers_of(tensor: Tensor) -> tuple[int, bool]:
    """Convert a tensor of int32 or int64 for the kernels."""
    return tensor.data_ptr(), tensor.dtype == torch.int64


def has_kernel(tensor: Tensor) -> bool:
    return native is not None and tensor.is_cuda


def ahead_of(tensor: Tensor | None) -> tuple[int, int]:
    """Convert the tensor that the next kernel reads for the kernels: address and bytes."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)


@cache
def capability_of(device: int) -> tuple[int, int]:
    """Return the compute capability that kernels are chosen for.

    `VLLM_DLLM_KERNELS` can set a lower one than the card's, such as 8.0, to run the kernels of
    other cards.

    Raises:
        ValueError: The variable is not a compute capability, or a higher one than the card's.
    """
    given, capability = (
        os.environ.get("VLLM_DLLM_KERNELS", ""),
        torch.cuda.get_device_capability(device),
    )
    if not given:
        return capability
    major, _, minor = given.partition(".")
    named = (int(major), int(minor or 0)) if major.isdigit() and minor.isdigit() else None
    if named is None or not (8, 0) <= named <= capability:
        raise ValueError(
            f"VLLM_DLLM_KERNELS: given {given!r}; wanted a compute capability from 8.0 to the "
            f"card's, {capability[0]}.{capability[1]}"
        )
    return named


@cache
def hopper_multiprocessors(device: int) -> int:
    """Return the multiprocessors of a card of compute capability 9.0; 0 for any other card."""
    if capability_of(device) != (9, 0):
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def feeds_tensor_cores(*matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the copy engine can copy tiles of these matrices for the tensor cores.

    The matrices must have `dtype` (bf16 or fp8) and be on a card of compute capability 9.0, and
    their rows must start on 16 bytes.
    """
    first = matrices[0]
    if native is None or not first.is_cuda or hopper_multiprocessors(first.device.index) == 0:
        return False
    return all(
        matrix.dtype == dtype
        and matrix.stride(1) == 1
        and matrix.stride(0) * dtype.itemsize % 16 == 0
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )


def takes_pairs(out: Tensor) -> bool:
    """Whether pairs of 16-bit numbers can be written to the rows of a matrix."""
    return out.stride(1) == 1 and out.stride(0) % 2 == 0 and out.data_ptr() % 4 == 0


def check_rows(name: str, argument: str, tensor: Tensor, dims: tuple[int, ...]) -> None:
    if tensor.dim() not in dims or tensor.dtype not in _KERNEL_DTYPES:
        wanted = " or ".join(f"{dim}-D" for dim in dims)
        raise ValueError(
            f"{name}: {argument} must be {wanted} bf16, fp16 or fp32, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
    if not 1 <= tensor.shape[-1] < 2**31:
        raise ValueError(f"{name}: {argument} must have columns, got {list(tensor.shape)}")
    check_columns(name, argument, tensor)


def check_like(
    name: str, argument: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]
) -> None:
    same_place = tensor.dtype == like.dtype and tensor.device == like.device
    if tuple(tensor.shape) != tuple(shape) or not same_place:
        raise ValueError(
            f"{name}: {argument} must be {like.dtype} {list(shape)} on {like.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    check_columns(name, argument, tensor)


def check_vector(
    name: str,
    argument: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Check for a contiguous tensor of one of `dtypes` on `device`; -1 in `shape` is any size."""
    fits = tensor.dim() == len(shape) and all(
        wanted in (-1, given) for wanted, given in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        wanted_dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(
            f"{name}: {argument} must be {wanted_dtypes} [{sizes}] on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: {argument} must be contiguous, got strides {tensor.stride()}")


def check_columns(name: str, argument: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: the last dimension of {argument} must be contiguous, "
            f"got strides {tensor.stride()}"
        )
