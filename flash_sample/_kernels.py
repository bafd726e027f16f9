# SPDX-License-Identifier: Apache-2.0
"""Launches of the compiled kernels."""

import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .rows import Rows, Sampled, Score

_native: ModuleType | None
try:
    _native = import_module("._flash_sample", __package__)
except ModuleNotFoundError:
    _native = None
except ImportError as error:
    warnings.warn(f"flash_sample: the compiled module does not load: {error}", stacklevel=2)
    _native = None

_KERNEL_DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}


def is_built() -> bool:
    """Whether the compiled module is there; without it CUDA tensors run the reference."""
    return _native is not None


def _empty_candidates(num_rows: int, device: torch.device) -> Sampled:
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    score = torch.empty(num_rows, dtype=torch.float32, device=device)
    return Sampled(token, score, torch.empty_like(token))


def _launch(
    logits: Tensor,
    rows: Rows,
    score: Score,
    *,
    first_column: int = 0,
    whole: Tensor | None = None,
    share: Tensor | None = None,
    record: Tensor | None = None,
    found: Sampled | None = None,
) -> None:
    assert _native is not None
    with torch.cuda.device(logits.device):
        parameters, _kept = _row_parameters(rows)
        _native.candidates(
            **_matrix(logits),
            rows=parameters,
            first_column=first_column,
            score=getattr(_native, score.upper()),
            has_noise=rows.has_noise and whole is None,
            whole=_address(whole),
            share=_address(share),
            record=_address(record),
            token=0 if found is None else found.token.data_ptr(),
            value=0 if found is None else found.score.data_ptr(),
            greedy=0 if found is None else found.greedy.data_ptr(),
            **_place(),
        )


def _matrix(logits: Tensor) -> dict[str, Any]:
    """Arguments that describe logits [R, V] to a kernel."""
    return {
        "logits": logits.data_ptr(),
        "dtype": getattr(_native, _KERNEL_DTYPES[logits.dtype]),
        "row_stride": logits.stride(0),
        "num_rows": logits.shape[0],
        "num_columns": logits.shape[1],
    }


def _place() -> dict[str, int]:
    """Return the arguments of a launch on the current device and its current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    return {"device": torch.cuda.current_device(), "stream": stream}


def _row_parameters(rows: Rows) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Convert the rows for the kernels; also return the tensors to keep until they are enqueued.

    A freed tensor's memory is only given to work that comes later on the same stream.
    """
    kept: list[Tensor] = []
    parameters = (
        _pair(rows.temperature, torch.float64, kept),
        _integers(rows.seed, torch.int64, kept),
        _integers(rows.step, torch.int64, kept),
        _integers(0 if rows.positions is None else rows.positions, torch.int64, kept),
        rows.purpose & 0xFFFFFFFF,
        rows.is_tempered,
        _pair(rows.epsilon, torch.float32, kept),
        rows.columns,
        _integers(rows.forbidden, torch.int32, kept),
        _integers(rows.excluded, torch.int32, kept),
    )
    return parameters, kept


def _pair(value: float | Tensor, dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, float]:
    """Return a parameter's address, or 0 and its value; add what lies there to `kept`."""
    if not isinstance(value, Tensor):
        return 0, value
    kept.append(value.to(dtype).contiguous())
    return kept[-1].data_ptr(), 0


def _integers(value: int | Tensor, dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, int]:
    """Return the address or the value of a whole number, of which 64 bits count; as `_pair`."""
    address, whole = _pair(value, dtype, kept)
    whole = int(whole) & 0xFFFFFFFFFFFFFFFF
    return address, whole - (1 << 64) if whole >> 63 else whole


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
