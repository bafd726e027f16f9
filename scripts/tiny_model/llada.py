# SPDX-License-Identifier: Apache-2.0
"""The LLaDA family at tiny size.

Configuration keys, tensor names and forward pass follow the released LLaDA-8B-Instruct checkpoint
(Nie et al. 2025, arXiv:2502.09992, https://github.com/ML-GSAI/LLaDA): a pre-norm transformer with
bidirectional attention, rotary positions, RMSNorm and a gated SiLU feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_model.decoder import Attention, Decoder, GatedMLP, Layer
from tiny_model.decoding import semi_autoregressive
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import embedding_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

SPECIAL_TOKENS = SpecialTokens(
    bos="<|startoftext|>",
    eos="<|endoftext|>",
    mask="<|mdm_mask|>",
    others=("<|start_header_id|>", "<|end_header_id|>"),
    eot="<|eot_id|>",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: LLaDA-8B-Instruct's keys, at tiny size and in fp32."""
    return {
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
        "d_model": 128,
        "embedding_dropout": 0.0,
        "embedding_size": embedding_rows(tokens.vocab_size),
        "eos_token_id": tokens.eos,
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
        "mask_token_id": tokens.mask,
        "max_sequence_length": 4096,
        "mlp_hidden_size": 512,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 2,
        "pad_token_id": tokens.eos,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-05,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "torch_dtype": "float32",
        "transformers_version": "4.46.2",
        "use_cache": False,
        "vocab_size": tokens.vocab_size,
        "weight_tying": False,
    }


# Names in a checkpoint: of the modules of a layer, and of the modules outside the layers.
_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_BESIDE = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}


class LLaDANetwork(Decoder):
    """LLaDA with random weights; its `state_dict` has the released checkpoints' names."""

    def __init__(self, config: dict[str, Any]) -> None:
        width, has_bias = config["d_model"], config["include_bias"]
        num_kv_heads = 1 if config["multi_query_attention"] else config["n_heads"]
        usual = {
            "hidden_size": width,
            "num_attention_heads": config["n_heads"],
            "num_key_value_heads": config["n_kv_heads"] or num_kv_heads,
            "num_hidden_layers": config["n_layers"],
            "rms_norm_eps": config["rms_norm_eps"],
            "rope_theta": config["rope_theta"],
            "tie_word_embeddings": config["weight_tying"],
            "vocab_size": config["embedding_size"] or config["vocab_size"],
        }
        inner_width = config["mlp_hidden_size"] or config["mlp_ratio"] * width

        def make_layer(_: int) -> Layer:
            attention = Attention(
                usual,
                qkv_bias=has_bias or config["include_qkv_bias"],
                out_bias=has_bias,
                qk_norm="all" if config["attention_layer_norm"] else "",
            )
            return Layer(usual, attention, GatedMLP(width, inner_width, bias=has_bias))

        super().__init__(usual, make_layer, head_bias=has_bias)
        self.layers_per_group = config["block_group_size"]
        self.rotates_in_fp32 = config["rope_full_precision"]
        self.embedding_scale = width**0.5 if config["input_emb_norm"] else 1.0
        self.logits_scale = width**-0.5 if config["scale_logits"] else 1.0

    def _released(self, name: str) -> str:
        """Return the checkpoint's name of a tensor."""
        path, _, kind = name.rpartition(".")
        if path in _BESIDE:
            return f"model.transformer.{_BESIDE[path]}.{kind}"
        _, _, layer, module = path.split(".", 3)
        place, size = f"blocks.{layer}", self.layers_per_group
        if size > 1:
            place = f"block_groups.{int(layer) // size}.{int(layer) % size}"
        return f"model.transformer.{place}.{_OF_LAYERS[module]}.{kind}"

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See nn.Module; with the names of the released checkpoints."""
        tensors = super().state_dict(*args, **kwargs)
        return {self._released(name): tensor for name, tensor in tensors.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """See nn.Module; with the names of the released checkpoints."""
        own = {self._released(name): name for name in super().state_dict()}
        named = {own.get(name, name): tensor for name, tensor in state_dict.items()}
        return super().load_state_dict(named, *args, **kwargs)


FAMILY = Family(
    name="llada",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n\n", "system", "user", "assistant"),
    config=config,
    network=LLaDANetwork,
    decode=semi_autoregressive,
)
