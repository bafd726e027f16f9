# SPDX-License-Identifier: Apache-2.0
"""Cases for the attention kernel that splits the keys, compared with attention by definition."""

import math

import torch

from tests.pages import in_pages
from vllm.diffusion.core.spans import AttentionLayout, Span
from vllm.diffusion.layers.split_attention import SplitConfig, split_attention


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[Span], window: int = 0
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(hd)) v of every span, in float64.

    With a window, a row on a grid reads the last `window` keys up to its own. Another row reads its
    block and the `window` - 1 keys before it.
    """
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for span in spans:
        if not (span.num_keys and span.num_queries):
            continue
        queries, keys = slice(span.q_start, span.q_end), slice(span.kv_start, span.kv_end)
        heads_k, heads_v = (x[keys].double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[queries].double(), heads_k)
        if span.block_length:  # no later block than the query's own
            blocks = torch.arange(span.num_keys, device=q.device) // span.block_length
            own = torch.arange(span.num_queries, device=q.device) + span.first
            scores[:, blocks > (own // span.block_length)[:, None]] = -torch.inf
        if window:
            rows = torch.arange(span.num_queries, device=q.device) if span.block_length else 0
            starts = span.first + rows * torch.ones(span.num_queries, device=q.device) - window + 1
            keys_of = torch.arange(span.num_keys, device=q.device)
            scores[:, keys_of < starts[:, None]] = -torch.inf
        weights = (scores / math.sqrt(q.shape[2])).softmax(dim=-1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, heads_v)
    return out


def run_split() -> None:
    """Run grouped heads, strided rows, empty sequences, keys in one or more parts, and blocks."""
    single, half = (torch.float32, 1, 1e-5), (torch.float16, 2, 4e-3)
    whole = [Span(0, 5, 7, 177), Span(5, 5, 3, 9), Span(5, 14, 0, 0), Span(14, 15, 190, 200)]
    run_split_of(whole, half)
    blocks = [Span(0, 9, 7, 177, 4, 161), Span(9, 9, 3, 9, 1), Span(9, 14, 20, 100)]
    run_split_of([*blocks, Span(14, 15, 190, 200, 6, 3)], half)
    # Keys are not split, because a later part would have no keys for the first rows.
    run_split_of([Span(0, 15, 0, 15, 5)], single)
    run_split_of([Span(0, 15, 0, 170, 7, 60)], half)
    for window in (1, 40):
        context = [Span(0, 6, 0, 150, 1, 144), Span(6, 7, 20, 120, first=99)]
        block = [Span(7, 12, 0, 108, first=100, block_start=100), Span(12, 12, 0, 5, 1)]
        rest_of_block = Span(12, 15, 0, 108, first=100, block_start=100)
        run_split_of([*context, *block, rest_of_block], single, window=window)
    run_split_in_pages()


def run_split_of(
    spans: list[Span], *kinds: tuple[torch.dtype, int, float], window: int = 0
) -> None:
    """Check spans for each kind: a dtype, a number of key/value heads, and the maximum error."""
    layout = AttentionLayout.of(spans, "cpu")
    generator = torch.Generator().manual_seed(20250920)
    for dtype, num_kv_heads, limit in kinds:
        q = torch.randn(15, 7, 16, generator=generator).to(dtype)[:, 2:6]
        pool = torch.randn(200, 2 * num_kv_heads + 1, 16, generator=generator).to(dtype)
        k, v = pool[:, 1 : 1 + num_kv_heads], pool[:, 1 + num_kv_heads :]
        wanted = plain_attention(q, k, v, spans, window)
        is_read = torch.zeros(len(pool), dtype=torch.bool)
        for span in spans:
            is_read[span.kv_start : span.kv_start + span.keys_read_by(span.num_queries - 1)] = True
        pool[~is_read] = torch.nan  # rows that no sequence reads may have any value
        for programs in (0, 64):  # not split, and in parts of 64 keys
            out = torch.full(q.shape, torch.nan, dtype=dtype)
            bounded = layout._replace(max_keys=layout.max_keys + 80)  # an upper bound of the keys
            config = SplitConfig(16, 16, programs, num_warps=4, num_stages=1)
            result = split_attention(q, k, v, bounded, out, config, window=window)
            assert result is out
            torch.testing.assert_close(out.double(), wanted, rtol=limit, atol=limit)
        if not window:
            check_fixed_parts((q, k, v), bounded, wanted, limit)


def check_fixed_parts(
    tensors: tuple[torch.Tensor, ...],
    layout: AttentionLayout[torch.Tensor],
    wanted: torch.Tensor,
    limit: float,
) -> None:
    """Check parts of 32 keys: computed by one program each, by one for all, and row by row."""
    one, apart = (SplitConfig(16, 16, programs, num_warps=4, num_stages=1) for programs in (0, 64))
    whole = split_attention(*tensors, layout, config=one, part_keys=32)
    torch.testing.assert_close(whole.double(), wanted, rtol=limit, atol=limit)
    assert torch.equal(split_attention(*tensors, layout, config=apart, part_keys=32), whole)
    assert layout.spans is not None
    q, *keys_values = tensors
    for span in layout.spans:
        for query in range(0, span.num_queries, 4):
            row, end = span.q_start + query, span.kv_start + span.keys_read_by(query)
            alone = AttentionLayout.of([Span(0, 1, span.kv_start, end)], "cpu")
            found = split_attention(q[row : row + 1], *keys_values, alone, config=one, part_keys=32)
            assert torch.equal(found, whole[row : row + 1])


def run_split_in_pages() -> None:
    """Run the same with keys in shuffled pages of one tile and of several tiles."""
    spans = [Span(0, 5, 64, 191), Span(5, 5, 0, 9), Span(5, 14, 32, 32), Span(14, 15, 192, 193)]
    generator = torch.Generator().manual_seed(20261122)
    q = torch.randn(15, 4, 16, generator=generator)
    k, v = (torch.randn(200, 2, 16, generator=generator) for _ in range(2))
    wanted = plain_attention(q, k, v, spans)
    for size, programs in ((16, 64), (32, 0)):
        *stored, pages = in_pages(k, v, size)
        layout = AttentionLayout.of(spans, "cpu", pages)
        config = SplitConfig(16, 16, programs, num_warps=4, num_stages=1)
        result = split_attention(q, *stored, layout, config=config)
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    try:
        split_attention(q, *stored, layout._replace(pages=pages._replace(size=24)), config=config)
    except ValueError as error:
        assert "page size: wanted a multiple of 16, given 24" in str(error)
    else:
        raise AssertionError("pages that are not whole tiles were taken")
