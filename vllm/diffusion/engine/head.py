# SPDX-License-Identifier: Apache-2.0
"""The end of a model as sampling sees it, with the logits in the activation pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.buffers import Buffers
    from vllm.diffusion.models.base import DiffusionModel


class PooledHead:
    """Final norm and output head; what they return is good until the scope of `buffers` ends."""

    def __init__(self, model: DiffusionModel, buffers: Buffers) -> None:
        self.vocab_start = model.vocab_start
        self.vocab_size = model.vocab_size
        self._model = model
        self._buffers = buffers

    @property
    def head_matrix(self) -> Tensor | None:
        """The output matrix, see `DiffusionModel.head_matrix`."""
        return self._model.head_matrix

    def final_norm(self, x: Tensor) -> Tensor:
        """The last norm of x [R, D]."""
        return self._model.final_norm(x, out=self._buffers.take("normed", tuple(x.shape), x.dtype))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [R, columns of this rank] of normed hidden states [R, D]."""
        shape = (hidden_states.shape[0], self._model.num_columns)
        logits = self._buffers.take("logits", shape, hidden_states.dtype)
        return self._model.compute_logits(hidden_states, out=logits, scratch=self._buffers)
