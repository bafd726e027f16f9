# SPDX-License-Identifier: Apache-2.0
"""How a model's rotary embedding differs from the usual one. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Yarn(NamedTuple):
    """Rotary frequencies of a context that training has lengthened (Peng et al., arXiv:2309.00071).

    Channels that turn fewer than `beta_slow` times in `original_length` positions turn `factor`
    times slower, those that turn more than `beta_fast` times as before, and others in between.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float


class QueryGrowth(NamedTuple):
    """Factor of queries, 1 + beta ln(1 + position // length), after their rotation."""

    beta: float
    length: int
