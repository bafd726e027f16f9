# SPDX-License-Identifier: Apache-2.0
"""The plain networks of tiny models and benchmarks as references of any checkpoint.

This module adds windows of a sequence, cached keys and values, and the rounding of the released
models' norms. Letters: B rows, T positions, W positions of a window, K key/value heads, hd head
size, V logit columns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from tiny_model import dream, fast_dllm, llada, llada2, llada_moe, nemotron, sdar
from tiny_model.decoder import Decoder, dense_network
from tiny_model.layers import View, block_causal, wide
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

Config = dict[str, Any]
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "block_size": 0, "bd_size": 0}


class RoundedNorm(nn.RMSNorm):
    """A norm with fp32 statistics, which is cast back before it is multiplied by the gain."""

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(wide(x.dtype))
        precise = precise * torch.rsqrt(precise.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * precise.to(x.dtype)


@dataclass(frozen=True)
class KeyValues:
    """Keys (rotated) and values of every layer at some positions of the rows.

    positions: ascending. layers: one (k, v) of shape [B, K, len(positions), hd] each.
    """

    positions: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]

    def keep(self, positions: Container[int]) -> KeyValues:
        """Return only the rows whose position is among `positions`."""
        rows = [i for i, position in enumerate(self.positions) if position in positions]
        return KeyValues(
            tuple(self.positions[i] for i in rows),
            tuple((k[:, :, rows], v[:, :, rows]) for k, v in self.layers),
        )

    def overwrite(self, fresh: KeyValues) -> KeyValues:
        """Return these rows with the rows of `fresh`, which replace rows at the same positions."""
        old = self.keep(set(self.positions) - set(fresh.positions))
        positions = old.positions + fresh.positions
        order = sorted(range(len(positions)), key=positions.__getitem__)
        layers = []
        for (old_k, old_v), (new_k, new_v) in zip(old.layers, fresh.layers, strict=True):
            k, v = torch.cat([old_k, new_k], dim=2), torch.cat([old_v, new_v], dim=2)
            layers.append((k[:, :, order], v[:, :, order]))
        return KeyValues(tuple(positions[i] for i in order), tuple(layers))


class Reference:
    """A checkpoint whose logits a plain network computes.

    Attributes:
        network: makes the network of a config.json.
        logit_shift: logits at position i predict the token at i + logit_shift.
        config: config.json with defaults for missing keys.
    """

    network: ClassVar[Callable[[Config], Any]]
    logit_shift: ClassVar[int] = 0

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError for weights that do not match the configuration."""
        self.config = DEFAULTS | config
        self._network = self.empty(config).eval()
        self._network.load_state_dict(unfuse(weights), assign=True)
        self._network.requires_grad_(False)
        self._network.shift_rows = False
        for norm in self._network.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.__class__ = RoundedNorm

    @classmethod
    def empty(cls, config: Config) -> Decoder:
        """Return the network without weights."""
        with torch.device("meta"):
            network: Decoder = cls.network(DEFAULTS | config)
        return network

    @classmethod
    def tensor_shapes(cls, config: Config) -> dict[str, tuple[int, ...]]:
        """Return every tensor of a checkpoint with its shape; matrices are stored [out, in]."""
        tensors = cls.empty(config).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    @classmethod
    def from_checkpoint(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """Read a folder; `dtype` is the model dtype (float64 keeps every step in float64)."""
        folder, weights = Path(path), {}
        for file in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(str(file)))
        is_precise = issubclass(cls, LLaDA2Reference)
        cast = {
            name: tensor.to(wide(dtype) if is_precise and "expert_bias" in name else dtype)
            for name, tensor in weights.items()
        }
        return cls(json.loads((folder / "config.json").read_text()), cast)

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self._network.state_dict())

    def logits(self, ids: Tensor, block_length: int | None = None) -> Tensor:
        """Return raw logits [B, T, V], model dtype, of ids int64 [B, T]; see `shift_right`.

        With a `block_length`, a position attends to its own block and to earlier blocks.
        """
        num_positions = ids.shape[1]
        sees = None if block_length is None else block_causal(num_positions, block_length)
        return self.forward_with_kv(ids, range(num_positions), None, sees)[0]

    @torch.no_grad()
    def forward_with_kv(
        self,
        ids: Tensor,
        positions: Sequence[int],
        past: KeyValues | None,
        sees: Tensor | None = None,
    ) -> tuple[Tensor, KeyValues]:
        """Return raw logits [B, W, V] of a window ids [B, W], and keys and values.

        The window attends to itself and to the rows of `past` at other positions, or to the rows
        marked by `sees` [W, W]. The returned keys and values are those of `past`, overwritten by
        those of the window.
        """
        where, layers = tuple(positions), []

        def reuse(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            """Return keys and values of the next layer."""
            fresh = KeyValues(where, ((k, v),))
            if past is not None:
                fresh = KeyValues(past.positions, (past.layers[len(layers)],)).overwrite(fresh)
            layers.append(fresh.layers[0])
            return layers[-1]

        cos, sin = self._network.rotary(torch.tensor(where))
        x = self._network.rows(ids, View(cos, sin, sees, reuse))
        logits = self._network.logits(self._network.model["norm"](x))
        every = where if past is None else tuple(sorted({*past.positions, *where}))
        return logits, KeyValues(every, tuple(layers))

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """Return rows x [B, T, D] after the feed-forward stage of a layer, including its norm."""
        module = self._network.model["layers"][layer]
        return x + module.mlp(module.post_attention_layernorm(x))


class LLaDAReference(Reference):
    network = llada.LLaDANetwork


class DreamReference(Reference):
    """Dream, and DiffuLLaMA, whose layers are those of Llama: the same without biases."""

    logit_shift = 1

    @staticmethod
    def network(config: Config) -> Decoder:
        return (dense_network if config["model_type"] == "llama" else dream.network)(config)


class LLaDAMoEReference(Reference):
    network = llada_moe.network


class SDARReference(Reference):
    network = sdar.network


class SDARMoeReference(SDARReference):
    pass


class LLaDA2Reference(Reference):
    network = llada2.network


class WindowRouter(llada2.Router):
    """Chooses among the experts that some row of a window of positions scores highest."""

    window: int
    capacity: int

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and numbers of experts [R, top] for a sequence's rows [R, D] from 0 on.

        The last window of a sequence is shorter if the length is no multiple of windows.
        """
        dtype = wide(rows.dtype)
        scores = torch.sigmoid(rows.to(dtype) @ self.weight.to(dtype).T)
        shares, chosen = [], []
        for own in scores.split(self.window):
            ranks = own + self.expert_bias
            highest = ranks.max(dim=0).values.tolist()
            allowed = sorted(range(len(highest)), key=lambda e: (-highest[e], e))[: self.capacity]
            for row, rank in zip(own.tolist(), ranks.tolist(), strict=True):
                best = sorted(allowed, key=lambda e: (-rank[e], e))[: self.num_chosen]
                total = sum(row[e] for e in best) + 1e-20 if self.num_chosen > 1 else 1.0
                shares.append([row[e] / total * self.scale for e in best])
                chosen.append(best)
        return torch.tensor(shares, dtype=dtype), torch.tensor(chosen)


class LLaDA22Reference(LLaDA2Reference):
    """LLaDA2.2, whose rows are routed by windows of one whole sequence."""

    @staticmethod
    def network(config: Config) -> Decoder:
        network: Decoder = llada2.network(config)
        for module in network.modules():
            if isinstance(module, llada2.Router):
                module.__class__ = WindowRouter
                module.window, module.capacity = config["block_size"], config["expert_capacity"]
        return network


class StableDiffCoderReference(Reference):
    network = staticmethod(dense_network)


class A2DReference(Reference):
    """A2D, which has the network of Qwen3 (as SDAR), of Qwen2 (as Dream) or of Llama."""

    @staticmethod
    def network(config: Config) -> Decoder:
        networks = {"a2d-qwen3": sdar.network, "a2d-qwen2": dream.network}
        return networks.get(config["model_type"], dense_network)(config)


class CausalReference(Reference):
    """A checkpoint whose context is causal."""

    def causal_logits(self, ids: Tensor, num_causal: int) -> Tensor:
        """Return raw logits [B, T, V]; positions from `num_causal` on attend to all positions."""
        total = ids.shape[1]
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        sees[num_causal:] = True
        return self.forward_with_kv(ids, range(total), None, sees)[0]


class NemotronReference(CausalReference):
    """Nemotron, whose context is causal, while a block that is denoised also attends to itself."""

    network = nemotron.NemotronNetwork


class IDLMReference(CausalReference):
    """I-DLM: SDAR's network, with a causal mask."""

    network = sdar.network


class FastDLLMReference(Reference):
    network = fast_dllm.network
    logit_shift = 1


REFERENCES: dict[str, type[Reference]] = {
    **dict.fromkeys(("LLaDAModelLM", "LLaDAForDiffusionLM"), LLaDAReference),
    **dict.fromkeys(("DreamModel", "DreamForDiffusionLM"), DreamReference),
    "LlamaForCausalLM": DreamReference,  # DiffuLLaMA
    "StableDiffcoderForCausalLM": StableDiffCoderReference,
    **{f"A2D{name}LMHeadModel": A2DReference for name in ("Qwen3", "Qwen2", "Llama")},
    "NemotronLabsDiffusionModel": NemotronReference,
    **dict.fromkeys(("LLaDAMoEModelLM", "LLaDAMoEForDiffusionLM"), LLaDAMoEReference),
    "SDARForCausalLM": SDARReference,
    "SDARMoeForCausalLM": SDARMoeReference,
    "LLaDA2MoeModelLM": LLaDA2Reference,
    "Fast_dLLM_QwenForCausalLM": FastDLLMReference,
}


def reference_of(config: Config) -> type[Reference]:
    """Return the reference class for a config.json."""
    if config.get("expert_capacity"):
        return LLaDA22Reference
    if config.get("use_regular_causal"):
        return IDLMReference
    return REFERENCES[config["architectures"][0]]


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the reference of a folder; float64 keeps every step in float64."""
    config = json.loads((folder / "config.json").read_text())
    return reference_of(config).from_checkpoint(folder, dtype)


def shift_right(raw: Tensor) -> Tensor:
    """Return logits [..., T, V] moved one position later; position 0 keeps its own row."""
    return torch.cat([raw[..., :1, :], raw[..., :-1, :]], dim=-2)


def unfuse(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of LLaDA-MoE in the unfused layout, from either layout.

    Fused: mlp.w1 [E, 2I, D], gate rows before up rows, and mlp.w2 [E, D, I].
    """
    unfused = {}
    for name, tensor in weights.items():
        mlp, _, last = name.rpartition(".")
        if last not in ("w1", "w2"):
            unfused[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            path = f"{mlp}.experts.{expert}"
            if last == "w2":
                unfused[f"{path}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                unfused |= {f"{path}.gate_proj.weight": gate, f"{path}.up_proj.weight": up}
    return unfused
