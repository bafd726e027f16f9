# SPDX-License-Identifier: Apache-2.0
"""A family's visibility in packed batches gives the attention of a dense mask."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.cases import SERVED
from tests.pages import NO_PAGES, store_with
from vllm.diffusion import ops
from vllm.diffusion.core.spans import AttentionLayout
from vllm.diffusion.decoding import ForwardTarget
from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.worker.batch import StepBatch, build_batch
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.engine.worker.sample_rows import SampleRows
from vllm.diffusion.engine.worker.window import ForwardWindow
from vllm.diffusion.layers.attention_backends import attend
from vllm.diffusion.memory import KeptSequence, PageStore, chunks
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.visibility import FULL, BlockCausal, Forward, Visibility

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def sees(visibility: Visibility, query: int, key: int) -> bool:
    """Return whether a query attends to a key, by the definition in the families' papers."""
    if isinstance(visibility, BlockCausal):
        return key // visibility.block_length <= query // visibility.block_length
    return True


@pytest.mark.parametrize("visibility", [FULL, BlockCausal(4), BlockCausal(7), BlockCausal(100)])
@pytest.mark.parametrize(
    ("window", "kept"), [(range(30), 0), (range(8, 12), 8), (range(8, 16), 30), (range(14, 29), 14)]
)
def test_the_first_keys_are_seen_as_far_as_a_query_may_see(
    visibility: Visibility, window: range, kept: int
) -> None:
    num_keys = Forward(window, kept).num_keys
    for query in window:
        wanted = [key for key in range(num_keys) if sees(visibility, query, key)]
        assert list(range(visibility.num_seen(query, num_keys))) == wanted
    counts = {visibility.num_seen(query, num_keys) for query in window}
    alike = (counts.pop(), 0) if len(counts) == 1 else (num_keys, visibility.block_length)
    assert visibility.seen_by(window, num_keys) == alike


def test_keys_are_final_when_no_token_that_they_depend_on_may_change() -> None:
    whole, later = range(32), range(8, 16)
    assert not FULL.final(Forward(whole, committed=31))
    assert FULL.final(Forward(whole, committed=32)) == whole
    assert not FULL.final(Forward(later, kept=32, committed=32))  # its keys attended to stale keys
    blocks = BlockCausal(8)
    assert blocks.final(Forward(whole, committed=7)) == range(0)
    assert blocks.final(Forward(whole, committed=23)) == range(16)
    assert blocks.final(Forward(later, kept=8, committed=15)) == range(8, 8)
    assert blocks.final(Forward(later, kept=8, committed=16)) == later
    assert blocks.final(Forward(range(8, 24), kept=8, committed=19)) == later
    assert blocks.with_blocks_of(4).final(Forward(later, kept=8, committed=15)) == range(8, 12)
    assert FULL.with_blocks_of(4) == FULL


# ---- through the batch ----


class Window:
    """A rule that samples some positions and computes a range of rows."""

    def __init__(self, rows: tuple[int, int], sampled: Iterable[int]) -> None:
        self.target = ForwardTarget(np.array(list(sampled), dtype=np.int64), rows)

    def prepare(self, tokens: torch.Tensor) -> ForwardTarget:
        return self.target


def canvas(
    name: str,
    length: int,
    visibility: Visibility,
    sampled: Iterable[int],
    window: tuple[int, int] | None = None,
    cache: KeptSequence | None = None,
    **parameters: Any,
) -> Canvas:
    extra = {"gen_length": 8, "block_length": 4, "steps": 8, "seed": 0, **parameters}
    if cache is not None:
        extra["cache"] = "dual"
    prompt = [2 + i % 90 for i in range(length - 8)]
    decided = decision.decide(fields.canonical(extra), SERVED, prompt)
    made = Canvas(NewCanvas(name, prompt, decided), visibility)
    if cache is not None:  # it ends with the sequence, and not with a block
        own = visibility.with_blocks_of(decided.block_length, decided.block_offset(len(prompt)))
        made.window = ForwardWindow(decided, own, len(prompt), cache.length)
        made.window.cache = cache
    made.rule = Window(window or (0, length), sampled)  # type: ignore[assignment]
    return made


class Tensors:
    """Queries, keys and values by request and position, and the expected attention."""

    def __init__(self, batch: StepBatch, store: PageStore) -> None:
        generator = torch.Generator().manual_seed(5)

        def rows(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, HEAD_DIM, generator=generator)

        self.q = rows(batch.num_rows, HEADS)
        self.k, self.v = rows(batch.num_rows, KV_HEADS), rows(batch.num_rows, KV_HEADS)
        num_kept = len(store.keys(1))
        self.kept_k, self.kept_v = rows(num_kept, KV_HEADS), rows(num_kept, KV_HEADS)
        self.pages = store.table

    def attend(self, layouts: tuple[AttentionLayout[Any], ...], q: torch.Tensor) -> torch.Tensor:
        """Return the attention of the rows of a chunk, computed as layers do."""
        results = []
        for layout in ops.to_device(layouts, torch.device("cpu")):
            k, v = (self.k, self.v) if layout.pages is None else (self.kept_k, self.kept_v)
            assert layout.pages in (None, self.pages)
            results.append(attend(q[layout.rows], k, v, layout))
        return torch.cat(results)

    def dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: list[list[bool]]
    ) -> torch.Tensor:
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores = scores.masked_fill(~torch.tensor(mask), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def wanted_rows(
    tensors: Tensors, batch: StepBatch, made: list[Canvas], visibility: Visibility
) -> torch.Tensor:
    """Return the attention of every row of the batch under a dense mask."""
    actual, start = [], 0
    for one in made:
        own = visibility.with_blocks_of(one.params.block_length)
        copies = 2 if one.params.cfg_scale > 0 else 1
        first, end = one.rule.target.rows  # type: ignore[attr-defined]
        for _ in range(copies):
            rows = slice(start, start + end - first)
            if one.window.cache is None or end - first == one.window.cache.length:
                k, v = tensors.k[rows], tensors.v[rows]
            else:
                slots = one.window.cache.slots
                k, v = tensors.kept_k[slots], tensors.kept_v[slots]
            mask = [[sees(own, q, k) for k in range(len(k))] for q in range(first, end)]
            actual.append(tensors.dense(tensors.q[rows], k, v, mask))
            start = rows.stop
    assert start == batch.num_rows
    return torch.cat(actual)


@pytest.mark.parametrize("visibility", [FULL, BlockCausal()])
@pytest.mark.parametrize("rows_per_chunk", [1000, 13])
def test_a_batch_attends_as_under_a_dense_mask(visibility: Visibility, rows_per_chunk: int) -> None:
    """Block lengths differ in a batch with one guided request and three cached requests.

    One of the cached requests computes all of its positions and reads those keys.
    """
    store, (whole, first, second) = store_with(18, 130, 17)
    made = [
        canvas("a", 21, visibility, (13, 15, 20)),
        canvas("b", 16, visibility, (8, 9), cfg_scale=1.5, block_length=8),
        canvas("e", 18, visibility, (12, 16), (0, 18), whole),
        canvas("c", 130, visibility, (124, 125), (124, 128), first),
        canvas("d", 17, visibility, (9, 16), (5, 17), second, block_length=2),
    ]
    batch = build_batch([*made[:2], *made[:1:-1]], 0, store.table)  # cached windows move to the end
    assert [one.req_id for one in batch.items] == ["a", "b", "e", "d", "c"]
    made[3:] = made[:2:-1]
    tensors = Tensors(batch, store)
    wanted = wanted_rows(tensors, batch, made, visibility)
    actual = [
        tensors.attend(batch.layouts(rows), tensors.q[rows])
        for rows in chunks(batch.num_rows, rows_per_chunk)
    ]
    torch.testing.assert_close(torch.cat(actual), wanted)
    for part in SampleRows(batch).parts(rows_per_part=4):
        rows = torch.from_numpy(part.rows)
        given = tensors.attend(part.layouts, tensors.q[rows])
        torch.testing.assert_close(given, wanted[rows])


def test_prefill_of_a_block_causal_sequence_is_one_sequence_on_its_grid() -> None:
    made = canvas("a", 22, BlockCausal(), ())
    batch = build_batch([made], 0, NO_PAGES)
    (span,) = batch.layouts(slice(0, 22))[0].spans
    assert [span.keys_read_by(row) for row in range(0, 22, 4)] == [4, 8, 12, 16, 20, 22]
    (later,) = batch.layouts(slice(7, 13))[0].spans
    assert (later.first, later.keys_read_by(0), later.keys_read_by(5)) == (7, 8, 16)
    assert batch.shape.longest == 22
    assert np.array_equal(batch.positions, np.arange(22))
