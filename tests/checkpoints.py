# SPDX-License-Identifier: Apache-2.0
"""Tiny random LLaDA checkpoints in the released format, written to a folder of a test.

The weights are scaled up, norm gains too: with a plain initialisation the softmax is nearly
uniform, every confidence ties and no decoding rule can be told from another.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.reference.llada_model import LLaDASettings, tensor_shapes

UNKNOWN_ID = 245
BOS_ID = 246
START_HEADER_ID = 247
END_HEADER_ID = 248
EOT_ID = 249
EOS_ID = 250
MASK_ID = 251
SPECIAL_TOKENS = {
    "<|unknown|>": UNKNOWN_ID,
    "<|startoftext|>": BOS_ID,
    "<|start_header_id|>": START_HEADER_ID,
    "<|end_header_id|>": END_HEADER_ID,
    "<|eot_id|>": EOT_ID,
    "<|endoftext|>": EOS_ID,
    "<|mdm_mask|>": MASK_ID,
}
# Ids 252..255 have logit columns but no token, as the last columns of the released models.
VOCAB_SIZE = 256

CHAT_TEMPLATE = (
    "{{ '<|startoftext|>' }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)

WEIGHT_GAIN = 3.0
QUERY_KEY_WEIGHTS = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class Case:
    """A checkpoint of the parity tests: the seed of its weights and its config overrides."""

    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)


# Seeds for which runs have no near-ties and predict no mask; nothing else is special about them.
CASES: dict[str, Case] = {
    "mha": Case(seed=14),
    "gqa": Case(seed=11, overrides={"n_kv_heads": 2}),
    "padded_vocab": Case(seed=10, overrides={"embedding_size": 320}),
    "qkv_bias": Case(seed=12, overrides={"include_qkv_bias": True}),
    "bias": Case(seed=21, overrides={"include_bias": True}),
    "tied": Case(seed=13, overrides={"weight_tying": True}),
    "qk_norm": Case(seed=13, overrides={"attention_layer_norm": True, "n_kv_heads": 2}),
    "scaled": Case(seed=15, overrides={"input_emb_norm": True, "scale_logits": True}),
    "grouped": Case(seed=13, overrides={"n_layers": 4, "block_group_size": 2}),
    "model_dtype_rope": Case(seed=12, overrides={"rope_full_precision": False}),
    # At some positions the likeliest token is the mask itself, for a 20-token random_prompt.
    "predicts_mask": Case(seed=11),
}


def llada_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the tiny LLaDA with every key of the released one, then the overrides."""
    config: dict[str, Any] = {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": 64,
        "embedding_dropout": 0.0,
        "embedding_size": VOCAB_SIZE,
        "eos_token_id": EOS_ID,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": MASK_ID,
        "max_sequence_length": 256,
        "mlp_hidden_size": 128,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 3,
        "pad_token_id": EOS_ID,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "torch_dtype": "float32",
        "transformers_version": "4.46.2",
        "use_cache": False,
        "vocab_size": VOCAB_SIZE,
        "weight_tying": False,
    }
    config.update(overrides)
    return config


def random_weights(
    config: dict[str, Any], seed: int, gain: float = WEIGHT_GAIN
) -> dict[str, Tensor]:
    """fp32 tensors of a checkpoint: the usual initialisation, then times `gain`.

    Embedding rows are Gaussian, matrices uniform in +-1/sqrt(fan in) (a tied embedding too, as it
    is the head). Norm gains differ from channel to channel so that exchanged or forgotten norms
    show. Queries and keys keep their usual size: a very sharp attention would magnify rounding
    until near-ties are everywhere. Where the model divides its logits by sqrt(D), the last norm
    makes up for it, so that confidences are spread as elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(LLaDASettings.from_config(config)).items():
        if name.endswith("wte.weight") and not config["weight_tying"]:
            values = torch.randn(shape, generator=generator)
        elif name.endswith(".bias"):
            values = 0.1 * torch.randn(shape, generator=generator)
        elif len(shape) == 1:
            values = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        else:
            values = (2.0 * torch.rand(shape, generator=generator) - 1.0) / shape[1] ** 0.5
        keeps_size = name.endswith(QUERY_KEY_WEIGHTS)
        weights[name] = values if keeps_size else gain * values
    if config["scale_logits"]:
        weights["model.transformer.ln_f.weight"] *= config["d_model"] ** 0.5
    return weights


def save_weights(folder: Path, weights: dict[str, Tensor], num_shards: int = 2) -> None:
    """Writes safetensors shards of about the same number of tensors, and their index."""
    names = list(weights)
    per_shard = -(-len(names) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        save_file({name: weights[name] for name in part}, str(folder / file), {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total_size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of ASCII text: 128 bytes, 117 merges, 7 special tokens."""
    byte_symbols = pre_tokenizers.ByteLevel.alphabet()
    symbol_of_byte = _byte_symbols()
    if set(symbol_of_byte.values()) != set(byte_symbols):
        raise AssertionError("the byte alphabet differs from the one of the tokenizers package")
    vocab = {symbol_of_byte[byte]: byte for byte in range(128)}
    space = symbol_of_byte[ord(" ")]
    consonants = [letter for letter in string.ascii_lowercase if letter not in "aeiou"]
    merges = [(space, letter) for letter in string.ascii_lowercase]
    merges += [(consonant, vowel) for consonant in consonants for vowel in "aeiou"]
    merges = merges[: UNKNOWN_ID - len(vocab)]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    vocab["<|unknown|>"] = UNKNOWN_ID

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mdm_mask|>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_checkpoint(
    folder: str | Path,
    *,
    seed: int = 0,
    gain: float = WEIGHT_GAIN,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 2,
    **overrides: Any,
) -> Path:
    """Writes a whole tiny checkpoint to `folder` (made when missing) and returns it.

    `overrides` replace or add keys of config.json. The weights depend on `seed` and the shapes
    only, and are rounded to `dtype` after scaling.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = llada_config(**{"torch_dtype": str(dtype).removeprefix("torch."), **overrides})
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "transformers_version": "4.46.2"},
    )
    weights = random_weights(config, seed, gain)
    save_weights(folder, {name: w.to(dtype) for name, w in weights.items()}, num_shards)
    make_tokenizer().save_pretrained(str(folder))
    return folder


def make_case(folder: str | Path, name: str) -> Path:
    """`make_checkpoint` of one entry of CASES."""
    case = CASES[name]
    return make_checkpoint(folder, seed=case.seed, **case.overrides)


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Ids of ordinary tokens (no special ones), the same for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    prompt: list[int] = torch.randint(0, UNKNOWN_ID, (num_tokens,), generator=generator).tolist()
    return prompt


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte (the GPT-2 byte alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in symbols]
    return symbols | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
