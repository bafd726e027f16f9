#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint that has the shape of a released model and no weights.

    scripts/make_dummy_checkpoint.py --family llada OUTPUT_DIR          LLaDA-8B
    scripts/make_dummy_checkpoint.py --family dream OUTPUT_DIR          Dream-7B
    scripts/make_dummy_checkpoint.py --family llada-moe OUTPUT_DIR      LLaDA-MoE-7B-A1B
    scripts/make_dummy_checkpoint.py --family llada2 OUTPUT_DIR         LLaDA2.0-mini, 16B-A1.4B
                                                                        (--size flash: 100B-A6.1B)
    scripts/make_dummy_checkpoint.py --family llada22 OUTPUT_DIR        LLaDA2.2-mini, or flash
    scripts/make_dummy_checkpoint.py --family sdar OUTPUT_DIR           SDAR-8B (--size 4b: SDAR-4B)
    scripts/make_dummy_checkpoint.py --family sdar-moe OUTPUT_DIR       SDAR-30B-A3B
    scripts/make_dummy_checkpoint.py --family idlm OUTPUT_DIR           I-DLM-8B
    scripts/make_dummy_checkpoint.py --family fast-dllm OUTPUT_DIR      Fast-dLLM v2 7B
    scripts/make_dummy_checkpoint.py --family nemotron OUTPUT_DIR       Nemotron-Labs-Diffusion-8B
                                                                        (--size 3b, 14b)
    scripts/make_dummy_checkpoint.py --family diffusion-gemma OUTPUT_DIR
                                                                        DiffusionGemma-26B-A4B
    scripts/make_dummy_checkpoint.py --family llada --num-layers 2 --shrink 16 OUTPUT_DIR

    python -m vllm.entrypoints.api_server --model OUTPUT_DIR --load-format dummy

The checkpoint is meant for measurements of speed and memory: `--load-format dummy` fills the
weights with random numbers, so answers are noise. The tokenizer has single bytes and the special
tokens, at the ids of the released model. The other ids of its vocabulary decode to nothing.
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

    from tiny_model.family import SpecialTokens, TokenIds
    from tokenizers import Tokenizer

# All other keys of config.json are as in the tiny models' configurations, which have the released
# models' keys.
LAYER_KEYS = ("n_layers", "num_hidden_layers", "max_window_layers")
HEAD_KEYS = ("n_heads", "num_attention_heads")
WIDTH_KEYS = (
    *HEAD_KEYS,
    *("d_model", "n_kv_heads", "mlp_hidden_size"),
    *("hidden_size", "num_key_value_heads", "num_global_key_value_heads", "intermediate_size"),
    *("expert_intermediate_size", "dense_intermediate_size", "moe_intermediate_size"),
)


class DummyCheckpointError(Exception):
    """The checkpoint cannot be written; the message is one line for the user."""


@dataclass(frozen=True)
class Preset:
    """Sizes of a released model in its config.json, and the ids of its tokens.

    `like` is the family of the tiny model that provides the other keys, if it is not the family
    itself.
    """

    sizes: dict[str, Any]
    token_ids: dict[str, int]
    like: str | None = None


QWEN_TOKEN_IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
SDAR_TOKEN_IDS = QWEN_TOKEN_IDS | {"<think>": 151667, "</think>": 151668, "<|MASK|>": 151669}
LING_TOKEN_IDS = {
    "<|startoftext|>": 156891,
    "<|endoftext|>": 156892,
    "<|mask|>": 156895,
    "<role>": 156898,
    "</role>": 156899,
    "<|role_end|>": 156900,
}


def layers(number: int) -> dict[str, int]:
    """Return the configuration keys for `number` layers."""
    return {"max_window_layers": number, "num_hidden_layers": number}


QWEN_7B_SIZES = layers(28) | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
LLADA2_SIZES = {
    "head_dim": 128,
    "n_group": 8,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rotary_dim": 64,
    "topk_group": 4,
    "vocab_size": 157184,
}
LLADA2_MINI = {
    **LLADA2_SIZES,
    **layers(20),
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
}
LLADA2_FLASH = {
    **LLADA2_SIZES,
    **layers(32),
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
}
# Rows choose experts by blocks. The tokens that delete and insert have no names.
LLADA22_KEYS = {
    "delete_token_id": 156930,
    "expert_capacity": 48,
    "split_token_id": 156931,
}
SDAR_SIZES = layers(36) | {
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}


def nemotron(num_layers: int, width: int, inner: int, theta: float = 1e6) -> Preset:
    """Return the preset for one size of Nemotron-Labs-Diffusion."""
    return Preset(
        sizes=layers(num_layers)
        | {
            "head_dim": 128,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": theta,
                "rope_type": "yarn",
            },
            "vocab_size": 131072,
        },
        token_ids={
            "<s>": 1,
            "<|im_start|>": 10,
            "<|im_end|>": 11,
            "<think>": 12,
            "</think>": 13,
            "<SPECIAL_100>": 100,
        },
    )


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
        sizes=QWEN_7B_SIZES | {"max_position_embeddings": 131072},
        token_ids=QWEN_TOKEN_IDS | {"<|beginoftext|>": 151665, "<|mask|>": 151666},
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
        token_ids=LING_TOKEN_IDS,
    ),
    # LLaDA2.0-mini, LLaDA2.1-mini
    ("llada2", "mini"): Preset(
        sizes=LLADA2_MINI,
        token_ids=LING_TOKEN_IDS,
    ),
    # LLaDA2.0-flash, LLaDA2.1-flash
    ("llada2", "flash"): Preset(
        sizes=LLADA2_FLASH,
        token_ids=LING_TOKEN_IDS,
    ),
    # LLaDA2.2-mini
    ("llada22", "mini"): Preset(
        sizes=LLADA2_MINI | LLADA22_KEYS,
        token_ids=LING_TOKEN_IDS,
    ),
    # LLaDA2.2-flash
    ("llada22", "flash"): Preset(
        sizes=LLADA2_FLASH | LLADA22_KEYS,
        token_ids=LING_TOKEN_IDS,
    ),
    # SDAR-8B-Chat, TraDo-8B
    ("sdar", "8b"): Preset(
        sizes=SDAR_SIZES | {"hidden_size": 4096, "intermediate_size": 12288},
        token_ids=SDAR_TOKEN_IDS,
    ),
    # SDAR-4B-Chat, TraDo-4B
    ("sdar", "4b"): Preset(
        sizes=SDAR_SIZES | {"hidden_size": 2560, "intermediate_size": 9728},
        token_ids=SDAR_TOKEN_IDS,
    ),
    # I-DLM-8B, with the sizes of Qwen3-8B
    ("idlm", "8b"): Preset(
        sizes={
            **SDAR_SIZES,
            "block_size": 3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "use_regular_causal": True,
        },
        token_ids=SDAR_TOKEN_IDS,
        like="sdar",
    ),
    # SDAR-30B-A3B-Chat
    ("sdar-moe", "30b-a3b"): Preset(
        sizes={
            **SDAR_SIZES,
            **layers(48),
            "architectures": ["SDARMoeForCausalLM"],
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "model_type": "sdar_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
        },
        token_ids=SDAR_TOKEN_IDS,
        like="sdar",
    ),
    # Fast_dLLM_v2_7B
    ("fast-dllm", "7b"): Preset(
        sizes=QWEN_7B_SIZES,
        token_ids=QWEN_TOKEN_IDS | {"|<MASK>|": 151665},
    ),
    # Nemotron-Labs-Diffusion-8B, -3B, -14B, and their bases
    ("nemotron", "8b"): nemotron(34, 4096, 14336),
    ("nemotron", "3b"): nemotron(26, 3072, 9216),
    ("nemotron", "14b"): nemotron(40, 5120, 16384, theta=1e9),
    # DiffusionGemma-26B-A4B, the text part
    ("diffusion-gemma", "26b-a4b"): Preset(
        sizes={
            "canvas_length": 256,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "sliding_window": 1024,
            "top_k_experts": 8,
            "vocab_size": 262144,
        },
        token_ids={"<pad>": 0, "<eos>": 1, "<bos>": 2, "<mask>": 4, "<|turn>": 105, "<turn|>": 106},
    ),
    # Qwen3-0.6B-diffusion-mdlm; the tokens have Dream's names
    ("a2d", "0.6b"): Preset(
        sizes=layers(28)
        | {
            "architectures": ["A2DQwen3LMHeadModel"],
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "model_type": "a2d-qwen3",
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        token_ids=QWEN_TOKEN_IDS | {"<|beginoftext|>": 151665, "<|mask|>": 151669},
        like="dream",
    ),
    # Stable-DiffCoder-8B-Base, Stable-DiffCoder-8B-Instruct; the tokens have Dream's names
    ("stable-diffcoder", "8b"): Preset(
        sizes=layers(32)
        | {
            "architectures": ["StableDiffcoderForCausalLM"],
            "bos_token_id": 0,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "pad_token_id": 1,
            "rope_theta": 500000.0,
            "vocab_size": 155136,
        },
        token_ids={
            "<|beginoftext|>": 0,
            "<|endoftext|>": 2,
            "<|im_start|>": 3,
            "<|im_end|>": 4,
            "<|mask|>": 5,
        },
        like="dream",
    ),
}
"""Presets by (family, size); the first size of a family is its default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
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
    """Parse the command line."""
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
        DummyCheckpointError: There is no such model, a number does not fit, or the folder already
            holds weights, which would not match the configuration.
    """
    preset = preset_of(family, size)
    weights = sorted(path.name for path in directory.glob("*.safetensors"))
    if weights:
        raise DummyCheckpointError(
            f"OUTPUT_DIR: wanted a folder without weights, {directory} holds {weights[0]}"
        )

    from tiny_model.checkpoint import generation_config, write_json
    from tiny_model.family import load_family
    from tiny_model.tokenizer import write_tokenizer

    config = configuration(family, size, num_layers=num_layers, shrink=shrink)
    directory.mkdir(parents=True, exist_ok=True)
    described = load_family(preset.like or family)
    special_tokens = described.special_tokens
    write_tokenizer(
        directory,
        byte_tokenizer(preset.token_ids),
        special_tokens,
        described.chat_template,
    )
    write_json(directory / "config.json", config)
    tokens = tokens_of(preset, special_tokens)
    write_json(directory / "generation_config.json", generation_config(described, tokens))


def configuration(
    family: str, size: str | None = None, *, num_layers: int | None = None, shrink: int = 1
) -> dict[str, Any]:
    """Return the contents of config.json, in bf16.

    Args:
        num_layers: number of layers; None: as released.
        shrink: divisor of the widths and numbers of heads; the head width does not change.

    Raises:
        DummyCheckpointError: see `write_checkpoint`.
    """
    preset = preset_of(family, size)

    from tiny_model.family import load_family

    described = load_family(preset.like or family)
    tokens = tokens_of(preset, described.special_tokens)
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


def tokens_of(preset: Preset, names: SpecialTokens) -> TokenIds:
    """Return the ids of the released model."""
    from tiny_model.family import TokenIds

    ids = preset.token_ids
    return TokenIds(
        vocab_size=preset.sizes["vocab_size"],
        bos=None if names.bos is None else ids[names.bos],
        eos=ids[names.eos],
        mask=ids[names.mask],
        eot=ids[names.eot],
    )


def preset_of(family: str, size: str | None = None) -> Preset:
    """Return the model of that family and size; the family's first one if `size` is None.

    Raises:
        DummyCheckpointError: There is no such model.
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
    """Divide `value` by `divisor`.

    Numbers of heads must divide exactly, so that heads keep their width; other values are rounded
    down.

    Raises:
        DummyCheckpointError: The number of heads is not a multiple of the divisor.
    """
    if divisor < 1 or (key in HEAD_KEYS and value % divisor):
        raise DummyCheckpointError(f"--shrink: wanted a divisor of {key} {value}, got {divisor}")
    return max(1, value // divisor)


def byte_tokenizer(special_ids: dict[str, int]) -> Tokenizer:
    """Make a tokenizer of bytes (ids 0 to 255) and special tokens; all other ids stay unused."""
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
