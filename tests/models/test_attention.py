# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout, on the CPU: against its definition, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from vllm.diffusion.layers.attention_backends import (
    AttentionLayout,
    Backend,
    Span,
    attend,
    can_be_captured,
    check_tiling,
    choose_backend,
)

HEAD_DIM = 8
NUM_KEYS = 9
LAYOUTS = [
    [Span(0, 9, 0, 9)],  # one whole sequence
    [Span(0, 3, 2, 9)],  # a chunk of one
    [Span(0, 4, 0, 4), Span(4, 5, 4, 5), Span(5, 9, 5, 9)],  # packed, one row among them
    [Span(0, 2, 0, 4), Span(2, 4, 4, 9)],  # a chunk across a border
    [Span(0, 2, 5, 9), Span(2, 4, 0, 5)],  # key ranges in another order
    [Span(0, 2, 6, 7), Span(2, 4, 1, 3)],  # gaps between key ranges
    [Span(0, 2, 0, 4), Span(2, 2, 4, 5), Span(2, 4, 5, 9)],  # a sequence without queries
    [Span(0, 2, 0, 4), Span(2, 4, 4, 4)],  # a sequence without keys
    [Span(0, 0, 0, 0)],
    [],
]


def heads(rows: int, num_heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, num_heads, HEAD_DIM, generator=generator)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[Span]
) -> torch.Tensor:
    """The definition, one span, head and query at a time, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for span in spans:
        keys = slice(span.kv_start, span.kv_end)
        for row in range(span.q_start, span.q_end):
            for head in range(q.shape[1]):
                scores = k[keys, head // group].double() @ q[row, head].double()
                weights = torch.softmax(scores / math.sqrt(HEAD_DIM), dim=0)
                out[row, head] = weights @ v[keys, head // group].double()
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spans", LAYOUTS)
def test_attend_equals_its_definition(spans: list[Span], num_kv_heads: int) -> None:
    num_rows = spans[-1].q_end if spans else 0
    q = heads(num_rows, 4, seed=1)
    k, v = heads(NUM_KEYS, num_kv_heads, seed=2), heads(NUM_KEYS, num_kv_heads, seed=3)
    layout = AttentionLayout.of(spans, "cpu")
    result = attend(q, k, v, layout)
    wanted = plain_attention(q, k, v, spans)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    assert result.is_contiguous()
    out = torch.full_like(q, torch.nan)
    assert attend(q, k, v, layout, out=out) is out
    assert torch.equal(out, result)


def test_views_into_a_fused_product_give_the_same_bits() -> None:
    product = heads(NUM_KEYS, 4 + 2 + 2, seed=4)
    q, k, v = product[:, :4], product[:, 4:6], product[:, 6:]
    layout = AttentionLayout.of([Span(0, 5, 0, 5), Span(5, 9, 5, 9)], "cpu")
    copies = attend(q.contiguous(), k.contiguous(), v.contiguous(), layout)
    assert torch.equal(attend(q, k, v, layout), copies)


def test_each_sequence_has_the_bits_of_torchs_attention() -> None:
    q, k, v = heads(6, 4, seed=5), heads(NUM_KEYS, 4, seed=6), heads(NUM_KEYS, 4, seed=7)
    spans = [Span(0, 2, 4, 9), Span(2, 6, 0, 4)]
    result = attend(q, k, v, AttentionLayout.of(spans, "cpu"))
    for span in spans:
        rows, keys = slice(span.q_start, span.q_end), slice(span.kv_start, span.kv_end)
        parts = (part.transpose(0, 1)[None] for part in (q[rows], k[keys], v[keys]))
        wanted = functional.scaled_dot_product_attention(*parts)
        assert torch.equal(result[rows], wanted[0].transpose(0, 1))


def test_layout_of_spans() -> None:
    spans = [Span(0, 2, 5, 9), Span(2, 2, 3, 4), Span(2, 5, 0, 1)]
    layout = AttentionLayout.of(spans, "cpu")
    assert layout.query_ends.tolist() == [0, 2, 2, 5]
    assert layout.key_starts.tolist() == [5, 3, 0, 0]
    assert layout.key_counts.tolist() == [4, 1, 1]
    assert (layout.max_queries, layout.max_keys) == (3, 4)
    assert layout.spans == tuple(spans)
    tensors = (layout.query_ends, layout.key_starts, layout.key_counts)
    assert all(tensor.dtype == torch.int32 for tensor in tensors)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(1, 4, 0, 4)],  # a row before the first
        [Span(0, 2, 0, 4), Span(3, 4, 0, 4)],  # a gap
        [Span(0, 3, 0, 4), Span(2, 4, 0, 4)],  # an overlap
        [Span(0, 2, 0, 4), Span(2, 1, 0, 4), Span(1, 4, 0, 4)],  # an end before its start
        [Span(0, 4, 3, 1)],
    ],
)
def test_spans_must_follow_one_another(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="spans: wanted ranges that tile"):
        AttentionLayout.of(spans, "cpu")


@pytest.mark.parametrize("num_rows", [3, 5])
def test_spans_must_tile_the_rows(num_rows: int) -> None:
    q = heads(num_rows, 2, seed=1)
    layout = AttentionLayout.of([Span(0, 4, 0, 3)], "cpu")
    with pytest.raises(ValueError, match=f"tile {num_rows} query rows"):
        attend(q, q, q, layout)
    with pytest.raises(ValueError, match=f"tile {num_rows} query rows"):
        check_tiling([Span(0, 4, 0, 3)], num_rows)


def test_cpu_needs_the_spans_of_the_host() -> None:
    q = heads(4, 2, seed=1)
    layout = AttentionLayout.of([Span(0, 4, 0, 4)], "cpu")._replace(spans=None)
    assert not can_be_captured(q.dtype, HEAD_DIM, q.device)
    assert choose_backend(q, q, layout) is Backend.SDPA
    with pytest.raises(ValueError, match=r"layout\.spans: wanted .* given None"):
        attend(q, q, q, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_graph_without_a_packed_kernel(dtype: torch.dtype) -> None:
    assert not can_be_captured(dtype, 128, torch.device("cuda"))
