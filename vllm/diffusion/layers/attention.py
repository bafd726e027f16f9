# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention over packed sequences, and the two stages around it.

Letters: R rows of a chunk, T rows of the key and value buffers, D hidden size, H and KV query and
key/value heads of this rank, hd head width.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm.diffusion import ops
from vllm.distributed import tensor_model_parallel_all_reduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

# cuDNN is the fastest of torch's backends on long sequences; it takes 16-bit inputs only.
_CUDA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Span(NamedTuple):
    """Queries of one sequence and all keys of that sequence, as half-open row ranges.

    `q_start`, `q_end` are rows of the chunk, `kv_start`, `kv_end` rows of the key and value
    buffers.
    """

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int


def attention(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span]) -> Tensor:
    """softmax(q k^T / sqrt(hd)) v of every span, no mask; softmax statistics in fp32.

    Args:
        q: [R, H, hd].
        k, v: [T, KV, hd], KV dividing H; query head h reads key/value head h // (H / KV).
        spans: tile the rows 0..R-1 in order.

    Returns:
        [R, H, hd], the dtype of q.

    Raises:
        ValueError: the spans do not tile the rows of q.
    """
    spans = [span for span in spans if span.q_end > span.q_start]
    ends = [0, *(span.q_end for span in spans)]
    if [span.q_start for span in spans] != ends[:-1] or ends[-1] != q.shape[0]:
        raise ValueError(f"spans: wanted ranges that tile {q.shape[0]} query rows, given {spans}")
    if len(spans) == 1:
        return _attend_one(q, k[spans[0].kv_start : spans[0].kv_end], _values(v, spans[0]))
    if len(spans) > 1 and q.is_cuda and _can_be_packed(q, k, spans):
        return _attend_packed(q, k, v, tuple(spans))
    out = torch.empty_like(q)
    for span in spans:
        keys = k[span.kv_start : span.kv_end]
        rows = slice(span.q_start, span.q_end)
        out[rows] = _attend_one(q[rows], keys, _values(v, span))
    return out


def _values(v: Tensor, span: Span) -> Tensor:
    return v[span.kv_start : span.kv_end]


def _can_be_packed(q: Tensor, k: Tensor, spans: Sequence[Span]) -> bool:
    """Whether one launch can serve all spans: 16-bit values, keys of the spans side by side."""
    grouped = q.shape[1] != k.shape[1]
    if q.dtype.itemsize != 2 or (grouped and not _varlen_takes_grouped_heads()):
        return False
    return all(a.kv_end == b.kv_start for a, b in itertools.pairwise(spans))


@functools.cache
def _varlen_takes_grouped_heads() -> bool:
    """False before torch 2.12, whose variable-length attention wants as many key as query heads."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence; grouped heads are read in place, never repeated."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    choice = sdpa_kernel(_CUDA_PRIORITY, set_priority=True) if q.is_cuda else nullcontext()
    with choice:
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """Attention of several sequences in one launch; their keys lie one after another."""
    from torch.nn.attention.varlen import varlen_attn

    ends = _cumulative_ends(spans, q.device)
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    keys = slice(spans[0].kv_start, spans[-1].kv_end)
    out = varlen_attn(
        q.contiguous(),
        k[keys],
        v[keys],
        ends.queries,
        ends.keys,
        max(span.q_end - span.q_start for span in spans),
        max(span.kv_end - span.kv_start for span in spans),
        **grouped,
    )
    assert isinstance(out, torch.Tensor)
    return out


class _Ends(NamedTuple):
    queries: Tensor  # [S + 1] int32, 0 and then the end of each span's queries
    keys: Tensor  # [S + 1] int32, the same of its keys, from the first span's first key


@functools.lru_cache(maxsize=64)
def _cumulative_ends(spans: tuple[Span, ...], device: torch.device) -> _Ends:
    """Device tensors of the span ends; cached, for all layers of a step ask for the same."""
    first_key = spans[0].kv_start
    queries = [0, *(span.q_end for span in spans)]
    keys = [0, *(span.kv_end - first_key for span in spans)]
    return _Ends(
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class SelfAttention:
    """The keys-values stage and the attend stage of one layer, over weights owned elsewhere.

    `q_norm` and `k_norm`, where the model has them, map [R, heads, hd] to the same shape. `clip`
    bounds the projections' elements, before the norms.
    """

    norm: RMSNorm
    qkv_proj: QKVParallelLinear
    out_proj: RowParallelLinear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    clip: float | None = None

    def keys_values(
        self, x: Tensor, rotary: Rotary, k: Tensor, v: Tensor, q: Tensor | None = None
    ) -> None:
        """Write this layer's rotated keys and its values of the rows of a chunk.

        Args:
            x: [R, D], the residual stream.
            rotary: the table rows of these rows' positions.
            k, v: [R, KV, hd], written.
            q: [R, H, hd], written with the rotated queries of the same fused product.
        """
        if x.shape[0] == 0:
            return
        q_width = self.qkv_proj.num_heads * self.qkv_proj.head_size
        kv_width = self.qkv_proj.num_kv_heads * self.qkv_proj.head_size
        first = 0 if q is not None else q_width
        product = self._project(x, slice(first, None))
        k_start = q_width - first
        if q is not None:
            _write_heads(product[:, :q_width], self.q_norm, q)
        _write_heads(product[:, k_start : k_start + kv_width], self.k_norm, k)
        _write_heads(product[:, k_start + kv_width :], None, v)
        ops.apply_rotary(q, k, rotary.cos, rotary.sin)

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        k: Tensor,
        v: Tensor,
        spans: Sequence[Span],
        q: Tensor | None = None,
    ) -> None:
        """x += Wo attention(q, k, v), in place, summed over the ranks.

        Args:
            x: [R, D], the residual stream, not yet updated by this layer; written.
            rotary: the table rows of these rows' positions.
            k, v: [T, KV, hd], complete for every sequence of the spans.
            spans: what each row reads.
            q: [R, H, hd] as `keys_values` wrote them; None computes them from x.
        """
        if x.shape[0] == 0:
            return
        if q is None:
            q = self._queries(x, rotary)
        heads = attention(q, k, v, spans).reshape(x.shape[0], -1)
        x.add_(tensor_model_parallel_all_reduce(ops.linear(heads, self.out_proj)))

    def _queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """The rotated queries [R, H, hd] of a chunk of the residual stream."""
        num_heads, head_dim = self.qkv_proj.num_heads, self.qkv_proj.head_size
        product = self._project(x, slice(0, num_heads * head_dim))
        q = product.view(-1, num_heads, head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        ops.apply_rotary(q, None, rotary.cos, rotary.sin)
        return q

    def _project(self, x: Tensor, columns: slice) -> Tensor:
        """Columns of the fused product of the normed rows, clipped where the model does so."""
        product = ops.linear(self.norm(x), self.qkv_proj, columns=columns)
        return product if self.clip is None else product.clamp_(-self.clip, self.clip)


def _write_heads(product: Tensor, norm: RMSNorm | None, out: Tensor) -> None:
    """Split columns [R, heads * hd] into heads and write them, normalised, to out."""
    heads = product.view(out.shape)
    if norm is None:
        out.copy_(heads)
    else:
        norm(heads, out=out)
