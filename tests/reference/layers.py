# SPDX-License-Identifier: Apache-2.0
"""What the reference models have in common, as plainly as it can be written.

Letters: B rows, T positions, H heads, K key/value heads, hd head size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence


def read_checkpoint(
    path: str | Path, dtype: torch.dtype, wide: str = "none are"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a folder (shards with index, or one file), cast to dtype.

    Tensors whose names end in `wide` stay at least fp32.
    """
    folder = Path(path)
    config = json.loads((folder / "config.json").read_text())
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    weights: dict[str, Tensor] = {}
    for name in files:
        weights.update(load_file(str(folder / name)))
    at_least = torch.promote_types(dtype, torch.float32)
    return config, {
        name: tensor.to(at_least if name.endswith(wide) else dtype)
        for name, tensor in weights.items()
    }


def check_shapes(wanted: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the tensors have exactly the wanted names and shapes."""
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if dict(wanted) != given:
        differing = sorted(set(wanted.items()) ^ set(given.items()))
        raise ValueError(f"weights: these names or shapes do not fit the config: {differing}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm: statistics in fp32, cast back, and only then times the gain."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(
    x: Tensor, theta: float, full_precision: bool, positions: Sequence[int] | None = None
) -> Tensor:
    """Rotary embedding of x [B, heads, T, hd], half-split pairing, positions 0..T-1 by default.

    full_precision rotates in fp32 and casts back; otherwise the tables are cast to x's dtype.
    """
    dtype = x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    num_positions, head_dim = x.shape[-2:]
    if positions is None:
        positions = range(num_positions)
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=wide) / head_dim)
    angle = torch.tensor(list(positions)).to(wide)[:, None] * inv_freq[None, :]
    angle = torch.cat([angle, angle], dim=-1)  # [T, hd]
    cos, sin = angle.cos(), angle.sin()
    if full_precision:
        x = x.to(wide)
    else:
        cos, sin = cos.to(dtype), sin.to(dtype)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None = None) -> Tensor:
    """Attention of q [B, H, T, hd] to k and v [B, K, S, hd] -> [B, H, T, hd].

    Query head h reads key/value head h // (H / K). sees [T, S] bool: which keys a query reads;
    without it all.
    """
    num_repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(num_repeats, dim=1)
    v = v.repeat_interleave(num_repeats, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if sees is not None:
        scores = scores.masked_fill(~sees, -math.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.softmax(scores.to(wide), dim=-1).to(q.dtype) @ v


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads * hd] -> [B, heads, T, hd]."""
    return x.reshape(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def shift_right(raw: Tensor) -> Tensor:
    """Logits [..., T, V] moved one position later; position 0 keeps its own row."""
    return torch.cat([raw[..., :1, :], raw[..., :-1, :]], dim=-2)


@dataclass(frozen=True)
class KeyValues:
    """Keys (rotated) and values of every layer at some positions of the rows.

    positions: ascending. layers: one (k, v) of shape [B, K, len(positions), hd] each.
    """

    positions: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]

    def keep(self, positions: Container[int]) -> KeyValues:
        """Only those rows whose position is among `positions`."""
        rows = [i for i, position in enumerate(self.positions) if position in positions]
        return KeyValues(
            tuple(self.positions[i] for i in rows),
            tuple((k[:, :, rows], v[:, :, rows]) for k, v in self.layers),
        )

    def overwrite(self, fresh: KeyValues) -> KeyValues:
        """These rows, with those of `fresh` added or in the place of older ones."""
        old = self.keep(set(self.positions) - set(fresh.positions))
        positions = old.positions + fresh.positions
        order = sorted(range(len(positions)), key=positions.__getitem__)
        layers = []
        for (old_k, old_v), (new_k, new_v) in zip(old.layers, fresh.layers, strict=True):
            k, v = torch.cat([old_k, new_k], dim=2), torch.cat([old_v, new_v], dim=2)
            layers.append((k[:, :, order], v[:, :, order]))
        return KeyValues(tuple(positions[i] for i in order), tuple(layers))


def seen_by_window(
    past: KeyValues | None, layer: int, positions: Iterable[int], k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, S, hd] that the window's queries of one layer attend to."""
    if past is None:
        return k, v
    fresh = KeyValues(tuple(positions), ((k, v),))
    return KeyValues(past.positions, (past.layers[layer],)).overwrite(fresh).layers[0]
