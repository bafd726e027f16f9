# SPDX-License-Identifier: Apache-2.0
"""The model with upstream's interface in addition to the stages that this engine runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.diffusion.core.spans import Span
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.models.bitsandbytes import widened
from vllm.diffusion.models.mixture import unstacked
from vllm.diffusion.models.transformer import destinations_of, run_whole
from vllm.diffusion.models.weights import Destination, load_checkpoint
from vllm.model_executor.models.interfaces import SupportsQuant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class UpstreamModel(DiffusionModel, SupportsQuant):
    """The model class that upstream loads and calls."""

    packed_modules_mapping = {  # noqa: RUF012 (upstream declares it as an instance attribute)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    # Upstream checks these at the start of an engine with adapters.
    supports_lora = True
    embedding_modules: ClassVar[dict[str, str]] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint; after the first load, replace some of its tensors in place.

        Each call counts as a change of the weights, unless an update has begun.

        Returns:
            names of the parameters that were filled.

        Raises:
            CheckpointError: names the tensors that are missing or not part of the model.
        """
        received = self.receive()
        destinations, ignored = self.destinations()
        weights = widened(weights)
        if self.architecture.expert_layers:
            weights = unstacked(weights, self.config)
        with torch.no_grad():
            return load_checkpoint(self, weights, destinations, ignored, received=received)

    def destinations(self) -> tuple[dict[str, Destination], set[str]]:
        """Return the destinations of the checkpoint's modules, and the modules to skip."""
        destinations = destinations_of(self.architecture, self.model)
        if not self.config.tie_word_embeddings:
            return destinations, set()
        head = self.architecture.module_names.get("lm_head", "lm_head")
        del destinations[head]
        return destinations, {head}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, D] of ids [T], in a new tensor."""
        shape = (*input_ids.shape, self.hidden_size)
        return self.embed(input_ids, self.model.norm.weight.new_empty(shape))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
        *,
        fp8_attention: bool = False,
    ) -> Tensor:
        """Return the final, normed hidden states [T, D] of one sequence, in one chunk per stage.

        The family's visibility applies, with blocks of the configured length.

        Args:
            input_ids: [T] token ids; unused if `inputs_embeds` is given.
            positions: [T], from 0.
            intermediate_tensors: upstream's argument for pipeline parallelism; always None.
            inputs_embeds: [T, D], instead of ids.
            fp8_attention: whether attention is fp8, as in forwards of long sequences.
        """
        if inputs_embeds is not None:
            x = inputs_embeds.clone()
        elif input_ids is not None:
            x = self.embed_input_ids(input_ids)
        else:
            raise ValueError("input_ids: wanted token ids, or inputs_embeds; given neither")
        visibility = self.family.visibility.with_blocks_of(self.config.block_length)
        span = Span(0, len(x), 0, len(x), visibility.kept_unit)
        rotary = self.rotary(positions)
        x = run_whole(self.layers, x, rotary, [span], fp8_attention=fp8_attention)
        return self.final_norm(x)
