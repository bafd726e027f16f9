# SPDX-License-Identifier: Apache-2.0
"""Block-causal families in plain PyTorch, with their published loops: what our engine is against.

The networks and loops are those that the tiny models are trained and verified with: no keys and
values are kept, so every forward of a block computes all rows before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from tiny_model.checkpoint import load_weights, read_config
from tiny_model.family import FAMILY_NAMES, load_family
from tiny_model.settings import DecodingSetting

from benchmarks.harness import BenchmarkError
from benchmarks.random_weights import randomise
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tiny_model.family import Decode, Network


@dataclass(frozen=True)
class PlainBlocks:
    """A network with its loop."""

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
        """The tokens of a canvas behind `prompt`; its last block is computed whole."""
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


def load(folder: Path, device: str, dtype: torch.dtype, *, has_weights: bool) -> PlainBlocks:
    """The model of a checkpoint folder; with random weights where it has none.

    Raises:
        BenchmarkError: there is no plain network of its family.
    """
    config = read_config(folder)
    name = Shape.of(config).family
    if name not in FAMILY_NAMES:
        raise BenchmarkError(f"no plain loop of {name}: leave it out (--no-reference)")
    family = load_family(name)
    with torch.device("meta"):
        network = family.network(config)
    network = network.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if has_weights:
        load_weights(folder, network)
    else:
        randomise(network)
        for buffer in network.buffers():
            buffer.zero_()
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: int(token["id"]) for token in tokenizer["added_tokens"]}
    return PlainBlocks(network, family.decode, added[family.special_tokens.mask], device)
