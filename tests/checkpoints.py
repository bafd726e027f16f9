# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in the released formats, written to a folder of a test.

Families: LLaDA ("llada"), Dream ("dream"), LLaDA-MoE ("moe"), SDAR ("sdar"), SDAR with experts
("sdar_moe"), I-DLM ("idlm"), LLaDA2 ("llada2"), Fast-dLLM v2 ("fast_dllm") and DiffuLLaMA
("diffullama").

Weights and norm gains are scaled up. With a plain initialisation the softmax would be nearly
uniform, so that all confidences tie and all decoding rules give the same tokens.
"""

import json
import string
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference.models import reference_of
from safetensors.torch import save_file
from tiny_model.family import TokenIds, load_family
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

UNKNOWN_ID = 245
BOS_ID = 246
START_HEADER_ID = 247
END_HEADER_ID = 248
EOT_ID = 249
EOS_ID = 250
MASK_ID = 251


def special_tokens(bos: str, start: str, end: str, eot: str, mask: str) -> dict[str, int]:
    """Return the family's names of the tokens with the last ids."""
    names = ("<|unknown|>", bos, start, end, eot, "<|endoftext|>", mask)
    return dict(zip(names, range(UNKNOWN_ID, MASK_ID + 1), strict=True))


SPECIAL_TOKENS = special_tokens(
    "<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"
)
DREAM_SPECIAL_TOKENS = special_tokens(
    "<|beginoftext|>", "<|im_start|>", "<|vision_pad|>", "<|im_end|>", "<|mask|>"
)
MOE_SPECIAL_TOKENS = special_tokens(
    "<|startoftext|>", "<role>", "</role>", "<|role_end|>", "<|mask|>"
)
SDAR_SPECIAL_TOKENS = special_tokens(
    "<think>", "<|im_start|>", "</think>", "<|im_end|>", "<|MASK|>"
)
FAST_DLLM_SPECIAL_TOKENS = special_tokens(
    "<|object_ref_start|>", "<|im_start|>", "<|object_ref_end|>", "<|im_end|>", "|<MASK>|"
)
DIFFCODER_SPECIAL_TOKENS = special_tokens(
    "<|beginoftext|>", "<|im_start|>", "<|vision_pad|>", "<|im_end|>", "<[MASK_TOKEN]>"
)
NEMOTRON_SPECIAL_TOKENS = {
    "<|im_end|>" if token == "<|endoftext|>" else token: number
    for token, number in special_tokens(
        "<think>", "<|im_start|>", "</think>", "<s>", "<SPECIAL_100>"
    ).items()
}
THINK_IDS = (BOS_ID, END_HEADER_ID)  # in families with thinking tokens
# Ids 252..255 have logit columns but no token, as the last columns of the released models.
VOCAB_SIZE = 256
DELETE_ID, SPLIT_ID = 252, 253  # in families with edits

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

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEMOTRON_CHAT_TEMPLATE = (
    "{% if not messages or messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n<|im_end|>\n' }}"
    "{% endif %}" + CHATML_TEMPLATE + "{% if add_generation_prompt and enable_thinking is false %}"
    "{{ '<think></think>' }}{% endif %}"
)
DREAM_CHAT_TEMPLATE = (
    "{% if not messages or messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + CHATML_TEMPLATE
)
SDAR_CHAT_TEMPLATE = (
    CHATML_TEMPLATE + "{% if add_generation_prompt and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
MOE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'HUMAN' if message['role'] == 'user' else message['role'] | upper %}"
    "{{ '<role>' + role + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)


@dataclass(frozen=True)
class TokenizerStyle:
    """The differences between the tokenizers of the families. Ids are the same in all families."""

    special_tokens: dict[str, int]
    bos_token: str | None
    mask_token: str | None
    chat_template: str
    nfc: bool = False
    eos_token: str = "<|endoftext|>"


TOKENIZER_STYLES = {
    "llada": TokenizerStyle(SPECIAL_TOKENS, "<|startoftext|>", "<|mdm_mask|>", CHAT_TEMPLATE),
    "dream": TokenizerStyle(
        DREAM_SPECIAL_TOKENS, "<|beginoftext|>", "<|mask|>", DREAM_CHAT_TEMPLATE, nfc=True
    ),
    "moe": TokenizerStyle(MOE_SPECIAL_TOKENS, "<|startoftext|>", "<|mask|>", MOE_CHAT_TEMPLATE),
    "sdar": TokenizerStyle(SDAR_SPECIAL_TOKENS, None, "<|MASK|>", SDAR_CHAT_TEMPLATE, nfc=True),
    "sdar_moe": TokenizerStyle(SDAR_SPECIAL_TOKENS, None, "<|MASK|>", SDAR_CHAT_TEMPLATE, nfc=True),
    "idlm": TokenizerStyle(SDAR_SPECIAL_TOKENS, None, "<|MASK|>", SDAR_CHAT_TEMPLATE, nfc=True),
    "llada2": TokenizerStyle(MOE_SPECIAL_TOKENS, "<|startoftext|>", "<|mask|>", MOE_CHAT_TEMPLATE),
    "llada22": TokenizerStyle(MOE_SPECIAL_TOKENS, "<|startoftext|>", "<|mask|>", MOE_CHAT_TEMPLATE),
    "stable_diffcoder": TokenizerStyle(
        DIFFCODER_SPECIAL_TOKENS, "<|beginoftext|>", None, CHATML_TEMPLATE
    ),
    "nemotron": TokenizerStyle(
        NEMOTRON_SPECIAL_TOKENS, "<s>", None, NEMOTRON_CHAT_TEMPLATE, eos_token="<|im_end|>"
    ),
    "diffullama": TokenizerStyle(
        DREAM_SPECIAL_TOKENS, "<|beginoftext|>", "<|mask|>", CHATML_TEMPLATE
    ),
    **dict.fromkeys(
        ("a2d_qwen3", "a2d_qwen2", "a2d_llama"),
        TokenizerStyle(DREAM_SPECIAL_TOKENS, "<|beginoftext|>", "<|mask|>", SDAR_CHAT_TEMPLATE),
    ),
    "fast_dllm": TokenizerStyle(
        FAST_DLLM_SPECIAL_TOKENS, None, None, DREAM_CHAT_TEMPLATE, nfc=True
    ),
}
# eos_token_id of generation_config.json, unless it is EOS_ID alone.
STOP_IDS = {
    family: [EOT_ID, EOS_ID] for family in ("sdar", "idlm", "sdar_moe", "llada22", "fast_dllm")
}

WEIGHT_GAIN = 3.0
# A very sharp attention or routing would magnify rounding until near-ties are everywhere.
KEEP_SIZE = (
    *("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"),
    *("mlp.gate.weight", "mlp.expert_bias", "gate.expert_bias"),
    *("query_layernorm.weight", "key_layernorm.weight"),
)
EMBEDDINGS = ("wte.weight", "embed_tokens.weight", "word_embeddings.weight")


@dataclass(frozen=True)
class Case:
    """A checkpoint of the parity tests: the seed of its weights, and overrides of config.json."""

    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    family: str = "llada"
    fused_experts: bool = False


# With these seeds, runs have no near-ties and predict no mask. They have no other meaning.
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
    # At some positions of a 20-token random_prompt, the most likely token is the mask itself.
    "predicts_mask": Case(seed=11),
}

FAMILY_CASES: dict[str, Case] = {
    "dream": Case(seed=11, family="dream"),
    "dream_tied": Case(seed=1, family="dream", overrides={"tie_word_embeddings": True}),
    "moe": Case(seed=9, family="moe"),
    "moe_fused": Case(seed=9, family="moe", fused_experts=True),
    "moe_dense_mix": Case(seed=1, family="moe", overrides={"moe_layer_freq": [1, 0, 1]}),
    "moe_bias": Case(seed=13, family="moe", overrides={"moe_router_enable_expert_bias": True}),
    # The tensors of Qwen3, Qwen2 and Llama; config.json does not name the mask token.
    "a2d_qwen3": Case(seed=3, family="a2d_qwen3"),
    "a2d_qwen2": Case(seed=5, family="a2d_qwen2"),
    "a2d_llama": Case(seed=7, family="a2d_llama"),
}

# The configuration of Llama does not name the mask token.
DIFFULLAMA_CASE = Case(seed=12, family="diffullama")
# Cases of block-causal families, with seeds that were chosen in the same way.
BLOCK_CASES: dict[str, Case] = {
    "sdar": Case(seed=2, family="sdar"),
    "sdar_tied": Case(seed=3, family="sdar", overrides={"tie_word_embeddings": True}),
    "sdar_moe": Case(seed=6, family="sdar_moe"),
    "sdar_moe_mix": Case(
        seed=7,
        family="sdar_moe",
        overrides={"mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "llada2": Case(seed=8, family="llada2"),
    "llada2_dense_first": Case(
        seed=9,
        family="llada2",
        overrides={"first_k_dense_replace": 2, "num_shared_experts": 2, "head_dim": 24},
    ),
    "llada2_all_experts": Case(
        seed=10,
        family="llada2",
        overrides={"first_k_dense_replace": 0, "num_shared_experts": 0, "n_group": 1}
        | {"topk_group": 1, "num_experts_per_tok": 1},
    ),
    "llada22": Case(seed=11, family="llada22"),
    "stable_diffcoder": Case(seed=4, family="stable_diffcoder"),
    "nemotron": Case(seed=6, family="nemotron"),
    "idlm": Case(seed=5, family="idlm"),
    "fast_dllm": Case(seed=4, family="fast_dllm"),
    "fast_dllm_tied": Case(seed=5, family="fast_dllm", overrides={"tie_word_embeddings": True}),
}


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_hidden_layers": 3,
}


def remote_code(suffix: str, name: str, *, is_causal: bool = True) -> dict[str, str]:
    """Return auto_map of a released checkpoint, whose code is stored with its weights."""
    classes = {"AutoConfig": f"configuration{suffix}.{name}Config"}
    classes["AutoModel"] = f"modeling{suffix}.{name}Model"
    return classes | (
        {"AutoModelForCausalLM": f"modeling{suffix}.{name}ForCausalLM"} if is_causal else {}
    )


SDAR: dict[str, Any] = {
    **TINY,
    "auto_map": remote_code("_sdar", "SDAR"),
    "fuse_cross_entropy": True,
    "head_dim": 24,  # heads x head_dim is not hidden_size, as in the release
    "max_window_layers": 3,
    "use_cache": True,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
# For each family: the tiny model whose keys it has, and its additional and different values.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": (
        "llada",
        {"d_model": 64, "max_sequence_length": 256, "mlp_hidden_size": 128, "n_layers": 3}
        | {"vocab_size": VOCAB_SIZE},
    ),
    "dream": (
        "dream",
        {**TINY, "auto_map": remote_code("_dream", "Dream", is_causal=False)}
        | {"max_window_layers": 3},
    ),
    "moe": (
        "llada-moe",
        {**TINY, "dense_intermediate_size": 96, "expert_intermediate_size": 32}
        | {"model_type": "lladamoe", "moe_layer_freq": [1, 1, 1], "norm_topk_prob": None},
    ),
    "sdar": ("sdar", SDAR),
    "sdar_moe": (
        "sdar",
        {**SDAR, **EXPERTS, "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe"}
        | {"auto_map": remote_code("_sdar_moe", "SDARMoe"), "norm_topk_prob": True}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "idlm": ("sdar", {**SDAR, "block_size": 3, "use_regular_causal": True}),
    "llada2": (
        "llada2",
        {**TINY, **EXPERTS, "head_dim": 16, "rotary_dim": 8, "max_window_layers": 3}
        | {
            "auto_map": {
                **remote_code("_llada2_moe", "LLaDA2Moe"),
                "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
            },
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
    ),
    "llada22": (
        "llada22",
        {**TINY, **EXPERTS, "head_dim": 16, "rotary_dim": 8, "max_window_layers": 3}
        | {"block_size": 8, "expert_capacity": 4, "num_experts": 16, "n_group": 8}
        | {"topk_group": 4, "delete_token_id": DELETE_ID, "split_token_id": SPLIT_ID},
    ),
    "fast_dllm": (
        "fast-dllm",
        {**TINY, "auto_map": remote_code("", "Fast_dLLM_Qwen"), "bd_size": 8}
        | {"layer_types": ["full_attention"] * 3, "max_window_layers": 3, "use_cache": True},
    ),
    "stable_diffcoder": (  # the keys are Llama's
        "dream",
        {**TINY, "architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama"}
        | {"attention_bias": False, "mlp_bias": False, "bos_token_id": BOS_ID}
        | {"num_key_value_heads": 2, "pretraining_tp": 1, "rope_theta": 500000.0},
    ),
    "nemotron": (
        "nemotron",
        {**TINY, "head_dim": 24, "bos_token_id": EOT_ID}
        | {"auto_map": remote_code("_nemotron", "NemotronLabsDiffusion")}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "type": "yarn",
                "factor": 4.0,
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 48,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "a2d_qwen3": (
        "sdar",
        {**SDAR, "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
        | {"auto_map": remote_code("_qwen3", "A2DQwen3LMHead"), "tie_word_embeddings": True}
        | {"layer_types": ["full_attention"] * 3, "rope_theta": 1e6},
    ),
    "a2d_qwen2": (
        "dream",
        {**TINY, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"}
        | {"auto_map": remote_code("_qwen2", "A2DQwen2LMHead"), "max_window_layers": 3},
    ),
    "a2d_llama": (
        "dream",
        {**TINY, "architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama"}
        | {"attention_bias": False, "mlp_bias": False, "head_dim": 16}
        | {"num_key_value_heads": 2, "pretraining_tp": 1, "rope_theta": 500000.0},
    ),
    "diffullama": (  # the keys are Llama's
        "dream",
        {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        | {"attention_bias": False, "mlp_bias": False, "bos_token_id": BOS_ID}
        | {"num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
        | {"rope_theta": 10000.0, "use_cache": True},
    ),
}
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "a2d_qwen3": ("mask_token_id", "block_size", "fuse_cross_entropy"),
    "a2d_qwen2": ("mask_token_id",),
    "a2d_llama": (*("mask_token_id", "max_window_layers", "sliding_window", "use_sliding_window"),),
    "stable_diffcoder": (
        *("mask_token_id", "pad_token_id", "max_window_layers"),
        *("sliding_window", "use_sliding_window"),
    ),
    "diffullama": (
        *("mask_token_id", "pad_token_id", "max_window_layers"),
        *("sliding_window", "use_sliding_window"),
    ),
    "moe": ("intermediate_size",),
}


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """Return config.json of a family's tiny model with the released keys, then the overrides."""
    like, own = CONFIGS[family]
    tokens = TokenIds(UNKNOWN_ID, bos=BOS_ID, eos=EOS_ID, mask=MASK_ID, eot=EOT_ID)
    config = {**load_family(like).config(tokens), **own}
    for key in LEFT_OUT.get(family, ()):
        del config[key]
    return config | overrides


llada_config, sdar_config, llada2_config = (
    partial(config_of, family) for family in ("llada", "sdar", "llada2")
)


# The order in which the random weights of a layer are drawn, by parts of their names.
DRAWN = (
    *("input_layernorm", "attn_norm", "q_proj", "k_proj", "v_proj"),  # LLaDA-MoE: then o_proj
    "query_key_value",
    *("q_norm", "k_norm", "query_layernorm", "key_layernorm", "o_proj", "attn_out", "dense"),
    *("post_attention_layernorm", "ff_norm", ".gate.weight", "mlp.expert_bias", ".experts."),
    *("gate.expert_bias", "shared_experts", "proj", "ff_out"),
)


def checkpoint_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint of any family, with unfused experts."""
    shapes = reference_of(config).tensor_shapes(config)
    of_layers = [name for name in shapes if any(part.isdigit() for part in name.split("."))]
    outside = [name for name in shapes if name not in of_layers]
    drawn = (*DRAWN[:5], "o_proj", *DRAWN[5:]) if "qk_layernorm" in config else DRAWN

    def order(name: str) -> tuple[list[int], int]:
        place = [int(part) for part in name.split(".")[:5] if part.isdigit()]
        return place, next(i for i, part in enumerate(drawn) if part in name)

    names = [outside[0], *sorted(of_layers, key=order), *outside[1:]]
    return {name: shapes[name] for name in names}


def random_weights(
    config: dict[str, Any], seed: int, gain: float = WEIGHT_GAIN
) -> dict[str, Tensor]:
    """Return fp32 tensors of a checkpoint: the usual initialisation, multiplied by `gain`.

    Embedding rows are Gaussian. Matrices are uniform in +-1/sqrt(fan in), and so is a tied
    embedding, because it is the head. Norm gains differ between channels, so that exchanged or
    forgotten norms are detected. Queries, keys and routers are not scaled up (see KEEP_SIZE). If
    the model divides its logits by sqrt(D), the last norm compensates for that, so that confidences
    have the usual spread.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = config.get("weight_tying", config.get("tie_word_embeddings"))
    weights = {}
    for name, shape in checkpoint_shapes(config).items():
        if name.endswith(EMBEDDINGS) and not tied:
            values = torch.randn(shape, generator=generator)
        elif name.endswith((".bias", "_bias")):
            values = 0.1 * torch.randn(shape, generator=generator)
        elif len(shape) == 1:
            values = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        else:
            values = (2.0 * torch.rand(shape, generator=generator) - 1.0) / shape[1] ** 0.5
        weights[name] = values if name.endswith(KEEP_SIZE) else gain * values
    if config.get("scale_logits"):
        weights["model.transformer.ln_f.weight"] *= config["d_model"] ** 0.5
    return weights


def fuse_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the fused layout of an unfused LLaDA-MoE checkpoint.

    mlp.w1 [E, 2I, D] has each expert's gate rows and then its up rows, and mlp.w2 [E, D, I] has its
    down matrix.
    """
    fused = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    mlps = sorted({name.split(".experts.")[0] for name in weights if ".experts." in name})
    for mlp in mlps:
        num_experts = len(weights[f"{mlp}.gate.weight"])

        def part(mlp: str, expert: int, name: str) -> Tensor:
            return weights[f"{mlp}.experts.{expert}.{name}_proj.weight"]

        fused[f"{mlp}.w1"] = torch.stack(
            [torch.cat([part(mlp, e, "gate"), part(mlp, e, "up")]) for e in range(num_experts)]
        )
        fused[f"{mlp}.w2"] = torch.stack([part(mlp, e, "down") for e in range(num_experts)])
    return fused


def save_weights(folder: Path, weights: dict[str, Tensor], num_shards: int = 2) -> None:
    """Write safetensors shards with about the same number of tensors, and their index."""
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


def make_tokenizer(family: str = "llada") -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of ASCII text: 128 bytes, 117 merges, 7 special tokens."""
    style = TOKENIZER_STYLES[family]
    vocab, merges = bpe_vocabulary()
    vocab["<|unknown|>"] = UNKNOWN_ID
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<|unknown|>"))
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in style.special_tokens]
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        bos_token=style.bos_token,
        eos_token=style.eos_token,
        pad_token=style.eos_token,
        mask_token=style.mask_token,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    fast.chat_template = style.chat_template
    return fast


def bpe_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return symbols with ids 0..244 and merges, without special tokens."""
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
    return vocab, merges


def save_dream_tokenizer_files(folder: Path) -> None:
    """Write Dream's tokenizer as released: without tokenizer.json, and with a class in remote code.

    The files are vocab.json, merges.txt, added_tokens.json, special_tokens_map.json and
    tokenizer_config.json.
    """
    vocab, merges = bpe_vocabulary()
    style = TOKENIZER_STYLES["dream"]
    write_json(folder / "vocab.json", vocab)
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(folder / "added_tokens.json", style.special_tokens)
    named: dict[str, Any] = {
        "bos_token": style.bos_token,
        "eos_token": "<|endoftext|>",
        "mask_token": style.mask_token,
        "pad_token": "<|endoftext|>",
        "unk_token": "<|unknown|>",
    }
    write_json(folder / "special_tokens_map.json", named)
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    flags["special"] = True
    added = {str(id): {"content": token, **flags} for token, id in style.special_tokens.items()}
    write_json(
        folder / "tokenizer_config.json",
        {
            **named,
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
            "chat_template": style.chat_template,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": 256,
            "split_special_tokens": False,
            "tokenizer_class": "DreamTokenizer",
        },
    )


def make_checkpoint(
    folder: str | Path,
    *,
    family: str = "llada",
    seed: int = 0,
    gain: float = WEIGHT_GAIN,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 2,
    fused_experts: bool = False,
    released_tokenizer_files: bool = False,
    **overrides: Any,
) -> Path:
    """Write a whole tiny checkpoint to `folder`, which is made if it is missing, and return it.

    Args:
        overrides: keys of config.json to replace or to add.
        seed: determines the weights together with the shapes.
        dtype: of the weights, which are rounded after scaling.
        released_tokenizer_files: for Dream, see `save_dream_tokenizer_files`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = str(dtype).removeprefix("torch.")
    config = config_of(family, **{"torch_dtype": torch_dtype, **overrides})
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": config.get("bos_token_id", BOS_ID)}
    generation |= {"eos_token_id": STOP_IDS.get(family, EOS_ID), "transformers_version": "4.46.2"}
    write_json(folder / "generation_config.json", generation)
    weights = random_weights(config, seed, gain)
    if fused_experts:
        weights = fuse_experts(weights)
    stored = {
        name: w if name.endswith("gate.expert_bias") else w.to(dtype) for name, w in weights.items()
    }
    save_weights(folder, stored, num_shards)
    if released_tokenizer_files:
        save_dream_tokenizer_files(folder)
    else:
        make_tokenizer(family).save_pretrained(str(folder))
    return folder


def make_case(folder: str | Path, name: str, more: dict[str, Case] | None = None) -> Path:
    """Write one entry of CASES, FAMILY_CASES, BLOCK_CASES or `more`; see `make_checkpoint`."""
    ours = {**CASES, **FAMILY_CASES, **BLOCK_CASES, "diffullama": DIFFULLAMA_CASE}
    case = {**ours, **(more or {})}[name]
    return make_checkpoint(
        folder,
        family=case.family,
        seed=case.seed,
        fused_experts=case.fused_experts,
        **case.overrides,
    )


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return ids of ordinary tokens, which only depend on the seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    prompt: list[int] = torch.randint(0, UNKNOWN_ID, (num_tokens,), generator=generator).tolist()
    return prompt


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _byte_symbols() -> dict[int, str]:
    """Return the printable character of each byte in the GPT-2 byte alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in symbols]
    return symbols | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
