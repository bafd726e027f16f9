# SPDX-License-Identifier: Apache-2.0
"""The sizes that plans are made of, and the memory of a load."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.checkpoint_files import weights_of
from tests.checkpoints import make_checkpoint
from tests.models.support import Recorder, engine_config
from vllm.diffusion.core.spans import AttentionLayout, KeySource, Span
from vllm.diffusion.engine.planning import model_shape
from vllm.diffusion.layers.norm import AllHeadsRMSNorm
from vllm.diffusion.memory import ModelShape
from vllm.diffusion.memory.footprint import Footprint
from vllm.diffusion.memory.plan import Residency
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.ops import loading

CASES = [
    *("mha", "gqa", "padded_vocab", "bias", "qk_norm", "model_dtype_rope", "one_kv_head"),
    *("dream", "dream_tied", "moe", "moe_dense_mix", "moe_partial_clipped", "moe_all_dense"),
    *("moe_narrow_heads", "diffullama", "sdar", "fast_dllm_tied", "sdar_moe_mix", "nemotron"),
    *("llada2", "llada2_dense_first", "llada2_all_experts", "idlm"),
]


@pytest.mark.parametrize("case", CASES)
def test_sizes_from_the_configuration_are_those_of_the_model(
    case: str,
    case_model: Callable[[str], DiffusionModel],
    case_path: Callable[[str], Path],
) -> None:
    model, shape = case_model(case), model_shape(engine_config(case_path(case)))
    assert (shape.num_layers, shape.hidden_size) == (len(model.layers), model.hidden_size)
    assert (shape.num_heads, shape.num_kv_heads) == (model.num_heads, model.num_kv_heads)
    assert (shape.head_dim, shape.num_columns) == (model.head_dim, model.num_columns)
    assert shape.dtype == model.dtype
    tables = model.rotary(torch.arange(3))
    assert tables.cos.shape == (3, shape.rotary_dim) and tables.cos.dtype == shape.rotary_dtype
    attention = model.layers[0].attention
    are_sliced = all(product.can_slice for product in attention.products)
    is_each = not isinstance(attention.k_norm, AllHeadsRMSNorm)
    assert shape.can_group_heads == (are_sliced and is_each)
    assert_same_widths(shape, [layer.mlp_stage for layer in model.layers])


def assert_same_widths(shape: ModelShape, stages: list[Any]) -> None:
    dense = [stage.width for stage in stages if hasattr(stage, "width")]
    assert shape.mlp_width == max(dense, default=0)
    mixtures = [stage for stage in stages if hasattr(stage, "w2")]
    if not mixtures:
        assert shape.experts is None
        return
    assert shape.experts is not None
    count, _, width = mixtures[0].w2.values.shape
    assert (shape.experts.count, shape.experts.width) == (count, width)
    num_joined = count - len(mixtures[0].gate)
    assert shape.experts.chosen == mixtures[0].num_chosen + num_joined
    shared = mixtures[0].shared
    assert shape.experts.shared_width == (0 if shared is None else shared.width)
    assert shape.experts.in_fp32 == mixtures[0].scoring.in_fp32


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize(
    "case", ["bias", "qk_norm", "dream", "moe", "llada2", "llada2_dense_first"]
)
def test_stages_take_what_is_planned(
    case: str,
    quantization: str | None,
    load_model: Callable[..., DiffusionModel],
    case_path: Callable[[str], Path],
) -> None:
    """Names and bytes agree, so that no layer uses memory that plans do not count."""
    path, rows, layout = case_path(case), 7, Residency(keep_queries=False)
    model = load_model(path, quantization=quantization)
    layer, x = model.layers[-1], torch.ones(rows, model.hidden_size)
    rotary = model.rotary(torch.arange(rows))
    product = torch.zeros(rows, 2 * model.num_kv_heads * model.head_dim)
    layer.attention.keys_values(x, rotary, product, wrote := Recorder())
    _, k, v = layer.attention.split(product)
    keys = AttentionLayout.of([Span(0, rows, 0, rows)], "cpu")
    sources = [KeySource(k, v, keys)]
    layer.attention.attend(x, rotary, sources, None, attended := Recorder())
    layer.mlp_stage.feed_forward(x, fed := Recorder())
    footprint = Footprint(model_shape(engine_config(path, quantization=quantization)))
    for scratch, phases in (
        (wrote, footprint.keys_values(layout)),
        (attended, footprint.attend(layout, is_packed=False)),
        (fed, footprint.feed_forward(layout)),
    ):
        planned: dict[str, int] = {}
        for buffer in (buffer for phase in phases for buffer in phase):
            planned[buffer.name] = max(planned.get(buffer.name, 0), rows * buffer.row_bytes)
        taken = scratch.taken
        # A dense layer may have wider buffers of these names.
        widest = {"gate and up", "activated", "scales of activated"}
        assert {name: planned[name] for name in taken.keys() - widest} == {
            name: num_bytes for name, num_bytes in taken.items() if name not in widest
        }
        assert all(taken[name] <= planned[name] for name in taken)
        # Buffers of the forward pass, of fp8 on a GPU, and of a layer of another kind.
        not_here = {"cos", "sin", "projected"} | (planned.keys() if scratch is fed else set())
        assert planned.keys() - taken.keys() <= not_here


def test_ranks_share_heads_widths_and_columns(case_path: Callable[[str], Path]) -> None:
    config = engine_config(case_path("gqa"))
    alone = model_shape(config)
    config.parallel_config.tensor_parallel_size = 4
    shared = model_shape(config)
    assert (shared.num_heads, shared.num_kv_heads, shared.num_ranks) == (1, 1, 4)
    assert 4 * shared.mlp_width == alone.mlp_width
    assert 4 * shared.num_columns == alone.num_columns
    assert shared.hidden_size == alone.hidden_size


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (
            {"d_model": 96, "n_heads": 6, "n_kv_heads": 3},
            "a divisor or a multiple of the 3 key/value heads",
        ),
        ({"mlp_hidden_size": 75}, "a divisor of the MLP's width 75"),
    ],
)
def test_what_two_ranks_cannot_share_is_refused_in_one_line(
    sizes: dict[str, int], wanted: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, **sizes)
    with pytest.raises(ValueError, match=f"tensor_parallel_size: given 2; wanted {wanted}"):
        engine_config(folder, tensor_parallel_size=2)


# ---- Memory of a load in addition to its result while weights are quantised ----


WIDTH, INNER, AT_ONCE = 128, 8192, 1 << 14
WORDS = 8  # 32-bit words for each number that is quantised at a time


@pytest.mark.parametrize("kind", ["fp8", "int4", "nf4"])
def test_a_load_takes_two_matrices_and_a_little_besides_its_result(
    kind: str, tmp_path: Path, load_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's allocator measures here the memory that a GPU would use."""
    sizes = {"n_layers": 2, "d_model": WIDTH, "mlp_hidden_size": INNER}
    path = make_checkpoint(tmp_path / "wide", dtype=torch.bfloat16, num_shards=1, **sizes)
    model = load_model(path, "bfloat16", quantization=kind)
    tensors = weights_of(path)
    monkeypatch.setattr(loading, "NUMBERS_AT_ONCE", AT_ONCE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    events = profiled.profiler.kineto_results.events()
    taken = list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    matrix = 2 * WIDTH * INNER  # bytes of a loaded matrix, of which the previous one is still there
    assert matrix < max(taken) <= 2 * matrix + 4 * WORDS * AT_ONCE
    assert taken[-1] == 0


def test_that_is_less_than_a_layer_of_a_large_model() -> None:
    """The layer is that of LLaDA-8B, in bf16."""
    matrix = 2 * 4096 * 12288
    assert 2 * matrix + 4 * WORDS * loading.NUMBERS_AT_ONCE < 2 * 4 * 4096**2 + 3 * matrix


# ---- Rotary tables of a model ----


@pytest.mark.parametrize("case", ["mha", "dream", "moe_partial_clipped"])
def test_a_models_tables_follow_its_configuration(
    case: str, case_model: Callable[[str], DiffusionModel]
) -> None:
    """Tables do not depend on the default dtype at the time of loading, and are not stored."""
    model = case_model(case)
    config: Any = model.config
    rotary_dim = config.architecture.rotary_dim
    angles = 5.0 * config.rope_theta ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    rotary = model.rotary(torch.tensor([5]))
    tolerance = 1e-6 if rotary.cos.dtype == torch.float32 else 2**-8
    for table, wanted in ((rotary.cos, angles.cos()), (rotary.sin, angles.sin())):
        halves = table.double().view(2, -1)
        torch.testing.assert_close(halves, wanted.expand(2, -1), rtol=0, atol=tolerance)
    assert not any("frequencies" in name for name in model.state_dict())
