# SPDX-License-Identifier: Apache-2.0
"""Loads models with upstream's loader in this process, and computes their logits."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from tests.checkpoint_files import change_json, change_weights
from tests.checkpoints import MASK_ID, VOCAB_SIZE
from tests.engine.harness import models_inspected_here
from vllm.diffusion.adapters.lora_flags import matrices_of, reader_of
from vllm.diffusion.adapters.matrices import Shard
from vllm.diffusion.adapters.peft_files import AdapterReader
from vllm.diffusion.adapters.slot_memory import SlotMemory
from vllm.diffusion.core.spans import AttentionLayout, KeySource, Span
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.models.adapted_layers import install_adapters, layer_products
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.ops.packed import NF4, NF4_ORDER
from vllm.diffusion.request.visibility import FULL, BlockCausal, Visibility
from vllm_add_llada.cuda_kernels.fused_ops import Packed, unpack

REL_TOLERANCE = 1e-4  # relative to the largest logit: fp32 sums in another order


class Recorder:
    """Scratch memory that records the bytes of each buffer."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.full(shape, torch.nan, dtype=dtype)
        self.taken[name] = out.nbytes
        return out

    def expect(self, name: str, num_bytes: int) -> None:
        self.taken[name] = num_bytes

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        return nullcontext()


def engine_config(path: Path, dtype: str = "float32", **engine_args: Any) -> VllmConfig:
    """Return the configuration that a server of this checkpoint would have."""
    args = EngineArgs(
        model=str(path), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, **engine_args
    )
    with models_inspected_here():
        return args.create_engine_config()


def join_world(config: VllmConfig, init_file: Path, rank: int = 0, size: int = 1) -> None:
    """Join a group of `size` tensor-parallel processes as `rank`; they meet over a file."""
    if model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, f"file://{init_file}", rank, "gloo")
        ensure_model_parallel_initialized(size, 1)


def load(config: VllmConfig) -> DiffusionModel:
    """Build the model and load its weights, as a worker does."""
    # Upstream's loader empties the cache of an accelerator, which fails without one. Its garbage
    # collections take longer than a tiny model.
    no_cache = mock.patch.object(torch.accelerator, "empty_cache", lambda: None)
    with set_current_vllm_config(config), no_cache, mock.patch.object(gc, "collect"):
        model = get_model(vllm_config=config)
    assert isinstance(model, DiffusionModel)
    return model


def add_slots(
    model: DiffusionModel, config: VllmConfig, num_slots: int
) -> tuple[SlotMemory, AdapterReader]:
    """Add slots of adapters to a loaded model; also return the reader of their files."""
    lora, reader = config.lora_config, reader_of(config)
    assert lora is not None and reader is not None
    slots = SlotMemory(
        matrices_of(lora, model.config),
        num_slots,
        lora.max_lora_rank,
        Shard(0, 1, slice(0, model.num_columns)),
        dtype=model.dtype,
        device=model.rotary_frequencies.device,
        products=layer_products(model),
    )
    install_adapters(model, slots)
    return slots, reader


@torch.no_grad()
def logits(model: DiffusionModel, ids: Tensor) -> Tensor:
    """Return this rank's logits [T, columns] of one sequence, by the whole forward pass."""
    return model.compute_logits(model(ids, torch.arange(len(ids))))


@torch.no_grad()
def staged_logits(
    model: DiffusionModel,
    sequences: Sequence[Tensor],
    *,
    rows: int | None = None,
    keep_queries: bool = True,
    visibility: Visibility = FULL,
) -> list[Tensor]:
    """Return logits of packed sequences, every stage in chunks of `rows` rows (None: whole)."""
    lengths = [len(ids) for ids in sequences]
    ids = torch.cat(list(sequences))
    positions = torch.cat([torch.arange(length) for length in lengths])
    total = len(ids)
    chunks = list(_chunks(total, rows or total))
    x = model.embed(ids, torch.empty(total, model.hidden_size, dtype=model.dtype))
    rotary, buffers = model.rotary(positions), FreshBuffers(x.device)
    num_heads = (model.num_heads if keep_queries else 0) + 2 * model.num_kv_heads
    product = x.new_empty(total, num_heads * model.head_dim)
    for layer in model.layers:
        for start, end in chunks:
            part = slice(start, end)
            layer.attention.keys_values(x[part], rotary.rows(part), product[part], buffers)
        q, k, v = layer.attention.split(product)
        for start, end in chunks:
            part = slice(start, end)
            layout = AttentionLayout.of(_spans(lengths, start, end, visibility), x.device)
            sources = [KeySource(k, v, layout)]
            queries = None if q is None else q[part]
            layer.attention.attend(x[part], rotary.rows(part), sources, queries, buffers)
        for start, end in chunks:
            layer.mlp_stage.feed_forward(x[start:end], buffers)
    parts = [model.compute_logits(model.final_norm(x[start:end])) for start, end in chunks]
    return list(torch.cat(parts).split(lengths))


def visibility_of(model: DiffusionModel) -> Visibility:
    """Return which rows of a sequence attend to which, as in `DiffusionModel.forward`."""
    visibility = model.family.visibility.with_blocks_of(model.config.block_length)
    return BlockCausal(1) if model.family.has_causal_context else visibility


def assert_same_logits(given: Tensor, wanted: Tensor) -> None:
    """Check that logits differ by at most REL_TOLERANCE and have the same best tokens."""
    assert given.shape == wanted.shape
    difference = (given - wanted).abs().max() / wanted.abs().max()
    assert difference <= REL_TOLERANCE, f"relative difference {difference:.2e}"
    assert torch.equal(given.argmax(dim=-1), wanted.argmax(dim=-1))


def check_bf16(
    model: DiffusionModel,
    of_tables: torch.dtype,
    reference_logits: Callable[[Tensor, torch.dtype], Tensor],
) -> None:
    """Check that bf16 logits are as close to exact ones as the reference's logits in bf16.

    Args:
        model: in bf16.
        of_tables: the dtype of its rotary tables.
        reference_logits: returns logits [T, V] of ids [1, T], computed in a dtype.
    """
    ids = some_ids(40)
    assert model.rotary(torch.arange(3)).cos.dtype == of_tables
    given = logits(model, ids)
    assert given.dtype == torch.bfloat16
    half, exact = (
        reference_logits(ids[None], dtype).double() for dtype in (torch.bfloat16, torch.float64)
    )
    our_error, reference_error = ((x.double() - exact).square().mean() for x in (given, half))
    assert our_error <= 1.5 * reference_error  # a margin for the attention kernel


def _chunks(total: int, rows: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + rows, total)) for start in range(0, total, rows))


def _spans(lengths: Sequence[int], start: int, end: int, visibility: Visibility) -> list[Span]:
    """Return the spans of rows `start` to `end` of sequences that are packed in order."""
    spans, first = [], 0
    for length in lengths:
        step = visibility.block_length or length
        for block in range(0, length, step):
            low, high = max(first + block, start), min(first + min(block + step, length), end)
            if low < high:
                num_keys = visibility.num_seen(block, length)
                spans.append(Span(low - start, high - start, first, first + num_keys))
        first += length
    return spans


def some_ids(length: int, seed: int = 0) -> torch.Tensor:
    """Return ordinary tokens, with masks in the second half."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
    ids[length // 2 :: 2] = MASK_ID
    return ids


FP8, LARGEST = torch.float8_e4m3fn, 448.0


def fp8_layer(weight: Tensor, bias: Tensor | None, fixed: Tensor | None = None) -> Any:
    """Return a layer with an fp8 weight, a scale per row, and an optional scale of inputs."""
    scales = weight.abs().amax(dim=1) / LARGEST
    layer = SimpleNamespace(
        weight=(weight / scales[:, None]).to(FP8),
        weight_scale=scales,
        bias=bias,
        params_dtype=torch.float32,
        quant_method=None,
    )
    if fixed is not None:
        layer.input_scale = fixed
    return layer


def rounded(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return rows rounded to fp8, in float64."""
    scale = x.abs().amax(dim=1, keepdim=True) / LARGEST if scale is None else scale
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).double() * scale.double()


def empty_packed(num_rows: int, depth: int, group: int, kind: str, device: str = "cpu") -> Packed:
    """Return a matrix of 4-bit numbers that is still to be filled."""
    size = (num_rows, depth // group)
    return Packed(
        torch.zeros(num_rows, depth // 2, dtype=torch.uint8, device=device),
        torch.zeros(size, device=device),
        torch.zeros(size, dtype=torch.uint8, device=device) if kind == "int4" else None,
        torch.tensor([NF4[i] for i in NF4_ORDER], device=device) if kind == "nf4" else None,
    )


def meant(packed: Packed) -> Tensor:
    """Return the values [N, D] of a packed matrix in fp32."""
    out = torch.empty(packed.shape)
    unpack(packed, out)
    return out


def packed_layer(packed: Packed, bias: Tensor | None = None) -> Any:
    """Return a layer with a packed weight."""
    return SimpleNamespace(
        weight=packed.values,
        weight_scale=packed.scales,
        weight_zero=packed.zeros,
        table=packed.table,
        bias=bias,
        quant_method=None,
    )


def compressed_tensors(
    weights: dict[str, Any], rows: dict[str, Any] | None, **changes: Any
) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors with one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        **changes,
    }


def quantise_checkpoint(
    folder: Path,
    config: dict[str, Any],
    matrix: Callable[[str, Tensor], dict[str, Tensor] | None],
) -> None:
    """Quantise a checkpoint: name the format in config.json, and replace tensors of matrices.

    Args:
        folder: a LLaDA checkpoint.
        config: the `quantization_config`.
        matrix: returns the tensors of a linear layer by the ends of their names, given its path and
            its weight, or None if the weight stays.
    """
    change_json(folder, quantization_config=config)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            path, _, kind = name.rpartition(".")
            if ".blocks." not in name or kind != "weight" or "_norm" in name:
                continue
            if (own := matrix(path, tensors[name])) is not None:
                del tensors[name]
                tensors |= {f"{path}.{key}": tensor for key, tensor in own.items()}

    change_weights(folder, change)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
