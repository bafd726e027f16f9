# SPDX-License-Identifier: Apache-2.0
"""A model whose prompt is computed once, which is `cache: frozen` for any loop without a cache.

The first forward pass is whole, and its keys and values of the prompt are kept. Later forward
passes compute the canvas, which attends to them and to itself. With guidance, a forward pass has
two sequences with separate keys and values. If logits are shifted, the row before the canvas is
computed again as well.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reference.fast_dllm import WindowModel

if TYPE_CHECKING:
    from reference.models import KeyValues


class FrozenPrompt:
    """The model of one run of a loop.

    Args:
        model: computes windows of sequences.
        prompt_length: positions before the canvas.
    """

    def __init__(self, model: WindowModel, prompt_length: int) -> None:
        self.logit_shift = getattr(model, "logit_shift", 0)
        self._model = model
        self._start = max(prompt_length - self.logit_shift, 0)
        self._prompt: KeyValues | None = None

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, V]; rows that are not computed are NaN."""
        length = ids.shape[1]
        if self._prompt is None:
            logits, kept = self._model.forward_with_kv(ids, range(length), None)
            self._prompt = kept.keep(range(self._start))
            return logits
        window = range(self._start, length)
        computed, _ = self._model.forward_with_kv(ids[:, self._start :], window, self._prompt)
        logits = torch.full((*ids.shape, computed.shape[-1]), torch.nan, dtype=computed.dtype)
        logits[:, self._start :] = computed
        return logits
