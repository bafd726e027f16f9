# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of DiffusionGemma, written by transformers, and its own network.

All weights are random, and larger than a usual initialisation, so that a forgotten norm, scalar or
window changes the logits. The self-conditioning MLP has small weights: it returns its input's
rounding errors to the model in every step.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers.models.diffusion_gemma import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    generation_diffusion_gemma,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSamplerConfig,
)

from tests.checkpoints import make_tokenizer, write_json
from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import NOISE, TOKEN

CANVAS = 8
WINDOW = 12
STOP_IDS = [250, 249]
TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 1024,
    "eos_token_id": 250,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}


def make_gemma(
    folder: Path, *, seed: int = 0, generation: dict[str, Any] | None = None, **text: Any
) -> Path:
    """Write a tiny checkpoint with its tokenizer to `folder` and return it.

    Args:
        folder: the folder, which is created.
        seed: determines the weights.
        generation: keys of generation_config.json to replace or to add.
        text: keys of `text_config` to replace or to add.
    """
    config = DiffusionGemmaConfig(
        text_config={**TEXT, **text}, vision_config=dict(VISION), canvas_length=CANVAS
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = DiffusionGemmaForBlockDiffusion(config)
        for name, tensor in network.state_dict(keep_vars=True).items():
            _randomise(name, tensor.data)
    network.save_pretrained(str(folder))
    make_tokenizer("sdar").save_pretrained(str(folder))
    write_json(folder / "generation_config.json", {"eos_token_id": STOP_IDS, **(generation or {})})
    return folder


def _randomise(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or "vision" in name or "inv_freq" in name:
        return
    if name.endswith("layer_scalar"):
        tensor.uniform_(0.6, 1.3)
    elif name.endswith("embed_tokens.weight"):
        tensor.normal_(std=0.5)
    elif tensor.dim() == 1 and "embed_scale" not in name:
        tensor.normal_(mean=1.0, std=0.2)
    elif tensor.dim() > 1:
        gain = 0.3 if "self_conditioning" in name else 2.0
        tensor.normal_(std=gain / tensor.shape[-1] ** 0.5)


def load_network(folder: Path) -> DiffusionGemmaForBlockDiffusion:
    """Return the network of transformers with the weights of a checkpoint, in fp32."""
    network = DiffusionGemmaForBlockDiffusion.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa"
    )
    return network.eval()


@dataclass(frozen=True)
class GemmaRun:
    """A run of the authors' loop: the tokens of whole canvases, and the steps of each canvas."""

    ids: list[int]
    steps: list[int]
    logits: list[torch.Tensor]  # [L, V] of every step, at its temperature


class _Noise:
    """Replaces the module torch in the authors' loop, with the noise of a request of ours."""

    def __init__(self, seed: int, temperature: float) -> None:
        self.seed, self.temperature = seed, temperature
        self.steps: list[int] = []  # steps of every canvas
        self.has_drawn = False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _uniform(self, purpose: int, step: int, columns: range, length: int) -> torch.Tensor:
        first = (len(self.steps) - 1) * length
        positions = torch.arange(first, first + length)
        return ops.philox_uniform(self.seed, purpose, step, positions, columns)

    def randint(self, low: int, high: int, size: tuple[int, int], device: Any) -> torch.Tensor:
        if not self.has_drawn:
            self.steps.append(0)
        self.has_drawn = False
        uniform = self._uniform(NOISE, self.steps[-1], range(1), size[1])
        return (uniform[:, 0] * high).floor().long()[None]

    def multinomial(self, shares: torch.Tensor, num_samples: int) -> torch.Tensor:
        uniform = self._uniform(TOKEN, self.steps[-1], range(shares.shape[1]), len(shares))
        noise = -self.temperature * torch.log(-torch.log(uniform))
        self.steps[-1] += 1
        self.has_drawn = True
        return (shares.double().log() + noise).argmax(dim=-1, keepdim=True)


class _Logits:
    """Streamer of the authors' loop that collects the logits of every step."""

    _takes_logits = True

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        pass

    def put_draft(self, logits: torch.Tensor) -> None:
        self.values.append(logits[0])

    def end(self) -> None:
        pass


def run_loop(
    network: DiffusionGemmaForBlockDiffusion,
    prompt: list[int],
    *,
    max_tokens: int,
    seed: int,
    temperature: float = 1.0,
    entropy_bound: float = 0.1,
    **options: Any,
) -> GemmaRun:
    """Run the authors' `generate` with the noise of our request; no token ends the answer.

    Args:
        network: the network.
        prompt: its prompt.
        max_tokens: fewest tokens of the answer, which has whole canvases.
        seed, temperature: of the request.
        entropy_bound: of the sampler.
        options: further arguments of `generate`.
    """
    noise, logits = _Noise(seed, temperature), _Logits()
    generation = generation_diffusion_gemma.DiffusionGemmaGenerationConfig(
        max_new_tokens=max_tokens, sampler_config=EntropyBoundSamplerConfig(entropy_bound)
    )
    with mock.patch.object(generation_diffusion_gemma, "torch", noise):
        out = network.generate(
            input_ids=torch.tensor([prompt]),
            generation_config=generation,
            streamer=logits,
            eos_token_id=-1,
            **options,
        )
    return GemmaRun(out.sequences[0, len(prompt) :].tolist(), noise.steps, logits.values)
