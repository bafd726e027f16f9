# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories: JSON files and safetensors shards with their index."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from tiny_model.family import Family, TokenIds

INDEX_NAME = "model.safetensors.index.json"


def write_json(path: Path, content: object) -> None:
    """Write `content` like the released checkpoints: two spaces, sorted keys, final newline."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def generation_config(family: Family, tokens: TokenIds) -> dict[str, Any]:
    """Return the special tokens of generation_config.json."""
    begin = {} if tokens.bos is None else {"bos_token_id": tokens.bos}
    end = [tokens.eot, tokens.eos] if family.lists_eot else tokens.eos
    return {**begin, "eos_token_id": end}


def write_weights(directory: Path, tensors: Mapping[str, Tensor], num_shards: int = 2) -> None:
    """Write `tensors` in order as `num_shards` safetensors files of roughly equal size."""
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    written_bytes = 0
    for name, tensor in tensors.items():
        shards[written_bytes * num_shards // total_bytes][name] = tensor.contiguous()
        written_bytes += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        (directory / file_name).chmod(0o644)  # save_file makes the file unreadable for others
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(directory / INDEX_NAME, index)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the contents of config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def load_weights(directory: Path, network: nn.Module) -> None:
    """Load all shards of the index into `network`; raise RuntimeError if names differ."""
    index = json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        tensors |= load_file(directory / file_name)
    network.load_state_dict(tensors)
