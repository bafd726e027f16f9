# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model and of a request that the planner requires, from their configurations.

The API server, the scheduler and the workers compute equal numbers, each in its own process.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from vllm.diffusion import ops
from vllm.diffusion.config import num_replicas, row_budget, settings_of, slots_of
from vllm.diffusion.core import envs, stages
from vllm.diffusion.core.pages import HEAD_DIMS
from vllm.diffusion.engine.adapted_shape import AdaptedBuffers, adapted_shape
from vllm.diffusion.memory import (
    Demand,
    Experts,
    LinearBuffers,
    ModelShape,
    Planner,
    RuleMemory,
)
from vllm.diffusion.ops import arena
from vllm.diffusion.request.causal_context import CausalContext
from vllm.diffusion.request.visibility import FULL, BlockCausal, num_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.diffusion.core.stages import Listed
    from vllm.diffusion.memory import Rates
    from vllm.diffusion.models.config import Architecture, DiffusionConfig
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.visibility import Visibility

# Files with a container's memory limit, for both versions of control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def make_planner(
    vllm_config: VllmConfig, budget_bytes: int, rates: Rates, device: torch.device | None = None
) -> Planner:
    """Create the planner of an engine with `budget_bytes` per rank for steps and caches.

    Workers report the budget and the rates (`DiffusionWorker.capacity`). Only workers may pass the
    device. Without it, long chunks are planned with slightly more memory than they use, but the
    decision whether a request fits is the same.
    """
    settings, parallel = settings_of(vllm_config), vllm_config.parallel_config
    architecture: Architecture = vllm_config.model_config.hf_config.architecture
    shards = settings.sequence_parallel_size
    is_on_gpu = vllm_config.device_config.device_type == "cuda"
    shape = model_shape(vllm_config, device)
    # The kernel that reads pages is available, and it splits keys.
    if not shape.collects_keys:
        of_card = stages.SPLIT_ROWS
        if settings.batch_invariant:
            of_card = stages.FIXED_PART_ROWS
        rows = of_card * rates.multiprocessors
        split_bytes = rows * stages.split_attention(shape.head_dim).row_bytes
        shape = shape.with_split_bytes(split_bytes)
    return Planner(
        shape,
        budget_bytes,
        row_budget(vllm_config),
        uses_host=architecture.has_equal_layers and envs.use_host_residual(),
        host_bytes=_host_cache_budget(vllm_config, parallel.tensor_parallel_size * shards),
        is_split=is_on_gpu and envs.use_vmm() and arena.is_built(),
        rates=rates,
        shards=shards,
        min_rows=settings.sequence_parallel_min_tokens,
    )


def rule_memory(params: DiffusionParams) -> RuleMemory:
    """Return the memory that a request's decoding rule takes on the device.

    With `acceptance: ratio` the rule keeps the fp32 distributions of drafts: the drafts that it
    verifies, and the drafts that it makes (`decoding/introspective.py`). To draw tokens, it takes a
    few numbers for each token of the vocabulary and row, and some of 8 bytes for one row.
    """
    if not params.keeps_distributions or params.stride is None:
        return RuleMemory()
    num_drafts, num_rows = params.stride - 1, 2 * params.stride - 1
    kept, drawing = 2 * 4 * num_drafts, 4 * 4 * num_rows + 5 * 8
    return RuleMemory(kept * params.vocab_size, drawing * params.vocab_size)


def demand_of(params: DiffusionParams, num_prompt_tokens: int, *, adapts: bool = False) -> Demand:
    """Return the memory and rows that a request uses while it runs.

    Args:
        params: its parameters.
        num_prompt_tokens: length of its prompt.
        adapts: whether it has a LoRA adapter.
    """
    if params.is_block_causal and (params.score is None or params.cache == "exact"):
        return _demand_in_blocks(params, num_prompt_tokens, adapts=adapts)
    visibility = _visibility_of(params, num_prompt_tokens)
    length = num_positions(visibility, num_prompt_tokens, params.gen_length)
    return Demand(
        length=length,
        sample_positions=length if params.allow_infill else params.gen_length,
        num_sequences=2 if params.cfg_scale > 0 else 1,
        keeps_cache=params.cache != "none",
        window=_window(params, length),
        once=params.score is not None,
        fp8_attention=params.has_fp8_attention(length),
        adapts=adapts,
    )


def _demand_in_blocks(params: DiffusionParams, num_prompt_tokens: int, *, adapts: bool) -> Demand:
    """Return the demand of a block-causal request, whose forwards end with the current block.

    With an exact cache, forwards also begin with the current block. A finished block may be
    computed once more together with the next block, like any other rows before the current block,
    and in parts if necessary.
    """
    visibility = _visibility_of(params, num_prompt_tokens)
    length = num_positions(visibility, num_prompt_tokens, params.gen_length)
    is_exact = params.cache == "exact"
    first, num_sampled = visibility.first_end(num_prompt_tokens), params.block_length
    if params.revision is not None:  # its blocks are scanned together
        is_bounded = params.ends_with_text and not params.revision.slack
        text = len(params.revision.token_ids) if is_bounded else params.gen_length
        first = num_positions(visibility, num_prompt_tokens, text)
        num_sampled = text
    return Demand(
        length=length,
        sample_positions=num_sampled,
        num_sequences=2 if params.cfg_scale > 0 else 1,
        keeps_cache=is_exact,
        window=params.block_length if is_exact else None,
        first=min(first, length),
        unit=params.unit_of_cuts(length) if is_exact else None,
        adapts=adapts,
        of_rule=rule_memory(params),
    )


def _window(params: DiffusionParams, length: int) -> int | None:
    """Return the maximum positions of a forward with cached keys; None if it may compute all.

    See `BlockwiseRule`.

    A delayed cache saves rows only while no block settles, and a frozen cache saves none while
    masks of the prompt are left. So all their forwards may be whole.
    """
    windows = {"dual": params.block_length, "prefix": params.gen_length}
    if not params.allow_infill:
        windows["frozen"] = params.gen_length
    positions = windows.get(params.cache)
    return None if positions is None else min(positions + params.logit_shift, length)


def model_shape(vllm_config: VllmConfig, device: torch.device | None = None) -> ModelShape:
    """Return the sizes of the configured model on each tensor-parallel rank.

    Args:
        vllm_config: configuration of the engine.
        device: device of the model; None for the configured kind of device.
    """
    model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    config: DiffusionConfig = model.hf_config
    architecture, width = config.architecture, config.hidden_size
    num_heads, num_kv_heads, head_dim = _heads(config, num_ranks)
    device = device or torch.device(vllm_config.device_config.device_type)
    specs = _weight_specs(vllm_config, device)
    kinds, of_head = _kinds(vllm_config)
    is_short = device.type == "cuda" and model.dtype.itemsize == 2
    shape = ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=architecture.dense_width // num_ranks,
        num_columns=-(-architecture.num_embeddings // num_ranks),
        dtype=model.dtype,
        rotary_dim=architecture.rotary_dim,
        rotary_dtype=torch.float32 if architecture.rotates_in_fp32 else model.dtype,
        products=tuple(_products(kind, specs) for kind in kinds),
        experts=_experts(
            config,
            num_ranks,
            is_plain=vllm_config.quant_config is None,
            quantises=any(kind.quantises for kind in kinds),
        ),
        can_group_heads=architecture.has_equal_layers
        and all(kind.can_slice for kind in kinds)
        and not architecture.norms_all_heads,
        collects_keys=not (is_short and head_dim in HEAD_DIMS and architecture.has_equal_layers),
        num_ranks=num_ranks,
        row_unit=max(architecture.scoring.window, 1),
        scales_queries=architecture.growth_within(model.max_model_len) is not None,
        head=_head_buffers(vllm_config, _products(of_head, specs)),
        window_layers=config.window_layers(num_ranks),
    )
    slots = slots_of(vllm_config)
    if slots is None:
        return shape
    buffers = AdaptedBuffers(slots, specs, can_join=not model.enable_sleep_mode)
    return adapted_shape(shape, buffers, kinds, architecture.shared_expert_width // num_ranks)


def _weight_specs(vllm_config: VllmConfig, device: torch.device) -> dict[str, ops.WeightSpec]:
    """Return the widest weight of each use on a rank, by the last part of its path."""
    model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    config: DiffusionConfig = model.hf_config
    architecture, width = config.architecture, config.hidden_size
    num_heads, num_kv_heads, head_dim = _heads(config, num_ranks)
    out = ops.WeightSpec(
        columns=width,
        depth=num_heads * head_dim,
        dtype=model.dtype,
        has_bias=architecture.has_bias,
        device=device,
        is_summed=num_ranks > 1 or architecture.norms_results,
    )
    qkv = out._replace(columns=(num_heads + 2 * num_kv_heads) * head_dim, depth=width)
    widest = max(architecture.dense_width, architecture.shared_expert_width) // num_ranks
    gate_up = qkv._replace(columns=2 * widest)
    return {"qkv_proj": qkv, "o_proj": out, "gate_up_proj": gate_up, "down_proj": out}


def _heads(config: DiffusionConfig, num_ranks: int) -> tuple[int, int, int]:
    """Return query heads and key/value heads of a rank, and the width of a head."""
    all_kv_heads, head_dim = config.cache_heads
    return config.num_attention_heads // num_ranks, max(1, all_kv_heads // num_ranks), head_dim


def _kinds(
    vllm_config: VllmConfig,
) -> tuple[tuple[type[ops.Projection], ...], type[ops.Projection]]:
    """Return the classes of a model's projections, and that of its output head."""
    mode = {"is_batch_invariant": settings_of(vllm_config).batch_invariant}
    scheme = vllm_config.quant_config
    return ops.kinds_of(scheme, **mode), ops.kind_of_head(scheme, **mode)


def _head_buffers(vllm_config: VllmConfig, head: LinearBuffers) -> Listed:
    """Return buffers of the output head, without the logits."""
    model = vllm_config.model_config
    config: DiffusionConfig = model.hf_config
    architecture, num_ranks = config.architecture, vllm_config.parallel_config.tensor_parallel_size
    normed = stages.normed(model.dtype, config.hidden_size)
    num_columns = -(-architecture.num_embeddings // num_ranks)
    capped = () if architecture.logits_cap is None else stages.capped(model.dtype, num_columns)
    return (*head.quant_buffers(normed), *head.project, *capped)


def _products(kind: type[ops.Projection], specs: Mapping[str, ops.WeightSpec]) -> LinearBuffers:
    gated = kind.workspace(ops.ProjectionKind.GATED, specs["gate_up_proj"])
    return LinearBuffers(
        project=kind.workspace(ops.ProjectionKind.PROJECT, specs["qkv_proj"]).buffers,
        gated=gated.buffers,
        add_to=kind.workspace(ops.ProjectionKind.ADD_TO, specs["o_proj"]).buffers,
        most_gated_rows=gated.most_rows,
        gated_limit=gated.beyond,
        quantises=kind.quantises,
        weight_bytes=kind.weight_bytes,
        speed=kind.speed,
    )


def _experts(
    config: DiffusionConfig, num_ranks: int, *, is_plain: bool, quantises: bool
) -> Experts | None:
    architecture = config.architecture
    if not architecture.expert_layers:
        return None
    is_joined = architecture.joins_shared_expert(is_plain=is_plain)
    return Experts(
        count=config.num_experts + is_joined,
        chosen=config.num_experts_per_tok + is_joined,
        width=architecture.expert_width // num_ranks,
        shared_width=0 if is_joined else architecture.shared_expert_width // num_ranks,
        in_fp32=architecture.scoring.in_fp32,
        quantises=quantises,
    )


def _host_cache_budget(vllm_config: VllmConfig, num_ranks: int) -> int:
    """Return the host bytes per rank for cached keys and values; equal in all processes."""
    if not envs.use_host_residual():
        return 0
    slots = slots_of(vllm_config)
    adapter_bytes = 0 if slots is None else slots.known_bytes(vllm_config.model_config.dtype)
    share = _host_memory() // 2 // num_ranks // num_replicas(vllm_config)
    return envs.host_cache_size_bytes() or max(share - adapter_bytes, 0)


@functools.cache
def _host_memory() -> int:
    """Return the memory of this machine in bytes, or the limit of its control group if smaller."""
    total = int(psutil.virtual_memory().total)
    for path in map(Path, LIMITS):
        limit = path.read_text().strip() if path.exists() else ""
        total = min(total, int(limit)) if limit.isdigit() else total
    return total


def _visibility_of(params: DiffusionParams, num_prompt_tokens: int) -> Visibility:
    """Return which positions of a request attend to which."""
    if params.has_causal_context:
        return CausalContext(params.block_length, is_open=params.is_open)
    if params.is_block_causal:
        offset = params.block_offset(num_prompt_tokens)
        return BlockCausal(params.block_length, params.completes_prompts, offset)
    return FULL
