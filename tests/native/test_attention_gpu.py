# SPDX-License-Identifier: Apache-2.0
"""Every attention backend on a GPU matches float64, and the selection of a backend."""

import random as random_numbers

import pytest
import torch

from tests.models.split_kernel import plain_attention
from tests.pages import in_pages
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.spans import AttentionLayout, Span
from vllm.diffusion.layers.attention_backends import (
    Backend,
    attend,
    can_be_captured,
    can_serve,
    choose_backend,
)
from vllm.diffusion.layers.split_attention import HEAD_DIMS, SplitConfig, split_attention

pytestmark = pytest.mark.gpu

# Norm of the error over the norm of the result: weights and result are rounded to the dtype.
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
HEAD_DIM = 128
NUM_KEYS = 5000
# dtype, query heads, key/value heads: those of LLaDA, those of Dream, and one key/value head
KINDS = [(torch.bfloat16, 4, 4), (torch.bfloat16, 14, 2), (torch.float16, 4, 1)]
LAYOUTS = {
    "whole": [Span(0, 300, 0, 300)],
    "one row": [Span(0, 1, 7, 4900)],
    "a window": [Span(0, 32, 3, 4999)],
    "few keys": [Span(0, 32, 4, 5)],
    "many rows": [Span(0, 513, 0, 1025)],
    "windows": [Span(32 * i, 32 * i + 32, 50 * i, 50 * i + 3 * i * i) for i in range(32)],
    "ragged": [
        *(Span(0, 17, 0, 2000), Span(17, 17, 0, 300), Span(17, 80, 2500, 2500)),
        *(Span(80, 81, 4990, 5000), Span(81, 337, 1000, 1256)),
    ],
    "more than are counted at once": [Span(i, i + 1, i, 2 * i) for i in range(150)],
    "no keys": [Span(0, 40, 9, 9)],
    "blocks": [Span(0, 300, 0, 300, 32), Span(300, 332, 0, 4032, 4, 4000), Span(332, 340, 9, 4000)],
    "many blocks": [Span(0, 2001, 3, 2004, 4)],
    "the block before and the next": [
        Span(64 * i, 64 * i + 64, 0, 64 * i + 64, 32, 64 * i) for i in range(40)
    ],
}
# Keys of a sequence begin at a page of 64.
PAGED_LAYOUTS = {
    "a window": [Span(0, 32, 128, 4999)],
    "one row": [Span(0, 1, 64, 4900)],
    "few keys": [Span(0, 32, 64, 65)],
    "whole pages": [Span(0, 33, 0, 64), Span(33, 65, 256, 512)],
    "many rows": [Span(0, 513, 0, 1025)],
    "windows": [Span(32 * i, 32 * i + 32, 64 * i, 64 * i + 3 * i * i) for i in range(32)],
    "ragged": [
        *(Span(0, 17, 0, 2000), Span(17, 17, 0, 300), Span(17, 80, 2560, 2560)),
        *(Span(80, 81, 4992, 5000), Span(81, 337, 1024, 1281)),
    ],
    "no keys": [Span(0, 40, 64, 64)],
    "blocks": [
        *(Span(0, 300, 0, 300, 32), Span(300, 332, 0, 4032, 4, 4000)),
        *(Span(332, 340, 64, 4000), Span(340, 341, 128, 2000, 7, 1871), Span(341, 360, 64, 64, 4)),
    ],
    "many blocks": [Span(0, 2001, 64, 3073, 4, 1008)],
}


def random(generator, dtype, *shape):
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def poison_unread(spans, k, v):
    """Set rows that no sequence reads to NaN, as unwritten memory may be."""
    is_read = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    for span in spans:
        is_read[span.kv_start : span.kv_end] = True
    k[~is_read], v[~is_read] = torch.nan, torch.nan


def assert_close(result, wanted, dtype):
    assert result.isfinite().all()
    assert (result.double() - wanted).norm() <= ERROR[dtype] * wanted.norm()


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads"), KINDS)
@pytest.mark.parametrize("spans", LAYOUTS.values(), ids=LAYOUTS)
def test_against_float64(generator, backend, dtype, num_heads, num_kv_heads, spans):
    if backend is Backend.SDPA and (len(spans) > 8 or dtype != torch.bfloat16):
        pytest.skip("cuDNN makes a plan for every shape, which takes long")
    product = random(generator, dtype, NUM_KEYS, num_heads + 2 * num_kv_heads, HEAD_DIM)
    q, k, v = product.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q = q[: spans[-1].q_end]
    poison_unread(spans, k, v)
    layout = AttentionLayout.of(spans, "cuda")
    if not can_serve(backend, q, layout):
        pytest.skip(f"{backend} is not there")
    result = attend(q, k, v, layout, backend=backend)
    assert result.is_contiguous() and result.dtype == dtype
    assert_close(result, plain_attention(q, k, v, spans), dtype)
    out = torch.full_like(result, torch.nan)
    assert attend(q, k, v, layout, out=out, backend=backend) is out
    assert torch.equal(out, result)


@pytest.mark.parametrize("backend", [Backend.SDPA, Backend.SPLIT, Backend.TILED])
@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads"), KINDS)
@pytest.mark.parametrize("spans", PAGED_LAYOUTS.values(), ids=PAGED_LAYOUTS)
def test_pages_against_float64(generator, backend, dtype, num_heads, num_kv_heads, spans):
    """Keys are in shuffled pages, as in a store, and no other part of the store is read."""
    if backend is Backend.SDPA and (len(spans) > 8 or dtype != torch.bfloat16):
        pytest.skip("cuDNN makes a plan for every shape, which takes long")
    q = random(generator, dtype, spans[-1].q_end, num_heads, HEAD_DIM)
    k, v = (random(generator, dtype, NUM_KEYS, num_kv_heads, HEAD_DIM) for _ in range(2))
    wanted = plain_attention(q, k, v, spans)
    *stored, pages = in_pages(k, v, PAGE_SIZE)
    layout = AttentionLayout.of(spans, "cuda", pages)
    assert choose_backend(q, layout) in (Backend.SPLIT, Backend.TILED)
    if not can_serve(backend, q, layout):
        pytest.skip(f"{backend} does not take {dtype}")
    result = attend(q, *stored, layout, backend=backend)
    assert result.is_contiguous() and result.dtype == dtype
    assert_close(result, wanted, dtype)


@pytest.mark.parametrize(
    ("head_dim", "rows"), list(zip(HEAD_DIMS, (64, 32, 64, 16, 64, 16), strict=True))
)
@pytest.mark.parametrize("programs", [0, 1, 64])  # not split, split, split to the limit
def test_other_heads_in_other_tiles(generator, head_dim, rows, programs):
    """Heads of other widths, with tiles of other sizes, in one range and in pages."""
    num_rows = LAYOUTS["ragged"][-1].q_end
    q = random(generator, torch.bfloat16, num_rows, 4, head_dim)
    k, v = (random(generator, torch.bfloat16, NUM_KEYS, 2, head_dim) for _ in range(2))
    *stored, pages = in_pages(k, v, PAGE_SIZE)
    num_warps, num_stages = (4, 3) if head_dim <= 128 else (8, 1)
    for spans, kept, table, config in (
        (LAYOUTS["ragged"], (k, v), None, SplitConfig(rows, 32, programs, num_warps, 2)),
        (PAGED_LAYOUTS["ragged"], stored, pages, SplitConfig(64, 32, programs, 8, num_stages)),
    ):
        layout = AttentionLayout.of(spans, "cuda", table)
        result = split_attention(q, *kept, layout, config=config)
        assert_close(result, plain_attention(q, k, v, spans), torch.bfloat16)


@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.parametrize("window", [1, 100, 1024])
def test_windows_of_wide_heads(generator, head_dim, window):
    """Rows of a context and of a block, with our tiles, in one range and in pages."""
    spans = [
        Span(0, 70, 0, 1200, 1, 1130),
        Span(70, 71, 64, 1264, first=1199),
        Span(71, 199, 128, 1584, first=1200, block_start=1200),
        Span(199, 327, 128, 1584, first=1200, block_start=1200),
        Span(327, 327, 0, 64, 1),
        Span(327, 583, 2048, 2304, block_start=0),
    ]
    q = random(generator, torch.bfloat16, spans[-1].q_end, 16, head_dim)
    k, v = (random(generator, torch.bfloat16, NUM_KEYS, 2, head_dim) for _ in range(2))
    wanted = plain_attention(q, k, v, spans, window)
    *stored, pages = in_pages(k, v, PAGE_SIZE)
    for kept, table in (((k, v), None), (stored, pages)):
        layout = AttentionLayout.of(spans, "cuda", table)
        result = split_attention(q, *kept, layout, window=window)
        assert_close(result, wanted, torch.bfloat16)


def test_every_bucket_runs_the_same_programs(generator, monkeypatch):
    """A server captures graphs of many shapes, and Triton must not compile for each."""
    triton = pytest.importorskip("triton")
    compiled = []

    def note(*, fn, **_):
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    num_heads, num_kv_heads = 6, 3  # used by hardly any other test, so few programs are cached
    kept = random(generator, torch.bfloat16, 2, NUM_KEYS, num_kv_heads, HEAD_DIM)
    *stored, pages = in_pages(*kept, PAGE_SIZE)
    for num_rows in (16, 17, 48, 112, 640, 1024):
        product = random(generator, torch.bfloat16, num_rows, 12, HEAD_DIM)
        q, k, v = product.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        for num_sequences in (1, 2, num_rows // 16 + 1):
            ends = torch.full((num_sequences + 1,), num_rows, dtype=torch.int32, device="cuda")
            ends[0] = 0
            layout = AttentionLayout(ends, 0 * ends, ends[1:], num_rows, num_rows, None)
            attend(q, k, v, layout, backend=Backend.SPLIT)
            layout = layout._replace(max_keys=NUM_KEYS, pages=pages)
            attend(q, *stored, layout, backend=Backend.SPLIT)
            layout = layout._replace(block_lengths=ends[1:], firsts=0 * ends[1:])
            attend(q, *stored, layout, backend=Backend.SPLIT)
    # Keys split or not, times one range, pages, and pages with blocks.
    assert 0 < compiled.count("part_kernel") <= 6
    assert compiled.count("merge_kernel") <= 1


def test_large_scores(generator):
    """Some queries give all weight to one key, and others give equal weight to all keys."""
    q = random(generator, torch.bfloat16, 32, 4, HEAD_DIM) * 30
    q[::2] = 0
    k, v = (random(generator, torch.bfloat16, 3000, 4, HEAD_DIM) for _ in range(2))
    spans = [Span(0, 32, 0, 3000)]
    result = attend(q, k, v, AttentionLayout.of(spans, "cuda"), backend=Backend.SPLIT)
    assert_close(result, plain_attention(q, k, v, spans), torch.bfloat16)


@pytest.mark.parametrize("backend", [Backend.FLASH, Backend.SPLIT])
@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads"), KINDS[:2])
def test_a_graph_follows_its_layout(generator, backend, dtype, num_heads, num_kv_heads):
    """A graph is captured with loose bounds and replayed for other sequences of the same rows."""
    num_rows, num_sequences = 96, 4
    q = random(generator, dtype, num_rows, num_heads, HEAD_DIM)
    k, v = (random(generator, dtype, NUM_KEYS, num_kv_heads, HEAD_DIM) for _ in range(2))
    captured = AttentionLayout(
        torch.tensor([0, 96, 96, 96, 96], dtype=torch.int32, device="cuda"),
        torch.zeros(num_sequences + 1, dtype=torch.int32, device="cuda"),
        torch.ones(num_sequences, dtype=torch.int32, device="cuda"),
        max_queries=num_rows,
        max_keys=NUM_KEYS,
        spans=None,
    )
    attend(q, k, v, captured, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(q, k, v, captured, backend=backend)
    for spans in (
        [Span(0, 96, 0, 5000), *[Span(96, 96, 0, 0)] * 3],
        [Span(0, 32, 0, 40), Span(32, 64, 40, 2040), Span(64, 95, 2040, 5000), Span(95, 96, 0, 0)],
        [Span(0, 1, 4000, 4001), Span(1, 2, 0, 300), Span(2, 2, 0, 0), Span(2, 96, 300, 800)],
    ):
        layout = AttentionLayout.of(spans, "cuda")
        for old, new in zip(captured[:3], layout[:3], strict=True):
            old.copy_(new)
        graph.replay()
        assert_close(result, plain_attention(q, k, v, spans), dtype)


@pytest.mark.parametrize("backend", [Backend.SPLIT, Backend.TILED])
@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads"), KINDS[:2])
def test_a_graph_follows_its_table(generator, backend, dtype, num_heads, num_kv_heads):
    """The page table and the pages may change between replays."""
    num_rows = 96
    q = random(generator, dtype, num_rows, num_heads, HEAD_DIM)
    k, v = (random(generator, dtype, NUM_KEYS, num_kv_heads, HEAD_DIM) for _ in range(2))
    *stored, pages = in_pages(k, v, PAGE_SIZE)
    # The last sequence pads the rows. It has no keys, and its first key is past the table.
    spans = [Span(0, 32, 0, 2000), Span(32, 90, 2048, 5000), Span(90, 96, 10**9, 10**9)]
    layout = AttentionLayout.of(spans, "cuda", pages)._replace(spans=None, max_keys=NUM_KEYS)
    if not can_serve(backend, q, layout):
        pytest.skip(f"{backend} does not take {dtype}")
    attend(q, *stored, layout, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(q, *stored, layout, backend=backend)
    for seed in range(3):
        *others, table = in_pages(k, v, PAGE_SIZE, seed)
        for old, new in zip((*stored, pages.rows), (*others, table.rows), strict=True):
            old.copy_(new)
        graph.replay()
        assert_close(result, plain_attention(q, k, v, spans), dtype)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", [Backend.SPLIT, Backend.TILED])
def test_many_sequences_of_any_length(generator, backend, seed):
    """There are more tiles than the GPU runs at once, with mixed queries, keys and blocks."""
    numbers = random_numbers.Random(seed)
    num_heads, num_kv_heads = numbers.choice([(8, 8), (16, 4), (28, 4), (6, 3)])
    spans, end = [], 0
    for _ in range(numbers.choice([3, 60, 300])):
        first_key = numbers.randrange(0, NUM_KEYS - 64, PAGE_SIZE)
        num_keys = numbers.choice([0, 1, 63, 128, numbers.randrange(NUM_KEYS)])
        num_keys = min(num_keys, NUM_KEYS - first_key)
        count = numbers.choice([0, 1, numbers.randrange(40), numbers.randrange(400)])
        block = numbers.choice([0, 0, 4, 32, 7])
        first = numbers.randrange(max(num_keys - count, 0) + 1) if block else 0
        count = min(count, num_keys - first) if block else count
        spans.append(Span(end, end + count, first_key, first_key + num_keys, block, first))
        end += count
    q = random(generator, torch.bfloat16, max(end, 1), num_heads, HEAD_DIM)[:end]
    k, v = (random(generator, torch.bfloat16, NUM_KEYS, num_kv_heads, HEAD_DIM) for _ in range(2))
    *stored, pages = in_pages(k, v, PAGE_SIZE)
    layout = AttentionLayout.of(spans, "cuda", pages)
    if not can_serve(backend, q, layout):
        pytest.skip(f"{backend} is not there")
    result = attend(q, *stored, layout, backend=backend)
    assert_close(result, plain_attention(q, k, v, spans), torch.bfloat16)


def test_choice():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("an older GPU has torch's attention only")

    def chosen(num_rows, num_keys, num_sequences=1, dtype=torch.bfloat16, captured=False):
        spans = [Span(num_rows * i, num_rows * (i + 1), 0, num_keys) for i in range(num_sequences)]
        layout = AttentionLayout.of(spans, "cuda")
        layout = layout._replace(spans=None) if captured else layout
        q = torch.empty(1, dtype=dtype, device="cuda").expand(
            num_rows * num_sequences, 32, HEAD_DIM
        )
        return choose_backend(q, layout)

    assert can_be_captured(torch.bfloat16, HEAD_DIM, torch.device("cuda"))
    assert chosen(64, 64, dtype=torch.float32) is Backend.SDPA
    assert chosen(32, 4096) is Backend.SPLIT
    assert chosen(32, 4096, 8, captured=True) is Backend.SPLIT
    many = Backend.TILED if torch.cuda.get_device_capability() == (9, 0) else Backend.SPLIT
    assert chosen(512, 512, 8) is many
    assert chosen(512, 512, 8, dtype=torch.float16) is Backend.SPLIT
    assert chosen(16384, 16384) in (Backend.SDPA, Backend.FLASH3)
    assert chosen(16384, 16384, captured=True) is many
