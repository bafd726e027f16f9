# SPDX-License-Identifier: Apache-2.0
"""What crosses the cards of one host within a kernel: sums over ranks, and parts side by side."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._support import check_like, dtype_of, has_kernel, launch, native

_VECTOR_BYTES = 16
_THREADS = 512  # of a block, each with a vector at a time
_BLOCK_BYTES = _THREADS * _VECTOR_BYTES


class Meeting(NamedTuple):
    """Memory of every rank as this card addresses it, and how ranks wait for each other in it.

    All ranks make the same calls in the same order. A call returns what the others had written
    before theirs; what it reads may be written again only after the call that follows it.

    Attributes:
        parts: address of what is read of each rank, on 16 bytes.
        flags: address of [`MAX_RANK_BLOCKS`, `MAX_RANKS`] uint32 of each rank, zero at first.
        calls: [`MAX_RANK_BLOCKS`] int32 on this card, zero at first.
        is_over: an integer in pinned memory; while it is not zero nobody waits for others.
        rank: this one.
    """

    parts: tuple[int, ...]
    flags: tuple[int, ...]
    calls: Tensor
    is_over: Tensor
    rank: int


def has_sum_ranks(num_ranks: int) -> bool:
    """Whether the kernels are built, and for so many ranks."""
    return native is not None and num_ranks in (2, 4, 8)


def flag_bytes() -> int:
    """Bytes of the flags of a rank."""
    assert native is not None
    return 4 * int(native.MAX_RANK_BLOCKS) * int(native.MAX_RANKS)


def call_counts(device: torch.device) -> Tensor:
    """The calls of a rank that has made none."""
    assert native is not None
    return torch.zeros(int(native.MAX_RANK_BLOCKS), dtype=torch.int32, device=device)


def sum_ranks(
    meeting: Meeting, out: Tensor, residual: Tensor | None = None, *, most_blocks: int
) -> None:
    """out = residual + the parts of all ranks, added in fp32 in their order and rounded once.

    Args:
        meeting: with a part of out's shape and dtype at every rank.
        out: bf16, fp16 or fp32, contiguous, whole vectors of 16 bytes; written.
        residual: like out; may be out.
        most_blocks: of the launch.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    name = "sum_ranks"
    num_bytes = out.numel() * out.element_size()
    rest = out if residual is None else residual
    check_like(name, "residual", rest, out, out.shape)
    is_whole = num_bytes % _VECTOR_BYTES == 0 and out.is_contiguous() and rest.is_contiguous()
    if not has_kernel(out) or not is_whole:
        raise ValueError(f"{name}: out must be contiguous vectors of 16 bytes on a GPU")
    assert native is not None
    launch(
        native.sum_ranks,
        out,
        **_meeting(meeting, -(-num_bytes // _BLOCK_BYTES), most_blocks),
        residual=0 if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        dtype=dtype_of(out),
        count=out.numel(),
    )


def norms_sums(num_columns: int, dtype: torch.dtype) -> bool:
    """Whether `sum_norm_ranks` takes rows of this width: from 33 to 1,024 vectors of 16 bytes."""
    num_vectors, rest = divmod(num_columns * dtype.itemsize, _VECTOR_BYTES)
    return rest == 0 and 32 < num_vectors <= 2 * _THREADS


def sum_norm_ranks(
    meeting: Meeting, out: Tensor, weight: Tensor, eps: float, normed: Tensor, *, most_blocks: int
) -> None:
    """out += the parts of all ranks, as `sum_ranks`, and normed = `rms_norm` of it.

    Args:
        meeting: with a part of out's shape and dtype at every rank.
        out: [R, D] of a width that `norms_sums`; bf16, fp16 or fp32, contiguous, written.
        weight: [D] like out.
        eps: added to the mean square.
        normed: like out, written.
        most_blocks: of the launch, each of which has a row at a time.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    name = "sum_norm_ranks"
    check_like(name, "normed", normed, out, out.shape)
    check_like(name, "weight", weight, out, out.shape[1:])
    tensors = (out, normed, weight)
    is_whole = all(x.is_contiguous() and x.data_ptr() % _VECTOR_BYTES == 0 for x in tensors)
    if not has_kernel(out) or not is_whole or not norms_sums(out.shape[1], out.dtype):
        raise ValueError(f"{name}: rows must be 33 to 1,024 vectors of 16 bytes on a GPU")
    assert native is not None
    launch(
        native.sum_norm_ranks,
        out,
        **_meeting(meeting, len(out), most_blocks),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        normed=normed.data_ptr(),
        dtype=dtype_of(out),
        num_rows=len(out),
        num_columns=out.shape[1],
        eps=eps,
    )


def gather_ranks(meeting: Meeting, out: Tensor, *, most_blocks: int) -> None:
    """Write the parts of all ranks one after the other.

    Args:
        meeting: with a part of the dtype at every rank.
        out: [ranks, ...], contiguous, whole vectors of 16 bytes a rank; written.
        most_blocks: of the launch.

    Raises:
        ValueError: a shape or stride is not as above.
    """
    part_bytes = out[0].numel() * out.element_size()
    is_whole = part_bytes % _VECTOR_BYTES == 0 and len(out) == len(meeting.parts)
    if not has_kernel(out) or not out.is_contiguous() or not is_whole:
        raise ValueError("gather_ranks: out must be contiguous vectors of 16 bytes on a GPU")
    assert native is not None
    launch(
        native.gather_ranks,
        out,
        **_meeting(meeting, -(-part_bytes * len(out) // _BLOCK_BYTES), most_blocks),
        out=out.data_ptr(),
        count=part_bytes // _VECTOR_BYTES,
    )


def _meeting(meeting: Meeting, blocks: int, most_blocks: int) -> dict[str, object]:
    return {
        "parts": meeting.parts,
        "flags": meeting.flags,
        "calls": meeting.calls.data_ptr(),
        "is_over": meeting.is_over.data_ptr(),
        "rank": meeting.rank,
        "num_blocks": max(min(blocks, most_blocks), 1),
    }
