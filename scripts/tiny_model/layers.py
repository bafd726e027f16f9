# SPDX-License-Identifier: Apache-2.0
"""Parts that the networks of several families share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_EMBEDDING_ROWS_MULTIPLE = 64
# Standard deviation of a matrix: gain / sqrt(inputs). Half the gain learns clearly slower: 83 % of
# the answers right instead of 98 % after the same 220 iterations.
_EMBEDDING_STD = 0.5
_INIT_GAIN = 1.0


def embedding_rows(num_tokens: int) -> int:
    """Rows of the embedding: like released checkpoints more than tokens, here by at least one."""
    return (num_tokens // _EMBEDDING_ROWS_MULTIPLE + 1) * _EMBEDDING_ROWS_MULTIPLE


def initialise(network: nn.Module) -> None:
    """Draws every matrix from a normal distribution; biases become 0, norm gains stay 1."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=_INIT_GAIN * module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=_EMBEDDING_STD)


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the half-split rotary embedding, [length, head_dim] fp32 each."""
    inverse_frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequency)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., T, hd]: channel j pairs with channel j + hd/2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
