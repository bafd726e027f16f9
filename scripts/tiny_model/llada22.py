# SPDX-License-Identifier: Apache-2.0
"""The LLaDA2.2 family at tiny size.

Configuration keys, tensor names and forward pass follow the released LLaDA2.2-mini
(https://huggingface.co/inclusionAI). They are those of LLaDA2.0, but rows choose among the experts
that any row of their block scores highest. The model is trained to replace tokens, and to delete
and insert them by two tokens that have no name in the tokenizer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tiny_model import llada2
from tiny_model.decoder import Decoder
from tiny_model.layers import embedding_rows
from tiny_model.settings import BLOCK_LENGTHS

if TYPE_CHECKING:
    from torch import Tensor

    from tiny_model.family import TokenIds
    from tiny_model.layers import View


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: LLaDA2.2-mini's keys, at tiny size and in fp32."""
    return {
        **llada2.config(tokens),
        "block_size": BLOCK_LENGTHS["llada22"],
        "delete_token_id": tokens.delete,
        "expert_capacity": 5,  # experts per block, out of 8
        "max_position_embeddings": 131072,
        "rope_theta": 3000000,
        "split_token_id": tokens.split,
        "vocab_size": embedding_rows(tokens.split + 1),
    }


class WindowRouter(llada2.Router):
    """Chooses among the experts that any row of a window scores highest.

    Attributes:
        windows: number of the window of every row [T] int64 of a sequence.
    """

    windows: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.capacity = config["expert_capacity"]

    def open(self, ranks: Tensor) -> Tensor:
        """See Router."""
        by_row = ranks.unflatten(0, (-1, len(self.windows)))  # [B, T, experts]
        window = self.windows[:, None].expand_as(by_row)
        highest = torch.full_like(by_row, -torch.inf).scatter_reduce(1, window, by_row, "amax")
        best = highest.topk(self.capacity).indices
        is_closed = torch.ones_like(by_row, dtype=torch.bool).scatter(-1, best, False)
        return by_row.masked_fill(is_closed[:, self.windows], -torch.inf).flatten(0, 1)


class LLaDA22Network(Decoder):
    """LLaDA2's transformer; rows that attend to the same blocks form a window of its routers."""

    def rows(self, ids: Tensor, view: View) -> Tensor:
        """See Decoder."""
        windows = torch.zeros(ids.shape[1], dtype=torch.int64)
        if view.sees is not None:
            windows = view.sees.unique(dim=0, return_inverse=True)[1]
        for module in self.modules():
            if isinstance(module, WindowRouter):
                module.windows = windows
        return super().rows(ids, view)


def network(config: dict[str, Any]) -> Decoder:
    """Build LLaDA2.2 with random weights; its `state_dict` has the released checkpoints' names."""
    return llada2.network(config, decoder=LLaDA22Network, router=WindowRouter)


FAMILY = replace(llada2.FAMILY, name="llada22", config=config, network=network)
