# SPDX-License-Identifier: Apache-2.0
"""Base class of models whose weights change while they serve."""

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
        is_loaded: whether the model is loaded; from then on a load may contain only some of its
            weights.
        weight_generation: number of weight changes since then.
    """

    rotary_frequencies: torch.Tensor
    is_loaded = False
    weight_generation = 0
    _received: set[str] | None = None  # tensors of an update that has begun

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, or some of its tensors; return the parameters that were filled."""
        raise NotImplementedError

    def destinations(self) -> tuple[dict[str, Destination], set[str]]:
        """Return the destinations of the checkpoint's modules, and the modules to skip."""
        raise NotImplementedError

    def receive(self) -> set[str] | None:
        """Prepare to load tensors; return the set of received names, or None for the first load."""
        if not self.is_loaded:
            return None
        if self.rotary_frequencies.is_cuda:
            # Running steps may still read the old weights.
            torch.cuda.synchronize(self.rotary_frequencies.device)
        if self._received is not None:
            return self._received
        self._renew_largest()
        self.weight_generation += 1
        return set()

    def begin_update(self) -> None:
        """Begin a weight update: all loads until `end_update` count as one change of weights."""
        self._received = set()
        self._renew_largest()

    def cancel_update(self) -> None:
        """End an update that has received no tensor."""
        self._received = None

    def end_update(self) -> list[str]:
        """End an update; return the names of the tensors that did not arrive."""
        received, self._received = self._received or set(), None
        self.weight_generation += 1
        return missing_tensors(self, self.destinations()[0], received)

    def _renew_largest(self) -> None:
        """Reset running maxima (fp8 scales) before new weights arrive."""
        for parameter in self.parameters():
            if isinstance(parameter, ops.StreamedParameter):
                parameter.should_reset = True
