# SPDX-License-Identifier: Apache-2.0
"""Inputs of CUDA graphs, which the graphs themselves copy to the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion.ops.transfer import Staging

if TYPE_CHECKING:
    from vllm.diffusion.ops.transfer import Array

_PATIENCE_S = 0.002  # seconds that the host polls before it sleeps


class GraphInputs:
    """Host arrays that a CUDA graph itself copies to the device at every replay.

    A copy within the graph costs the host nothing, but has no event that signals its end. So a
    number is sent with the arrays, and the graph returns it. Until the number of the latest replay
    is back, the device may still read the arrays.

    Args:
        like: arrays of the required shapes and dtypes, in tuples and named tuples; other values in
            these are kept.
        device: a CUDA device.

    Attributes:
        tensors: tensors that the graph may read after `upload`: equal shapes and dtypes, nested in
            the same way.
    """

    def __init__(self, like: Any, device: torch.device) -> None:
        self._staging = Staging((like, np.zeros(1, dtype=np.int64)), device)
        self._arrays, self._sent = self._staging.arrays
        self.tensors, self._there = self._staging.tensors
        self._back = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._returned: Array = self._back.numpy()
        self._sent[0] = 0

    def wait(self) -> None:
        """Wait until the device has copied the latest arrays.

        This waits only for the number, unless it takes too long; then it waits for the end of the
        graph.
        """
        patience = time.perf_counter() + _PATIENCE_S
        while self._returned[0] != self._sent[0]:
            if time.perf_counter() > patience:
                torch.cuda.current_stream().synchronize()
                return

    def to_write(self) -> Any:
        """Return the arrays, nested like `tensors`, for one replay; uninitialised at first.

        This waits until the device has copied their old contents, which usually was long ago.
        """
        self.wait()
        self._sent[0] += 1
        return self._arrays

    def upload(self) -> None:
        """Copy the arrays; this must be captured as the first node of the graph."""
        self._staging.upload()
        self._back.copy_(self._there, non_blocking=True)
