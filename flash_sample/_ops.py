# SPDX-License-Identifier: Apache-2.0
"""Public operations: they check the arguments, then launch the kernel or run the reference."""

import torch
from torch import Tensor

from . import _kernels, philox, reference
from .filters import Filters, kept_by
from .rows import MAX_COLUMNS, Rows, Sampled, Score


def candidates(logits: Tensor, rows: Rows, score: Score = "confidence") -> Sampled:
    """Sample each row of logits: token, score and greedy column.

    Rows may belong to any number of requests, and the logits are read once. On CUDA the compiled
    kernel runs if it is built, else the reference. The kernel sums in fp32, and the bits of a row's
    result do not depend on the other rows.

    A token with noise is ``argmax(logit - temperature * log(-log U))`` in fp64 (Gumbel, 1954), with
    U of `flash_sample.philox`. It depends only on the row's logits, temperature, filters, seed,
    step and position. Rows with filters are read a few times.

    Args:
        logits: [R, V] bf16, fp16 or fp32 (fp64: reference). Rows may be strided; columns are
            contiguous. -inf columns are allowed. R may be 0.
        rows: Sampling parameters of each row.
        score: "confidence", "entropy" or "margin". On CUDA an epsilon that cannot change the
            entropy by 2e-5 nats is ignored.

    Raises:
        ValueError: The logits or a parameter of the rows are not as above. Values of tensors on a
            GPU are not checked.
    """
    return checked_candidates("candidates", logits, rows, score)


def kept_columns(logits: Tensor, temperature: float | Tensor, filters: Filters) -> Tensor:
    """Return a mask of the columns that filters keep, computed in PyTorch.

    Args:
        logits: [R, V] as for `candidates`; bf16 and fp16 are compared in fp32.
        temperature: >= 0, float or floating [R]; at 0 the distribution is that of temperature 1.
        filters: Filters to apply.

    Returns:
        bool [R, V].

    Raises:
        ValueError: An argument is not as above.
    """
    name = "kept_columns"
    check_logits(name, logits)
    rows = Rows(temperature=temperature, filters=filters)
    check_parameters(name, rows, len(logits), logits.device)
    return kept_by(reference.computed(logits), temperature, filters)


def uniform(
    seed: int | Tensor,
    purpose: int,
    step: int | Tensor,
    positions: Tensor,
    columns: int | tuple[int, int],
) -> Tensor:
    """Generate uniform numbers in the open interval (0, 1); see `flash_sample.philox.uniform`.

    Column 0 alone gives the scores of random remasking.
    """
    first, end = (0, columns) if isinstance(columns, int) else columns
    if _kernels.native is None or not positions.is_cuda or not 0 <= first <= end:
        return philox.uniform(seed, purpose, step, positions, columns)
    rows = Rows(seed=seed, step=step, positions=positions, purpose=purpose)
    check_parameters("uniform", rows, len(positions), positions.device)
    return _kernels.uniform(rows, positions, first, end - first)


def checked_candidates(name: str, logits: Tensor, rows: Rows, score: Score) -> Sampled:
    """Check the arguments and sample each row; `name` starts the error messages."""
    check_logits(name, logits)
    check_parameters(name, rows, len(logits), logits.device)
    if score not in ("confidence", "entropy", "margin"):
        raise ValueError(f"{name}: score must be confidence, entropy or margin, got {score!r}")
    if not has_kernel(logits):
        return reference.candidates(logits, rows, score)
    return _kernels.candidates(logits, rows, score)


def has_kernel(logits: Tensor) -> bool:
    """Whether a compiled kernel supports these logits; otherwise the reference runs."""
    return logits.is_cuda and _kernels.native is not None and logits.dtype in _kernels.DTYPES


def check_logits(name: str, logits: Tensor) -> None:
    """Check that logits are [R, V] floating with contiguous columns, and 1 <= V < 2^31."""
    is_floating = logits.dtype in _kernels.DTYPES or logits.dtype == torch.float64
    if logits.dim() != 2 or not is_floating or not 1 <= logits.shape[1] < 2**31:
        raise ValueError(
            f"{name}: logits must be [R, V] bf16, fp16, fp32 or fp64 with V >= 1, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"{name}: the columns of logits must be contiguous, got strides {logits.stride()}"
        )


def check_parameters(name: str, rows: Rows, num_rows: int, device: torch.device) -> None:
    """Check shapes, dtypes and devices of the parameters of rows; on a CPU also their values."""
    if len(rows.columns) > MAX_COLUMNS:
        raise ValueError(
            f"{name}: columns must hold at most {MAX_COLUMNS} columns, got {len(rows.columns)}"
        )
    _check_real(name, "temperature", rows.temperature, num_rows, device)
    _check_real(name, "epsilon", rows.epsilon, num_rows, device)
    _check_integers(name, "seed", rows.seed, torch.int64, num_rows, device)
    _check_integers(name, "step", rows.step, torch.int64, num_rows, device)
    _check_integers(name, "forbidden", rows.forbidden, torch.int32, num_rows, device)
    _check_integers(name, "excluded", rows.excluded, torch.int32, num_rows, device)
    if rows.positions is not None:
        _check_integers(name, "positions", rows.positions, torch.int64, num_rows, device)
    if rows.filters is not None:
        _check_real(name, "min_p", rows.filters.min_p, num_rows, device)
        _check_integers(name, "top_k", rows.filters.top_k, torch.int64, num_rows, device)
        _check_real(name, "top_p", rows.filters.top_p, num_rows, device)


def _check_real(
    name: str, argument: str, value: float | Tensor, num_rows: int, device: torch.device
) -> None:
    """Check that a real parameter is >= 0, or > 0 for an epsilon."""
    wanted = ">" if argument == "epsilon" else ">="
    least: float = 0.0
    if not isinstance(value, Tensor):
        least = value
    elif value.shape != (num_rows,) or not value.is_floating_point() or value.device != device:
        raise ValueError(
            f"{name}: {argument} must be a float or floating [R={num_rows}] on {device}, "
            f"got {value.dtype} {list(value.shape)} on {value.device}"
        )
    elif value.device.type == "cpu" and num_rows > 0:
        least = float(value.min())  # values on a GPU are not read: the host would wait
    else:
        return
    if not (least > 0 or (least == 0 and wanted == ">=")):
        raise ValueError(f"{name}: {argument} must be {wanted} 0, got {least}")


def _check_integers(
    name: str,
    argument: str,
    value: int | Tensor,
    dtype: torch.dtype,
    num_rows: int,
    device: torch.device,
) -> None:
    if not isinstance(value, Tensor):
        return
    if value.shape != (num_rows,) or value.dtype != dtype or value.device != device:
        raise ValueError(
            f"{name}: {argument} must be {str(dtype)[6:]} [R={num_rows}] on {device}, "
            f"got {value.dtype} {list(value.shape)} on {value.device}"
        )
