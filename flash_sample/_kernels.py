# SPDX-License-Identifier: Apache-2.0
"""Launches of the compiled kernels.

The callers have checked the arguments, and all tensors are on a GPU.
"""

import warnings
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference
from .filters import Filters
from .rows import RECORD_FIELDS, Rows, Sampled, Score

native: ModuleType | None
try:
    native = import_module("._flash_sample", __package__)
except ModuleNotFoundError:
    native = None
except ImportError as error:
    warnings.warn(f"flash_sample: the compiled module does not load: {error}", stacklevel=2)
    native = None

DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}

# An epsilon changes the entropy by at most V * epsilon nats. fp32 sums over a vocabulary are only
# accurate to about this bound, so up to it the kernel ignores the epsilon. Including the epsilon
# takes a second pass over the logits.
_NEGLIGIBLE_NATS = 2e-5


def is_built() -> bool:
    """Whether the compiled module is available; without it CUDA tensors run the reference."""
    return native is not None


def build_stamp() -> int | None:
    """Return the stamp of the sources that the compiled module was built from, if it has one."""
    return getattr(native, "BUILD_STAMP", None)


def candidates(logits: Tensor, rows: Rows, score: Score) -> Sampled:
    """Sample each row; see `flash_sample.candidates`."""
    sampled = _empty_candidates(len(logits), logits.device)
    if rows.filters is not None:
        return _filtered(logits, rows, rows.filters, score, sampled)
    if score == "entropy" and _epsilon_counts(rows.epsilon, logits.shape[1]):
        whole = logits.new_empty(len(logits), RECORD_FIELDS, dtype=torch.float64)
        _launch(logits, rows, score, record=whole, sampled=sampled)
        _launch(logits, rows, score, whole=whole, share=sampled.score)
    else:
        _launch(logits, rows, score, sampled=sampled)
    return sampled


def partial(logits: Tensor, rows: Rows, score: Score, *, first_column: int, out: Tensor) -> None:
    """Write the records of a slice of the columns to `out`; see `flash_sample.partial`."""
    _launch(logits, rows, score, first_column=first_column, record=out)


def merge(records: Tensor, rows: Rows, score: Score) -> Sampled:
    """Merge the records of slices; see `flash_sample.merge`."""
    sampled = _empty_candidates(records.shape[1], records.device)
    _merge(records, rows, score, sampled=sampled)
    return sampled


def entropy_share(logits: Tensor, records: Tensor, rows: Rows, *, first_column: int) -> Tensor:
    """Compute the share of a slice in each row's entropy; see `flash_sample.entropy_share`."""
    whole = torch.empty_like(records[0])
    share = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _merge(records, rows, "entropy", record=whole)
    _launch(logits, rows, "entropy", first_column=first_column, whole=whole, share=share)
    return share


def uniform(rows: Rows, positions: Tensor, first_column: int, num_columns: int) -> Tensor:
    """Generate uniform numbers [R, num_columns] fp64 for a range of columns, keyed by `rows`."""
    assert native is not None
    numbers = torch.empty(len(positions), num_columns, dtype=torch.float64, device=positions.device)
    with torch.cuda.device(positions.device):
        parameters, _kept = _row_parameters(rows)
        native.uniform(
            rows=parameters,
            num_rows=len(positions),
            first_column=first_column,
            num_columns=num_columns,
            numbers=numbers.data_ptr(),
            **_place(),
        )
    return numbers


def _empty_candidates(num_rows: int, device: torch.device) -> Sampled:
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    score = torch.empty(num_rows, dtype=torch.float32, device=device)
    return Sampled(token, score, torch.empty_like(token))


def _filtered(
    logits: Tensor, rows: Rows, filters: Filters, score: Score, sampled: Sampled
) -> Sampled:
    """Sample rows with filters into `sampled`; some scores need a second launch."""
    is_exact = score == "entropy" and _epsilon_counts(rows.epsilon, logits.shape[1])
    is_apart = not filters.are_scored and (is_exact or score == "margin")
    if filters.are_scored and is_exact:
        return reference.candidates(logits, rows, score)
    assert native is not None
    with torch.cuda.device(logits.device):
        parameters, kept = _row_parameters(rows)
        native.filtered(
            **_matrix(logits),
            rows=parameters,
            min_p=_pair(filters.min_p, torch.float64, kept),
            top_k=_integers(filters.top_k, torch.int64, kept),
            top_p=_pair(filters.top_p, torch.float64, kept),
            is_top_p_first=filters.is_top_p_first,
            keeps_equal=filters.keeps_equal,
            has_noise=rows.has_noise,
            are_scored=filters.are_scored,
            score=getattr(native, score.upper()),
            **_results(sampled),
            **_place(),
        )
    if is_apart:
        whole = replace(rows, filters=None, positions=None)
        return sampled._replace(score=candidates(logits, whole, score).score)
    return sampled


def _launch(
    logits: Tensor,
    rows: Rows,
    score: Score,
    *,
    first_column: int = 0,
    whole: Tensor | None = None,
    share: Tensor | None = None,
    record: Tensor | None = None,
    sampled: Sampled | None = None,
) -> None:
    assert native is not None
    with torch.cuda.device(logits.device):
        parameters, _kept = _row_parameters(rows)
        native.candidates(
            **_matrix(logits),
            rows=parameters,
            first_column=first_column,
            score=getattr(native, score.upper()),
            has_noise=rows.has_noise and whole is None,
            whole=_address(whole),
            share=_address(share),
            record=_address(record),
            **_results(sampled),
            **_place(),
        )


def _merge(
    records: Tensor,
    rows: Rows,
    score: Score,
    *,
    record: Tensor | None = None,
    sampled: Sampled | None = None,
) -> None:
    assert native is not None
    with torch.cuda.device(records.device):
        parameters, _kept = _row_parameters(rows)
        native.merge(
            rows=parameters,
            records=records.data_ptr(),
            num_slices=len(records),
            num_rows=records.shape[1],
            score=getattr(native, score.upper()),
            record=_address(record),
            **_results(sampled),
            **_place(),
        )


def _matrix(logits: Tensor) -> dict[str, Any]:
    """Return the kernel arguments that describe logits [R, V]."""
    return {
        "logits": logits.data_ptr(),
        "dtype": getattr(native, DTYPES[logits.dtype]),
        "row_stride": logits.stride(0),
        "num_rows": logits.shape[0],
        "num_columns": logits.shape[1],
    }


def _results(sampled: Sampled | None) -> dict[str, int]:
    """Return the addresses to which a launch writes its results; None writes nothing."""
    if sampled is None:
        return {"token": 0, "value": 0, "greedy": 0}
    token, score, greedy = sampled
    return {"token": token.data_ptr(), "value": score.data_ptr(), "greedy": greedy.data_ptr()}


def _place() -> dict[str, int]:
    """Return the arguments of a launch on the current device and its current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    return {"device": torch.cuda.current_device(), "stream": stream}


def _row_parameters(rows: Rows) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Convert the rows for the kernels; also return the tensors that the launch reads.

    Keep these tensors until the launch is enqueued. After that they can be freed, because PyTorch
    reuses their memory only for later work on the same stream.
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
    """Return a parameter as (address, 0) if it is a tensor, else as (0, value).

    The converted tensor is added to `kept`, so that the caller can keep it alive.
    """
    if not isinstance(value, Tensor):
        return 0, value
    kept.append(value.to(dtype).contiguous())
    return kept[-1].data_ptr(), 0


def _integers(value: int | Tensor, dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, int]:
    """Return the address or the value of an integer parameter, modulo 2^64; see `_pair`."""
    address, whole = _pair(value, dtype, kept)
    whole = int(whole) & 0xFFFFFFFFFFFFFFFF
    return address, whole - (1 << 64) if whole >> 63 else whole


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _epsilon_counts(epsilon: float | Tensor, num_columns: int) -> bool:
    return isinstance(epsilon, Tensor) or num_columns * epsilon > _NEGLIGIBLE_NATS
