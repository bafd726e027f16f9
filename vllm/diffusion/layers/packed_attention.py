# SPDX-License-Identifier: Apache-2.0
"""Attention by kernels of PyTorch, upstream and ours that run on a GPU only.

Arguments are as for `attention_backends.attend`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from vllm.diffusion import ops
from vllm.diffusion.core.devices import capability
from vllm.diffusion.core.spans import check_tiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout

    _Layout: TypeAlias = AttentionLayout[Tensor]


@functools.cache
def flash3(device: torch.device) -> Callable[..., Tensor] | None:
    """Return upstream's FlashAttention 3; None without its binary or a Hopper GPU."""
    if capability(device)[0] != 9:
        return None
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    if not is_fa_version_supported(3):
        return None
    return functools.partial(flash_attn_varlen_func, fa_version=3)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, out: Tensor | None) -> Tensor:
    """Attend in all sequences by one launch of the flash kernel.

    The kernel reads the first key of a sequence from `cum_seq_k` and the number of keys from
    `seqused_k`, so the ranges need not be adjacent.
    """
    # With max_q 1 and grouped heads, the kernel assumes one query in every sequence.
    max_queries = max(layout.max_queries, 2)
    if layout.max_keys == 0:  # the kernel rejects a bound of 0
        return (
            torch.zeros_like(q, memory_format=torch.contiguous_format)
            if out is None
            else out.zero_()
        )
    ends = (layout.query_ends, layout.key_starts, max_queries, layout.max_keys)
    result = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, 0.0, False, False, seqused_k=layout.key_counts
    )[0]
    assert isinstance(result, torch.Tensor)
    return result.contiguous() if out is None else out.copy_(result)


def attend_flash3(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, out: Tensor | None) -> Tensor:
    """Attend in one sequence by upstream's kernel, which reads keys from row 0 on."""
    attention = flash3(q.device)
    assert attention is not None and layout.spans is not None
    check_tiling(layout.spans, q.shape[0])
    (span,) = layout.spans
    keys = slice(span.kv_start, span.kv_end)
    return attention(
        *(q, k[keys], v[keys]),
        max_seqlen_q=layout.max_queries,
        cu_seqlens_q=layout.query_ends,
        max_seqlen_k=layout.max_keys,
        cu_seqlens_k=functional.pad(layout.key_counts, (1, 0)),
        out=out,
    )


def fits_tiles(q: Tensor, layout: _Layout) -> bool:
    """Whether our tiled kernel serves these queries and this layout."""
    pages = layout.pages
    if pages is not None and pages.size != ops.ATTENTION_PAGE:
        return False
    return ops.has_attention(q, len(layout.key_counts))


def attend_tiled(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, out: Tensor | None) -> Tensor:
    """Attend in all sequences by one launch, with tiles of queries in turn."""
    page_rows = None if layout.pages is None else layout.pages.rows
    attended = ops.Attended(*layout[:3], layout.block_lengths, layout.firsts, page_rows)
    return ops.attention(q, k, v, attended, out)
