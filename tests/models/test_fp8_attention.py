# SPDX-License-Identifier: Apache-2.0
"""fp8 attention approximates float64: copies of heads, surveyed scales, and each backend."""

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from vllm.diffusion import ops
from vllm.diffusion.core.spans import AttentionLayout, HeadGroup, Span
from vllm.diffusion.layers import cudnn_fp8
from vllm.diffusion.layers.attention import SelfAttention
from vllm.diffusion.layers.attention_backends import Backend, attend, can_serve, choose_backend
from vllm.diffusion.layers.fp8_attention import SURVEYED_ROWS, Fp8Attention, HeadScales

FP8 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL = HeadGroup(0, 1)


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(7)


def layer_of(num_kv_heads: int, head_dim: int) -> Fp8Attention:
    """Return fp8 attention of a layer without products."""
    layer = mock.Mock(SelfAttention, key_width=num_kv_heads * head_dim, head_dim=head_dim)
    return Fp8Attention(layer)


def statistics_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = k.flatten(1).double()
    largest = torch.stack([q.abs().amax(), v.abs().amax()]).double()
    return torch.cat((keys.sum(0), keys.new_tensor([len(k)]), keys.amax(0), -keys.amin(0), largest))


def known_of(q: Tensor, k: Tensor, v: Tensor) -> HeadScales:
    return layer_of(*k.shape[1:]).scales_from(statistics_of(q, k, v), ALL)


def copied(q: Tensor, k: Tensor, v: Tensor, known: HeadScales) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp8 copies of heads with a rotation by the angle zero."""
    out = [torch.empty(x.shape, dtype=FP8, device=x.device) for x in (q, k, v)]
    ones = torch.ones(max(len(q), len(k)), k.shape[2], device=k.device)
    ops.apply_rotary(q, None, ones[: len(q)], 0 * ones[: len(q)], None, _heads(out[0], known=known))
    tables = ones[: len(k)], 0 * ones[: len(k)]
    ops.apply_rotary(None, k, *tables, None, ops.Fp8Heads(None, *out[1:], v, *known))
    return out[0], out[1], out[2]


def _heads(q: Tensor, known: HeadScales) -> ops.Fp8Heads:
    return ops.Fp8Heads(q, None, None, None, *known)


def plain(q: Tensor, k: Tensor, v: Tensor, spans: list[Span]) -> Tensor:
    """Return attention in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    per_group = q.shape[1] // k.shape[1]
    for q_start, q_end, kv_start, kv_end, *_ in spans:
        for head in range(q.shape[1]):
            keys = k[kv_start:kv_end, head // per_group].double()
            logits = q[q_start:q_end, head].double() @ keys.T / math.sqrt(q.shape[2])
            values = v[kv_start:kv_end, head // per_group].double()
            out[q_start:q_end, head] = logits.softmax(-1) @ values
    return out


def error(actual: Tensor, known: HeadScales, wanted: Tensor) -> float:
    given = actual.double() * known.scales[3].double()
    return float((given - wanted).norm() / wanted.norm())


# Query heads, key/value heads, head width.
KINDS = [(4, 4, 128), (8, 2, 128), (4, 1, 64)]
SPANS = {
    "whole": [Span(0, 300, 0, 300)],
    "a chunk": [Span(0, 130, 5, 900)],
    "one row": [Span(0, 1, 0, 700)],
    "few rows": [Span(0, 3, 0, 65)],
    "two sequences": [Span(0, 200, 0, 450), Span(200, 333, 450, 901)],
    "no keys": [Span(0, 20, 7, 7), Span(20, 40, 0, 100)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_attention_is_as_near_as_the_format(
    generator: torch.Generator, device: str, kind: tuple[int, int, int], spans: list[Span]
) -> None:
    """The mean of keys far exceeds their spread; if it were kept, 8 bits would lose the spread."""
    num_heads, num_kv_heads, head_dim = kind
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = (spans[-1].q_end, num_heads), *[(1000, num_kv_heads)] * 2
    q, k, v = (torch.randn(*size, head_dim, generator=generator) for size in sizes)
    k[..., ::16] += 30.0
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    known = known_of(q, k, v)
    q8, k8, v8 = copied(q, k, v, known)
    layout = AttentionLayout.of(spans, device)
    assert choose_backend(q8, layout) is Backend.FP8 and can_serve(Backend.FP8, q8, layout)
    out = torch.empty(q.shape, dtype=FP8, device=device)
    assert attend(q8, k8, v8, layout, out, scales=known.scales) is out
    assert error(out, known, plain(q, k, v, spans)) < 0.075
    without = known._replace(mean=torch.zeros_like(known.mean))
    attend(q8, copied(q, k, v, without)[1], v8, layout, out, scales=known.scales)
    assert error(out, known, plain(q, k, v, spans)) > 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_and_heads_are_bit_equal(generator: torch.Generator, device: str) -> None:
    q, k, v = (torch.randn(500, 4, 64, generator=generator).to(device) for _ in range(3))
    known = known_of(q, k, v)
    q, k, v = copied(q, k, v, known)
    whole, parts = (torch.empty(q.shape, dtype=FP8, device=device) for _ in range(2))
    attend(q, k, v, AttentionLayout.of([Span(0, 500, 0, 500)], device), whole, scales=known.scales)
    for rows in (slice(0, 256), slice(256, 500)):
        layout = AttentionLayout.of([Span(0, rows.stop - rows.start, 0, 500)], device)
        attend(q[rows], k, v, layout, parts[rows], scales=known.scales)
    assert torch.equal(parts.view(torch.uint8), whole.view(torch.uint8))
    some = torch.empty(500, 2, 64, dtype=FP8, device=device)
    layout = AttentionLayout.of([Span(0, 500, 0, 500)], device)
    attend(q[:, 1:3], k[:, 1:3], v[:, 1:3], layout, some, scales=known.scales)
    assert torch.equal(some.view(torch.uint8), whole[:, 1:3].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("num_kept", [None, 5])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 32), (80, 80)])
def test_copies_are_what_the_rotation_leaves(
    generator: torch.Generator,
    device: str,
    has_norm: bool,
    num_kept: int | None,
    head_dim: int,
    rotary_dim: int,
) -> None:
    """Rows are views of wider rows, keys lose their mean, and large numbers are clipped."""
    num_rows, num_heads, num_kv_heads = 13, 6, 2
    wide = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    q, k, v = wide.to(device, torch.bfloat16).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = torch.randn(2, num_rows, rotary_dim, generator=generator).to(device)
    mean = torch.randn(num_kv_heads, head_dim, generator=generator).to(device)
    scales = torch.tensor([2.0**-8, 2.0**-7, 2.0**-6, 1.0], device=device)
    buffer = torch.zeros(num_rows, num_heads + 2 * num_kv_heads, head_dim, device=device).to(FP8)
    q8, k8, v8 = buffer.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    fp8 = ops.Fp8Heads(q8, k8, v8, v, mean, scales)
    kept = None
    if num_kept is not None:
        caches = torch.zeros(2, 9, num_kv_heads, head_dim, dtype=torch.bfloat16, device=device)
        kept = ops.Kept(v, *caches, torch.arange(num_kept, device=device))
    if has_norm:
        gains = torch.randn(2, head_dim, generator=generator).to(device, torch.bfloat16)
        ops.norm_rotary(q, k, *gains, 1e-6, cos, sin, kept, fp8)
    else:
        ops.apply_rotary(q, k, cos, sin, kept, fp8)
    if kept is not None:
        assert torch.equal(kept.k_cache[:num_kept], k[-len(kept.slots) :])
        assert torch.equal(kept.v_cache[:num_kept], v[-len(kept.slots) :])
    for out, heads, shift, scale in ((q8, q, 0, 0), (k8, k, mean, 1), (v8, v, 0, 2)):
        wanted = ((heads.float() - shift) / scales[scale]).clamp(-448, 448).to(FP8)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def test_scales_leave_room_and_pieces_do_not_matter(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(100, 2, 16, generator=generator) for _ in range(3))
    k += 5.0
    attention, whole = layer_of(2, 16), statistics_of(q, k, v)
    pieces = [statistics_of(q[i : i + 30], k[i : i + 30], v[i : i + 30]) for i in range(0, 100, 30)]
    known = attention.scales_from(whole, ALL)
    merged = attention.scales_from(attention.merged(torch.stack(pieces), ALL), ALL)
    assert torch.equal(known.scales, merged.scales)
    assert torch.allclose(known.mean, merged.mean, rtol=0, atol=1e-6)
    assert torch.allclose(known.mean, k.mean(0), rtol=0, atol=1e-5)
    for scale, heads in zip(known.scales[:3], (q, k - k.mean(0), v), strict=True):
        room = 448 * float(scale) / float(heads.abs().amax())
        assert 8 <= room <= 16.01 and math.log2(float(scale)).is_integer()
    assert known.scales[3] == known.scales[2] / 4


@pytest.mark.parametrize("num_rows", [1, 1000, SURVEYED_ROWS, SURVEYED_ROWS + 1, 204_800])
def test_surveyed_rows_are_spread(num_rows: int) -> None:
    rows = Fp8Attention.surveyed_rows(num_rows)
    assert len(rows) == min(num_rows, SURVEYED_ROWS)
    assert rows[0] == 0 and rows[-1] < num_rows and (rows[1:] > rows[:-1]).all()
    parts = rows * len(rows) // num_rows
    assert len(set(parts.tolist())) >= len(rows) - 1


def test_numbers_of_a_survey_that_is_exceeded_are_clipped(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(64, 1, 16, generator=generator) for _ in range(3))
    known = known_of(q, k, v)
    v[3] *= 1000
    out = torch.empty(64, 1, 16, dtype=FP8)
    layout = AttentionLayout.of([Span(0, 64, 0, 64)], "cpu")
    attend(*copied(q, k, v, known), layout, out, scales=known.scales)
    assert out.float().isfinite().all()


def test_why_not_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cudnn_fp8.why_not(torch.device("cpu"), 128) is None
    card = torch.device("cuda", 0)
    versions: dict[str, Any] = {"package": "1.32.0", "cudnn": 91900}
    monkeypatch.setattr(cudnn_fp8, "capability", lambda _: (9, 0))
    monkeypatch.setattr(cudnn_fp8.util, "find_spec", lambda _: versions["package"] or None)
    monkeypatch.setattr(cudnn_fp8.metadata, "version", lambda _: versions["package"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: versions["cudnn"])
    monkeypatch.setattr(cudnn_fp8, "_tried", lambda *_: versions["error"])
    versions["error"] = 0.03
    assert cudnn_fp8.why_not(card, 128) is None
    versions["error"] = 0.6
    assert "error 0.600" in str(cudnn_fp8.why_not(card, 128))
    monkeypatch.setattr(cudnn_fp8, "_tried", mock.Mock(side_effect=RuntimeError("no symbol")))
    assert "it says: no symbol" in str(cudnn_fp8.why_not(card, 128))
    assert "multiple of 16" in str(cudnn_fp8.why_not(card, 100))
    for changed, message in (("1.18.0", "1.19.1"), ("", "pip install nvidia-cudnn-frontend")):
        versions["package"] = changed
        assert message in str(cudnn_fp8.why_not(card, 128))
    versions.update(package="1.32.0", cudnn=91000)
    assert "91900" in str(cudnn_fp8.why_not(card, 128))
    monkeypatch.setattr(cudnn_fp8, "capability", lambda _: (8, 0))
    assert "9.0" in str(cudnn_fp8.why_not(card, 128))
