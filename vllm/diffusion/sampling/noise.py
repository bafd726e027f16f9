# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a request.

A number is a function of (seed, purpose, step, canvas position, column) alone, so it does not
depend on batch neighbours, chunks, vocabulary tiles, device or rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm.diffusion import ops

if TYPE_CHECKING:
    import torch


class NoiseSource(Protocol):
    """Where uniform random numbers come from."""

    def uniform(
        self, seed: int, purpose: int, step: int, positions: torch.Tensor, columns: range
    ) -> torch.Tensor:
        """[R, len(columns)] float64 in (0, 1) for canvas positions [R] int64."""
        ...


class PhiloxNoise:
    """Counter-based generator Philox4x32-10 (Salmon et al., SC 2011)."""

    def uniform(
        self, seed: int, purpose: int, step: int, positions: torch.Tensor, columns: range
    ) -> torch.Tensor:
        return ops.philox_uniform(seed, purpose, step, positions, columns)
