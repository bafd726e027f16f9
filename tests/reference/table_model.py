# SPDX-License-Identifier: Apache-2.0
"""A model whose logits are a table."""

from __future__ import annotations

import torch
from torch import Tensor


class TableModel:
    """Fixed logits, whatever the tokens: `rows` [N, V] for the last N positions, else 0."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def logits(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, self.rows.shape[1], dtype=self.rows.dtype)
        logits[:, -len(self.rows) :] = self.rows
        return logits


def rows_of(*tokens_and_logits: dict[int, float], num_columns: int = 16) -> Tensor:
    rows = torch.zeros(len(tokens_and_logits), num_columns)
    for row, entries in zip(rows, tokens_and_logits, strict=True):
        for token, value in entries.items():
            row[token] = value
    return rows
