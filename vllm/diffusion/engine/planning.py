# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model and of a request that the planner requires, from their configurations.

The API server, the scheduler and the workers compute equal numbers, each in its own process.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from vllm.diffusion import ops
from vllm.diffusion.adapters.matrices import HEAD
from vllm.diffusion.config import row_budget, settings_of, slots_of
from vllm.diffusion.core import envs, stages
from vllm.diffusion.core.pages import HEAD_DIMS
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
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.diffusion.adapters.lora_flags import SlotSizes
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
        text = len(params.revision.token_ids) if params.ends_with_text else params.gen_length
        first = num_positions(visibility, num_prompt_tokens, text)
        num_sampled = text
    return Demand(
        length=length,
        sample_positions=num_sampled,
        num_sequences=2 if params.cfg_scale > 0 else 1,
        keeps_cache=is_exact,
        window=params.block_length if is_exact else None,
        first=min(first, length),
        unit=params.block_length if is_exact else None,
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
    num_heads = config.num_attention_heads // num_ranks
    all_kv_heads, head_dim = config.cache_heads
    num_kv_heads = max(1, all_kv_heads // num_ranks)
    out = ops.WeightSpec(
        columns=width,
        depth=num_heads * head_dim,
        dtype=model.dtype,
        has_bias=architecture.has_bias,
        device=device or torch.device(vllm_config.device_config.device_type),
        is_summed=num_ranks > 1 or architecture.norms_results,
    )
    qkv_columns = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = out._replace(columns=qkv_columns, depth=width)
    widest = max(architecture.dense_width, architecture.shared_expert_width) // num_ranks
    gate_up = qkv._replace(columns=2 * widest)
    kinds, of_head = _kinds(vllm_config)
    head = _products(of_head, qkv, gate_up, out)
    is_short = out.device.type == "cuda" and model.dtype.itemsize == 2
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
        products=tuple(_products(kind, qkv, gate_up, out) for kind in kinds),
        experts=_experts(
            config,
            num_ranks,
            is_plain=vllm_config.quant_config is None and vllm_config.lora_config is None,
            quantises=any(kind.quantises for kind in kinds),
        ),
        can_group_heads=architecture.has_equal_layers
        and all(kind.can_slice for kind in kinds)
        and not architecture.norms_all_heads,
        collects_keys=not (is_short and head_dim in HEAD_DIMS and architecture.has_equal_layers),
        num_ranks=num_ranks,
        row_unit=max(architecture.scoring.window, 1),
        scales_queries=architecture.growth_within(model.max_model_len) is not None,
        head=_head_buffers(vllm_config, head),
        window_layers=config.window_layers(num_ranks),
    )
    slots = slots_of(vllm_config)
    if slots is None:
        return shape
    return replace(shape, adapted=_adapted(shape, slots, kinds, gate_up))


def _kinds(
    vllm_config: VllmConfig,
) -> tuple[tuple[type[ops.Projection], ...], type[ops.Projection]]:
    """Return the classes of a model's projections, and that of its output head."""
    mode = {"is_batch_invariant": settings_of(vllm_config).batch_invariant}
    scheme = vllm_config.quant_config
    return ops.kinds_of(scheme, **mode), ops.kind_of_head(scheme, **mode)


def _adapted(
    shape: ModelShape,
    slots: SlotSizes,
    kinds: Sequence[type[ops.Projection]],
    gate_up: ops.WeightSpec,
) -> ModelShape:
    """Return the sizes of steps in which some rows have an adapter."""
    num_parts = Counter[str]()
    matrices = slots.matrices.allowed.values()
    of_products = Counter(matrix.product for matrix in matrices)
    for product, count in of_products.items():
        use = product.rpartition(".")[2]
        num_parts[use] = max(num_parts[use], count)

    def low(*uses: str) -> Listed:
        count = max(num_parts[use] for use in uses)
        return (stages.low_rank(count * slots.max_rank),) if count else ()

    products = list[LinearBuffers]()
    for kind, plain in zip(kinds, shape.products, strict=True):
        gated = plain
        if num_parts["gate_up_proj"]:
            # Gate and up are stored before an adapter changes them.
            project = kind.workspace(ops.ProjectionKind.PROJECT, gate_up).buffers
            stored = stages.gate_up(shape.dtype, gate_up.columns)
            gated = plain._replace(
                gated=(stored, *project, *low("gate_up_proj")),
                most_gated_rows=None,
                gated_limit=(),
            )
        copy, wide = _copies(shape, gate_up, quantises=kind.quantises)
        products.append(
            gated._replace(
                project=(*plain.project, *copy, *low("qkv_proj")),
                gated=(*gated.gated, *copy, *wide),
                add_to=(*plain.add_to, *wide, *low("o_proj", "down_proj")),
                keeps_plain=kind.quantises,
            )
        )
    num_ranks = max(num_parts.values(), default=0) * slots.max_rank
    depth = max((matrix.num_columns for matrix in matrices), default=0)
    return replace(
        shape,
        products=tuple(products),
        head=(*shape.head, *low(HEAD)),
        split_bytes=shape.split_bytes + ops.split_bytes(num_ranks, depth),
    )


def _copies(
    shape: ModelShape, gate_up: ops.WeightSpec, *, quantises: bool
) -> tuple[Listed, Listed]:
    """Return buffers that steps with adapters take for both forms of rows [D], and of wider rows.

    Adapters multiply rows in the model dtype, which are quantised for the other products.
    """
    if not quantises:
        return (), ()
    widest = max(gate_up.columns // 2, shape.num_heads * shape.head_dim)
    normed, wide = (
        stages.quantised_rows(shape.dtype, width).quantised for width in (shape.hidden_size, widest)
    )
    return normed, (*wide, stages.plain_rows(shape.dtype, widest))


def _head_buffers(vllm_config: VllmConfig, head: LinearBuffers) -> Listed:
    """Return buffers of the output head, without the logits."""
    model = vllm_config.model_config
    config: DiffusionConfig = model.hf_config
    architecture, num_ranks = config.architecture, vllm_config.parallel_config.tensor_parallel_size
    normed = stages.normed(model.dtype, config.hidden_size)
    num_columns = -(-architecture.num_embeddings // num_ranks)
    capped = () if architecture.logits_cap is None else stages.capped(model.dtype, num_columns)
    return (*head.quant_buffers(normed), *head.project, *capped)


def _products(
    kind: type[ops.Projection], qkv: ops.WeightSpec, gate_up: ops.WeightSpec, out: ops.WeightSpec
) -> LinearBuffers:
    gated = kind.workspace(ops.ProjectionKind.GATED, gate_up)
    return LinearBuffers(
        project=kind.workspace(ops.ProjectionKind.PROJECT, qkv).buffers,
        gated=gated.buffers,
        add_to=kind.workspace(ops.ProjectionKind.ADD_TO, out).buffers,
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
    share = _host_memory() // 2 // num_ranks
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
