# SPDX-License-Identifier: Apache-2.0
"""Filters of a draw, for rules that draw tokens from logits themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams


def filtered(logits: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
    """Return logits [R, V] with -inf for the tokens that the request's filters exclude."""
    if not params.has_filters:
        return logits
    filters = ops.Filters(
        min_p=params.min_p,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        keeps_equal=True,
    )
    return logits.masked_fill(~ops.kept_columns(logits, 1.0, filters), -torch.inf)
