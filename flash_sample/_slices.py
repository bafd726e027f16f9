# SPDX-License-Identifier: Apache-2.0
"""Sampling over slices of the vocabulary: each slice yields a record to merge."""

import torch
from torch import Tensor

from . import _kernels
from . import slices_reference as reference
from ._ops import check_logits, check_parameters, has_kernel
from .rows import RECORD_FIELDS, Rows, Sampled, Score


def partial(
    logits: Tensor,
    rows: Rows,
    score: Score = "confidence",
    *,
    first_column: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Reduce a slice of the columns to one record per row, to be merged over ranks or tiles.

    Args:
        logits: [R, V] as for `candidates`: the columns from ``first_column`` on.
        rows: As for `candidates`; ``columns`` counts over the whole vocabulary, and columns outside
            the slice have no effect.
        score: Score that `merge` will return.
        first_column: Column of the whole vocabulary that ``logits`` starts with. Sampling with
            noise is faster if it is a multiple of 4.
        out: Memory of the record: float64 [R, 8] contiguous, such as one tile's part of [P, R, 8].

    Returns:
        Record, float64 [R, 8]; `flash_sample.rows` names the fields.

    Raises:
        ValueError: An argument is not as above.
    """
    name = "partial"
    check_logits(name, logits)
    if first_column < 0:
        raise ValueError(f"{name}: first_column must be >= 0, got {first_column}")
    if rows.filters is not None:
        raise ValueError(f"{name}: filters must be None: they need whole rows")
    check_parameters(name, rows, len(logits), logits.device)
    if out is None:
        out = torch.empty(len(logits), RECORD_FIELDS, dtype=torch.float64, device=logits.device)
    _check_records(name, "out", out, (len(logits), RECORD_FIELDS))
    if has_kernel(logits):
        _kernels.partial(logits, rows, score, first_column=first_column, out=out)
    else:
        out.copy_(reference.partial(logits, rows, score, first_column=first_column))
    return out


def merge(records: Tensor, rows: Rows, score: Score = "confidence") -> Sampled:
    """Merge the records of slices into token, score and greedy column of whole rows.

    Args:
        records: float64 [P, R, 8] contiguous, the records of P disjoint slices that together cover
            the rows. All of them were computed with these ``rows`` and this ``score``.
        rows: Parameters with which the records were computed.
        score: Score for which the records were computed. "entropy" ignores the epsilon, which
            changes it by at most V * epsilon nats; `entropy_share` includes it.

    Raises:
        ValueError: An argument is not as above.
    """
    name = "merge"
    if records.dim() != 3:
        raise ValueError(f"{name}: records must be [P, R, 8], got {list(records.shape)}")
    num_slices, num_rows, _ = records.shape
    _check_records(name, "records", records, (max(num_slices, 1), num_rows, RECORD_FIELDS))
    check_parameters(name, rows, num_rows, records.device)
    if _kernels.native is None or not records.is_cuda:
        return reference.merge(records, rows, score)
    return _kernels.merge(records, rows, score)


def entropy_share(logits: Tensor, records: Tensor, rows: Rows, *, first_column: int = 0) -> Tensor:
    """Compute the share of a slice of the columns in each row's entropy, including the epsilon.

    Args:
        logits: [R, V] as for `partial`.
        records: float64 [P, R, 8] contiguous, the records of all slices, with ``score="entropy"``.
        rows: Parameters with which the records were computed.
        first_column: Column of the whole vocabulary that ``logits`` starts with.

    Returns:
        fp32 [R] (fp64 for fp64 logits); the shares of all slices add up to the entropy.

    Raises:
        ValueError: An argument is not as above.
    """
    name = "entropy_share"
    check_logits(name, logits)
    check_parameters(name, rows, len(logits), logits.device)
    if records.dim() != 3:
        raise ValueError(f"{name}: records must be [P, R, 8], got {list(records.shape)}")
    num_slices = max(records.shape[0], 1)
    _check_records(name, "records", records, (num_slices, len(logits), RECORD_FIELDS))
    if has_kernel(logits):
        return _kernels.entropy_share(logits, records, rows, first_column=first_column)
    whole = reference.join(records, rows)
    return reference.entropy_share(logits, whole, rows, first_column=first_column)


def _check_records(name: str, argument: str, records: Tensor, shape: tuple[int, ...]) -> None:
    is_good = records.dtype == torch.float64 and records.is_contiguous()
    if not is_good or tuple(records.shape) != shape:
        raise ValueError(
            f"{name}: {argument} must be contiguous float64 {list(shape)}, "
            f"got {records.dtype} {list(records.shape)}"
        )
