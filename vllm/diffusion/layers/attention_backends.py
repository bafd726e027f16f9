# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences: one interface, and the fastest kernel for each shape.

Attention is bidirectional, and block-causal for sequences on a grid of blocks (`Span`).

Letters: R query rows, N rows of the keys and values, S sequences, H and KV query and key/value
heads of this rank, hd head width.
"""

from __future__ import annotations

import enum
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm.diffusion import ops
from vllm.diffusion.core.devices import capability, num_multiprocessors
from vllm.diffusion.core.spans import Span, check_tiling
from vllm.diffusion.layers.packed_attention import (
    attend_flash3,
    attend_packed,
    attend_tiled,
    fits_tiles,
    flash3,
)
from vllm.diffusion.layers.split_attention import can_split, split_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout, PageTable

    _Layout: TypeAlias = AttentionLayout[Tensor]

# cuDNN is the fastest of torch's backends on long sequences; it takes 16-bit inputs only.
_CUDA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Backend(enum.Enum):
    """A way to compute attention; `choose_backend` selects the fastest."""

    SDPA = "torch's scaled_dot_product_attention, one call per sequence; cuDNN if available"
    FLASH = "torch's variable-length flash kernel, one launch for all sequences"
    FLASH3 = "upstream's FlashAttention 3, of one sequence"
    SPLIT = "our Triton kernel, one launch for all sequences; with few queries the keys are split"
    FP8 = "cuDNN's fp8 attention by its Python front end, one call per sequence"
    TILED = "our CUDA kernel for Hopper, one launch for all sequences, if they fill the card"


# Thresholds of the choice; docs/measurements/kernels.md has the measurements.

# Minimum queries of a sequence for which cuDNN and FlashAttention 3 are faster than all others.
_MANY_QUERIES = 512
# cuDNN makes a plan for every new shape, which takes 40 ms. The plan of a whole sequence serves all
# layers and steps. With this many keys it pays after 75 steps, with double the number after 20.
_KEYS_OF_WHOLE = 1024
# The rows after the last layer may differ in every step. With this many keys a step takes
# so long that the time of a plan does not matter.
_KEYS_OF_PART = 16384
# Minimum rows, of one head each, per multiprocessor for which tiles of queries fill a card: three
# quarters of a tile of 128. With fewer rows the keys are split.
_ROWS_OF_HEADS = 96
# Queries under one mask when torch's attention computes a sequence on a grid of blocks.
_MASKED_KEYS = 256


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: _Layout,
    out: Tensor | None = None,
    *,
    backend: Backend | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T / sqrt(hd)) v of every sequence; softmax statistics in fp32.

    Args:
        q: [R, H, hd]; rows may be strided, as views into a fused product are.
        k, v: [N, KV, hd], KV dividing H, rows may be strided; query head h reads key/value head
            h // (H / KV).
        layout: the sequences.
        out: [R, H, hd] contiguous, written.
        backend: a backend that `can_serve`, instead of the fastest.
        scales: [4] fp32, of fp8 queries, keys, values and results; None for other dtypes.

    Returns:
        [R, H, hd] contiguous, the dtype of q; `out` if given.

    Raises:
        ValueError: the host spans do not tile the rows of q, or are missing although the only
            backend for these tensors requires them (see `can_be_captured`).
    """
    if q.shape[0] == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    backend = backend or choose_backend(q, layout)
    if backend is Backend.FP8:
        from vllm.diffusion.layers import cudnn_fp8

        assert scales is not None and out is not None
        return cudnn_fp8.attend(q, k, v, layout, scales, out)
    return _ATTEND[backend](q, k, v, layout, out)


def can_be_captured(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether `attend` needs no host spans for such tensors, so that a graph can contain it."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return capability(device) >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256


def reads_pages(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether `attend` reads keys in their pages, without host spans.

    Otherwise it first copies the keys and values of a sequence to one range of rows.
    """
    return can_be_captured(dtype, head_dim, device) and can_split(dtype, head_dim, device)


def _is_in_pages_or_blocks(layout: _Layout) -> bool:
    """Whether a layout has pages or block grids, which only our kernels read."""
    return layout.pages is not None or layout.block_lengths is not None


def can_serve(backend: Backend, q: Tensor, layout: _Layout) -> bool:
    """Whether a backend can compute attention of these tensors."""
    if backend is Backend.SDPA:
        return layout.spans is not None
    is_fp8 = q.dtype == torch.float8_e4m3fn
    if is_fp8 or backend is Backend.FP8:
        is_plain = layout.spans is not None and not _is_in_pages_or_blocks(layout)
        return is_fp8 and backend is Backend.FP8 and is_plain
    if backend is Backend.TILED:
        return fits_tiles(q, layout)
    if backend is not Backend.SPLIT and _is_in_pages_or_blocks(layout):
        return False
    if not can_be_captured(q.dtype, q.shape[2], q.device):
        return False
    if backend is Backend.FLASH3:
        is_lone = layout.spans is not None and len(layout.spans) == 1
        return is_lone and layout.max_keys > 0 and flash3(q.device) is not None
    return backend is Backend.FLASH or can_split(q.dtype, q.shape[2], q.device)


def available_backends(
    dtype: torch.dtype, head_dim: int, device: torch.device
) -> tuple[Backend, ...]:
    """Return the backends that serve such heads in some shape."""
    if not can_be_captured(dtype, head_dim, device):
        return (Backend.SDPA,)
    backends = [Backend.SDPA]
    if flash3(device):
        backends.append(Backend.FLASH3)
    if ops.has_attention(torch.empty(0, 1, head_dim, dtype=dtype, device=device), 1):
        backends.append(Backend.TILED)
    backends.append(Backend.SPLIT if can_split(dtype, head_dim, device) else Backend.FLASH)
    return tuple(backends)


def choose_backend(q: Tensor, layout: _Layout) -> Backend:
    """Return the fastest backend that serves these tensors."""
    if q.dtype == torch.float8_e4m3fn:
        return Backend.FP8
    if not can_be_captured(q.dtype, q.shape[2], q.device):
        return Backend.SDPA
    ours = Backend.TILED if _fills_card(q, layout) else Backend.SPLIT
    if _is_in_pages_or_blocks(layout):
        return ours if can_serve(ours, q, layout) else Backend.SDPA
    spans = layout.spans or ()
    if spans and min(span.num_queries for span in spans) >= _MANY_QUERIES:
        if can_serve(Backend.FLASH3, q, layout):
            return Backend.FLASH3
        if all(_is_worth_a_plan(span) for span in spans):
            return Backend.SDPA
    return ours if can_serve(ours, q, layout) else Backend.FLASH


def _fills_card(q: Tensor, layout: _Layout) -> bool:
    """Whether the tiled kernel can serve, and there are queries for every multiprocessor."""
    if not can_serve(Backend.TILED, q, layout):
        return False
    return q.shape[0] * q.shape[1] >= _ROWS_OF_HEADS * num_multiprocessors(q.device)


def _is_worth_a_plan(span: Span) -> bool:
    num_queries, num_keys = span.num_queries, span.num_keys
    return num_keys >= (_KEYS_OF_WHOLE if num_keys == num_queries else _KEYS_OF_PART)


def _attend_each(q: Tensor, k: Tensor, v: Tensor, layout: _Layout, out: Tensor | None) -> Tensor:
    """Attend one sequence at a time."""
    if layout.spans is None:
        raise ValueError(
            f"layout.spans: wanted the host's spans, for {q.dtype} heads of width {q.shape[2]} on"
            f" {q.device} are served a sequence at a time, given None"
        )
    check_tiling(layout.spans, q.shape[0])
    spans = tuple(span for span in layout.spans if span.q_end > span.q_start)
    if len(spans) == 1 and out is None:
        return _attend_span(q, k, v, spans[0], layout.pages).contiguous()
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for span in spans:
        out[span.q_start : span.q_end] = _attend_span(q, k, v, span, layout.pages)
    return out


def _attend_span(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    pages: PageTable | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend within one sequence; grouped heads are read in place, never repeated.

    `mask` [queries, keys] is True where a query reads a key; with None every query reads all keys.
    """
    q, start, end = q[span.q_start : span.q_end], span.kv_start, span.kv_end
    if start == end:
        return torch.zeros_like(q)
    if span.block_length:
        return _attend_blocks(q, k, v, span, pages)
    if pages is None:
        k, v = k[start:end], v[start:end]
    else:
        rows = pages.rows_of(start, end)
        k, v = k.index_select(0, rows), v.index_select(0, rows)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    choice = sdpa_kernel(_CUDA_PRIORITY, set_priority=True) if q.is_cuda else nullcontext()
    with choice:
        is_grouped = q.shape[1] != k.shape[1]
        out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=is_grouped)
    return out.squeeze(0).transpose(0, 1)


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, span: Span, pages: PageTable | None) -> Tensor:
    """Attend within one sequence on a grid, with several blocks of nearly equal keys at once."""
    parts, start = [], 0
    while start < span.num_queries:
        # Keys after a query's own block are computed unnecessarily, and then masked.
        stop = start + max(_MASKED_KEYS, span.block_length)
        stop -= (span.first + stop) % span.block_length
        stop = min(stop, span.num_queries)
        num_keys = span.keys_read_by(stop - 1)
        ends = torch.tensor([span.keys_read_by(i) for i in range(start, stop)], device=q.device)
        mask = torch.arange(num_keys, device=q.device) < ends[:, None]
        keys = Span(0, stop - start, span.kv_start, span.kv_start + num_keys)
        parts.append(_attend_span(q[start:stop], k, v, keys, pages, mask))
        start = stop
    return torch.cat(parts)


_Attend: TypeAlias = "Callable[[Tensor, Tensor, Tensor, _Layout, Tensor | None], Tensor]"
_ATTEND: dict[Backend, _Attend] = {
    Backend.SDPA: _attend_each,
    Backend.FLASH: attend_packed,
    Backend.FLASH3: attend_flash3,
    Backend.SPLIT: split_attention,
    Backend.TILED: attend_tiled,
}
