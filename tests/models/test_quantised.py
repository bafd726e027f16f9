# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints whose layers belong to upstream's quantisation methods."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import LLaDAReference
from torch.nn import functional
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from tests.checkpoint_files import weights_of
from tests.checkpoints import llada_config, make_checkpoint
from tests.models.support import (
    assert_same_logits,
    engine_config,
    logits,
    quantise_checkpoint,
    staged_logits,
)
from vllm.diffusion import ops
from vllm.diffusion.core.errors import CheckpointError, ServerConfigError
from vllm.diffusion.models.llada import LLaDAConfig
from vllm.diffusion.models.weights import module_names

KEPT_PLAIN = "model.transformer.blocks.0.q_proj"  # and the projections fused with it


@register_weight_loader_v2_supported_method
class Int8Method(LinearMethodBase):  # type: ignore[misc]
    """int8 weights with a scale per output channel, multiplied after a cast to the model dtype."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        rows, loader = sum(output_partition_sizes), attributes["weight_loader"]
        weight = torch.empty(rows, input_size_per_partition, dtype=torch.int8)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader),
        )
        layer.register_parameter(
            "weight_scale",
            ChannelQuantScaleParameter(
                data=torch.empty(rows, 1), output_dim=0, weight_loader=loader
            ),
        )

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, layer.weight.to(x.dtype) * layer.weight_scale, bias)


@register_quantization_config("tests_int8")
class Int8Config(QuantizationConfig):  # type: ignore[misc]
    """int8 on every linear layer of the checkpoint except the ignored ones."""

    def __init__(self, ignored: list[str]) -> None:
        super().__init__()
        self.ignored = ignored

    def get_name(self) -> str:
        return "tests_int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        return cls(config["ignored"])

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.ignored = hf_to_vllm_mapper.apply_list(self.ignored)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, LinearBase):
            return None
        if is_layer_skipped(prefix, self.ignored, self.packed_modules_mapping):
            return UnquantizedLinearMethod()
        return Int8Method()


def quantise(folder: Path) -> None:
    """Quantise the matrices of the layers' linear modules to int8, also in config.json."""
    kept = [KEPT_PLAIN.replace("q_proj", f"{part}_proj") for part in "qkv"]

    def matrix(path: str, weight: torch.Tensor) -> dict[str, torch.Tensor] | None:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        return None if path in kept else {"weight": values, "weight_scale": scale}

    quantise_checkpoint(folder, {"quant_method": "tests_int8", "ignored": kept}, matrix)


def widened(folder: Path, reference: LLaDAReference) -> LLaDAReference:
    """Return the reference with the values of the int8 weights."""
    weights, tensors = dict(reference.weights), weights_of(folder)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            weights[name] = tensor.float() * tensors[f"{name}_scale"]
    return LLaDAReference(reference.config, weights)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LLaDAReference]:
    folder = make_checkpoint(
        tmp_path_factory.mktemp("int8"), seed=50, num_shards=1, n_kv_heads=2, include_bias=True
    )
    reference = LLaDAReference.from_checkpoint(folder)
    quantise(folder)
    return folder, widened(folder, reference)


def test_quantised_layers_run_by_their_own_method(
    quantised: tuple[Path, LLaDAReference], load_model: Callable[..., Any]
) -> None:
    folder, reference = quantised
    model = load_model(folder)
    assert isinstance(model.layers[1].attention.qkv_proj, ops.QuantisedProjection)
    # The list has the names of the checkpoint.
    assert isinstance(model.layers[0].attention.qkv_proj, ops.PlainProjection)
    ids = torch.arange(3, 250, 13)
    wanted = reference.logits(ids[None])[0]
    assert_same_logits(logits(model, ids), wanted)
    (chunked,) = staged_logits(model, [ids], rows=7, keep_queries=False)
    assert_same_logits(chunked, wanted)


def test_a_quantised_layer_without_tensors_is_named(
    quantised: tuple[Path, LLaDAReference], load_model: Callable[..., Any]
) -> None:
    folder, _ = quantised
    model = load_model(folder)
    missing = "model.transformer.blocks.1.k_proj"
    tensors = {n: t for n, t in weights_of(folder).items() if not n.startswith(missing)}
    with pytest.raises(CheckpointError, match=missing):
        model.load_weights(tensors.items())


def test_names_in_a_quantisations_lists_become_those_of_the_model() -> None:
    """A list may have whole paths of the checkpoint, names within a layer, and patterns."""
    config = LLaDAConfig.from_dict(llada_config(n_layers=12))
    mapper = module_names(config.architecture)
    assert mapper.apply_list(
        [
            "model.transformer.ff_out",
            "model.transformer.blocks.1.ff_out",
            "model.transformer.blocks.11.up_proj",
            "attn_out",
            "re:.*ff_proj$",
        ]
    ) == [
        "lm_head",
        "model.layers.1.mlp.down_proj",
        "model.layers.11.mlp.up_proj",
        "self_attn.o_proj",
        "re:.*mlp.gate_proj$",
    ]


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_a_method_of_an_absent_package_is_one_line(tmp_path: Path) -> None:
    config = {"quant_method": "torchao", "quant_type": {}}
    path = make_checkpoint(tmp_path, family="dream", quantization_config=config)
    with pytest.raises(ServerConfigError, match=r"model .*torchao") as refused:
        engine_config(path)
    assert "\n" not in str(refused.value)
