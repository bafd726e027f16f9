# SPDX-License-Identifier: Apache-2.0
"""The families' own decoding loops at temperature 0, as simple as possible.

They verify a checkpoint independently of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tiny_model.family import Network, OpenNetwork, SeededNetwork
    from tiny_model.settings import DecodingSetting


def commit_quotas(num_masked: int, steps: int) -> list[int]:
    """Return how many positions each of `steps` steps commits; earlier steps take the remainder."""
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
    """Run LLaDA's loop, block by block; arguments and result as in family.Decode.

    The canvas must be a multiple of the block length, and the steps a multiple of the number of
    blocks. Each step commits the most confident masked positions up to the end of the current
    block; ties go to the lowest position.

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
    """Run Dream's loop over the whole canvas; arguments and result as in family.Decode.

    Each step commits the masked positions whose distribution has the lowest entropy; ties go to the
    lowest position. The schedule of noise levels gives their number. The block length of `setting`
    is not used.

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
    """Return how many positions each of Dream's `steps` steps commits.

    The noise falls from 1 to `eps`.
    """
    noise = torch.linspace(1, eps, steps + 1, dtype=torch.float32)
    quotas = []
    for step in range(steps - 1):
        quotas.append(int(num_masked * (1 - noise[step + 1] / noise[step])))
        num_masked -= quotas[-1]
    return [*quotas, num_masked]


@torch.inference_mode()
def low_confidence_dynamic(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
    *,
    threshold: float,
) -> Tensor:
    """Run the loop of SDAR and LLaDA2.0; arguments and result as in family.Decode.

    Blocks form a grid that starts at the first token of the prompt. Each step commits the masked
    positions of the block whose confidence is above `threshold`, but at least the step's quota of
    the most confident positions.
    """
    rows, block_length = _on_grid(prompts, mask_id, setting), setting.block_length
    quotas = commit_quotas(block_length, setting.steps // -(-setting.canvas // block_length))
    for start in _block_starts(prompts, setting):
        seen = rows[:, : start + block_length]
        window = seen[:, start:]
        for quota in quotas:
            masked = window == mask_id
            if not masked.any():
                break
            confidence, tokens = _candidates(network, seen, start, masked, mask_id)
            above = confidence > threshold
            best = confidence.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < quota
            is_enough = above.sum(dim=-1, keepdim=True) >= quota
            _commit(window, tokens, above.where(is_enough, best & masked))
            after_forward(rows)
    return rows[:, : prompts.shape[1] + setting.canvas]


@torch.inference_mode()
def hierarchy_block(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
    *,
    threshold: float = 1.0,
    sub_block_length: int = 8,
) -> Tensor:
    """Run Fast-dLLM v2's loop; arguments and result as in family.Decode, except for the steps.

    The finished block before a block predicts its first position, if that is behind the prompt.
    Then sub-blocks are filled from left to right: each forward commits the best masked position of
    the sub-block, and all positions whose confidence is above `threshold`.
    """
    rows, block_length = _on_grid(prompts, mask_id, setting), setting.block_length
    for start in _block_starts(prompts, setting):
        seen = rows[:, : start + block_length]
        if start >= prompts.shape[1]:
            seed = seen[:, start : start + 1]
            seed.copy_(_candidates(network, seen, start, seed == mask_id, mask_id)[1])
            after_forward(rows)
        for left in range(start, start + block_length, sub_block_length):
            window = seen[:, left : left + sub_block_length]
            while (masked := window == mask_id).any():
                confidence, tokens = _candidates(network, seen, left, masked, mask_id)
                best = confidence == confidence.max(dim=-1, keepdim=True).values
                _commit(window, tokens, (best | (confidence > threshold)) & masked)
                after_forward(rows)
    return rows[:, : prompts.shape[1] + setting.canvas]


@torch.inference_mode()
def seeded_block(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
    *,
    threshold: float,
) -> Tensor:
    """Run Nemotron-Labs-Diffusion's loop.

    Arguments and result are as in family.Decode, except for the steps. Blocks start behind the
    prompt. A causal forward gives the first token of a block. Each further forward commits the best
    masked position, and all positions whose confidence reaches `threshold`.
    """
    seeded, length = cast("SeededNetwork", network).seeded, prompts.shape[1]
    rows = _with_canvas(prompts, mask_id, setting)
    for start in range(length, length + setting.canvas, setting.block_length):
        seen = rows[:, : start + setting.block_length]
        starts = torch.full((len(rows),), start)
        following = _without(mask_id, network.logits(seeded(seen[:, :start], starts)[:, -1]))
        seen[:, start] = following.argmax(dim=-1)
        after_forward(rows)
        window = seen[:, start:]
        while (masked := window == mask_id).any():
            logits = _without(mask_id, network.logits(seeded(seen, starts)[:, start:]))
            confidence, tokens = logits.softmax(dim=-1).max(dim=-1)
            confidence = confidence.masked_fill(~masked, -torch.inf)
            best = confidence == confidence.max(dim=-1, keepdim=True).values
            _commit(window, tokens, (best | (confidence >= threshold)) & masked)
            after_forward(rows)
    return rows


@torch.inference_mode()
def strided(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
    *,
    stride: int,
) -> Tensor:
    """Run I-DLM's loop.

    Arguments and result are as in family.Decode, except for the steps. A causal forward verifies
    the drafts of each row, and commits those before the first wrong one and the token after them.
    If all are right, the predictions at the masks after them are the next drafts.
    """
    end = prompts.shape[1] + setting.canvas
    rows = prompts.new_full((len(prompts), end + 2 * stride), mask_id)
    rows[:, : prompts.shape[1]] = prompts
    lengths, num_drafts = [prompts.shape[1]] * len(rows), [0] * len(rows)
    while min(lengths) < end:
        hidden = network.hidden(torch.cat((rows, rows[:, -1:]), dim=1))[:, 1:]
        best = _without(mask_id, network.logits(hidden)).argmax(dim=-1)
        for row, following in zip(range(len(rows)), best, strict=True):
            start, tried = min(lengths[row], end), num_drafts[row]
            verified = following[start - 1 : start + tried]
            wrong = (verified[:-1] != rows[row, start : start + tried]).nonzero()
            count = int(wrong[0]) + 1 if len(wrong) else tried + 1
            has_seed = start > prompts.shape[1]
            num_drafts[row] = 0 if len(wrong) or not has_seed else stride - 1
            drafts = following[start + tried : start + tried + num_drafts[row]]
            lengths[row] = start + count
            rows[row, start : start + count] = verified[:count]
            rows[row, start + count :] = mask_id
            rows[row, start + count : start + count + len(drafts)] = drafts
        after_forward(rows[:, :end])
    return rows[:, :end]


@torch.inference_mode()
def entropy_bound(
    network: Network,
    prompts: Tensor,
    mask_id: int,
    setting: DecodingSetting,
    after_forward: Callable[[Tensor], object],
    *,
    bound: float = 0.1,
    temperatures: tuple[float, float] = (0.4, 0.8),
    confidence: float = 0.005,
) -> Tensor:
    """Run DiffusionGemma's loop; arguments and result as in family.Decode.

    A block begins as random tokens. Each step predicts all of its tokens at a temperature that
    falls, and keeps the most certain ones as long as the entropies before them sum to at most
    `bound`; all others become random again. A block ends with its last step, or as soon as all of
    its predictions are certain and equal to the previous ones.
    """
    model, generator = cast("OpenNetwork", network), torch.Generator().manual_seed(0)
    rows, length = _with_canvas(prompts, mask_id, setting), prompts.shape[1]
    num_steps = setting.steps // (setting.canvas // setting.block_length)
    low, high = temperatures

    def noise(like: Tensor) -> Tensor:
        return torch.randint(model.num_tokens, like.shape, generator=generator)

    for start in range(length, length + setting.canvas, setting.block_length):
        seen = rows[:, : start + setting.block_length]
        window, soft, before = seen[:, start:], None, None
        window.copy_(noise(window))
        ends = torch.zeros(len(rows), dtype=torch.bool)
        for step in range(num_steps):
            hidden = model.denoised(seen, torch.full((len(rows),), start), soft)
            logits = model.logits(hidden) / (low + (high - low) * (num_steps - step) / num_steps)
            after_forward(rows)
            soft, shares = model.expected(logits), logits[:, start:].softmax(dim=-1)
            entropy, best = torch.special.entr(shares).sum(dim=-1), shares.argmax(dim=-1)
            kept = noise(best)
            if step + 1 < num_steps:
                ordered, order = entropy.sort(dim=-1, stable=True)
                is_kept = ordered.cumsum(dim=-1) - ordered <= bound
                kept = best.where(is_kept.gather(1, order.argsort(dim=-1)), kept)
            else:
                kept = best
            window.copy_(torch.where(ends[:, None], window, kept))
            if before is not None:
                is_stable = (best == before).all(dim=-1) & (entropy.mean(dim=-1) < confidence)
                window.copy_(torch.where((is_stable & ~ends)[:, None], best, window))
                ends |= is_stable
            before = best
            if ends.all():
                break
    return rows


def _on_grid(prompts: Tensor, mask_id: int, setting: DecodingSetting) -> Tensor:
    """Return prompts and their canvas, with masks up to the end of the last block."""
    num_masks = setting.canvas + -(prompts.shape[1] + setting.canvas) % setting.block_length
    return torch.cat((prompts, prompts.new_full((len(prompts), num_masks), mask_id)), dim=1)


def _block_starts(prompts: Tensor, setting: DecodingSetting) -> range:
    length, block_length = prompts.shape[1], setting.block_length
    return range(length - length % block_length, length + setting.canvas, block_length)


def _candidates(
    network: Network, seen: Tensor, start: int, masked: Tensor, mask_id: int
) -> tuple[Tensor, Tensor]:
    """Return confidence and token of the positions from `start` on.

    The confidence is -inf if the position is not masked.
    """
    hidden = network.hidden(seen)[:, start : start + masked.shape[1]]
    logits = _without(mask_id, network.logits(hidden))
    confidence, tokens = logits.softmax(dim=-1).max(dim=-1)
    return confidence.masked_fill(~masked, -torch.inf), tokens


def _without(mask_id: int, logits: Tensor) -> Tensor:
    """Set the mask's logit to -inf in logits [..., V]; otherwise a loop might not end."""
    logits[..., mask_id] = -torch.inf
    return logits


def _commit(window: Tensor, tokens: Tensor, chosen: Tensor) -> None:
    """Write the chosen elements of `tokens` into `window`, a view of the rows."""
    window.copy_(tokens.where(chosen, window))


def _with_canvas(prompts: Tensor, mask_id: int, setting: DecodingSetting) -> Tensor:
    return torch.cat((prompts, prompts.new_full((len(prompts), setting.canvas), mask_id)), dim=1)


def _commit_best(window: Tensor, tokens: Tensor, score: Tensor, quota: int, mask_id: int) -> None:
    """Write `quota` tokens of every row into `window`; all arguments are [B, window]."""
    score = score.masked_fill(window != mask_id, -torch.inf)
    chosen = score.sort(dim=-1, descending=True, stable=True).indices[:, :quota]
    window.scatter_(1, chosen, tokens.gather(1, chosen))  # `window` is a view of the rows
