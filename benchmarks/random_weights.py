# SPDX-License-Identifier: Apache-2.0
"""Random weights in place of a checkpoint's, and random LoRA adapters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from vllm.diffusion.adapters.matrices import Matrix

WEIGHT_STD = 0.02
EMBEDDING_STD = 1.0
DRAWN_AT_ONCE = 1 << 26  # numbers that are drawn at a time
EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings")


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw every matrix of a model from N(0, 0.02); norms' gains become 1, biases 0.

    Embeddings are drawn from N(0, 1), so that a row depends on its token, as in a trained model.
    With small embeddings all rows would follow the mean of their values, and choose the same
    experts. If an engine quantises a weight when it is loaded, the weight receives a matrix to
    quantise.
    """
    for name, parameter in model.named_parameters():
        put = getattr(parameter, "take_part", None)
        if put is not None and parameter.dim() > 1:
            # A byte may hold two numbers
            depth = parameter.num_weights // parameter[..., 0].numel()
            count = max(1, DRAWN_AT_ONCE // (parameter[0, ..., 0].numel() * depth))
            for start in range(0, len(parameter), count):
                rows = slice(start, min(start + count, len(parameter)))
                shape = (rows.stop - rows.start, *parameter.shape[1:-1], depth)
                drawn = torch.empty(shape, dtype=torch.float32, device=parameter.device)
                put(rows, drawn.normal_(std=WEIGHT_STD))
        elif parameter.dim() > 1:
            is_embedding = any(part in name for part in EMBEDDINGS)
            parameter.normal_(std=EMBEDDING_STD if is_embedding else WEIGHT_STD)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def randomise_rank(worker: Any) -> None:
    """Draw the weights of an engine's worker; ranks that divide rows draw equal weights."""
    torch.manual_seed(0)
    randomise(worker.worker.model_runner.model)


def write_adapter(
    folder: Path,
    configuration: dict[str, Any],
    rank: int,
    dtype: str,
    is_changed: Callable[[Matrix], bool] = lambda _: True,
) -> None:
    """Draw an adapter of a model from N(0, 0.02), and write it as PEFT does.

    Args:
        folder: folder of the adapter, created.
        configuration: content of the model's config.json.
        rank, dtype: rank and dtype of the adapter.
        is_changed: whether the adapter changes a matrix; the head stays as it is.
    """
    from vllm.diffusion.adapters.matrices import HEAD, Matrices
    from vllm.diffusion.models.config import DiffusionConfig

    folder.mkdir()
    config = DiffusionConfig.from_dict(configuration)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = dict[str, torch.Tensor]()
    for name, matrix in Matrices(config).all.items():
        if matrix.product == HEAD or not is_changed(matrix):
            continue
        shapes = {"A": (rank, matrix.num_columns), "B": (matrix.num_rows, rank)}
        for part, shape in shapes.items():
            drawn = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            tensors[f"{name}.lora_{part}.weight"] = drawn.normal_(std=WEIGHT_STD)
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
