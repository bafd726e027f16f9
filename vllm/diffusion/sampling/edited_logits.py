# SPDX-License-Identifier: Apache-2.0
"""Logits as the edits of their requests leave them, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


def edited(
    logits: torch.Tensor, run: list[RowGroup], most_rows: int, first_column: int
) -> Iterator[tuple[torch.Tensor, list[RowGroup]]]:
    """Yield the edited logits of a run of groups, fp32, and the groups that they belong to.

    Args:
        logits: [R, C], the groups' rows one after another, columns of this rank; unchanged.
        run: groups with edits; several have at most `most_rows` rows together.
        most_rows: rows that are copied at a time.
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
    found = logits.to(torch.float32, copy=True)
    columns = range(first_column, first_column + logits.shape[1])
    given = [(g.edits, len(g.positions)) for g in groups if g.edits is not None]
    host = tuple([_local(edits, columns) for edits, _ in given])
    start = 0
    for (edits, size), arrays in zip(given, ops.to_device(host, logits.device), strict=True):
        _change(found[start : start + size], edits.edits, arrays)
        start += size
    return found


class _Columns(NamedTuple):
    """Changes of a request in the columns of a rank; as of `RowEdits`, and ids as columns."""

    allowed: Array
    biased: Array
    bias: Array
    counted: Array
    in_prompt: Array
    counts: Array
    rows: Array
    columns: Array


def _local(edits: RowEdits, columns: range) -> _Columns:
    def within(ids: Array) -> Array:
        return (ids >= columns.start) & (ids < columns.stop)

    allowed = np.array(edits.edits.allowed_token_ids, dtype=np.int64)
    bias = edits.edits.logit_bias
    biased = np.array([token for token, _ in bias], dtype=np.int64)
    here, counted, forbidden = within(biased), within(edits.counted), within(edits.columns)
    return _Columns(
        allowed[within(allowed)] - columns.start,
        biased[here] - columns.start,
        np.array([value for _, value in bias], dtype=np.float32)[here],
        edits.counted[counted] - columns.start,
        edits.in_prompt[counted],
        np.ascontiguousarray(edits.counts[:, counted]),
        edits.rows[forbidden],
        edits.columns[forbidden] - columns.start,
    )


def _change(logits: torch.Tensor, edits: Edits, own: _Columns) -> None:
    """Change the logits [R, C] fp32 of one request."""
    at: dict[str, torch.Tensor] = {name: getattr(own, name) for name in own._fields}
    if at["biased"].numel():
        logits.index_add_(1, at["biased"], at["bias"].expand(len(logits), -1))
    if at["counted"].numel():
        found, counts = logits.index_select(1, at["counted"]), at["counts"]
        repeated = at["in_prompt"] | (counts > 0)
        penalty = edits.repetition_penalty
        penalised = torch.where(found > 0, found / penalty, found * penalty)
        found = torch.where(repeated, penalised, found)
        found = found - edits.frequency_penalty * counts
        found = found - edits.presence_penalty * (counts > 0)
        logits.index_copy_(1, at["counted"], found)
    if edits.allowed_token_ids:
        kept = logits.index_select(1, at["allowed"])
        logits.fill_(-torch.inf).index_copy_(1, at["allowed"], kept)
    if at["rows"].numel():
        logits.index_put_((at["rows"], at["columns"]), logits.new_full((), -torch.inf))
