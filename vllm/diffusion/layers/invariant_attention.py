# SPDX-License-Identifier: Apache-2.0
"""Attention of engines that are batch invariant."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.diffusion.core import stages
from vllm.diffusion.core.spans import Span
from vllm.diffusion.layers.attention_backends import Backend, attend
from vllm.diffusion.layers.split_attention import FIXED_PART_KEYS, can_split, split_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout
    from vllm.diffusion.layers.attention import SelfAttention


def with_invariant_attention(attention: SelfAttention) -> SelfAttention:
    """Return the same layer with `attend_invariantly`."""
    return replace(attention, kernel=attend_invariantly, split_rows=stages.FIXED_PART_ROWS)


def attend_invariantly(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout[Tensor], out: Tensor | None = None
) -> Tensor:
    """Compute `attend` so that no row's result depends on other rows, or on keys that it skips.

    On a GPU that `can_split`, keys are read in parts of one size. Otherwise the rows are computed
    one after another.
    """
    if q.shape[0] and can_split(q.dtype, q.shape[2], q.device):
        return split_attention(q, k, v, layout, out, part_keys=FIXED_PART_KEYS)
    if layout.spans is not None:
        layout = layout._replace(spans=[row for span in layout.spans for row in _rows_of(span)])
    return attend(q, k, v, layout, out, backend=Backend.SDPA)


def _rows_of(span: Span) -> Iterator[Span]:
    """Yield a span for each query, with the keys that it reads."""
    for query in range(span.num_queries):
        row, first = span.q_start + query, span.kv_start
        end = first + span.keys_read_by(query)
        yield Span(row, row + 1, first, end, in_pages=span.in_pages)
