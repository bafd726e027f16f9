# SPDX-License-Identifier: Apache-2.0
"""The I-DLM family at tiny size.

Configuration keys and tensor names follow the released I-DLM-8B (2026), which are SDAR's
(https://github.com/togethercomputer/introspective-dlm): Qwen3 under a causal mask. A row predicts
the next token, at masks too, which all come after the tokens that are known.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiny_model import sdar
from tiny_model.decoder import Attention, Decoder, GatedMLP, Layer
from tiny_model.decoding import strided
from tiny_model.family import Family, TokenIds
from tiny_model.settings import BLOCK_LENGTHS

_STRIDE = BLOCK_LENGTHS["idlm"]


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: I-DLM-8B's keys, at tiny size and in fp32."""
    return sdar.config(tokens) | {
        "block_size": _STRIDE - 1,
        "max_position_embeddings": 40960,
        "use_regular_causal": True,
    }


class IDLMNetwork(Decoder):
    """I-DLM with random weights; see family.SeededNetwork."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._mask_id = config["mask_token_id"]

        def make_layer(_: int) -> Layer:
            mlp = GatedMLP(config["hidden_size"], config["intermediate_size"])
            return Layer(config, Attention(config, qk_norm="head"), mlp)

        super().__init__(config, make_layer, shift_rows=True, block_length=1)

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """See family.Network; `clean` is ignored, because all rows are causal."""
        return super().hidden(ids)

    def seeded(self, ids: Tensor, starts: Tensor, clean: Tensor | None = None) -> Tensor:
        """See family.SeededNetwork; all tokens of a block after its first one are masks."""
        positions = torch.arange((ids if clean is None else clean).shape[1])
        after = positions > starts[:, None]
        if clean is None:
            rows = self.causal(ids.masked_fill(after, self._mask_id))
            return torch.where(after[..., None], _later(rows), rows)
        rows = self.causal(torch.cat((clean, clean.masked_fill(after, self._mask_id))))
        known, masked = rows.chunk(2)
        return torch.cat((known, _later(masked)[:, -ids.shape[1] :]), dim=1)

    def causal(self, ids: Tensor) -> Tensor:
        """Map ids [B, T] int64 to hidden states [B, T, D] fp32, which predict the next tokens."""
        following = torch.cat((ids, ids[:, -1:]), dim=1)
        return self.hidden(following)[:, 1:]


def _later(rows: Tensor) -> Tensor:
    """Return rows [B, T, D] moved one position later, so that each predicts its own token."""
    return torch.cat((rows[:, :1], rows[:, :-1]), dim=1)


FAMILY = Family(
    name="idlm",
    special_tokens=sdar.SPECIAL_TOKENS,
    chat_template=sdar.CHAT_TEMPLATE,
    template_texts=sdar.FAMILY.template_texts,
    config=config,
    network=IDLMNetwork,
    decode=partial(strided, stride=_STRIDE),
    lists_eot=True,
)
