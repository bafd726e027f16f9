# SPDX-License-Identifier: Apache-2.0
"""LLaDA's semi-autoregressive decoding at temperature 0, as plain as possible.

Source: the reference `generate` of https://github.com/ML-GSAI/LLaDA with low-confidence remasking.
Used to verify a checkpoint independently of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tiny_model.family import Network
    from tiny_model.settings import DecodingSetting


def commit_quotas(num_masked: int, steps: int) -> list[int]:
    """How many positions each of `steps` steps commits; earlier steps take the remainder."""
    base, remainder = divmod(num_masked, steps)
    return [base + (step < remainder) for step in range(steps)]


@torch.inference_mode()
def denoise(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
) -> Tensor:
    """Fills a canvas behind every prompt, block by block.

    prompts [B, P] int64 without `mask_id` -> rows [B, P + canvas] int64. `after_forward` is shown
    the rows after each forward.
    The canvas must be a multiple of the block length and the steps of the number of blocks.
    Each step commits the most confident masked positions up to the end of the current block;
    ties go to the lowest position.
    """
    num_rows, prompt_length = prompts.shape
    rows = torch.cat((prompts, prompts.new_full((num_rows, setting.canvas), mask_id)), dim=1)
    steps_per_block = setting.steps // (setting.canvas // setting.block_length)
    for block_start in range(0, setting.canvas, setting.block_length):
        window = rows[:, prompt_length : prompt_length + block_start + setting.block_length]
        for quota in commit_quotas(setting.block_length, steps_per_block):
            hidden = network.hidden(rows)[:, prompt_length : prompt_length + window.shape[1]]
            confidence, tokens = network.logits(hidden).softmax(dim=-1).max(dim=-1)  # [B, window]
            confidence.masked_fill_(window != mask_id, -1.0)
            ranking = confidence.sort(dim=-1, descending=True, stable=True).indices
            chosen = ranking[:, :quota]
            window.scatter_(1, chosen, tokens.gather(1, chosen))  # a view: writes into rows
            after_forward(rows)
    return rows
