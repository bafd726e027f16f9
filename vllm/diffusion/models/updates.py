# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that change while it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.models.weights import missing_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.diffusion.models.weights import Destination


class Updatable(nn.Module):
    """Base of a model whose tensors may be loaded again, some or all of them, in place.

    Attributes:
        is_loaded: it serves; from then on some of its weights may be loaded without the others.
        weight_generation: how often its weights have changed since then.
    """

    rotary_frequencies: torch.Tensor
    is_loaded = False
    weight_generation = 0
    _received: set[str] | None = None  # tensors of an update that has begun

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, or some of its tensors; return the parameters that were filled."""
        raise NotImplementedError

    def destinations(self) -> tuple[dict[str, Destination], set[str]]:
        """Return where the checkpoint's modules go, and which of them are skipped."""
        raise NotImplementedError

    def receive(self) -> set[str] | None:
        """Prepare for tensors that come now; return the set of names that came; None at first."""
        if not self.is_loaded:
            return None
        if self.rotary_frequencies.is_cuda:
            torch.cuda.synchronize(self.rotary_frequencies.device)  # steps may read the old ones
        if self._received is not None:
            return self._received
        self._renew_largest()
        self.weight_generation += 1
        return set()

    def begin_update(self) -> None:
        """Let the loads that follow be one change of the weights, which `end_update` ends."""
        self._received = set()
        self._renew_largest()

    def cancel_update(self) -> None:
        """End an update in which no tensor has come."""
        self._received = None

    def end_update(self) -> list[str]:
        """End an update; return the names of the tensors that did not come."""
        received, self._received = self._received or set(), None
        self.weight_generation += 1
        return missing_tensors(self, self.destinations()[0], received)

    def _renew_largest(self) -> None:
        """Let parameters that keep the largest of what comes begin with what comes next."""
        for parameter in self.parameters():
            if isinstance(parameter, ops.StreamedParameter):
                parameter.should_reset = True
