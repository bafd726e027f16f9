# SPDX-License-Identifier: Apache-2.0
"""Attention over spans, rotary tables and norms by themselves."""

from __future__ import annotations

import math

import pytest
import torch

from vllm.diffusion import ops
from vllm.diffusion.layers.attention import Span, attention
from vllm.diffusion.layers.rotary import rotary_rows

HEAD_DIM = 8


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
@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 9, 0, 9)],  # one whole sequence
        [Span(0, 3, 2, 9)],  # a chunk of one
        [Span(0, 4, 0, 4), Span(4, 5, 4, 5), Span(5, 9, 5, 9)],  # packed, one row among them
        [Span(0, 2, 0, 4), Span(2, 4, 4, 9)],  # a chunk across a border
        [Span(0, 2, 5, 9), Span(2, 4, 0, 5)],  # keys elsewhere than next to each other
        [Span(0, 2, 0, 4), Span(2, 2, 4, 5), Span(2, 4, 5, 9)],  # a sequence without queries
        [],
    ],
)
def test_attention_equals_its_definition(spans: list[Span], num_kv_heads: int) -> None:
    num_rows = max((span.q_end for span in spans), default=0)
    q = heads(num_rows, 4, seed=1)
    k, v = heads(9, num_kv_heads, seed=2), heads(9, num_kv_heads, seed=3)
    wanted = plain_attention(q, k, v, spans)
    torch.testing.assert_close(attention(q, k, v, spans).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 300, 0, 300)],  # one sequence: cuDNN or flash attention in bf16
        [Span(0, 100, 0, 100), Span(100, 101, 100, 101), Span(101, 300, 101, 300)],  # packed
        [Span(0, 30, 100, 200), Span(30, 60, 200, 300)],  # a chunk, keys from row 100 on
        [Span(0, 30, 200, 300), Span(30, 60, 0, 100)],  # one by one
    ],
)
def test_attention_on_cuda_equals_attention_on_cpu(
    spans: list[Span], num_kv_heads: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(spans[-1].q_end, 4, 64, generator=generator).to(dtype)
    k, v = torch.randn(2, 300, num_kv_heads, 64, generator=generator).to(dtype)
    wanted = attention(q.double(), k.double(), v.double(), spans)
    given = attention(q.cuda(), k.cuda(), v.cuda(), spans)
    assert given.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bf16: a few units in the last place
    torch.testing.assert_close(given.cpu().double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(0, 3, 0, 4)],  # rows left over
        [Span(0, 2, 0, 4), Span(3, 4, 0, 4)],  # a gap
        [Span(0, 3, 0, 4), Span(2, 4, 0, 4)],  # an overlap
        [Span(0, 5, 0, 4)],
    ],
)
def test_spans_must_tile_the_rows(spans: list[Span]) -> None:
    q = heads(4, 2, seed=1)
    with pytest.raises(ValueError, match="spans"):
        attention(q, q, q, spans)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_tables_at_any_position(theta: float) -> None:
    positions = torch.tensor([0, 1, 7, 4095, 204799])
    rotary = rotary_rows(positions, theta=theta, rotary_dim=HEAD_DIM)
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    angles = positions.double()[:, None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=1)
    # an fp32 angle is exact to a part in 2^23 or so: that much, in radians
    tolerance = 3e-7 * float(positions.max())
    torch.testing.assert_close(rotary.cos.double(), angles.cos(), rtol=0, atol=tolerance)
    torch.testing.assert_close(rotary.sin.double(), angles.sin(), rtol=0, atol=tolerance)
    assert torch.equal(rotary.rows(1, 3).cos, rotary.cos[1:3])
    assert torch.equal(rotary.rows(1, 3).sin, rotary.sin[1:3])


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    rotary = rotary_rows(torch.tensor([3]), theta=10000.0, rotary_dim=HEAD_DIM)
    k = heads(1, 2, seed=4)
    turned = k.clone()
    ops.apply_rotary(None, turned, rotary.cos, rotary.sin)
    half = HEAD_DIM // 2
    as_complex = torch.complex(k[..., :half], k[..., half:])
    angles = 3.0 * 10000.0 ** -(torch.arange(half) * 2 / HEAD_DIM)
    wanted = as_complex * torch.polar(torch.ones(half), angles)
    torch.testing.assert_close(turned, torch.cat((wanted.real, wanted.imag), dim=-1))


def test_rotation_of_queries_alone_and_together() -> None:
    rotary = rotary_rows(torch.arange(5), theta=10000.0, rotary_dim=HEAD_DIM)
    q, k = heads(5, 4, seed=5), heads(5, 2, seed=6)
    alone_q, alone_k, both_q, both_k = q.clone(), k.clone(), q.clone(), k.clone()
    ops.apply_rotary(alone_q, None, rotary.cos, rotary.sin)
    ops.apply_rotary(None, alone_k, rotary.cos, rotary.sin)
    ops.apply_rotary(both_q, both_k, rotary.cos, rotary.sin)
    assert torch.equal(alone_q, both_q)
    assert torch.equal(alone_k, both_k)


def test_norm_casts_back_before_the_gain() -> None:
    x = torch.tensor([[1.0, 3.0, -2.0, 0.5]], dtype=torch.bfloat16)
    gain = torch.tensor([1.01, 0.99, 1.5, -1.0], dtype=torch.bfloat16)
    wide = x.float()
    normed = (wide / (wide.square().mean() + 1e-5).sqrt()).to(torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, gain, 1e-5), gain * normed)
