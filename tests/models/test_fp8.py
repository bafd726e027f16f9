# SPDX-License-Identifier: Apache-2.0
"""fp8 weights, quantised while they are loaded, or stored in checkpoints."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.checkpoint_files import change_json, change_weights, weights_of
from tests.checkpoints import llada_config, make_checkpoint
from tests.models.support import (
    FP8,
    LARGEST,
    Recorder,
    compressed_tensors,
    engine_config,
    fp8_layer,
    logits,
    quantise_checkpoint,
    rounded,
    some_ids,
    staged_logits,
)
from vllm.diffusion import ops
from vllm.diffusion.core.errors import CheckpointError, ModelConfigError, ServerConfigError
from vllm.diffusion.core.quantisation import Fp8Scheme, scheme_of
from vllm.diffusion.core.stages import Buffer
from vllm.diffusion.models.llada import LLaDAConfig
from vllm.diffusion.models.weights import checkpoint_name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a plain checkpoint in one file."""
    path = tmp_path_factory.mktemp("plain") / "llada"
    return make_checkpoint(path, seed=11, num_shards=1, n_kv_heads=2, include_bias=True)


# ---- products ----


def test_an_mlp_of_both_kinds_of_weights_hands_on_plain_rows() -> None:
    """silu(gate) * up is only written as fp8 if the first product supports it."""
    from vllm.diffusion.layers.mlp import GatedMLP
    from vllm.diffusion.layers.norm import RMSNorm

    generator = torch.Generator().manual_seed(6)
    first, second = torch.randn(32, 16, generator=generator), torch.randn(16, 16)
    plain = SimpleNamespace(weight=first, bias=None)
    x = torch.randn(3, 16, generator=generator)
    gain = RMSNorm(16, 1e-5)
    gate, up = (gain(x) @ first.t()).chunk(2, dim=1)
    layer = fp8_layer(second, None)
    stored = layer.weight.double() * layer.weight_scale.double()[:, None]
    wanted = x.double() + rounded(functional.silu(gate) * up) @ stored.t()
    mlp = GatedMLP(gain, ops.PlainProjection(plain), ops.Fp8Projection(layer), 16)
    mlp.feed_forward(x, Recorder())
    torch.testing.assert_close(x.double(), wanted, rtol=1e-4, atol=1e-4)


class DeviceRecorder(Recorder):
    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(super().take(name, shape, torch.float32)).to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 32, 64, 100, 256, 1000])
def test_a_gpu_computes_every_use(num_rows: int, has_bias: bool) -> None:
    """Our kernels and cuBLAS's compute all uses, also of some columns and some features."""
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)

    bias, x, scratch = numbers(4096) if has_bias else None, numbers(num_rows, 512), DeviceRecorder()
    layer = fp8_layer(numbers(4096, 512).float() / 16, bias)
    layer.params_dtype = torch.bfloat16
    made = ops.Fp8Projection(layer)
    stored = layer.weight.double() * layer.weight_scale.double()[:, None]

    def product(features: slice = slice(None)) -> Tensor:
        actual = rounded(x[:, features].float()) @ stored[:, features].t()
        return actual if bias is None else actual + bias.double()

    def assert_near(given: Tensor, wanted: Tensor) -> None:
        assert ((given.double() - wanted).norm() <= 0.02 * wanted.norm()).item()

    out = torch.empty(num_rows, 4096, device="cuda").bfloat16()
    made.project(x, out, scratch)
    assert_near(out, product())
    some = torch.empty(num_rows, 256, device="cuda").bfloat16()
    made.project(x, some, scratch, slice(128, 384))
    assert_near(some, product()[:, 128:384])
    made.multiply(x, out, scratch)
    assert_near(out, product())
    before = numbers(num_rows, 4096)
    after = before.clone()
    made.add_to(after, x, scratch)
    assert_near(after, before.double() + product())
    first, second = slice(0, 256), slice(256, 512)
    after = before.clone()
    made.add_to(after, x[:, first].contiguous(), scratch, first)
    made.add_to(after, x[:, second].contiguous(), scratch, second)
    parts = product(first) + product(second) - (0 if bias is None else bias.double())
    assert_near(after, before.double() + parts)
    gate, up = product().chunk(2, dim=1)
    gated = torch.empty(num_rows, 2048, device="cuda").bfloat16()
    made.gated(x, gated, scratch)
    assert_near(gated, functional.silu(gate) * up)
    rows: Any = made.rows(Buffer("activated", (2048,), torch.bfloat16), num_rows, scratch)
    made.gated(x, rows, scratch)
    wanted = functional.silu(gate) * up
    actual = rows.values.double() * rows.scales.double()[:, None]
    assert ((actual - wanted).norm() <= 0.05 * wanted.norm()).item()


# ---- online ----


def test_weights_become_fp8_as_they_are_loaded(
    folder: Path, load_model: Callable[..., Any]
) -> None:
    plain, quantised = load_model(folder), load_model(folder, quantization="fp8")
    assert isinstance(quantised.layers[0].attention.qkv_proj, ops.Fp8Projection)
    assert isinstance(quantised.head, ops.PlainProjection)
    for kind in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        for layer, like in zip(quantised.layers, plain.layers, strict=True):
            module, weight = layer.get_submodule(kind), like.get_submodule(kind).weight
            stored = module.weight.float() * module.weight_scale[:, None]
            assert module.weight.dtype == FP8
            largest = weight.abs().amax(dim=1)
            torch.testing.assert_close(stored.abs().amax(dim=1), largest)
            room = weight.abs() / 16 + largest[:, None] / LARGEST / 1000
            assert ((stored - weight).abs() <= room).all()
    ids = some_ids(40)
    given, wanted = logits(quantised, ids), logits(plain, ids)
    assert not torch.equal(given, wanted)
    # The weights are random and scaled up, which makes the error large.
    assert ((given - wanted).norm() / wanted.norm()).item() < 0.35
    parts = [some_ids(9, seed=1), ids]
    for rows, keep_queries in ((7, True), (None, False)):
        actual = staged_logits(quantised, parts, rows=rows, keep_queries=keep_queries)
        torch.testing.assert_close(actual[1], given, rtol=1e-3, atol=1e-3)


HEAD = {"additional_config": {"dllm": {"fp8_head": True}}}


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_the_head_becomes_fp8_where_that_is_asked_for(
    kind: str, folder: Path, load_model: Callable[..., Any]
) -> None:
    without = load_model(folder, quantization=kind)
    model = load_model(folder, quantization=kind, **HEAD)
    assert isinstance(without.head, ops.PlainProjection)
    assert isinstance(model.head, ops.Fp8Projection) and model.head_matrix is None
    assert model.model.embed_tokens.weight.dtype == torch.float32
    x = torch.randn(7, model.hidden_size, generator=torch.Generator().manual_seed(2))
    stored = model.lm_head.weight.double() * model.lm_head.weight_scale.double()[:, None]
    wanted = (rounded(x) @ stored.t())[:, : model.num_columns] + model.lm_head.bias.double()
    torch.testing.assert_close(model.compute_logits(x).double(), wanted, rtol=1e-4, atol=1e-4)
    ids = some_ids(40)
    given, like = logits(model, ids), logits(without, ids)
    assert 0 < ((given - like).norm() / like.norm()).item() < 0.1


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {}, "wanted --quantization fp8, int4 or nf4 with it"),
        ({"weight_tying": True}, {"quantization": "fp8"}, "wanted false: the head is"),
    ],
)
def test_an_fp8_head_that_cannot_be_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "llada", seed=1, **changes)
    with pytest.raises(ValueError, match=message):
        engine_config(path, **settings, **HEAD)


@pytest.mark.parametrize(
    ("card", "message"), [("8.6", "wanted int4 or nf4 alone, or a GPU of .* 8.9"), ("8.9", None)]
)
def test_fp8_is_for_cards_that_multiply_it(
    card: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DLLM_KERNELS", card)
    model = SimpleNamespace(quantization="fp8", hf_config=object(), dtype=torch.bfloat16)
    device = SimpleNamespace(device_type="cuda")
    config: Any = SimpleNamespace(model_config=model, device_config=device, quant_config=None)
    with pytest.raises(ServerConfigError, match=message) if message else nullcontext():
        ops.use_scheme(config, has_fp8_head=False)
    assert (config.quant_config is None) == (message is not None)


@pytest.mark.parametrize("family", ["moe", "llada2", "sdar_moe"])
def test_experts_become_fp8_as_they_are_loaded(
    family: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path / family, family=family, seed=9)
    plain, quantised = load_model(path), load_model(path, quantization="fp8")
    for layer, like in zip(quantised.layers, plain.layers, strict=True):
        if not hasattr(layer.mlp, "w1"):
            continue
        assert layer.mlp.gate.weight.dtype == torch.float32
        for given, wanted in ((layer.mlp.w1, like.mlp.w1), (layer.mlp.w2, like.mlp.w2)):
            values, scales = given.matrices
            assert values.dtype == FP8 and wanted.matrices.scales is None
            # Quantised layers store the shared expert separately.
            weight = wanted.weight[like.mlp.num_joined :]
            largest = weight.abs().amax(dim=2)
            torch.testing.assert_close(scales, largest / LARGEST)
            room = weight.abs() / 16 + largest[:, :, None] / LARGEST / 1000
            assert ((values.float() * scales[:, :, None] - weight).abs() <= room).all()
    ids = some_ids(40)
    given, wanted = logits(quantised, ids), logits(plain, ids)
    assert not torch.equal(given, wanted) and given.isfinite().all()
    sizes = [sum(p.nbytes for p in model.layers.parameters()) for model in (quantised, plain)]
    assert sizes[0] < 0.3 * sizes[1]  # compared with fp32


def test_experts_of_a_checkpoint_are_read_as_they_are(
    tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    """ModelOpt stores one scale per matrix, and one for the inputs, which experts do not use."""
    path = make_checkpoint(tmp_path / "llada2", family="llada2", seed=9, num_shards=1)
    ignored = ["lm_head", "*mlp.gate", "*.attention.*", "*.shared_experts.*", "*.layers.0.mlp*"]
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ignored}
    change_json(path, quantization_config=config)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            scale = tensors[name].abs().max() / LARGEST
            tensors[name] = (tensors[name] / scale).to(FP8)
            tensors[name.replace("weight", "weight_scale")] = scale
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)

    change_weights(path, quantise)
    model, tensors = load_model(path), weights_of(path)
    names = {"w1": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
    mixtures = {index: layer.mlp for index, layer in enumerate(model.layers) if index > 0}
    for index, mixture in mixtures.items():
        for ours, theirs in names.items():
            values, scales = getattr(mixture, ours).matrices
            paths = [f"model.layers.{index}.mlp.experts.3.{name}" for name in theirs]
            wanted = [
                tensors[f"{path}.weight"].float() * tensors[f"{path}.weight_scale"]
                for path in paths
            ]
            assert torch.equal(values[3].float() * scales[3][:, None], torch.cat(wanted))
    assert isinstance(model.layers[1].attention.qkv_proj, ops.PlainProjection)
    assert logits(model, some_ids(20)).isfinite().all()


def test_a_matrix_that_is_missing_is_named(folder: Path, load_model: Callable[..., Any]) -> None:
    model = load_model(folder, quantization="fp8")
    missing = "model.transformer.blocks.1.k_proj.weight"
    tensors = {name: tensor for name, tensor in weights_of(folder).items() if name != missing}
    with pytest.raises(CheckpointError, match=missing):
        model.load_weights(tensors.items())


# ---- checkpoints ----


def write_fp8(source: Path, target: Path, strategy: str, rows: dict[str, Any]) -> dict[str, Tensor]:
    """Write a checkpoint of compressed-tensors and return the values of its matrices."""
    shutil.copytree(source, target)
    meaning = {}
    config = compressed_tensors(
        {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True},
        {"num_bits": 8, "type": "float", **rows},
        format="float-quantized",
        ignore=["model.transformer.ff_out", "re:.*blocks\\.0\\.attn_out"],
    )

    def matrix(path: str, weight: Tensor) -> dict[str, Tensor] | None:
        if path.endswith("blocks.0.attn_out"):
            return None
        by_channel = strategy == "channel"
        largest = weight.abs().amax(dim=1, keepdim=True) if by_channel else weight.abs().max()[None]
        scale = (largest / LARGEST).float()
        values = (weight.float() / scale).to(FP8)
        scale = scale.bfloat16() if by_channel else scale
        meaning[f"{path}.weight"] = values.float() * scale.float()
        inputs = {} if rows["dynamic"] else {"input_scale": torch.tensor([0.02])}
        return {"weight": values, "weight_scale": scale, **inputs}

    quantise_checkpoint(target, config, matrix)
    return meaning


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize(
    "rows", [{"dynamic": True, "strategy": "token"}, {"dynamic": False, "strategy": "tensor"}]
)
def test_a_checkpoint_of_compressed_tensors_is_read_as_it_is(
    folder: Path,
    tmp_path: Path,
    load_model: Callable[..., Any],
    strategy: str,
    rows: dict[str, Any],
) -> None:
    meaning = write_fp8(folder, tmp_path / "fp8", strategy, rows)
    model = load_model(tmp_path / "fp8")
    assert isinstance(model.layers[0].attention.out_proj, ops.PlainProjection)
    assert isinstance(model.layers[1].attention.out_proj, ops.Fp8Projection)
    for index, layer in enumerate(model.layers):
        path = f"model.transformer.blocks.{index}"
        fused = {
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "mlp.gate_up_proj": ("ff_proj", "up_proj"),
            "mlp.down_proj": ("ff_out",),
        }
        for ours, theirs in fused.items():
            module = layer.get_submodule(ours)
            wanted = torch.cat([meaning[f"{path}.{name}.weight"] for name in theirs])
            assert torch.equal(module.weight.float() * module.weight_scale[:, None], wanted)
            assert hasattr(module, "input_scale") is not rows["dynamic"]
            if not rows["dynamic"]:
                torch.testing.assert_close(module.input_scale.data, torch.tensor([0.02]))
    assert logits(model, some_ids(20)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: None, ""),
        (lambda scale: scale[:-1].clone(), ": given .* no part"),
    ],
    ids=["without a scale", "of another shape"],
)
def test_scales_that_do_not_fit_are_refused(
    change: Any, message: str, folder: Path, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    write_fp8(folder, tmp_path / "fp8", "channel", {"dynamic": True})
    name = "model.transformer.blocks.1.up_proj.weight_scale"

    def put(tensors: dict[str, Tensor]) -> None:
        scale = change(tensors.pop(name))
        tensors |= {} if scale is None else {name: scale}

    change_weights(tmp_path / "fp8", put)
    with pytest.raises(CheckpointError, match=f"blocks.1.up_proj.weight_scale{message}"):
        load_model(tmp_path / "fp8")


# ---- configurations ----


def test_methods_of_upstreams_are_refused_where_their_kernels_are_missing(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"given experts_int8, which .* wanted fp8, int4 or nf4"):
        engine_config(folder, quantization="experts_int8")


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
ROWS = {"dynamic": True}


def compressed(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors(WEIGHTS, ROWS)
    config["config_groups"]["group_0"] |= changes
    return config


def test_schemes_of_configurations() -> None:
    assert scheme_of(None, None) is None
    assert scheme_of("fp8", None) == Fp8Scheme(is_online=True)
    assert scheme_of("compressed-tensors", compressed()) == Fp8Scheme()
    fixed = {"dynamic": False, "strategy": "tensor"}
    assert scheme_of(None, compressed(input_activations=fixed)) == Fp8Scheme(has_input_scale=True)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert scheme_of("modelopt", modelopt) == Fp8Scheme(has_input_scale=True, ignored=("lm_head",))
    autofp8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    assert scheme_of("fp8", autofp8) == Fp8Scheme(has_input_scale=True, ignored=("lm_head",))
    assert scheme_of("tests_int8", {"quant_method": "tests_int8"}) is None  # left to upstream


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["q_proj"]}, "config_groups"),
        ({"weights": WEIGHTS | {"num_bits": 4}}, "quantization_config.weights"),
        ({"weights": WEIGHTS | {"num_bits": 4, "type": "int"}}, "4 bits with plain rows"),
        ({"weights": WEIGHTS | {"strategy": "group"}}, "given 'group'"),
        ({"input_activations": None}, "input_activations"),
        ({"input_activations": {"dynamic": False, "strategy": "token"}}, "tensor where static"),
    ],
)
def test_what_a_scheme_does_not_describe_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        scheme_of(None, compressed(**changes))


def test_parts_of_one_matrix_are_quantised_together() -> None:
    config = ops.SchemeConfig(Fp8Scheme(ignored=("layers.0.q_proj", "re:.*up_proj", "o_proj")))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert config.ignores("model.layers.1.o_proj") and not config.ignores("model.layers.1.qkv_proj")
    with pytest.raises(ServerConfigError, match="wanted all or none"):
        config.ignores("model.layers.0.qkv_proj")


def test_modules_are_ignored_by_the_names_of_the_checkpoint() -> None:
    architecture = LLaDAConfig.from_dict(llada_config(n_layers=12)).architecture
    ignored = ("re:.*blocks\\.11\\.ff_out", "model.transformer.blocks.1.attn_out", "*.2.ff_out")
    config = ops.SchemeConfig(Fp8Scheme(ignored=ignored))
    config.use_names(partial(checkpoint_name, architecture))
    actual = [
        path
        for index in range(12)
        for path in (
            f"model.layers.{index}.mlp.down_proj",
            f"model.layers.{index}.self_attn.o_proj",
        )
        if config.ignores(path)
    ]
    assert actual == [
        "model.layers.1.self_attn.o_proj",
        "model.layers.2.mlp.down_proj",
        "model.layers.11.mlp.down_proj",
    ]
    assert checkpoint_name(architecture, "lm_head") == "model.transformer.ff_out"


def test_kinds_that_a_model_may_have(folder: Path) -> None:
    config = engine_config(folder, quantization="fp8").quant_config
    assert ops.kinds_of(config) == (ops.Fp8Projection,)
    some = ops.SchemeConfig(Fp8Scheme(ignored=("o_proj",)))
    assert set(ops.kinds_of(some)) == {ops.Fp8Projection, ops.PlainProjection}
