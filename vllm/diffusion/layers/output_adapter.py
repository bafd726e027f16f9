# SPDX-License-Identifier: Apache-2.0
"""Low-rank addition to the output projection of attention, for some rows of a step.

Letters: R rows, D hidden size, H query heads of this rank, hd head width, r rank of the adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion import ops

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OutputAdapter:
    """The two matrices of one layer, in the model dtype.

    Attributes:
        down: [r, H hd], the columns of this rank's heads.
        up: [D, r], with the adapter's scale.
        is_summed: whether other ranks have the other heads.
    """

    down: Tensor
    up: Tensor
    is_summed: bool = False

    def add_to(self, x: Tensor, heads: Tensor) -> None:
        """Add up (down heads) to x [R, D], for attention results heads [R, H hd]."""
        low = heads @ self.down.T
        if self.is_summed:
            low = ops.tensor_parallel().sum(low)
        x.addmm_(low, self.up.T)
