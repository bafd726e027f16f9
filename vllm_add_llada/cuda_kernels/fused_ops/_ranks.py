# SPDX-License-Identifier: Apache-2.0
"""Communication between the cards of one host within a kernel: sums over ranks, and gathers."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._support import check_like, dtype_of, has_kernel, launch, native

_VECTOR_BYTES = 16
_THREADS = 512  # threads per block; each processes one vector at a time


class Meeting(NamedTuple):
    """Memory of every rank as this card addresses it, with the flags by which ranks wait.

    All ranks make the same calls in the same order. A call returns the data that the other ranks
    wrote before their call. That data may be overwritten only after the next call.

    Attributes:
        parts: address of each rank's part, aligned to 16 bytes.
        flags: address of [`MAX_RANK_BLOCKS`, `MAX_RANKS`] uint32 of each rank, initially zero.
        calls: [`MAX_RANK_BLOCKS`] int32 on this card, initially zero.
        is_over: an integer in pinned memory; while it is not zero, no rank waits for the others.
        rank: number of this rank.
    """

    parts: tuple[int, ...]
    flags: tuple[int, ...]
    calls: Tensor
    is_over: Tensor
    rank: int


def has_sum_ranks(num_ranks: int) -> bool:
    """Whether the kernels are built, and support `num_ranks` ranks."""
    return native is not None and num_ranks in (2, 4, 8)


def flag_bytes() -> int:
    """Return the size of a rank's flags in bytes."""
    assert native is not None
    return 4 * int(native.MAX_RANK_BLOCKS) * int(native.MAX_RANKS)


def call_counts(device: torch.device) -> Tensor:
    """Allocate the call counters of a rank, initialised to zero."""
    assert native is not None
    return torch.zeros(int(native.MAX_RANK_BLOCKS), dtype=torch.int32, device=device)


def sum_ranks(
    meeting: Meeting, out: Tensor, residual: Tensor | None = None, *, most_blocks: int
) -> None:
    """Write the residual plus the parts of all ranks to `out`, added in fp32 and rounded once.

    The parts are added in the order of the ranks.

    Args:
        meeting: the memory, with a part of out's shape and dtype at every rank.
        out: bf16, fp16 or fp32, contiguous, a multiple of 16 bytes; written.
        residual: like out; may be out.
        most_blocks: maximum number of blocks of the launch.

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
        meeting=_members(meeting, num_bytes, most_blocks),
        residual=0 if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        dtype=dtype_of(out),
        count=out.numel(),
    )


def gather_ranks(meeting: Meeting, out: Tensor, *, most_blocks: int) -> None:
    """Write the parts of all ranks one after the other.

    Args:
        meeting: the memory, with a part of out's dtype at every rank.
        out: [ranks, ...], contiguous, a multiple of 16 bytes per rank; written.
        most_blocks: maximum number of blocks of the launch.

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
        meeting=_members(meeting, part_bytes * len(out), most_blocks),
        out=out.data_ptr(),
        count=part_bytes // _VECTOR_BYTES,
    )


def _members(
    meeting: Meeting, num_bytes: int, most_blocks: int
) -> tuple[tuple[int, ...], tuple[int, ...], int, int, int, int]:
    """Convert a meeting for the kernels."""
    parts, flags, calls, is_over, rank = meeting
    blocks = -(-num_bytes // (_THREADS * _VECTOR_BYTES))
    num_blocks = max(min(blocks, most_blocks), 1)
    return parts, flags, calls.data_ptr(), is_over.data_ptr(), rank, num_blocks
