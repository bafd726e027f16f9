#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint that has the shape of a released model and no weights.

    scripts/make_dummy_checkpoint.py --family llada OUTPUT_DIR          LLaDA-8B
    scripts/make_dummy_checkpoint.py --family dream OUTPUT_DIR          Dream-7B
    scripts/make_dummy_checkpoint.py --family llada-moe OUTPUT_DIR      LLaDA-MoE-7B-A1B
    scripts/make_dummy_checkpoint.py --family llada --num-layers 2 --shrink 16 OUTPUT_DIR

    python -m vllm.entrypoints.api_server --model OUTPUT_DIR --load-format dummy

For measurements of speed and memory: `--load-format dummy` fills the weights with random numbers,
so answers are noise. The tokenizer knows single bytes and the special tokens, at the ids of the
released model; the other ids of its vocabulary decode to nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

# Everything else in config.json is as in the tiny models' configurations, which have the released
# models' keys.
LAYER_KEYS = ("n_layers", "num_hidden_layers", "max_window_layers")
HEAD_KEYS = ("n_heads", "num_attention_heads")
WIDTH_KEYS = (
    *HEAD_KEYS,
    *("d_model", "n_kv_heads", "mlp_hidden_size"),
    *("hidden_size", "num_key_value_heads", "intermediate_size"),
    *("expert_intermediate_size", "dense_intermediate_size"),
)


class DummyCheckpointError(Exception):
    """The checkpoint cannot be written; the message is one line for the user."""


@dataclass(frozen=True)
class Preset:
    """A released model: what its config.json says about shapes, and the ids of its tokens."""

    sizes: dict[str, Any]
    token_ids: dict[str, int]


PRESETS: dict[tuple[str, str], Preset] = {
    # LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5
    ("llada", "8b"): Preset(
        sizes={
            "d_model": 4096,
            "embedding_size": 126464,
            "max_sequence_length": 4096,
            "mlp_hidden_size": 12288,
            "n_heads": 32,
            "n_kv_heads": 32,
            "n_layers": 32,
            "vocab_size": 126464,
        },
        token_ids={
            "<|startoftext|>": 126080,
            "<|endoftext|>": 126081,
            "<|mdm_mask|>": 126336,
            "<|start_header_id|>": 126346,
            "<|end_header_id|>": 126347,
            "<|eot_id|>": 126348,
        },
    ),
    # Dream-v0-Base-7B, Dream-v0-Instruct-7B
    ("dream", "7b"): Preset(
        sizes={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        token_ids={
            "<|endoftext|>": 151643,
            "<|im_start|>": 151644,
            "<|im_end|>": 151645,
            "<|beginoftext|>": 151665,
            "<|mask|>": 151666,
        },
    ),
    # LLaDA-MoE-7B-A1B-Base, LLaDA-MoE-7B-A1B-Instruct
    ("llada-moe", "7b-a1b"): Preset(
        sizes={
            "dense_intermediate_size": 8192,
            "expert_intermediate_size": 1024,
            "hidden_size": 2048,
            "max_position_embeddings": 8192,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "vocab_size": 157184,
        },
        token_ids={
            "<|startoftext|>": 156891,
            "<|endoftext|>": 156892,
            "<|mask|>": 156895,
            "<role>": 156898,
            "</role>": 156899,
            "<|role_end|>": 156900,
        },
    ),
}
"""(family, size) -> the model; the first size of a family is its default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        write_checkpoint(
            options.output_dir,
            options.family,
            options.size,
            num_layers=options.num_layers,
            shrink=options.shrink,
        )
    except (DummyCheckpointError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(f"written: {options.output_dir} (no weights: use it with --load-format dummy)")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Write a checkpoint without weights.")
    families = list(dict.fromkeys(family for family, _ in PRESETS))
    parser.add_argument("--family", required=True, choices=families)
    parser.add_argument("--size", help="which released model of the family (default: its only one)")
    parser.add_argument("--num-layers", type=int, help="fewer or more layers than the model has")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide every width and number of heads by this"
    )
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR")
    return parser.parse_args(arguments)


def write_checkpoint(
    directory: Path,
    family: str,
    size: str | None = None,
    *,
    num_layers: int | None = None,
    shrink: int = 1,
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into `directory`.

    Raises:
        DummyCheckpointError: there is no such model, a number does not fit, or the folder holds
            weights, which a dummy's configuration would belie.
    """
    preset = preset_of(family, size)
    weights = sorted(path.name for path in directory.glob("*.safetensors"))
    if weights:
        raise DummyCheckpointError(
            f"OUTPUT_DIR: wanted a folder without weights, {directory} holds {weights[0]}"
        )

    from tiny_model.checkpoint import write_json
    from tiny_model.family import load_family
    from tiny_model.tokenizer import write_tokenizer

    config = configuration(family, size, num_layers=num_layers, shrink=shrink)
    directory.mkdir(parents=True, exist_ok=True)
    described = load_family(family)
    special_tokens = described.special_tokens
    write_tokenizer(
        directory,
        byte_tokenizer(preset.token_ids),
        special_tokens,
        described.chat_template,
    )
    write_json(directory / "config.json", config)
    ids = {
        "bos_token_id": preset.token_ids[special_tokens.bos],
        "eos_token_id": preset.token_ids[special_tokens.eos],
    }
    write_json(directory / "generation_config.json", ids)


def configuration(
    family: str, size: str | None = None, *, num_layers: int | None = None, shrink: int = 1
) -> dict[str, Any]:
    """Contents of config.json, in bf16.

    Args:
        num_layers: number of layers; None: the model's own.
        shrink: divisor of the widths and numbers of heads; the head width stays.

    Raises:
        DummyCheckpointError: see `write_checkpoint`.
    """
    preset = preset_of(family, size)

    from tiny_model.family import TokenIds, load_family

    described = load_family(family)
    names, ids = described.special_tokens, preset.token_ids
    tokens = TokenIds(
        vocab_size=preset.sizes["vocab_size"],
        bos=ids[names.bos],
        eos=ids[names.eos],
        mask=ids[names.mask],
        eot=ids[names.eot],
    )
    config = {**described.config(tokens), **preset.sizes, "torch_dtype": "bfloat16"}
    for key in WIDTH_KEYS:
        if key in config:
            config[key] = divided(key, config[key], shrink)
    if num_layers is not None:
        if num_layers < 1:
            raise DummyCheckpointError(f"--num-layers: wanted at least 1, got {num_layers}")
        config |= {key: num_layers for key in LAYER_KEYS if key in config}
    if "moe_layer_freq" in config:
        config["moe_layer_freq"] = [1] * config["num_hidden_layers"]
    return config


def preset_of(family: str, size: str | None = None) -> Preset:
    """The model of that family and size; the family's first one where `size` is None.

    Raises:
        DummyCheckpointError: there is none.
    """
    sizes = [known for name, known in PRESETS if name == family]
    if not sizes:
        known_families = ", ".join(dict.fromkeys(name for name, _ in PRESETS))
        raise DummyCheckpointError(f"--family: wanted one of {known_families}, got {family}")
    if size is not None and size.lower() not in sizes:
        raise DummyCheckpointError(
            f"--size: wanted one of {', '.join(sizes)} for {family}, got {size}"
        )
    return PRESETS[family, sizes[0] if size is None else size.lower()]


def divided(key: str, value: int, divisor: int) -> int:
    """`value` / `divisor`: heads exactly, so that they keep their width; others rounded down.

    Raises:
        DummyCheckpointError: the heads cannot be divided.
    """
    if divisor < 1 or (key in HEAD_KEYS and value % divisor):
        raise DummyCheckpointError(f"--shrink: wanted a divisor of {key} {value}, got {divisor}")
    return max(1, value // divisor)


def byte_tokenizer(special_ids: dict[str, int]) -> Tokenizer:
    """A tokenizer of bytes (ids 0 to 255) and special tokens; nothing has the other ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **special_ids}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_ids]
    )
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
