# SPDX-License-Identifier: Apache-2.0
"""Public operations: check the arguments, then launch the kernel or run the reference."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import philox, reference
from .filters import Filters, kept_by
from .philox import TOKEN_NOISE
from .rows import MAX_COLUMNS, RECORD_FIELDS, Rows, Sampled, Score

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

# An epsilon changes the entropy by at most V * epsilon nats. Up to this bound, which is what fp32
# sums over a vocabulary are good to, the kernel leaves it out: it costs another read of the logits.
_NEGLIGIBLE_NATS = 2e-5


def is_built() -> bool:
    """Whether the compiled module is there; without it CUDA tensors run the reference."""
    return _native is not None


def candidates(logits: Tensor, rows: Rows, score: Score = "confidence") -> Sampled:
    """Sample each row of logits: token, score and greedy column.

    One pass over the logits, for rows of any number of requests; on CUDA the compiled kernel where
    it is built (fp32 sums; the bits of a row do not depend on the rows beside it), else the
    reference. A token with noise is ``argmax(logit - temperature * log(-log U))`` in fp64 (Gumbel,
    1954), with U of `flash_sample.philox`: it depends on the row's logits, temperature, filters,
    seed, step and position alone. Rows with filters are read a few times.

    Args:
        logits: [R, V] bf16, fp16 or fp32 (fp64: reference). Rows may be strided; columns are
            contiguous. -inf columns are allowed. R may be 0.
        rows: Sampling parameters of each row.
        score: "confidence", "entropy" or "margin". On CUDA an epsilon that cannot change the
            entropy by 2e-5 nats is left out of it.

    Raises:
        ValueError: The logits or a parameter of the rows are not as above. Values of tensors on a
            GPU are not checked.
    """
    return _candidates("candidates", logits, rows, score)


def kept_columns(logits: Tensor, temperature: float | Tensor, filters: Filters) -> Tensor:
    """Find the columns that filters keep, in PyTorch.

    Args:
        logits: [R, V] as for `candidates`; bf16 and fp16 are compared in fp32.
        temperature: >= 0, float or floating [R]; at 0 the distribution is that of temperature 1.
        filters: What to cut off.

    Returns:
        bool [R, V].

    Raises:
        ValueError: An argument is not as above.
    """
    name = "kept_columns"
    _check_logits(name, logits)
    rows = Rows(temperature=temperature, filters=filters)
    _check_parameters(name, rows, len(logits), logits.device)
    return kept_by(reference.computed(logits), temperature, filters)


def low_confidence(logits: Tensor, *, excluded: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Find the best column of each row of logits, and its softmax probability.

    This is the score of a masked position in low-confidence remasking (Nie et al., "Large Language
    Diffusion Models", arXiv:2502.09992).

    Args:
        logits: [R, V] as for `candidates`.
        excluded: At most 16 columns whose probability is taken as 0 (the rest is normalised
            without them), and which still may be the best column.

    Returns:
        token: int64 [R], the lowest column of the largest logit.
        confidence: fp32 [R] (fp64 for fp64 logits), its probability; 0 where the token is
            excluded, and where the row has no finite logit (the token is then 0). NaN or +inf in
            a row makes it NaN; the token is then in range and otherwise unspecified.

    Raises:
        ValueError: The logits are not as above, or ``excluded`` is too long or out of range.
    """
    name = "low_confidence"
    _check_logits(name, logits)
    _check_excluded(name, excluded, logits.shape[1])
    rows = Rows(columns=tuple(excluded), excluded=(1 << len(excluded)) - 1)
    return _candidates(name, logits, rows, "confidence")[:2]


def entropy(logits: Tensor, *, epsilon: float | Tensor = 1e-10) -> tuple[Tensor, Tensor]:
    """Find the best column of each row of logits, and the entropy of the row's softmax.

    Args:
        logits: [R, V] as for `candidates`.
        epsilon: Positive, float or fp32 [R]; the entropy is ``-sum p * log(p + epsilon)``.

    Returns:
        token: int64 [R], the lowest column of the largest logit.
        entropy: fp32 [R] (fp64 for fp64 logits), in nats; +inf where the row has no finite logit.

    Raises:
        ValueError: The logits are not as above, or ``epsilon`` is not positive.
    """
    return _candidates("entropy", logits, Rows(epsilon=epsilon), "entropy")[:2]


def entropy_witht(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    purpose: int = TOKEN_NOISE,
    epsilon: float | Tensor = 1e-10,
) -> tuple[Tensor, Tensor]:
    """Draw a column of each row at a temperature, and compute the row's entropy at it.

    Rows of one call may belong to different requests.

    Args:
        logits: [R, V] as for `candidates`.
        temperature: >= 0, float or [R] floating. At 0 the token is the best column and the
            entropy that of the plain softmax.
        seed: 64-bit seed, int or int64 [R] (its bit pattern).
        step: Denoise step, int or int64 [R].
        positions: int64 [R], canvas position of each row.
        purpose: Separates draws that must not share their numbers.
        epsilon: As for `entropy`.

    Returns:
        token: int64 [R].
        entropy: fp32 [R] (fp64 for fp64 logits), of ``softmax(logits / temperature)``, in nats;
            +inf where the row has no finite logit.

    Raises:
        ValueError: An argument is not as above. Temperatures on a GPU are not checked.
    """
    rows = Rows(
        temperature, seed, step, positions, purpose=purpose, is_tempered=True, epsilon=epsilon
    )
    return _candidates("entropy_witht", logits, rows, "entropy")[:2]


def margin(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best column of each row of logits, and the margin of its two largest probabilities.

    Args:
        logits: [R, V] as for `candidates`.

    Returns:
        token: int64 [R], the lowest column of the largest logit.
        margin: fp32 [R] (fp64 for fp64 logits); 0 where the row has no finite logit.

    Raises:
        ValueError: The logits are not as above.
    """
    return _candidates("margin", logits, Rows(), "margin")[:2]


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
        out.copy_(reference.partial(logits, rows, score, first_column=first_column))
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
        return reference.merge(records, rows, score)
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
        whole = reference.join(records, rows)
        return reference.entropy_share(logits, whole, rows, first_column=first_column)
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


def uniform(
    seed: int | Tensor,
    purpose: int,
    step: int | Tensor,
    positions: Tensor,
    columns: int | tuple[int, int],
) -> Tensor:
    """Make uniform numbers of the open interval (0, 1); see `flash_sample.philox.uniform`.

    Column 0 alone gives the scores of random remasking.
    """
    first, end = (0, columns) if isinstance(columns, int) else columns
    if _native is None or not positions.is_cuda or not 0 <= first <= end:
        return philox.uniform(seed, purpose, step, positions, columns)
    name = "uniform"
    rows = Rows(seed=seed, step=step, positions=positions, purpose=purpose)
    _check_parameters(name, rows, len(positions), positions.device)
    numbers = torch.empty(len(positions), end - first, dtype=torch.float64, device=positions.device)
    with torch.cuda.device(positions.device):
        parameters, _kept = _row_parameters(rows)
        _native.uniform(
            rows=parameters,
            num_rows=len(positions),
            first_column=first,
            num_columns=end - first,
            numbers=numbers.data_ptr(),
            **_place(),
        )
    return numbers


def _candidates(name: str, logits: Tensor, rows: Rows, score: Score) -> Sampled:
    _check_logits(name, logits)
    _check_parameters(name, rows, len(logits), logits.device)
    if score not in ("confidence", "entropy", "margin"):
        raise ValueError(f"{name}: score must be confidence, entropy or margin, got {score!r}")
    if not _has_kernel(logits):
        return reference.candidates(logits, rows, score)
    found = _empty_candidates(len(logits), logits.device)
    if rows.filters is not None:
        return _filtered(logits, rows, rows.filters, score, found)
    if score == "entropy" and _epsilon_counts(rows.epsilon, logits.shape[1]):
        whole = logits.new_empty(len(logits), RECORD_FIELDS, dtype=torch.float64)
        _launch(logits, rows, score, record=whole, found=found)
        _launch(logits, rows, score, whole=whole, share=found.score)
    else:
        _launch(logits, rows, score, found=found)
    return found


def _filtered(
    logits: Tensor, rows: Rows, filters: Filters, score: Score, found: Sampled
) -> Sampled:
    """Sample rows with filters into `found`; a score may want a launch of its own."""
    is_exact = score == "entropy" and _epsilon_counts(rows.epsilon, logits.shape[1])
    is_apart = not filters.are_scored and (is_exact or score == "margin")
    if filters.are_scored and is_exact:
        return reference.candidates(logits, rows, score)
    assert _native is not None
    with torch.cuda.device(logits.device):
        parameters, kept = _row_parameters(rows)
        _native.filtered(
            **_matrix(logits),
            rows=parameters,
            min_p=_pair(filters.min_p, torch.float64, kept),
            top_k=_integers(filters.top_k, torch.int64, kept),
            top_p=_pair(filters.top_p, torch.float64, kept),
            is_top_p_first=filters.is_top_p_first,
            keeps_equal=filters.keeps_equal,
            has_noise=rows.has_noise,
            are_scored=filters.are_scored,
            score=getattr(_native, score.upper()),
            token=found.token.data_ptr(),
            value=found.score.data_ptr(),
            greedy=found.greedy.data_ptr(),
            **_place(),
        )
    if is_apart:
        whole = replace(rows, filters=None, positions=None)
        return found._replace(score=_candidates("candidates", logits, whole, score).score)
    return found


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


def _epsilon_counts(epsilon: float | Tensor, num_columns: int) -> bool:
    return isinstance(epsilon, Tensor) or num_columns * epsilon > _NEGLIGIBLE_NATS


def _has_kernel(logits: Tensor) -> bool:
    return _native is not None and logits.is_cuda and logits.dtype in _KERNEL_DTYPES


def _check_logits(name: str, logits: Tensor) -> None:
    """Check that logits are [R, V] floating with contiguous columns, V at least 1 (and int32)."""
    is_floating = logits.dtype in _KERNEL_DTYPES or logits.dtype == torch.float64
    if logits.dim() != 2 or not is_floating or not 1 <= logits.shape[1] < 2**31:
        raise ValueError(
            f"{name}: logits must be [R, V] bf16, fp16, fp32 or fp64 with V >= 1, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"{name}: the columns of logits must be contiguous, got strides {logits.stride()}"
        )


def _check_excluded(name: str, excluded: Sequence[int], num_columns: int) -> None:
    if len(excluded) > MAX_COLUMNS:
        raise ValueError(
            f"{name}: excluded must hold at most {MAX_COLUMNS} columns, got {len(excluded)}"
        )
    outside = [c for c in excluded if not 0 <= c < num_columns]
    if outside:
        raise ValueError(
            f"{name}: excluded columns must be >= 0 and < {num_columns}, got {outside}"
        )


def _check_records(name: str, argument: str, records: Tensor, shape: tuple[int, ...]) -> None:
    is_good = records.dtype == torch.float64 and records.is_contiguous()
    if not is_good or tuple(records.shape) != shape:
        raise ValueError(
            f"{name}: {argument} must be contiguous float64 {list(shape)}, "
            f"got {records.dtype} {list(records.shape)}"
        )


def _check_parameters(name: str, rows: Rows, num_rows: int, device: torch.device) -> None:
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
    """Check that epsilons are > 0, and others >= 0."""
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
        least = float(value.min())  # looking at values on a GPU would make the host wait for it
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
