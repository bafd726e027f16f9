# SPDX-License-Identifier: Apache-2.0
"""Applies the edits of requests to their logits, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.sampling.row_group import pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.edits import Edits
    from vllm.diffusion.sampling.editing import RowEdits
    from vllm.diffusion.sampling.row_group import RowGroup

A = TypeVar("A")  # an array on the host or a tensor on the device


def edited(
    logits: torch.Tensor, run: list[RowGroup], most_rows: int, first_column: int
) -> Iterator[tuple[torch.Tensor, list[RowGroup]]]:
    """Yield the edited logits of a run of groups, fp32, and the groups that they belong to.

    Args:
        logits: [R, C], rows of the groups one after another, columns of this rank; unchanged.
        run: groups with edits; several have at most `most_rows` rows together.
        most_rows: maximum number of rows that are copied at a time.
        first_column: token id of the first column.
    """
    if len(run) > 1:
        yield _changed(logits, run, first_column), run
        return
    for rows in pieces_of(len(logits), most_rows):
        part = [run[0].piece(rows)]
        yield _changed(logits[rows], part, first_column), part


def _changed(logits: torch.Tensor, groups: list[RowGroup], first_column: int) -> torch.Tensor:
    """Return a changed fp32 copy of the logits of some groups."""
    edited = logits.to(torch.float32, copy=True)
    columns = range(first_column, first_column + logits.shape[1])
    edits_and_sizes = [(g.edits, len(g.positions)) for g in groups if g.edits is not None]
    host = tuple([_local(edits, columns) for edits, _ in edits_and_sizes])
    start = 0
    for (edits, size), arrays in zip(
        edits_and_sizes, ops.to_device(host, logits.device), strict=True
    ):
        _change(edited[start : start + size], edits.edits, edits.early, arrays)
        start += size
    return edited


class _Columns(NamedTuple, Generic[A]):
    """Changes of a request in the columns of a rank: fields of `RowEdits`, with ids as columns."""

    allowed: A
    biased: A
    bias: A
    counted: A
    in_prompt: A
    counts: A
    never: A
    ends: A
    rows: A
    columns: A


def _local(edits: RowEdits, columns: range) -> _Columns[Array]:
    def within(ids: Array) -> Array:
        return (ids >= columns.start) & (ids < columns.stop)

    biased, counted, forbidden = map(within, (edits.biased, edits.counted, edits.columns))
    return _Columns(
        edits.allowed[within(edits.allowed)] - columns.start,
        edits.biased[biased] - columns.start,
        edits.bias[biased],
        edits.counted[counted] - columns.start,
        edits.in_prompt[counted],
        np.ascontiguousarray(edits.counts[:, counted]),
        edits.never[within(edits.never)] - columns.start,
        edits.ends[within(edits.ends)] - columns.start,
        edits.rows[forbidden],
        edits.columns[forbidden] - columns.start,
    )


def _change(
    logits: torch.Tensor, edits: Edits, early: slice, columns: _Columns[torch.Tensor]
) -> None:
    """Change the logits [R, C] fp32 of one request."""
    if columns.biased.numel():
        logits.index_add_(1, columns.biased, columns.bias.expand(len(logits), -1))
    if columns.counted.numel():
        edited, counts = logits.index_select(1, columns.counted), columns.counts
        repeated = columns.in_prompt | (counts > 0)
        penalty = edits.repetition_penalty
        penalised = torch.where(edited > 0, edited / penalty, edited * penalty)
        edited = torch.where(repeated, penalised, edited)
        edited = edited - edits.frequency_penalty * counts
        edited = edited - edits.presence_penalty * (counts > 0)
        logits.index_copy_(1, columns.counted, edited)
    if edits.allowed_token_ids:
        allowed = logits.index_select(1, columns.allowed)
        logits.fill_(-torch.inf).index_copy_(1, columns.allowed, allowed)
    if columns.never.numel():
        logits.index_fill_(1, columns.never, -torch.inf)
    if columns.ends.numel():
        logits[early].index_fill_(1, columns.ends, -torch.inf)
    if columns.rows.numel():
        logits.index_put_((columns.rows, columns.columns), logits.new_full((), -torch.inf))
