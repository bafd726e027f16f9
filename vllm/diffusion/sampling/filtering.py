# SPDX-License-Identifier: Apache-2.0
"""Filters of a draw: min-p, top-k and top-p, in the order of the rule's reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.diffusion import ops

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.request.params import DiffusionParams

_NUMBERS: dict[str, type[np.generic]] = {
    "min_p": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
}


def filters_of(params: DiffusionParams, scoring: CandidateScoring) -> ops.Filters | None:
    """Return the filters of a request for a rule's scoring; None for none.

    Only Dream's reference filters at temperature 0, where filters change scores; it has no min-p.
    """
    if scoring.adjusts_first:
        return None
    is_drawn = params.temperature > 0
    if not is_drawn and scoring.draw != "categorical":
        return None
    min_p = params.min_p if is_drawn else 0.0
    top_p = 1.0 if params.top_p is None else params.top_p
    if min_p == 0 and params.top_k is None and top_p >= 1:
        return None
    return ops.Filters(
        min_p=min_p,
        top_k=params.top_k or 0,
        top_p=top_p,
        is_top_p_first=scoring.draw == "categorical",
        keeps_equal=scoring.is_categorical,
        are_scored=scoring.is_categorical and not scoring.scores_all,
    )


def kind_of(filters: ops.Filters) -> ops.Filters:
    """Return filters without their numbers, that is, the part that a launch cannot mix."""
    return replace(filters, min_p=0.0, top_k=0, top_p=1.0)


def numbers_of(
    filters: Iterable[ops.Filters | None],
) -> dict[str, tuple[list[Any], type[np.generic]]]:
    """Return the numbers of several requests' filters by name, each with its dtype."""
    numbers = list(filters)
    return {name: ([getattr(f, name) for f in numbers], dtype) for name, dtype in _NUMBERS.items()}


def with_numbers(kind: ops.Filters, parameters: Mapping[str, Any]) -> ops.Filters:
    """Return filters of a kind with these numbers, or with tensors of one value per row."""
    return replace(kind, **{name: parameters[name] for name in _NUMBERS})
