# SPDX-License-Identifier: Apache-2.0
"""Families and their published loops in plain PyTorch: the reference for the engine.

The networks are those with which the tiny models are trained (scripts/tiny_model), written from the
models' descriptions: one module call after the other, PyTorch's own attention, logits of all rows,
one request at a time, no cache. Letters: B rows of the batch, T positions, V rows of the head.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from tiny_model.checkpoint import load_weights, read_config
from tiny_model.decoder import MixtureOfExperts
from tiny_model.decoding import commit_quotas
from tiny_model.family import FAMILY_NAMES, load_family
from tiny_model.settings import DecodingSetting
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import BenchmarkError
from benchmarks.random_weights import randomise
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tiny_model.family import Decode, Network


class PlainModel(nn.Module):
    """Diffusion language model in plain PyTorch; made by `random_model` or `load_model`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.shape = Shape.of(config)
        self.network: Any = load_family(self.shape.family).network(dict(config))

    def forward(self, ids: Tensor) -> Tensor:
        """Compute logits [B, T, V], in the model's dtype, of ids [B, T] int64."""
        logits: Tensor = self.network.logits(self.network.hidden(ids))
        return logits


# --- making one ------------------------------------------------------------------------------


def random_model(
    config: Mapping[str, Any], device: str | torch.device, dtype: torch.dtype = torch.bfloat16
) -> PlainModel:
    """Make a model with the weights of `randomise`, in eval mode."""
    model = _empty_model(config, device, dtype)
    randomise(model)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def load_model(
    folder: Path, device: str | torch.device, dtype: torch.dtype, *, has_weights: bool = True
) -> PlainModel:
    """Load the model of a checkpoint folder; with random weights if it has none."""
    if not has_weights:
        return random_model(read_config(folder), device, dtype)
    model = _empty_model(read_config(folder), device, dtype)
    load_weights(folder, model.network)
    return model


def _empty_model(
    config: Mapping[str, Any], device: str | torch.device, dtype: torch.dtype
) -> PlainModel:
    with torch.device("meta"):
        model = PlainModel(config)
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)


# --- decoding --------------------------------------------------------------------------------


@torch.inference_mode()
def denoise_step(
    model: PlainModel,
    row: Tensor,
    end: int,
    num_commits: int,
    confidence_dtype: torch.dtype | None = None,
) -> None:
    """Run a step of LLaDA's loop at temperature 0: forward, confidence of all rows, commit.

    Args:
        row: [1, T] int64 prompt and canvas; the most confident masked positions are filled in.
        end: positions from here on wait for a later block.
        num_commits: number of positions to commit.
        confidence_dtype: precision of the softmax; None: the logits' own.
    """
    is_masked = row == model.shape.mask_id
    logits = model(row)
    tokens = torch.where(is_masked, logits.argmax(dim=-1), row)  # [1, T]
    probabilities = F.softmax(logits.to(confidence_dtype or logits.dtype), dim=-1)
    confidence = probabilities.gather(-1, tokens[..., None]).squeeze(-1)
    confidence[:, end:] = -torch.inf
    confidence = confidence.masked_fill(~is_masked, -torch.inf)
    chosen = confidence[0].topk(num_commits).indices
    row[0, chosen] = tokens[0, chosen]


def generate(
    model: PlainModel,
    prompt: Sequence[int],
    *,
    canvas: int,
    block_length: int,
    steps: int,
    confidence_dtype: torch.dtype | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> list[int]:
    """Generate the tokens of a canvas behind `prompt`, block after block.

    Args:
        steps: forwards of the whole canvas, a multiple of the number of blocks.

    Raises:
        ValueError: The canvas is not a multiple of the blocks, or the steps are not one of their
            number.
    """
    if canvas % block_length or steps % (canvas // block_length):
        raise ValueError(
            f"block_length, steps: wanted a divisor of the canvas {canvas} and a multiple of the "
            f"number of blocks, got {block_length} and {steps}"
        )
    device = next(model.parameters()).device
    row = torch.tensor([[*prompt, *[model.shape.mask_id] * canvas]], device=device)
    steps_of_block = steps // (canvas // block_length)
    for start in range(len(prompt), len(prompt) + canvas, block_length):
        for num_commits in commit_quotas(block_length, steps_of_block):
            denoise_step(model, row, start + block_length, num_commits, confidence_dtype)
            after_step()
    tokens: list[int] = row[0, len(prompt) :].tolist()
    return tokens


@contextmanager
def counted_experts(model: PlainModel) -> Iterator[list[int]]:
    """Collect the number of experts that any row uses, for each layer of each forward.

    Raises:
        ValueError: the model has no experts.
    """
    counts: list[int] = []

    @torch.inference_mode()
    def count(module: nn.Module, arguments: Any, _result: Any) -> None:
        scores = cast("nn.Module", module.gate)(arguments[0].flatten(0, -2)).float()
        chosen = scores.topk(cast("int", module.num_chosen)).indices
        counts.append(chosen.unique().numel())

    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        raise ValueError(f"model: wanted one with experts, got {model.shape.family}")
    handles = [module.register_forward_hook(count) for module in mixtures]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


# --- block-causal families -------------------------------------------------------------------


@dataclass(frozen=True)
class PlainBlocks:
    """Network with its published loop.

    No keys and values are kept, so every forward of a block computes all rows before the block.
    """

    network: torch.nn.Module
    decode: Decode
    mask_id: int
    device: str

    def generate(
        self,
        prompt: Sequence[int],
        *,
        canvas: int,
        block_length: int,
        steps: int,
        after_step: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Generate the tokens of a canvas behind `prompt`; the last block is computed whole."""
        network = cast("Network", self.network)
        network.block_length = block_length
        rows = self.decode(
            network,
            torch.tensor([list(prompt)], device=self.device),
            self.mask_id,
            DecodingSetting(canvas, steps, block_length),
            lambda _: after_step(),
        )
        tokens: list[int] = rows[0, len(prompt) :].tolist()
        return tokens


def load_blocks(folder: Path, device: str, dtype: torch.dtype, *, has_weights: bool) -> PlainBlocks:
    """Load the model of a checkpoint folder; with random weights if it has none.

    Raises:
        BenchmarkError: there is no plain network for its family.
    """
    name = Shape.of_folder(folder).family
    if name not in FAMILY_NAMES:
        raise BenchmarkError(f"no plain loop of {name}: leave it out (--no-reference)")
    family = load_family(name)
    network = load_model(folder, device, dtype, has_weights=has_weights).network
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: int(token["id"]) for token in tokenizer["added_tokens"]}
    return PlainBlocks(network, family.decode, added[family.special_tokens.mask], device)
