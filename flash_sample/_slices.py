# SPDX-License-Identifier: Apache-2.0
"""Sampling over slices of the vocabulary: a record of each, and what the records merge into."""

import torch
from torch import Tensor

from . import slices_reference
from ._kernels import _empty_candidates, _launch, _native, _place, _row_parameters
from ._ops import _check_logits, _check_parameters, _has_kernel
from .rows import RECORD_FIELDS, Rows, Sampled, Score


def partial(
    logits: Tensor,
    rows: Rows,
    score: Score = "confidence",
    *,
    first_column: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Reduce a slice of the columns to a record for each row, to be merged over ranks or tiles.

    Args:
        logits: [R, V] as for `candidates`: the columns from ``first_column`` on.
        rows: As for `candidates`; ``columns`` are those of the whole vocabulary, and those outside
            the slice have no effect.
        score: Score that `merge` will return.
        first_column: Column of the whole vocabulary that ``logits`` starts with. Drawing is faster
            where it is a multiple of 4.
        out: Memory of the record: float64 [R, 8] contiguous, such as one tile's part of [P, R, 8].

    Returns:
        Record, float64 [R, 8]; `flash_sample.rows` names the fields.

    Raises:
        ValueError: An argument is not as above.
    """
    name = "partial"
    _check_logits(name, logits)
    if first_column < 0:
        raise ValueError(f"{name}: first_column must be >= 0, got {first_column}")
    if rows.filters is not None:
        raise ValueError(f"{name}: filters must be None: they need whole rows")
    _check_parameters(name, rows, len(logits), logits.device)
    if out is None:
        out = torch.empty(len(logits), RECORD_FIELDS, dtype=torch.float64, device=logits.device)
    _check_records(name, "out", out, (len(logits), RECORD_FIELDS))
    if _has_kernel(logits):
        _launch(logits, rows, score, first_column=first_column, record=out)
    else:
        out.copy_(slices_reference.partial(logits, rows, score, first_column=first_column))
    return out


def merge(records: Tensor, rows: Rows, score: Score = "confidence") -> Sampled:
    """Merge the records of slices into token, score and greedy column of whole rows.

    Args:
        records: float64 [P, R, 8] contiguous, of P disjoint slices that make up the rows, all made
            with these ``rows`` and ``score``.
        rows: Parameters with which the records were made.
        score: Score for which the records were made. "entropy" leaves the epsilon out, which
            changes it by at most V * epsilon nats; `entropy_share` includes it.

    Raises:
        ValueError: An argument is not as above.
    """
    name = "merge"
    if records.dim() != 3:
        raise ValueError(f"{name}: records must be [P, R, 8], got {list(records.shape)}")
    num_slices, num_rows, _ = records.shape
    _check_records(name, "records", records, (max(num_slices, 1), num_rows, RECORD_FIELDS))
    _check_parameters(name, rows, num_rows, records.device)
    if _native is None or not records.is_cuda:
        return slices_reference.merge(records, rows, score)
    found = _empty_candidates(num_rows, records.device)
    with torch.cuda.device(records.device):
        parameters, _kept = _row_parameters(rows)
        _native.merge(
            rows=parameters,
            records=records.data_ptr(),
            num_slices=num_slices,
            num_rows=num_rows,
            score=getattr(_native, score.upper()),
            record=0,
            token=found.token.data_ptr(),
            value=found.score.data_ptr(),
            greedy=found.greedy.data_ptr(),
            **_place(),
        )
    return found


def entropy_share(logits: Tensor, records: Tensor, rows: Rows, *, first_column: int = 0) -> Tensor:
    """Compute the share of a slice of the columns in each row's entropy, epsilon included.

    Args:
        logits: [R, V] as for `partial`.
        records: float64 [P, R, 8] contiguous, of all slices, made with ``score="entropy"``.
        rows: Parameters with which the records were made.
        first_column: Column of the whole vocabulary that ``logits`` starts with.

    Returns:
        fp32 [R] (fp64 for fp64 logits); the shares of all slices add up to the entropy.

    Raises:
        ValueError: An argument is not as above.
    """
    name = "entropy_share"
    _check_logits(name, logits)
    _check_parameters(name, rows, len(logits), logits.device)
    if records.dim() != 3:
        raise ValueError(f"{name}: records must be [P, R, 8], got {list(records.shape)}")
    num_slices = max(records.shape[0], 1)
    _check_records(name, "records", records, (num_slices, len(logits), RECORD_FIELDS))
    if not _has_kernel(logits):
        whole = slices_reference.join(records, rows)
        return slices_reference.entropy_share(logits, whole, rows, first_column=first_column)
    assert _native is not None
    whole = torch.empty_like(records[0])
    share = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with torch.cuda.device(records.device):
        parameters, _kept = _row_parameters(rows)
        _native.merge(
            rows=parameters,
            records=records.data_ptr(),
            num_slices=num_slices,
            num_rows=len(logits),
            score=_native.ENTROPY,
            record=whole.data_ptr(),
            token=0,
            value=0,
            greedy=0,
            **_place(),
        )
    _launch(logits, rows, "entropy", first_column=first_column, whole=whole, share=share)
    return share


def _check_records(name: str, argument: str, records: Tensor, shape: tuple[int, ...]) -> None:
    is_good = records.dtype == torch.float64 and records.is_contiguous()
    if not is_good or tuple(records.shape) != shape:
        raise ValueError(
            f"{name}: {argument} must be contiguous float64 {list(shape)}, "
            f"got {records.dtype} {list(records.shape)}"
        )
