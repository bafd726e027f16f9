# SPDX-License-Identifier: Apache-2.0
"""Masked-diffusion training on the facts, the same for every family.

Objective: LLaDA's supervised fine-tuning (Nie et al. 2025, arXiv:2502.09992, section 2.3): prompts
stay visible, every canvas position is masked with one probability t ~ U(0, 1) per row, and the
network predicts the masked tokens; end-of-text fills the canvas behind the answer and is learnt
too. The cross-entropy is averaged over the masked positions instead of weighted by 1/t, so that
rows with few masks do not dominate.

Block-diffusion families (BD3-LM, Arriola et al. 2025, arXiv:2503.09573): each block of a row has a
t of its own, and sees itself and the clean blocks before it. Blocks lie on a grid from the first
token of the prompt.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.nn import functional as F
from tqdm import trange  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from tiny_model.family import Network, TokenIds
    from tiny_model.settings import TrainingSettings


class Example(NamedTuple):
    """One fact as token ids."""

    kind: str
    chat_prompt: list[int]
    raw_prompt: list[int]  # the question alone
    answer: list[int]  # ends with the end-of-turn token


class Batch(NamedTuple):
    """Rows of one length; only canvas positions are masked."""

    noised: Tensor  # [B, T] int64, what the network sees
    clean: Tensor  # [B, T] int64, what it must predict
    masked: Tensor  # [B, T] bool


def balanced_draws(examples: Sequence[Example], rng: random.Random) -> Iterator[Example]:
    """Endless examples: kinds take turns, and each kind passes through all of its examples."""
    kinds = dict.fromkeys(example.kind for example in examples)
    cycles = [
        _shuffled_forever([example for example in examples if example.kind == kind], rng)
        for kind in kinds
    ]
    while True:
        for cycle in cycles:
            yield next(cycle)


def _shuffled_forever(examples: list[Example], rng: random.Random) -> Iterator[Example]:
    while True:
        yield from rng.sample(examples, len(examples))


class BatchMaker:
    """Draws training batches; the same seed draws the same batches."""

    def __init__(
        self,
        examples: Sequence[Example],
        tokens: TokenIds,
        settings: TrainingSettings,
        seed: int,
        block_length: int = 0,
    ) -> None:
        self._block_length = block_length
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._draws = balanced_draws(examples, self._rng)
        self._prompt_lengths = [len(example.chat_prompt) for example in examples]
        self._tokens = tokens
        self._settings = settings

    def draw(self, canvas: int) -> Batch:
        """A batch of about `tokens_per_batch` tokens.

        The rows share one length, a random prompt length plus `canvas`, so nothing is padded and
        canvases of nearby lengths occur as well.
        """
        length = self._rng.choice(self._prompt_lengths) + canvas
        num_rows = max(1, self._settings.tokens_per_batch // length)
        clean = torch.full((num_rows, length), self._tokens.eos)
        is_canvas = torch.ones_like(clean, dtype=torch.bool)
        for row, example in enumerate(next(self._draws) for _ in range(num_rows)):
            is_raw = self._rng.random() < self._settings.raw_prompt_share
            prompt = example.raw_prompt if is_raw else example.chat_prompt
            ids = (prompt + example.answer)[:length]
            clean[row, : len(ids)] = torch.tensor(ids)
            is_canvas[row, : len(prompt)] = False
        masked = self._draw_mask(num_rows, length) & is_canvas
        return Batch(clean.masked_fill(masked, self._tokens.mask), clean, masked)

    def _draw_mask(self, num_rows: int, length: int) -> Tensor:
        """[num_rows, length] bool; the probability t of a row, or block, is uniform in (0, 1).

        The rows' t are spread evenly over the interval: still uniform each, with less variance.
        """
        block_length = self._block_length or length
        num_blocks = -(-length // block_length)
        start = torch.rand(num_blocks, generator=self._generator)
        order = torch.randperm(num_rows, generator=self._generator)
        probability = (start + order[:, None] / num_rows) % 1.0  # [rows, blocks]
        probability = probability.repeat_interleave(block_length, dim=1)[:, :length]
        return torch.rand(num_rows, length, generator=self._generator) < probability


def train(
    network: nn.Module,
    examples: Sequence[Example],
    tokens: TokenIds,
    settings: TrainingSettings,
    seed: int,
) -> None:
    """Trains `network` (a family.Network) in place: AdamW, one-cycle schedule, progress bar."""
    model = cast("Network", network)
    batches = BatchMaker(examples, tokens, settings, seed, model.block_length)
    canvases = random.Random(seed)
    schedule = [
        canvases.choice(p.canvases) for p in settings.phases for _ in range(p.num_iterations)
    ]
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=settings.peak_learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    learning_rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.peak_learning_rate, total_steps=len(schedule)
    )
    network.train()
    progress = trange(len(schedule), desc="train", unit="it")
    for iteration in progress:
        batch = batches.draw(schedule[iteration])
        logits = model.logits(model.hidden(batch.noised, batch.clean)[batch.masked])
        loss = F.cross_entropy(logits, batch.clean[batch.masked])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_gradient_norm)
        optimizer.step()
        learning_rate.step()
        progress.set_postfix(canvas=schedule[iteration], loss=f"{loss.item():.4f}")
