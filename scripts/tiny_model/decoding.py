# SPDX-License-Identifier: Apache-2.0
"""The families' own decoding loops at temperature 0, as plain as possible.

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
def semi_autoregressive(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
) -> Tensor:
    """LLaDA's loop, block by block; arguments and result as family.Decode.

    The canvas must be a multiple of the block length and the steps of the number of blocks.
    Each step commits the most confident masked positions up to the end of the current block;
    ties go to the lowest position.

    Source: `generate` of https://github.com/ML-GSAI/LLaDA with low-confidence remasking.
    """
    rows, prompt_length = _with_canvas(prompts, mask_id, setting), prompts.shape[1]
    steps_per_block = setting.steps // (setting.canvas // setting.block_length)
    for block_start in range(0, setting.canvas, setting.block_length):
        window = rows[:, prompt_length : prompt_length + block_start + setting.block_length]
        for quota in commit_quotas(setting.block_length, steps_per_block):
            hidden = network.hidden(rows)[:, prompt_length : prompt_length + window.shape[1]]
            confidence, tokens = network.logits(hidden).softmax(dim=-1).max(dim=-1)  # [B, window]
            _commit_best(window, tokens, confidence, quota, mask_id)
            after_forward(rows)
    return rows


@torch.inference_mode()
def dream(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
) -> Tensor:
    """Dream's loop over the whole canvas; arguments and result as family.Decode.

    Each step commits the masked positions whose distribution has the lowest entropy, as many as
    the schedule of noise levels says; ties go to the lowest position. The block length of
    `setting` is not used.

    Source: `diffusion_generate` of https://github.com/DreamLM/Dream with alg "entropy".
    """
    rows, prompt_length = _with_canvas(prompts, mask_id, setting), prompts.shape[1]
    window = rows[:, prompt_length:]
    for quota in dream_quotas(setting.canvas, setting.steps):
        probabilities = network.logits(network.hidden(rows)[:, prompt_length:]).softmax(dim=-1)
        negative_entropy = (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)
        _commit_best(window, probabilities.argmax(dim=-1), negative_entropy, quota, mask_id)
        after_forward(rows)
    return rows


def dream_quotas(num_masked: int, steps: int, eps: float = 1e-3) -> list[int]:
    """How many positions each of Dream's `steps` steps commits: the noise falls from 1 to `eps`."""
    noise = torch.linspace(1, eps, steps + 1, dtype=torch.float32)
    quotas = []
    for step in range(steps - 1):
        quotas.append(int(num_masked * (1 - noise[step + 1] / noise[step])))
        num_masked -= quotas[-1]
    return [*quotas, num_masked]


def _with_canvas(prompts: Tensor, mask_id: int, setting: DecodingSetting) -> Tensor:
    return torch.cat((prompts, prompts.new_full((len(prompts), setting.canvas), mask_id)), dim=1)


def _commit_best(window: Tensor, tokens: Tensor, score: Tensor, quota: int, mask_id: int) -> None:
    """Writes `quota` tokens of every row into `window`; all arguments [B, window] long."""
    score = score.masked_fill(window != mask_id, -torch.inf)
    chosen = score.sort(dim=-1, descending=True, stable=True).indices[:, :quota]
    window.scatter_(1, chosen, tokens.gather(1, chosen))  # a view of the rows
