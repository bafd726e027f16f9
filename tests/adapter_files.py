# SPDX-License-Identifier: Apache-2.0
"""Random adapters in PEFT's format for tiny checkpoints, and the checkpoints merged with them."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
ATTENTION = ("q_proj", "k_proj", "v_proj", "attn_out", "o_proj", "query_key_value", "dense")


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    tensors = dict[str, Tensor]()
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors


def adaptable(folder: Path) -> dict[str, tuple[int, int]]:
    """Return name and shape of every matrix of a checkpoint that an adapter may change."""
    config = read_config(folder)
    is_tied = config.get("weight_tying", config.get("tie_word_embeddings", False))
    others = r"\.experts\.|\.gate\.|embed|wte|\.mlp\.w[12]"
    if is_tied:
        others += r"|^lm_head|transformer\.ff_out|diffusion_head"
    found = dict[str, tuple[int, int]]()
    for name, tensor in checkpoint_tensors(folder).items():
        if tensor.dim() == 2 and name.endswith(".weight") and not re.search(others, name):
            found[name.removesuffix(".weight")] = (tensor.shape[0], tensor.shape[1])
    return found


def named(*parts: str) -> Callable[[str], bool]:
    """Return a choice of the modules whose names end with one of these parts."""
    return lambda module: module.rpartition(".")[2] in parts


def random_adapter(
    folder: Path,
    modules: Callable[[str], bool] = lambda module: True,
    *,
    rank: int = 8,
    seed: int = 0,
    gain: float = 1.0,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Return fp32 tensors of an adapter, by PEFT's names, for some modules of a checkpoint.

    Args:
        ranks: rank of the modules whose names end with the key.
    """
    generator = torch.Generator().manual_seed(7000 + seed)
    tensors = dict[str, Tensor]()
    for module, (rows, columns) in adaptable(folder).items():
        if not modules(module):
            continue
        own = next((r for end, r in (ranks or {}).items() if module.endswith(end)), rank)
        for part, shape in (("A", (own, columns)), ("B", (rows, own))):
            values = torch.randn(shape, generator=generator) * gain / shape[1] ** 0.5
            tensors[f"{PREFIX}{module}.lora_{part}.weight"] = values
    return tensors


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int = 8,
    alpha: float = 16,
    file: str = "adapter_model.safetensors",
    **config: Any,
) -> Path:
    """Write an adapter's folder and return it; `config` overrides adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": ["q_proj", "something_that_no_checkpoint_has"],
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    return folder


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """Return the scale of a module as PEFT computes it."""

    def of_pattern(field: str, default: float) -> float:
        for key, value in (config.get(field) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return float(value)
        return default

    rank = of_pattern("rank_pattern", config["r"])
    alpha = of_pattern("alpha_pattern", config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merge(checkpoint: Path, adapter: Path, target: Path) -> Path:
    """Write the checkpoint with an adapter merged into its matrices, computed in float64."""
    shutil.copytree(checkpoint, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    files = list(adapter.glob("adapter_model.*"))
    tensors: dict[str, Tensor] = (
        load_file(files[0])
        if files[0].suffix == ".safetensors"
        else torch.load(files[0], weights_only=True)
    )
    pattern = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_A(\.\w+)?\.weight")
    changes = dict[str, Tensor]()
    for name, down in tensors.items():
        found = pattern.fullmatch(name)
        if found is not None:
            up = tensors[name.replace(".lora_A", ".lora_B")]
            scale = scale_of(config, found[1])
            changes[f"{found[1]}.weight"] = scale * up.double() @ down.double()
    _change(target, changes)
    return target


def _change(folder: Path, changes: Mapping[str, Tensor]) -> None:
    """Add a change to each named tensor of a checkpoint."""
    left = set(changes)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name in left & tensors.keys():
            tensors[name] = (tensors[name].double() + changes[name]).to(tensors[name].dtype)
        left -= tensors.keys()
        save_file(tensors, file, {"format": "pt"})
    if left:
        raise AssertionError(f"the checkpoint has no {sorted(left)[:3]}")


def lora_request(name: str, number: int, path: Path | str, **more: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), **more)


def without_prefix(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by their names without PEFT's prefix."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors}
