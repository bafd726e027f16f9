# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences to keys that may be stored in pages.

There is no reference in this module: call `has_attention` first.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._support import check_vector, hopper_multiprocessors, launch, native, rows_of

ATTENTION_PAGE = 64  # keys per page


class Attended(NamedTuple):
    """Assignment of rows to the keys they attend to: S sequences, all int32 on the device.

    Attributes:
        query_ends: [S + 1], 0 and then the end of each sequence's query rows.
        key_starts: [S or more], the first key of each sequence: a row of the keys, or with
            `page_rows` a position in the pages.
        key_counts: [S], number of keys of each sequence.
        block_lengths: [S], keys per block; a query reads up to the end of its own block. 0: it
            reads all keys.
        firsts: [S], position of the first query among the keys.
        page_rows: [E], the first row of each page of `ATTENTION_PAGE` keys.
    """

    query_ends: Tensor
    key_starts: Tensor
    key_counts: Tensor
    block_lengths: Tensor | None = None
    firsts: Tensor | None = None
    page_rows: Tensor | None = None


def has_attention(heads: Tensor, num_sequences: int) -> bool:
    """Whether `attention` has a kernel for heads [R, H, hd] like these and this many sequences."""
    if native is None or not heads.is_cuda or hopper_multiprocessors(heads.device.index) == 0:
        return False
    is_taken = heads.dtype == torch.bfloat16 and heads.shape[2] == native.ATTENTION_WIDTH
    return is_taken and num_sequences <= native.MAX_ATTENDED_SEQUENCES


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    out: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(hd)) v of every sequence, with sums and statistics in fp32.

    Launches depend on shapes alone. The kernel is fast if all sequences together have at least as
    many tiles as the card has multiprocessors. A tile is 128 rows of queries times the query heads
    that share a KV head.

    Args:
        q: [R, H, hd] bf16, hd = 128; rows and heads may be strided.
        k, v: [N, KV, hd] bf16; rows may be strided. Query head h reads key/value head
            h // (H / KV).
        attended: the sequences; their queries together cover the R rows. Values are not checked.
        out: [R, H, hd] bf16, contiguous; allocated when not given.

    Returns:
        [R, H, hd], contiguous; zeros for sequences without keys.

    Raises:
        ValueError: There is no kernel for these tensors (`has_attention`), or an argument is not as
            above.
    """
    _check(q, k, v, attended)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"attention: out must be {q.dtype} {list(q.shape)} contiguous, got {out.dtype} "
            f"{list(out.shape)} with strides {out.stride()}"
        )
    if out.numel():
        assert native is not None
        addresses = [0 if vector is None else vector.data_ptr() for vector in attended]
        launch(
            native.attention,
            q,
            q=rows_of(q),
            k=rows_of(k),
            v=rows_of(v),
            out=out.data_ptr(),
            attended=(*addresses, len(attended.key_counts)),
            num_keys=len(k),
            num_values=len(v),
            scale=math.log2(math.e) / math.sqrt(q.shape[2]),
            num_blocks=hopper_multiprocessors(q.device.index),
        )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, attended: Attended) -> None:
    name, num_sequences = "attention", len(attended.key_counts)
    if not has_attention(q, num_sequences):
        raise ValueError(
            f"{name}: no kernel for q {q.dtype} {list(q.shape)} on {q.device} of {num_sequences} "
            "sequences"
        )
    _check_heads(name, "q", q, q)
    for argument, heads in (("k", k), ("v", v)):
        _check_heads(name, argument, heads, q)
        if q.shape[1] % heads.shape[1] or heads.stride(1) != heads.shape[2]:
            raise ValueError(
                f"{name}: {argument} must be [N, KV, {q.shape[2]}] with KV dividing {q.shape[1]} "
                f"and heads side by side, got {list(heads.shape)} with strides {heads.stride()}"
            )
    for field, vector in attended._asdict().items():
        if vector is not None:
            check_vector(name, field, vector, (torch.int32,), (-1,), q.device)


def _check_heads(name: str, argument: str, heads: Tensor, like: Tensor) -> None:
    fits = heads.dim() == 3 and heads.dtype == like.dtype and heads.device == like.device
    fits = fits and heads.shape[2] == like.shape[2] and heads.stride(2) == 1
    fits = fits and not any(stride % 8 for stride in heads.stride()[:2])
    if not fits or heads.data_ptr() % 16:
        raise ValueError(
            f"{name}: {argument} must be {like.dtype} [any, any, {like.shape[2]}] on {like.device} "
            f"whose rows and heads lie on whole 16 bytes, got {heads.dtype} {list(heads.shape)} "
            f"with strides {heads.stride()}"
        )
