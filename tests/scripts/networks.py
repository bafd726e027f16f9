# SPDX-License-Identifier: Apache-2.0
"""Networks that stand in for a trained one, and what a loop decodes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tiny_model.family import TokenIds
from tiny_model.training import Example

if TYPE_CHECKING:
    from tiny_model.settings import DecodingSetting

MASK = 99  # of networks that stand in
TOKENS = TokenIds(vocab_size=40, bos=36, eos=37, mask=38, eot=39)
EXAMPLES = [
    Example([36, 1, 2, 3], [4, 5, 39]),
    Example([36, 1, 7, 3], [9, 39]),
    Example([36, 6, 2, 3], [8, 4, 5, 5, 39]),
]


def committed(
    decode: Any, network: Any, num_prompt: int, setting: DecodingSetting
) -> tuple[list[int], list[list[int]]]:
    """The row that a loop fills behind a prompt, and the positions that each forward committed."""
    order, seen = [], set(range(num_prompt))

    def record(rows: torch.Tensor) -> None:
        filled = {i for i, token in enumerate(rows[0].tolist()) if token != MASK}
        order.append(sorted(filled - seen))
        seen.update(filled)

    prompt = network.tokens[None, :num_prompt]
    rows = decode(network, prompt, MASK, setting, record)
    return rows[0].tolist(), order


class FixedNetwork:
    """Logits by position only: token i at position i, with the given logit, 0 elsewhere."""

    tokens = torch.arange(100)

    def __init__(self, peaks: list[float]) -> None:
        self._peaks = torch.tensor(peaks)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        return torch.diag(self._peaks[:length]).expand(ids.shape[0], length, length)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
