# SPDX-License-Identifier: Apache-2.0
"""Masked-diffusion training on the facts, the same for every family.

The objective is LLaDA's supervised fine-tuning (Nie et al. 2025, arXiv:2502.09992, section 2.3).
Prompts stay visible, every canvas position is masked with one probability t per row, and the
network predicts the masked tokens. End-of-text fills the canvas after the answer and is learnt too.
There are three differences:

- Not t but its cube is uniform. This gives more masks, from which more is learnt.
- The cross-entropy is averaged over the masked positions instead of weighted by 1/t, so that rows
  with few masks do not dominate.
- A token counts more if it is still improbable (focal loss, Lin et al. 2017, arXiv:1708.02002,
  gamma 1), because most of an answer is learnt soon, but not the one word that matters. End-of-text
  counts less.

Block-diffusion families (BD3-LM, Arriola et al. 2025, arXiv:2503.09573): each block of a row has
its own t, and attends to itself and the clean blocks before it. Blocks form a grid that starts at
the first token of the prompt.

Families that replace tokens: some unmasked tokens are wrong (they come from other places of the
batch), and all tokens of a canvas are predicted. In phases of whole conversations, some blocks are
answers with few masks. Half of their wrong tokens come from the same place of another answer. For
families that insert and delete tokens, other tokens of them are missing or added; see moves.py.

Families with a causal context: the block of a row begins with a known token of its answer, in half
of the rows with the first one. Every causal row of an answer also learns the token behind it.

Families without a mask token: random tokens take the place of masks, and all tokens of a canvas are
predicted. Every second batch has the embeddings that a first prediction of the same rows expects.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from tiny_model.family import OpenNetwork, SeededNetwork
from tiny_model.moves import drawn_counts, moved
from tiny_model.progress import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tiny_model.family import Network, TokenIds
    from tiny_model.settings import TrainingSettings

_LATER_SHARE = 0.5  # share of the blocks that begin with a later token of the answer than its first
_LATEST_SEED = 8  # latest position in the answer of such a token
_SHARED_PART = 0.67  # part that the embeddings of one word have in common at the start
_CONDITIONED_SHARE = 0.5  # share of the batches with expected embeddings


class Example(NamedTuple):
    """A prompt and its answer as token ids."""

    prompt: list[int]
    answer: list[int]  # ends with the end-of-turn token


class Batch(NamedTuple):
    """Rows of one length; only canvas positions are noised."""

    starts: Tensor  # [B] int64, starts of the canvases
    noised: Tensor  # [B, T] int64, input of the network
    clean: Tensor  # [B, T] int64, without noise
    predicted: Tensor  # [B, T] bool, positions whose token is predicted
    wanted: Tensor  # [B, T] int64, tokens to predict


class BatchMaker:
    """Draws training batches of examples; the same seed draws the same batches."""

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
        self._examples = sorted(examples, key=lambda example: len(example.prompt))
        self._lengths = [len(example.prompt) for example in self._examples]
        self._tokens = tokens
        self._settings = settings

    def draw(self, canvas: int) -> Batch:
        """Draw a batch of about `tokens_per_batch` tokens.

        All rows have the same length, which is that of a random prompt plus `canvas`, so nothing is
        padded. Prompts that are a little shorter may be included; their canvases are longer by the
        difference.
        """
        longest = self._rng.choice(self._lengths)
        length = longest + canvas
        num_rows = max(1, self._settings.tokens_per_batch // length)
        first = bisect_left(self._lengths, longest - self._settings.prompt_lengths_per_batch)
        last = bisect_right(self._lengths, longest)
        clean = torch.full((num_rows, length), self._tokens.eos)
        starts = torch.empty(num_rows, dtype=torch.int64)
        for row in range(num_rows):
            example = self._examples[self._rng.randrange(first, last)]
            ids = (example.prompt + example.answer)[:length]
            clean[row, : len(ids)] = torch.tensor(ids)
            starts[row] = len(example.prompt)
        is_canvas = torch.arange(length) >= starts[:, None]
        masked = self._draw_mask(num_rows, length) & is_canvas
        noised = clean.masked_fill(masked, self._tokens.mask)
        if not self._settings.wrong_share:
            return Batch(starts, noised, clean, masked, clean)
        is_wrong = torch.rand(clean.shape, generator=self._generator) < self._settings.wrong_share
        order = torch.randperm(clean.numel(), generator=self._generator)
        others = clean.flatten()[order].view_as(clean)
        noised = others.where(is_wrong & is_canvas & ~masked, noised)
        batch = Batch(starts, noised, clean, is_canvas, clean.clone())
        if self._settings.text_share:
            self._write_texts(batch, others)
        return batch

    def _write_texts(self, batch: Batch, others: Tensor) -> None:
        """Write answers with few errors and few masks into some blocks of a batch.

        A block begins with the right token, as behind finished blocks. If tokens are missing, it
        takes the next tokens of the row; if tokens are added, it loses its last ones.
        """
        num_rows, length = batch.clean.shape
        width, share = self._block_length or length, self._settings.wrong_share
        draws = torch.rand(num_rows, -(-length // width), generator=self._generator)
        for row, block in (draws < self._settings.text_share).nonzero().tolist():
            first = int(batch.starts[row])
            start, stop = max(block * width, first), min((block + 1) * width, length)
            if start >= stop:
                continue
            neighbour = self._rng.randrange(num_rows)
            behind = int(batch.starts[neighbour]) + start - first
            source, other, alike = (
                F.pad(ids[:width], (0, width), value=self._tokens.eos)[: 2 * width]
                for ids in (
                    batch.clean[row, start : start + 2 * width],
                    others[row, start:],
                    batch.clean[neighbour, behind:],
                )
            )
            is_answer = (source != self._tokens.eos) & (source != self._tokens.eot)
            counts = drawn_counts(is_answer, self._settings.moved_share, self._generator)
            result = moved(source, other, counts, self._tokens)
            ids, wanted, is_own = (part[: stop - start] for part in result)
            noise = torch.rand(ids.shape, generator=self._generator)
            ids = other[: len(ids)].where(is_own & (noise < share / 2), ids)
            is_alike = is_own & (noise >= share / 2) & (noise < share)
            ids = alike[: len(ids)].where(is_alike, ids)
            ids = ids.masked_fill(is_own & (noise > 1 - share), self._tokens.mask)
            batch.noised[row, start:stop], batch.wanted[row, start:stop] = ids, wanted

    def _draw_mask(self, num_rows: int, length: int) -> Tensor:
        """Draw a mask [num_rows, length] bool; t differs by row or block.

        The cube of t is uniform in (0, 1). The cubes of the rows are spread evenly over the
        interval. Each is still uniform, but the variance is smaller.
        """
        block_length = self._block_length or length
        num_blocks = -(-length // block_length)
        start = torch.rand(num_blocks, generator=self._generator)
        order = torch.randperm(num_rows, generator=self._generator)
        probability = ((start + order[:, None] / num_rows) % 1.0) ** (1 / 3)  # [rows, blocks]
        probability = probability.repeat_interleave(block_length, dim=1)[:, :length]
        return torch.rand(num_rows, length, generator=self._generator) < probability


def train(
    network: nn.Module,
    lessons: Sequence[Sequence[Example]],
    tokens: TokenIds,
    settings: TrainingSettings,
    seed: int,
    words: Tensor,
) -> None:
    """Train `network` (a family.Network) in place, with a progress bar.

    Args:
        lessons: the examples of every phase of the settings.
        words: [V] int64, for each token the first token of the same word; they share an embedding.
    """
    model = cast("Network", network)
    draws = random.Random(seed)
    schedule = [
        (batches, draws.choice(phase.canvases))
        for phase, examples in zip(settings.phases, lessons, strict=True)
        for own in [replace(settings, text_share=0.0) if phase.only_single else settings]
        for batches in [BatchMaker(examples, tokens, own, seed, model.block_length)]
        for _ in range(phase.num_iterations)
    ]
    _share_words(network, words)
    optimizers = _optimizers(network, settings)
    rates = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            optimizer.param_groups[0]["lr"],
            total_steps=len(schedule),
            pct_start=settings.warm_up_share,
            cycle_momentum=False,
        )
        for optimizer in optimizers
    ]
    network.train()
    bar = progress(schedule, "train")
    for batches, canvas in bar:
        batch = batches.draw(canvas)
        if isinstance(network, SeededNetwork):
            hidden, wanted = _seeded(network, batch)
        elif isinstance(network, OpenNetwork):
            hidden, wanted = _denoised(network, batch, tokens.mask)
        else:
            hidden = model.hidden(batch.noised, batch.clean)[batch.predicted]
            wanted = batch.wanted[batch.predicted]
        logits = model.logits(hidden)
        surprise = F.cross_entropy(logits, wanted, reduction="none")
        weight = torch.where(wanted == tokens.eos, settings.end_weight, 1.0)
        weight *= 1.001 - (-surprise.detach()).exp()  # never 0
        loss = (weight * surprise).sum() / weight.sum()
        network.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_gradient_norm)
        for step in (*optimizers, *rates):
            step.step()
        bar.set_postfix(canvas=canvas, loss=f"{loss.item():.4f}", refresh=False)


def _seeded(network: SeededNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, D] of causal rows and masks, and the tokens [N] to predict.

    The masks are those of the blocks. The noised copy leaves out the positions that belong to the
    prompts of all rows.
    """
    num_rows, length = batch.clean.shape
    first, positions = int(batch.starts.min()), torch.arange(length)
    is_later = torch.rand(num_rows) < _LATER_SHARE
    starts = batch.starts + torch.randint(_LATEST_SEED + 1, (num_rows,)) * is_later
    kept = positions <= starts[:, None]
    noised = batch.clean.where(kept, batch.noised)
    hidden = network.seeded(noised[:, first:], starts, batch.clean)
    follows = positions[1:] >= batch.starts[:, None]
    masked = (batch.predicted & ~kept)[:, first:]
    causal, denoised = hidden[:, : length - 1][follows], hidden[:, length:][masked]
    wanted = (batch.clean[:, 1:][follows], batch.clean[:, first:][masked])
    return torch.cat((causal, denoised)), torch.cat(wanted)


def _denoised(network: OpenNetwork, batch: Batch, mask_id: int) -> tuple[Tensor, Tensor]:
    """Return hidden states [N, D] of all canvas rows, and the tokens [N] to predict."""
    noise = torch.randint(network.num_tokens, batch.noised.shape)
    rows = noise.where(batch.noised == mask_id, batch.noised)
    soft = None
    if torch.rand(()) < _CONDITIONED_SHARE:
        with torch.no_grad():
            soft = network.expected(network.logits(network.denoised(rows, batch.starts, None)))
    is_canvas = torch.arange(rows.shape[1]) >= batch.starts[:, None]
    hidden = network.denoised(rows, batch.starts, soft)
    return hidden[is_canvas], batch.clean[is_canvas]


def _share_words(network: nn.Module, words: Tensor) -> None:
    """Make tokens of one word, such as "the", " the" and " The", share their embedding permanently.

    words [V] int64 holds for each token the first token of its word. Each token of a word receives
    the gradients of all of them. If the embedding is also the head, which must distinguish them,
    they only begin with similar embeddings.
    """
    embedding = _embedding_of(network)
    words = torch.cat((words, torch.arange(len(words), embedding.num_embeddings)))
    shared = embedding.weight.detach()[words]
    if isinstance(network, OpenNetwork):
        with torch.no_grad():
            embedding.weight.lerp_(shared, _SHARED_PART)
        return

    def share(gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient).index_add_(0, words, gradient)[words]

    with torch.no_grad():
        embedding.weight.copy_(shared)
    embedding.weight.register_hook(share)


def _optimizers(network: nn.Module, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for all other parameters.

    Muon: https://kellerjordan.github.io/posts/muon/.
    """
    num_rows = _embedding_of(network).num_embeddings  # the head has the same number of rows
    parameters = list(network.parameters())
    matrices = [p for p in parameters if p.dim() == 2 and len(p) != num_rows]
    others = [p for p in parameters if p.dim() != 2 or len(p) == num_rows]
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(
            others,
            lr=settings.peak_learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        ),
    ]


def _embedding_of(network: nn.Module) -> nn.Embedding:
    (embedding,) = (m for m in network.modules() if isinstance(m, nn.Embedding))
    return embedding
