# SPDX-License-Identifier: Apache-2.0
"""Loads the adapter for drafts from a checkpoint's folder, in PEFT's format.

It is the folder `linear_spec_lora` of Nemotron-Labs-Diffusion: a LoRA of the output projections of
attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from vllm.diffusion.core.errors import CheckpointError
from vllm.diffusion.layers.output_adapter import OutputAdapter
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.diffusion.models.base import DiffusionModel

FOLDER = "linear_spec_lora"

logger = init_logger(__name__)


def load_adapter(model: DiffusionModel, checkpoint: str) -> None:
    """Set the layers' draft adapter from a checkpoint's folder, if it has one, before first use.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    folder = Path(checkpoint) / FOLDER
    weights = folder / "adapter_model.safetensors"
    if not model.family.has_causal_context or not weights.is_file():
        return
    described = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    scale = described["lora_alpha"] / described["r"]
    with safe_open(str(weights), framework="pt") as tensors:
        for layer, name in zip(model.layers, model.architecture.layer_names, strict=True):
            path = f"base_model.model.{name}.self_attn.o_proj"
            layer.self_attn.adapter = _adapter(model, tensors, path, scale)
    logger.info("drafts are made with the adapter of rank %d in %s", described["r"], folder)


def _adapter(model: DiffusionModel, tensors: Any, path: str, scale: float) -> OutputAdapter:
    width = model.num_heads * model.head_dim  # width of this rank's heads
    num_ranks = model.config.num_attention_heads // model.num_heads
    names = [f"{path}.lora_{part}.weight" for part in "AB"]
    missing = [name for name in names if name not in tensors.keys()]  # noqa: SIM118
    if missing:
        raise CheckpointError(f"{FOLDER}: missing {', '.join(missing)}")
    down, up = (tensors.get_tensor(name) for name in names)
    shapes = (tuple(down.shape), tuple(up.shape))
    expected = ((up.shape[1], num_ranks * width), (model.hidden_size, down.shape[0]))
    if shapes != expected:
        raise CheckpointError(f"{path}: lora_A and lora_B: given {shapes}, wanted {expected}")
    start = get_tensor_model_parallel_rank() * width
    device = model.rotary_frequencies.device
    return OutputAdapter(
        down[:, start : start + width].to(device, model.dtype).contiguous(),
        (scale * up).to(device, model.dtype),
        is_summed=num_ranks > 1,
    )
