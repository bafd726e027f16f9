# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout on the CPU: results by definition, refusals, and choice of backend."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from tests.models.split_kernel import plain_attention
from tests.pages import in_pages
from vllm.diffusion.core.spans import AttentionLayout, PageTable, Span, check_tiling
from vllm.diffusion.core.stages import SPLIT_ROWS
from vllm.diffusion.layers import attention_backends, packed_attention
from vllm.diffusion.layers.attention_backends import (
    Backend,
    attend,
    can_be_captured,
    can_serve,
    choose_backend,
    reads_pages,
)
from vllm.diffusion.layers.split_attention import (
    CONFIG,
    MAX_SPLITS,
    SplitConfig,
    can_split,
    choose_splits,
    split_attention,
)

HEAD_DIM = 8
NUM_KEYS = 9
LAYOUTS = [
    [Span(0, 9, 0, 9)],  # one whole sequence
    [Span(0, 3, 2, 9)],  # a chunk of a sequence
    [Span(0, 4, 0, 4), Span(4, 5, 4, 5), Span(5, 9, 5, 9)],  # packed sequences, one with one row
    [Span(0, 2, 0, 4), Span(2, 4, 4, 9)],  # a chunk across the border of two sequences
    [Span(0, 2, 5, 9), Span(2, 4, 0, 5)],  # key ranges in another order
    [Span(0, 2, 6, 7), Span(2, 4, 1, 3)],  # gaps between key ranges
    [Span(0, 2, 0, 4), Span(2, 2, 4, 5), Span(2, 4, 5, 9)],  # a sequence without queries
    [Span(0, 2, 0, 4), Span(2, 4, 4, 4)],  # a sequence without keys
    [Span(0, 0, 0, 0)],
    [],
]
PAGE_SIZE = 4
NUM_PAGED_KEYS = 30
PAGED_LAYOUTS = [
    [Span(0, 9, 0, 9)],
    [Span(0, 3, 8, 12)],  # whole pages
    [Span(0, 2, 8, 13), Span(2, 5, 0, 7), Span(5, 6, 16, 17)],  # ragged ends, another order
    [Span(0, 2, 0, 30), Span(2, 4, 4, 30)],  # shared pages
    [Span(0, 2, 0, 5), Span(2, 2, 8, 11), Span(2, 4, 12, 12)],  # no queries, no keys
]

# Sequences on grids of blocks, together with other sequences.
GRIDS = [
    [Span(0, 9, 0, 9, 4)],  # a whole sequence with an incomplete last block
    [Span(0, 6, 0, 9, 3, 3)],  # the blocks after the cached blocks
    [Span(0, 3, 0, 9, 4, 2)],  # a chunk across a border, in which no block is whole
    [Span(0, 4, 0, 4, 1), Span(4, 6, 0, 7), Span(6, 9, 0, 8, 5, 4)],
    [Span(0, 2, 0, 9, 100, 3), Span(2, 2, 0, 4, 2), Span(2, 4, 4, 4, 2)],
]


def heads(rows: int, num_heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, num_heads, HEAD_DIM, generator=generator)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spans", LAYOUTS + GRIDS)
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


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("spans", PAGED_LAYOUTS + GRIDS[:3])
def test_attend_reads_pages_in_any_order(spans: list[Span], num_kv_heads: int) -> None:
    q = heads(spans[-1].q_end, 4, seed=1)
    k, v = (heads(NUM_PAGED_KEYS, num_kv_heads, seed=seed) for seed in (2, 3))
    wanted = attend(q, k, v, AttentionLayout.of(spans, "cpu"))
    for seed in range(3):
        *stored, pages = in_pages(k, v, PAGE_SIZE, seed)
        layout = AttentionLayout.of(spans, "cpu", pages)
        result = attend(q, *stored, layout)
        assert torch.equal(result, wanted)
        out = torch.full_like(q, torch.nan)
        assert attend(q, *stored, layout, out=out) is out
        assert torch.equal(out, wanted)
    parts = [rows[:, :1] for rows in stored]  # one group of heads, as in a streamed forward pass
    group = attend(q[:, : 4 // num_kv_heads], *parts, layout)
    wanted = plain_attention(q, k, v, spans)[:, : 4 // num_kv_heads]
    torch.testing.assert_close(group.double(), wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_keys_in_pages() -> None:
    pages = PageTable(torch.tensor([70, 40, 10], dtype=torch.int32), 4)
    assert pages.rows_of(4, 4).tolist() == []
    assert pages.rows_of(0, 3).tolist() == [70, 71, 72]
    assert pages.rows_of(4, 10).tolist() == [40, 41, 42, 43, 10, 11]


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
    assert layout.spans == spans
    tensors = (layout.query_ends, layout.key_starts, layout.key_counts)
    assert all(tensor.dtype == torch.int32 for tensor in tensors)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(1, 4, 0, 4)],  # a row before the first span
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
    assert choose_backend(q, layout) is Backend.SDPA
    with pytest.raises(ValueError, match=r"layout\.spans: wanted .* given None"):
        attend(q, q, q, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_graph_without_a_packed_kernel(dtype: torch.dtype) -> None:
    assert not can_be_captured(dtype, 128, torch.device("cuda"))


# --- the choice of a backend, on a simulated GPU -----------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Simulate a GPU of capability 9.0 on the CPU, and yield upstream's attention module."""
    real = attention_backends.can_be_captured
    cuda = torch.device("cuda")
    for module in (attention_backends, packed_attention):
        monkeypatch.setattr(module, "capability", lambda _: (9, 0))
    monkeypatch.setattr(
        attention_backends, "can_be_captured", lambda dtype, dim, _: real(dtype, dim, cuda)
    )
    monkeypatch.setattr(attention_backends, "can_split", lambda *_: True)
    monkeypatch.setattr(
        attention_backends.ops, "has_attention", lambda heads, _: heads.dtype == torch.bfloat16
    )
    monkeypatch.setattr(attention_backends, "num_multiprocessors", lambda _: 132)
    upstream = ModuleType("vllm.vllm_flash_attn")
    upstream.is_fa_version_supported = lambda version: version == 3  # type: ignore[attr-defined]
    upstream.flash_attn_varlen_func = plain_flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", upstream)
    # Disable the cache of the result, because tests change the module.
    uncached = packed_attention.flash3.__wrapped__
    for module in (attention_backends, packed_attention):
        monkeypatch.setattr(module, "flash3", uncached)
    return upstream


def plain_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor | None,
    fa_version: int,
) -> torch.Tensor:
    """Compute the documented result of upstream's function, for the arguments that we pass."""
    assert fa_version == 3 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    (q_start, kv_start), *rest = ends
    spans = []
    for q_end, kv_end in rest:
        assert q_end - q_start <= max_seqlen_q and kv_end - kv_start <= max_seqlen_k
        spans.append(Span(q_start, q_end, kv_start, kv_end))
        q_start, kv_start = q_end, kv_end
    result = plain_attention(q, k, v, spans).to(q.dtype)
    return result if out is None else out.copy_(result)


def layout_of(num_sequences: int, num_queries: int, num_keys: int) -> AttentionLayout:
    ends = range(num_queries, num_queries * num_sequences + 1, num_queries)
    return AttentionLayout.of([Span(end - num_queries, end, 0, num_keys) for end in ends], "cpu")


def shaped(layout: AttentionLayout, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return 32 heads of 128 channels without allocating them."""
    return torch.empty(1, dtype=dtype).expand(int(layout.query_ends[-1]), 32, 128)


@pytest.mark.parametrize(
    ("sequences", "queries", "keys", "wanted"),
    [
        (1, 32, 200_000, Backend.SPLIT),  # sampled rows of a long sequence
        (8, 32, 4096, Backend.SPLIT),  # windows with cached keys
        (32, 32, 4096, Backend.TILED),
        (1, 256, 256, Backend.SPLIT),  # one short sequence
        (8, 256, 256, Backend.TILED),
        (1, 1000, 1000, Backend.TILED),
        (1, 1024, 1024, Backend.SDPA),
        (3, 1024, 1024, Backend.SDPA),
        (1, 1000, 4096, Backend.TILED),  # sampled rows
        (1, 1000, 16384, Backend.SDPA),
        (1, 4096, 65536, Backend.SDPA),  # a chunk
        (2, 256, 65536, Backend.TILED),
    ],
)
def test_choice_by_shape(
    hopper: ModuleType, sequences: int, queries: int, keys: int, wanted: Backend
) -> None:
    hopper.is_fa_version_supported = lambda _: False  # type: ignore[attr-defined]
    layout = layout_of(sequences, queries, keys)
    q = shaped(layout)
    assert choose_backend(q, layout) is wanted
    captured = choose_backend(q, layout._replace(spans=None))
    assert captured is (Backend.TILED if len(q) * 32 >= 96 * 132 else Backend.SPLIT)
    hopper.is_fa_version_supported = lambda _: True  # type: ignore[attr-defined]
    is_flash3 = sequences == 1 and queries >= 512
    assert choose_backend(q, layout) is (Backend.FLASH3 if is_flash3 else wanted)


def test_choice_by_what_is_there(hopper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    long, window = layout_of(1, 16384, 16384), layout_of(1, 32, 4096)
    q, few = shaped(long), shaped(window)
    assert choose_backend(shaped(long, torch.float32), long) is Backend.SDPA
    served = {backend for backend in Backend if can_serve(backend, q, long)}
    assert served == set(Backend) - {Backend.FP8}
    assert choose_backend(q, layout_of(1, 16384, 0)) is Backend.TILED
    monkeypatch.setattr(attention_backends, "can_split", lambda *_: False)
    assert choose_backend(few, window) is Backend.FLASH
    hopper.is_fa_version_supported = lambda _: False  # type: ignore[attr-defined]
    assert choose_backend(q, long) is Backend.SDPA
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)  # makes its import fail
    assert choose_backend(q, long) is Backend.SDPA


@pytest.mark.parametrize(
    ("sequences", "queries", "keys", "wanted"),
    [
        (1, 16384, 65536, Backend.TILED),
        (1, 1024, 1024, Backend.TILED),
        (32, 32, 4096, Backend.TILED),
        (8, 32, 4096, Backend.SPLIT),
    ],
)
def test_choice_for_keys_in_pages(
    hopper: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    sequences: int,
    queries: int,
    keys: int,
    wanted: Backend,
) -> None:
    """Our kernels read keys in their pages; for other kernels, keys are copied together."""
    layout = layout_of(sequences, queries, keys)
    q = shaped(layout)
    paged = layout._replace(pages=PageTable(torch.zeros(1024, dtype=torch.int32), 64))
    assert choose_backend(q, paged) is wanted
    assert choose_backend(q, paged._replace(spans=None)) is wanted
    served = [backend for backend in Backend if can_serve(backend, q, paged)]
    assert served == [Backend.SDPA, Backend.SPLIT, Backend.TILED]
    assert choose_backend(shaped(layout, torch.float32), paged) is Backend.SDPA
    other = paged._replace(pages=paged.pages._replace(size=128))
    assert choose_backend(q, other) is Backend.SPLIT
    assert reads_pages(q.dtype, 128, q.device)
    assert not reads_pages(torch.float32, 128, q.device)
    monkeypatch.setattr(attention_backends, "can_split", lambda *_: False)
    monkeypatch.setattr(attention_backends.ops, "has_attention", lambda *_: False)
    assert choose_backend(q, paged) is Backend.SDPA
    assert not reads_pages(q.dtype, 128, q.device)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_flash3_is_for_hopper(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    for module in (attention_backends, packed_attention):
        monkeypatch.setattr(module, "capability", lambda _: capability)
    layout = layout_of(1, 16384, 16384)
    assert choose_backend(shaped(layout), layout) is Backend.SDPA


def test_flash3_gets_the_keys_of_its_sequence(hopper: ModuleType) -> None:
    spans = [Span(0, 5, 2, 9)]
    q, k, v = heads(5, 4, seed=1), heads(NUM_KEYS, 2, seed=2), heads(NUM_KEYS, 2, seed=3)
    layout = AttentionLayout.of(spans, "cpu")
    result = attend(q, k, v, layout, backend=Backend.FLASH3)
    wanted = plain_attention(q, k, v, spans)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    out = torch.full_like(q, torch.nan)
    assert attend(q, k, v, layout, out=out, backend=Backend.FLASH3) is out
    assert torch.equal(out, result)


# --- the kernel that splits the keys; tests/native/test_interpreter.py runs it ------------------


def test_number_of_splits() -> None:
    config = SplitConfig(64, 64, programs=2, num_warps=4, num_stages=3)
    assert choose_splits(32, 200_000, config, 132) == 8  # 2 programs per multiprocessor
    assert choose_splits(32, 1024, config, 132) == 4  # at least 256 keys per part
    assert choose_splits(1024, 200_000, config, 132) == 1
    assert choose_splits(1, 10**6, config, 132) == MAX_SPLITS
    assert choose_splits(0, 0, config, 132) == 1


@pytest.mark.parametrize("rows", [1, 16, 63, 100, 1000, 5000])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (4, 7), (32, 1)])
def test_parts_take_no_more_than_is_planned(rows: int, num_kv_heads: int, group: int) -> None:
    programs = -(-rows * group // CONFIG.rows) * num_kv_heads  # lower bound
    splits = choose_splits(programs, 10**6, CONFIG, device_size=132)
    assert splits == 1 or splits * rows * num_kv_heads * group <= SPLIT_ROWS * 132


def test_split_takes_no_cpu() -> None:
    q = torch.zeros(4, 2, 64)
    assert not can_split(torch.bfloat16, 64, q.device)
    with pytest.raises(ValueError, match=r"split_attention: wanted 16-bit .* on cpu"):
        split_attention(q, q, q, AttentionLayout.of([Span(0, 4, 0, 4)], "cpu"))
