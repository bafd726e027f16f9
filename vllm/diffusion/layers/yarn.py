# SPDX-License-Identifier: Apache-2.0
"""Rotary positions for a context that training has lengthened: frequencies and query factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.positions import QueryGrowth, Yarn


def yarn_frequencies(plain: Tensor, theta: float, yarn: Yarn | None) -> Tensor:
    """Return YaRN's version of the `plain` frequencies [rd / 2] fp32; `plain` if `yarn` is None.

    Args:
        plain: as `inverse_frequencies` returns them.
        theta: base of the frequencies, above 1.
        yarn: YaRN parameters of the checkpoint.
    """
    if yarn is None:
        return plain
    num_pairs = plain.numel()

    def pair(num_turns: float) -> float:
        """Return the pair of channels that makes `num_turns` turns within the original length."""
        return (
            num_pairs * math.log(yarn.original_length / (num_turns * 2 * math.pi)) / math.log(theta)
        )

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, dtype=torch.float32)
    slowed = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / yarn.factor * slowed + plain * (1 - slowed)


def write_factors(positions: Tensor, growth: QueryGrowth, out: Tensor) -> None:
    """Write the factors of queries at positions [R] to `out` [R]; computed in fp32 and cast."""
    rounds = positions.div(growth.length, rounding_mode="floor").float()
    out.copy_(1 + growth.beta * torch.log(1 + rounds))
