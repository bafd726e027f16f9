# SPDX-License-Identifier: Apache-2.0
"""What the planner must know of a model and of a request, from their configurations alone.

The API server, the scheduler and the workers all reach the same numbers, in their own processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion import envs
from vllm.diffusion.config import row_budget
from vllm.diffusion.families import BY_ARCHITECTURE, LLADA, LLADA_MOE
from vllm.diffusion.memory import Demand, Experts, ModelShape, Planner
from vllm.diffusion.ops import arena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.diffusion.models.configs import DreamConfig, LLaDAConfig, LLaDAMoEConfig
    from vllm.diffusion.params import DiffusionParams

FP32_BYTES = 4


def make_planner(vllm_config: VllmConfig, budget_bytes: int) -> Planner:
    """The planner of an engine whose steps and caches may take `budget_bytes` on each rank."""
    is_on_gpu = vllm_config.device_config.device_type == "cuda"
    return Planner(
        model_shape(vllm_config),
        budget_bytes,
        row_budget(vllm_config),
        uses_host=envs.use_host_residual(),
        is_split=is_on_gpu and envs.use_vmm() and arena.is_built(),
    )


def demand_of(params: DiffusionParams, num_prompt_tokens: int) -> Demand:
    """What a request takes while it runs."""
    length = num_prompt_tokens + params.gen_length
    return Demand(
        length=length,
        sample_positions=length if params.allow_infill else params.gen_length,
        num_sequences=2 if params.cfg_scale > 0 else 1,
        keeps_cache=params.cache != "none",
        window=_window(params, length),
    )


def _window(params: DiffusionParams, length: int) -> int | None:
    """Positions of a forward that uses kept keys and values, at most; see `BlockwiseRule`.

    A delayed cache saves rows only while no block settles, so all its forwards may be whole.
    """
    positions = {"dual": params.block_length, "prefix": params.gen_length}.get(params.cache)
    return None if positions is None else min(positions + params.logit_shift, length)


def model_shape(vllm_config: VllmConfig, device_type: str | None = None) -> ModelShape:
    """The sizes of the configured model on each tensor-parallel rank.

    Args:
        vllm_config: of the engine.
        device_type: "cpu" or "cuda", where that is not the configured one.
    """
    model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    config = model.hf_config
    family = next(BY_ARCHITECTURE[a] for a in config.architectures if a in BY_ARCHITECTURE)
    is_plain = vllm_config.quant_config is None
    num_columns = getattr(config, "embedding_size", None) or config.vocab_size
    element_bytes: int = model.dtype.itemsize
    has_bias, norms_all_heads, table_bytes = False, False, element_bytes
    rotary_dim: int = config.head_dim
    if family is LLADA:
        llada: LLaDAConfig = config
        has_bias, norms_all_heads = llada.include_bias, llada.attention_layer_norm
        table_bytes = FP32_BYTES if llada.rope_full_precision else element_bytes
    else:
        llama_named: DreamConfig | LLaDAMoEConfig = config
        rotary_dim = llama_named.rotary_dim
    device_type = device_type or vllm_config.device_config.device_type
    is_alone_on_gpu = device_type == "cuda" and num_ranks == 1
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads // num_ranks,
        num_kv_heads=max(1, config.num_key_value_heads // num_ranks),
        head_dim=config.head_dim,
        mlp_width=_dense_width(config) // num_ranks,
        num_columns=-(-num_columns // num_ranks),
        element_bytes=element_bytes,
        rotary_bytes=2 * rotary_dim * table_bytes,
        experts=_experts(config, num_ranks) if family is LLADA_MOE else None,
        is_plain=is_plain,
        can_group_heads=is_plain and not norms_all_heads,
        adds_in_place=is_alone_on_gpu and is_plain and not has_bias,
        num_ranks=num_ranks,
    )


def _dense_width(config: LLaDAConfig | DreamConfig | LLaDAMoEConfig) -> int:
    """Width of the MLPs that are no experts; 0 where all are."""
    has_experts = getattr(config, "has_experts", None)
    if has_experts is None:
        return int(config.intermediate_size)
    if all(has_experts(layer) for layer in range(config.num_hidden_layers)):
        return 0
    return int(config.dense_intermediate_size)


def _experts(config: LLaDAMoEConfig, num_ranks: int) -> Experts | None:
    if not any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
        return None
    return Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=config.expert_intermediate_size // num_ranks,
    )
