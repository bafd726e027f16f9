# SPDX-License-Identifier: Apache-2.0
"""Variants of the rotary embedding, without torch."""

from __future__ import annotations

from typing import NamedTuple


class Yarn(NamedTuple):
    """Rotary frequencies of a context that training has extended (Peng et al., arXiv:2309.00071).

    Channels that turn fewer than `beta_slow` times in `original_length` positions turn `factor`
    times slower. Channels that turn more than `beta_fast` times are unchanged, and others are in
    between.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float


class QueryGrowth(NamedTuple):
    """Factor of queries after their rotation: 1 + beta ln(1 + position // length)."""

    beta: float
    length: int
