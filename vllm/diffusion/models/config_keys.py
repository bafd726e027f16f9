# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that no configuration class reads: harmless ones and refused ones.

A key of a checkpoint's config.json is read by the family's class, or is in one of these two tables,
or is unknown. A class reads the keys in its `DEFAULTS`, `ONLY` and `SIZES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.models.config_checks import refuse
from vllm.diffusion.models.rope_keys import OUR_LAYERS, ROPE_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Keys read for every family, by its class, by upstream or by `served_model`.
READ = frozenset(
    (
        *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config"),
        *("mask_token_id", "eos_token_id", "head_dim", "layer_types", *ROPE_KEYS),
        *("rotary_dim", "tie_word_embeddings", "weight_tying"),
    )
)

# Keys for training, for generation by transformers, or that describe the file.
_HARMLESS = """
    auto_map chunk_size_feed_forward id2label is_decoder label2id name_or_path num_labels
    output_attentions output_hidden_states problem_type return_dict task_specific_params
    tf_legacy_loss tokenizer_class torchscript transformers_version use_bfloat16 use_cache
    attn_implementation experts_implementation flash_attention use_flash_attention
    finetuning_task prefix pruned_heads sep_token_id decoder_start_token_id bos_token_id
    pad_token_id tie_encoder_decoder cross_attention_hidden_size unsloth_fixed unsloth_version

    begin_suppress_tokens bad_words_ids diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p

    alibi_bias_max attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout
    embd_pdrop embedding_dropout hidden_dropout hidden_dropout_prob output_dropout resid_pdrop
    residual_dropout dropout gradient_checkpointing initializer_range init_cutoff_factor
    init_device init_fn init_std precision pretraining_tp mlp_ratio debug ep_size
    fuse_cross_entropy micro_forward skip_checkpoint use_deepep max_window_layers
    aux_loss_alpha output_router_logits router_aux_loss_coef router_jitter_noise router_z_loss_coef
    mtp_loss_scaling_factor seq_aux using_split_qkv_in_self_attention
    moe_shared_expert_intermediate_size
"""
HARMLESS = frozenset(_HARMLESS.split())

_SUSPICIOUS = ("causal", "relay", "diffusion", "shift")  # parts of names of keys

_OFF = (None, False)
_ON = (None, True)
_NO = (None, 0)
_ONE = (None, 1)
_SILU = (None, "silu", "swish")

# Keys that affect the forward pass of other models, with the values that make no difference.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Attention masks and positions.
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), (None,)),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layers", "nope_layers"), (None,)),
    **dict.fromkeys(("no_rope_layer_interval", "mrope_section", "rope_local_base_freq"), (None,)),
    **dict.fromkeys(("use_sliding_window", "alibi", "use_mrope", "add_cross_attention"), _OFF),
    **dict.fromkeys(("is_encoder_decoder", "attn_temperature_tuning"), _OFF),
    **dict.fromkeys(("use_regular_causal", "use_relay"), _OFF),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "rotary_interleaved"), _OFF),
    **dict.fromkeys(("rope", "use_rope"), _ON),
    **dict.fromkeys(("rotary_pct", "rotary_percent", "rope_ratio", "rope_percent"), _ONE),
    "position_embedding_type": (None, "rope", "rotary"),
    "rotary_emb_base": (None,),
    "rope_base": (None,),
    # Biases, norms and bounds.
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias"), _OFF),
    **dict.fromkeys(("mlp_bias", "use_bias", "bias", "lm_head_bias", "add_bias_linear"), _OFF),
    **dict.fromkeys(("include_bias", "include_qkv_bias", "bias_for_layer_norm"), _OFF),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "attention_layer_norm"), _OFF),
    **dict.fromkeys(("norm_after", "parallel_attn", "use_parallel_residual", "norm_head"), _OFF),
    **dict.fromkeys(("apply_layernorm_1p", "norm_softmax", "attn_output_gate"), _OFF),
    **dict.fromkeys(("embedding_layer_norm", "residual_in_fp32", "fp32_residual"), _OFF),
    "use_rmsnorm": _ON,
    "layer_norm_with_affine": _ON,
    "layer_norm_type": (None, "rms"),
    "clip_qkv": (None,),
    # Factors and activations.
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _NO),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attn_scale"), (None,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), _ONE),
    **dict.fromkeys(("logit_scale", "scale_emb", "routed_scaling_factor"), _ONE),
    **dict.fromkeys(("moe_router_topk_scaling_factor", "embedding_scale"), _ONE),
    **dict.fromkeys(("scale_depth", "dim_model_base", "mup_width_scale"), (None,)),
    **dict.fromkeys(
        ("scale_embedding", "scale_logits", "input_emb_norm", "scale_embeddings"), _OFF
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _SILU),
    **dict.fromkeys(("activation_type", "activation"), _SILU),
    "swiglu_limit": (None,),
    # Experts, and layers that differ from the others.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _NO),
    **dict.fromkeys(("shared_expert_intermediate_size", "num_shared_experts"), _NO),
    **dict.fromkeys(("n_shared_experts", "expert_capacity", "num_nextn_predict_layers"), _NO),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), (None, 0, 1)),
    "scoring_func": (None, "softmax"),
    "score_function": (None, "softmax"),
    "moe_router_score_function": (None, "softmax"),
    "per_layer_config": (None, {}),
}


def check_foreign(values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse keys that affect other models' forward passes, unless a class reads them."""
    if any(kind != OUR_LAYERS for kind in values.get("layer_types") or ()):
        refuse(values, "layer_types", f'only "{OUR_LAYERS}" is supported')
    for key in values.keys() & NEUTRAL.keys() - {*known}:
        neutral = NEUTRAL[key]
        if values[key] not in neutral:
            wanted = " or ".join("null" if value is None else repr(value) for value in neutral)
            refuse(values, key, f"only {wanted.lower()} is supported")


def suspicious_keys(values: Mapping[str, Any], unknown: Iterable[str]) -> tuple[str, ...]:
    """Return the unknown keys that are true and whose names refer to how positions are computed."""
    return tuple(
        key for key in unknown if values[key] is True and any(word in key for word in _SUSPICIOUS)
    )


def unknown_keys(values: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return the keys, in order, that are in neither `known` nor a table."""
    others = {*values} - {*known} - READ - HARMLESS - NEUTRAL.keys()
    return tuple(sorted(key for key in others if not key.startswith("_")))
