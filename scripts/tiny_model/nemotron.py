# SPDX-License-Identifier: Apache-2.0
"""The Nemotron-Labs-Diffusion family at tiny size.

Configuration keys, tensor names and forward pass follow the released Nemotron-Labs-Diffusion-8B
(NVIDIA 2026): Llama's layers with YaRN (Peng et al. 2023, arXiv:2309.00071) and queries that grow
with their position. The context is causal. A block that is denoised begins with a known token, its
seed, and attends to itself, too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tiny_model.decoder import Attention, Decoder, GatedMLP, Layer
from tiny_model.decoding import seeded_block
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import View, embedding_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

SPECIAL_TOKENS = SpecialTokens(
    bos="<s>",
    eos="<|im_end|>",
    mask="<SPECIAL_100>",
    others=("<|im_start|>", "<think>", "</think>"),
    eot="<|im_end|>",
    names_mask=False,
)

CHAT_TEMPLATE = (
    "{% if not messages or messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think></think>' }}"
    "{% endif %}"
    "{% endif %}"
)

# Our prefix, the checkpoint's prefix
_NAMES = (("model.", "encoder."), ("lm_head.", "diffusion_head."))


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: the keys of the 8B model, at tiny size and in fp32."""
    return {
        "architectures": ["NemotronLabsDiffusionModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 32,
        "bos_token_id": tokens.bos,
        "dlm_paradigm": "bidirectional",
        "eos_token_id": tokens.eos,
        "head_dim": 48,  # heads are wider than hidden_size / num_attention_heads, as in the 3B
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "mask_token_id": tokens.mask,
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "model_type": "nemotron_labs_diffusion",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "vocab_size": embedding_rows(tokens.vocab_size),
    }


class NemotronNetwork(Decoder):
    """Nemotron-Labs-Diffusion with random weights; see family.SeededNetwork.

    Its `state_dict` has the released checkpoints' names.
    """

    query_factors: Tensor  # [T] fp64, for the rows of a forward

    def __init__(self, config: dict[str, Any]) -> None:
        self.rope = config["rope_parameters"]
        width, inner_width = config["hidden_size"], config["intermediate_size"]

        def make_layer(_: int) -> Layer:
            return Layer(config, Attention(config), GatedMLP(width, inner_width))

        super().__init__({**config, "rope_theta": self.rope["rope_theta"]}, make_layer)

    def seeded(self, ids: Tensor, starts: Tensor, clean: Tensor | None = None) -> Tensor:
        """See family.SeededNetwork."""
        num_clean, num_rows = 0 if clean is None else clean.shape[1], ids.shape[1]
        positions = torch.arange((num_clean or num_rows) - num_rows, num_clean or num_rows)
        starts = starts[:, None]
        if clean is None:
            denoises = positions >= starts  # [B, rows], like all masks of rows below
        else:
            ids, positions = (
                torch.cat((clean, ids), dim=1),
                torch.cat((torch.arange(num_clean), positions)),
            )
            denoises = (torch.arange(len(positions)) >= num_clean).expand(len(ids), -1)
        in_block = denoises & (positions >= starts)
        limits = starts.where(denoises, positions + 1)  # end of the context that a row attends to
        sees = ~denoises[:, None] & (positions < limits[..., None])
        sees |= in_block[..., None] & in_block[:, None]
        x = self.rows(ids, View(*self.rotary(positions), sees[:, None]))
        return cast("Tensor", self.model["norm"](x))

    def rows(self, ids: Tensor, view: View) -> Tensor:
        """See Decoder."""
        return super().rows(ids, view._replace(query_factors=self.query_factors))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See Decoder; also sets the factors of the queries."""
        rope, width = self.rope, self.rotary_dim
        theta, length = rope["rope_theta"], rope["original_max_position_embeddings"]

        def channel(turns: float) -> float:
            """Return the channel that turns this often within the original training length."""
            return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(channel(rope["beta_fast"])), 0)
        high = min(math.ceil(channel(rope["beta_slow"])), width - 1)
        channels = torch.arange(width // 2, dtype=torch.float64)
        ramp = ((channels - low) / (high - low)).clamp(0, 1)  # 0: the original speed, 1: slower
        speeds = theta ** (-2 * channels / width) * (ramp / rope["factor"] + 1 - ramp)
        angles = torch.outer(positions.double().cpu(), speeds).repeat(1, 2)
        growth = torch.log(1.0 + positions.double() // length)
        self.query_factors = 1 + rope["llama_4_scaling_beta"] * growth
        weight = self.embedding.weight
        return angles.cos().to(weight), angles.sin().to(weight)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the tensors by the checkpoint's names."""
        return {_renamed(k, 0, 1): v for k, v in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load tensors that have the checkpoint's names."""
        ours = {_renamed(name, 1, 0): tensor for name, tensor in state_dict.items()}
        return super().load_state_dict(ours, *args, **options)


def _renamed(name: str, before: int, after: int) -> str:
    for prefixes in _NAMES:
        if name.startswith(prefixes[before]):
            return prefixes[after] + name.removeprefix(prefixes[before])
    return name


FAMILY = Family(
    name="nemotron",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n", "system", "user", "assistant"),
    config=config,
    network=NemotronNetwork,
    decode=partial(seeded_block, threshold=0.9),
)
