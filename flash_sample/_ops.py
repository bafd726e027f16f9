# SPDX-License-Identifier: Apache-2.0
"""The public operations: check the arguments, then launch the kernel or run the reference."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .philox import TOKEN_NOISE
from .reference import Partial

_native: ModuleType | None
try:
    _native = import_module("._flash_sample", __package__)
except ModuleNotFoundError:
    _native = None
except ImportError as error:
    warnings.warn(f"flash_sample: the compiled module does not load: {error}", stacklevel=2)
    _native = None

MAX_EXCLUDED = 16  # the kernel takes the columns by value

_KERNEL_DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}


def is_built() -> bool:
    """Whether the compiled module is there; without it CUDA tensors run the reference."""
    return _native is not None


def low_confidence(logits: Tensor, *, excluded: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Best column of each row of logits, and its softmax probability.

    The score of a masked position in low-confidence remasking (Nie et al., "Large Language
    Diffusion Models", arXiv:2502.09992). One pass over the logits; on CUDA the compiled kernel
    where it is built (fp32 sums; the bits of a row do not depend on the rows beside it), else
    the reference.

    Args:
        logits: [R, V] bf16, fp16 or fp32 (fp64: reference). Rows may be strided; columns are
            contiguous. -inf columns are allowed. R may be 0.
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
    _check_logits("low_confidence", logits)
    _check_excluded("low_confidence", excluded, logits.shape[1])
    if not _has_kernel(logits):
        return reference.low_confidence(logits, excluded=excluded)
    token = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    confidence = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _launch(logits, excluded, column=token, confidence=confidence)
    return token, confidence


def low_confidence_partial(
    logits: Tensor, *, first_column: int = 0, excluded: Sequence[int] = ()
) -> Partial:
    """The same over a slice of the columns, to be joined over ranks.

    Args:
        logits: [R, V] as for `low_confidence`: the columns from ``first_column`` on.
        first_column: Column of the whole vocabulary that ``logits`` starts with.
        excluded: At most 16 columns of the whole vocabulary left out of the sum.

    Returns:
        ``Partial(maximum fp32 [R], column int64 [R], sum_exp fp32 [R])``; `merge` the slices, then
        take the `confidence`.

    Raises:
        ValueError: As `low_confidence`; ``first_column`` is negative.
    """
    _check_logits("low_confidence_partial", logits)
    if first_column < 0:
        raise ValueError(f"low_confidence_partial: first_column must be >= 0, got {first_column}")
    _check_excluded("low_confidence_partial", excluded, None)
    if not _has_kernel(logits):
        return reference.partial(logits, first_column=first_column, excluded=excluded)
    local = [c - first_column for c in excluded if 0 <= c - first_column < logits.shape[1]]
    column = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    maximum = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sum_exp = torch.empty_like(maximum)
    _launch(logits, local, column=column, maximum=maximum, sum_exp=sum_exp)
    return Partial(maximum, column + first_column, sum_exp)


def entropy(logits: Tensor, *, epsilon: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Best column of each row of logits, and the entropy of the row's softmax.

    Runs the PyTorch reference on every device for now.

    Args:
        logits: [R, V] as for `low_confidence`.
        epsilon: Positive; the entropy is ``-sum p * log(p + epsilon)``.

    Returns:
        token: int64 [R], the lowest column of the largest logit.
        entropy: fp32 [R] (fp64 for fp64 logits), in nats; +inf where the row has no finite logit.

    Raises:
        ValueError: The logits are not as above, or ``epsilon`` is not positive.
    """
    _check_logits("entropy", logits)
    _check_epsilon("entropy", epsilon)
    return reference.entropy(logits, epsilon=epsilon)


def entropy_witht(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    purpose: int = TOKEN_NOISE,
    epsilon: float = 1e-10,
) -> tuple[Tensor, Tensor]:
    """A column of each row drawn at a temperature, and the entropy of the row at it.

    The draw is the Gumbel-max one, ``argmax(logit - temperature * log(-log U))`` in fp64, with U of
    `flash_sample.philox`: a row's token depends on its logits, temperature, seed, step and position
    alone. Rows of one call may belong to different requests. Runs the PyTorch reference on every
    device for now.

    Args:
        logits: [R, V] as for `low_confidence`.
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
        ValueError: An argument is not as above. Temperatures on a GPU are not looked at.
    """
    name = "entropy_witht"
    _check_logits(name, logits)
    _check_epsilon(name, epsilon)
    _check_temperature(name, temperature, len(logits))
    _check_rows(name, "positions", positions, len(logits))
    for argument, value in (("seed", seed), ("step", step)):
        if isinstance(value, Tensor):
            _check_rows(name, argument, value, len(logits))
    return reference.entropy_witht(
        logits, temperature, seed, step, positions, purpose=purpose, epsilon=epsilon
    )


def _launch(
    logits: Tensor,
    excluded: Sequence[int],
    *,
    column: Tensor,
    confidence: Tensor | None = None,
    maximum: Tensor | None = None,
    sum_exp: Tensor | None = None,
) -> None:
    assert _native is not None
    num_rows, num_columns = logits.shape
    num_segments = -(-num_columns // _native.SEGMENT_COLUMNS)
    with torch.cuda.device(logits.device):
        workspace = torch.empty(
            3 * num_rows * num_segments, dtype=torch.float32, device=logits.device
        )
        _native.low_confidence(
            logits=logits.data_ptr(),
            dtype=getattr(_native.DataType, _KERNEL_DTYPES[logits.dtype]),
            row_stride=logits.stride(0),
            num_rows=num_rows,
            num_columns=num_columns,
            excluded=list(excluded),
            workspace=workspace.data_ptr(),
            column=column.data_ptr(),
            confidence=_address(confidence),
            maximum=_address(maximum),
            sum_exp=_address(sum_exp),
            device=torch.cuda.current_device(),
            stream=torch.cuda.current_stream().cuda_stream,
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _has_kernel(logits: Tensor) -> bool:
    return _native is not None and logits.is_cuda and logits.dtype in _KERNEL_DTYPES


def _check_logits(name: str, logits: Tensor) -> None:
    """Logits must be [R, V] floating with contiguous columns, V at least 1 (and int32)."""
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


def _check_excluded(name: str, excluded: Sequence[int], num_columns: int | None) -> None:
    if len(excluded) > MAX_EXCLUDED:
        raise ValueError(
            f"{name}: excluded must hold at most {MAX_EXCLUDED} columns, got {len(excluded)}"
        )
    outside = [c for c in excluded if c < 0 or (num_columns is not None and c >= num_columns)]
    if outside:
        bound = "" if num_columns is None else f" and < {num_columns}"
        raise ValueError(f"{name}: excluded columns must be >= 0{bound}, got {outside}")


def _check_epsilon(name: str, epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"{name}: epsilon must be > 0, got {epsilon}")


def _check_temperature(name: str, temperature: float | Tensor, num_rows: int) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_rows,) or not temperature.is_floating_point():
            raise ValueError(
                f"{name}: temperature must be a float or floating [R={num_rows}], "
                f"got {temperature.dtype} {list(temperature.shape)}"
            )
        # Looking at values on a GPU would make the host wait for it.
        if temperature.device.type == "cpu" and bool((temperature < 0).any()):
            raise ValueError(f"{name}: temperature must be >= 0, got {temperature.min().item()}")
    elif not temperature >= 0:
        raise ValueError(f"{name}: temperature must be >= 0, got {temperature}")


def _check_rows(name: str, argument: str, value: Tensor, num_rows: int) -> None:
    if value.shape != (num_rows,) or value.dtype != torch.int64:
        raise ValueError(
            f"{name}: {argument} must be int64 [R={num_rows}], "
            f"got {value.dtype} {list(value.shape)}"
        )
