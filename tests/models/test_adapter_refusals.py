# SPDX-License-Identifier: Apache-2.0
"""Adapters that cannot be served are refused with one line that names the field or the tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapter_files import PREFIX, adaptable, random_adapter, save_adapter
from tests.checkpoints import make_case
from vllm.diffusion.adapters import peft_files
from vllm.diffusion.adapters.matrices import Matrices
from vllm.diffusion.adapters.peft_files import AdapterReader
from vllm.diffusion.core.errors import AdapterError
from vllm.diffusion.models.config import config_class_of
from vllm.diffusion.request.families import family_of

NO_FOLDER = "wanted a folder with adapter_config.json and adapter_model.safetensors"
MERGED = "or the adapter merged into the checkpoint"
Q = "model.transformer.blocks.0.q_proj"


def config_of(folder: Path) -> Any:
    values = json.loads((folder / "config.json").read_text())
    family = family_of(values["architectures"], values.get("model_type"), values)
    assert family is not None
    return config_class_of(family).from_dict(values)


def reader_of(folder: Path, *, targets: Any = None, max_rank: int = 16) -> AdapterReader:
    return AdapterReader(Matrices(config_of(folder), targets), max_rank, torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("checkpoint"), "gqa")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Tensor]:
    return random_adapter(folder, rank=8)


def refusal_of(reader: AdapterReader, path: Path | str, *, is_read: bool = False) -> str:
    """Return the line of a refusal without the adapter's name, which it must have."""
    with pytest.raises(AdapterError) as caught:
        (reader.read if is_read else reader.check)("a", str(path))
    line = str(caught.value)
    assert line.startswith("adapter a: ") and "\n" not in line
    return line.removeprefix("adapter a: ")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 128}, "r: given 128; wanted at most max_lora_rank 16"),
    ({"r": 0}, "r: given 0; wanted a whole number from 1 on"),
    ({"r": None}, "r: given nothing; wanted a whole number from 1 on"),
    (
        {"rank_pattern": {"q_proj": 64}},
        "rank_pattern: q_proj: given 64; wanted at most max_lora_rank 16",
    ),
    ({"r": float("nan")}, "r: given nan; wanted a whole number from 1 on"),
    ({"r": 10**400}, f"r: given {10**400}; wanted a whole number from 1 on"),
    ({"rank_pattern": [1]}, "rank_pattern: given [1]; wanted an object of numbers by modules"),
    (
        {"rank_pattern": {"q_proj": "8"}},
        "rank_pattern: q_proj: given '8'; wanted a whole number from 1 on",
    ),
    (
        {"rank_pattern": {"(": 8}},
        "rank_pattern: given '('; wanted a regular expression: "
        "missing ), unterminated subpattern at position 0",
    ),
    ({"lora_alpha": "x"}, "lora_alpha: given 'x'; wanted a finite number"),
    ({"lora_alpha": float("nan")}, "lora_alpha: given nan; wanted a finite number"),
    ({"lora_alpha": float("inf")}, "lora_alpha: given inf; wanted a finite number"),
    (
        {"alpha_pattern": {"q_proj": None}},
        "alpha_pattern: q_proj: given nothing; wanted a finite number",
    ),
    ({"use_rslora": "no"}, "use_rslora: given 'no'; wanted true or false"),
    ({"peft_type": "IA3"}, "peft_type: given 'IA3'; wanted 'LORA'"),
    ({"use_dora": True}, f"use_dora: given true; wanted false, {MERGED}"),
    ({"bias": "all"}, f"bias: given 'all'; wanted 'none', {MERGED}"),
    ({"lora_bias": True}, f"lora_bias: given true; wanted false, {MERGED}"),
    ({"use_qalora": True}, f"use_qalora: given true; wanted false, {MERGED}"),
    ({"layer_replication": [[0, 1]]}, f"layer_replication: given [[0, 1]]; wanted none, {MERGED}"),
    (
        {"alora_invocation_tokens": [1]},
        f"alora_invocation_tokens: given [1]; wanted none, {MERGED}",
    ),
    (
        {"modules_to_save": ["lm_head"]},
        f"modules_to_save: given ['lm_head']; wanted none, {MERGED}",
    ),
    (
        {"trainable_token_indices": [3]},
        f"trainable_token_indices: given [3]; wanted none, {MERGED}",
    ),
    ({"init_lora_weights": "pissa"}, f"init_lora_weights: given 'pissa'; wanted true, {MERGED}"),
]


@pytest.mark.parametrize(("config", "line"), CONFIGS, ids=[next(iter(c)) for c, _ in CONFIGS])
def test_fields_of_the_configuration(
    config: dict[str, Any], line: str, folder: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    save_adapter(tmp_path, tensors, **config)
    assert refusal_of(reader_of(folder), tmp_path) == line


def test_harmless_fields(folder: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    harmless = {"modules_to_save": [], "init_lora_weights": "gaussian", "lora_dropout": 0.9}
    save_adapter(tmp_path, tensors, fan_in_fan_out=True, target_modules=None, **harmless)
    adapter = reader_of(folder).read("a", str(tmp_path))
    assert adapter.low_ranks.keys() == adaptable(folder).keys()
    assert (adapter.rank, adapter.low_ranks[Q].scale) == (8, 2.0)


def test_folders(folder: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    reader = reader_of(folder)
    for path in ("/x", "x" * 5000, "~no-such-user/x", "a\0b"):
        assert refusal_of(reader, path) == f"lora_path: given {path!r}; {NO_FOLDER}"
    save_adapter(tmp_path, tensors)
    (tmp_path / "adapter_config.json").rename(tmp_path / "config.json")
    assert refusal_of(reader, tmp_path) == f"lora_path: given {str(tmp_path)!r}; {NO_FOLDER}"
    (tmp_path / "adapter_config.json").write_text("[1]")
    assert refusal_of(reader, tmp_path).endswith("wanted a JSON object")
    save_adapter(tmp_path, tensors)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "wanted a safetensors file" in refusal_of(reader, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert refusal_of(reader, tmp_path) == f"lora_path: given {str(tmp_path)!r}; {NO_FOLDER}"
    (tmp_path / "adapter_model.bin").write_bytes(b"no tensors")
    line = "adapter_model.bin: wanted a file of tensors; reading: UnpicklingError"
    assert refusal_of(reader, tmp_path) == line


def test_a_name_on_the_hub_is_downloaded(
    folder: Path, tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"org/adapter": str(save_adapter(tmp_path / "snapshot", tensors))}
    monkeypatch.setattr(peft_files, "get_adapter_absolute_path", places.__getitem__)
    assert reader_of(folder).read("a", "org/adapter").rank == 8
    line = f"lora_path: given 'org/other'; {NO_FOLDER}"
    assert refusal_of(reader_of(folder), "org/other") == line


def one(module: str, rank: int = 8, rows: int = 64, columns: int = 64) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.ones(rank, columns),
        f"{PREFIX}{module}.lora_B.weight": torch.ones(rows, rank),
    }


NAMES: list[tuple[str, str, str]] = [
    (
        "moe",
        "model.layers.1.mlp.experts.0.gate_proj",
        "experts and their router take no adapters; wanted attention, dense and shared MLPs",
    ),
    (
        "llada2",
        "model.layers.1.mlp.gate",
        "experts and their router take no adapters; wanted attention, dense and shared MLPs",
    ),
    ("sdar_tied", "lm_head", "it is the embedding's matrix; wanted an adapter without it"),
    (
        "sdar",
        "model.layers.0.attn.q_proj",
        "wanted one of the checkpoint's modules; did you mean model.layers.0.self_attn.q_proj?",
    ),
    (
        "sdar",
        "model.embed_tokens",
        "wanted one of the checkpoint's modules; did you mean",
    ),
]


@pytest.mark.parametrize(("case", "module", "line"), NAMES)
def test_names_of_modules(case: str, module: str, line: str, tmp_path: Path) -> None:
    folder = make_case(tmp_path / "checkpoint", case)
    save_adapter(tmp_path / "a", one(module))
    assert refusal_of(reader_of(folder), tmp_path / "a").startswith(f"{module}: {line}")


def test_modules_outside_the_targets(
    folder: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    save_adapter(tmp_path, tensors)
    line = refusal_of(reader_of(folder, targets=["q_proj", "v_proj"]), tmp_path)
    assert line.endswith(": wanted one of lora_target_modules q_proj, v_proj")
    kept = {k: t for k, t in tensors.items() if "q_proj" in k or "v_proj" in k}
    save_adapter(tmp_path, kept)
    assert reader_of(folder, targets=["q_proj", "v_proj"]).read("a", str(tmp_path)).rank == 8


def test_shapes(folder: Path, tmp_path: Path) -> None:
    reader, module = reader_of(folder), f"{Q}: lora_A, lora_B"
    save_adapter(tmp_path, one(Q, columns=32))
    wanted = "wanted [r, 64], [64, r]"
    assert refusal_of(reader, tmp_path) == f"{module}: given [8, 32], [64, 8]; {wanted}"
    tensors = one(Q)
    del tensors[f"{PREFIX}{Q}.lora_B.weight"]
    save_adapter(tmp_path, tensors)
    assert refusal_of(reader, tmp_path) == f"{module}: given [8, 64], nothing; {wanted}"
    save_adapter(tmp_path, one(Q, rank=4))
    line = f"{module}: given [4, 64], [64, 4]; wanted [8, 64], [64, 8]"
    assert refusal_of(reader, tmp_path) == line


def test_numbers(folder: Path, tmp_path: Path) -> None:
    reader, line = reader_of(folder), "wanted finite floating-point numbers"
    for value in (float("nan"), float("inf")):
        tensors = one(Q)
        tensors[f"{PREFIX}{Q}.lora_B.weight"][3, 2] = value
        save_adapter(tmp_path, tensors)
        reader.check("a", str(tmp_path))  # the check reads no numbers
        assert refusal_of(reader, tmp_path, is_read=True) == f"{Q}: lora_B: {line}"
    save_adapter(tmp_path, {name: tensor.int() for name, tensor in one(Q).items()})
    assert refusal_of(reader, tmp_path).endswith(line)
    save_adapter(tmp_path, {})
    assert refusal_of(reader, tmp_path).endswith("wanted at least one lora_A")


def test_tensors_of_other_kinds(folder: Path, tmp_path: Path) -> None:
    reader = reader_of(folder)
    embedding = {f"{PREFIX}model.transformer.wte.lora_embedding_A": torch.ones(8, 256)}
    save_adapter(tmp_path, embedding)
    assert refusal_of(reader, tmp_path).startswith("lora_embedding_A: given")
    save_adapter(tmp_path, {f"{PREFIX}{Q}.weight": torch.ones(64, 64)})
    assert "MODULE.lora_A.weight" in refusal_of(reader, tmp_path)
