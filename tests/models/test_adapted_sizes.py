# SPDX-License-Identifier: Apache-2.0
"""Steps with LoRA adapters take the buffers that their plans count, and the slots have room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapter_files import random_adapter, save_adapter
from tests.checkpoints import make_checkpoint
from tests.models.support import Recorder, add_slots, engine_config
from vllm.diffusion.adapters.adapted_rows import RowSlots
from vllm.diffusion.adapters.lora_flags import matrices_of, reader_of
from vllm.diffusion.core.spans import AttentionLayout, KeySource, Span
from vllm.diffusion.engine.planning import make_planner, model_shape
from vllm.diffusion.memory import Planner
from vllm.diffusion.memory.cost import CPU
from vllm.diffusion.memory.footprint import Footprint
from vllm.diffusion.memory.plan import Residency
from vllm.diffusion.memory.shapes import StepShape
from vllm.diffusion.models.base import DiffusionModel

RANK = 16


class Largest(Recorder):
    """Records the largest take of each buffer."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        before = self.taken.get(name, 0)
        out = super().take(name, shape, dtype)
        self.taken[name] = max(before, out.nbytes)
        return out


@pytest.mark.parametrize(
    ("targets", "quantization"),
    [(None, None), (["q_proj", "v_proj"], None), (None, "fp8"), (None, "int4")],
    ids=["all", "some", "fp8", "int4"],
)
@pytest.mark.parametrize("case", ["gqa", "bias", "dream", "moe_dense_mix", "llada2_dense_first"])
def test_stages_take_what_is_planned(
    case: str,
    targets: list[str] | None,
    quantization: str | None,
    load_model: Callable[..., DiffusionModel],
    case_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    if targets and case == "llada2_dense_first":
        targets = ["query_key_value"]
    options: dict[str, Any] = {"lora_target_modules": targets, "quantization": quantization}
    seen = check_buffers(case_path(case), 7, load_model, tmp_path, options)
    assert "low rank" in seen
    assert seen & {"gate and up", "joined product"} or targets is not None or "moe" in case


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj", "o_proj"]])
def test_joined_products_are_planned(
    targets: list[str] | None, load_model: Callable[..., DiffusionModel], tmp_path: Path
) -> None:
    """Rows of wide weights have products with the first matrices in the same buffer."""
    sizes = {"hidden_size": 512, "intermediate_size": 512}
    path = make_checkpoint(tmp_path / "wide", family="dream", seed=3, **sizes)
    seen = check_buffers(path, 70, load_model, tmp_path, {"lora_target_modules": targets})
    assert "joined product" in seen
    # Other products of queries, keys and values compute some of the columns.
    assert "low rank" in seen


def check_buffers(
    path: Path,
    rows: int,
    load_model: Callable[..., DiffusionModel],
    folder: Path,
    options: dict[str, Any],
) -> set[str]:
    """Check the buffers that all stages take, and return their names."""
    layout = Residency(keep_queries=False)
    options = {"enable_lora": True, "max_lora_rank": RANK, **options}
    config = engine_config(path, **options)
    model, lora = load_model(path, **options), config.lora_config
    slots, reader = add_slots(model, config, num_slots=1)
    assert lora is not None and model.adapting is not None
    allowed = set(matrices_of(lora, model.config).allowed)
    tensors = random_adapter(path, lambda name: name in allowed, rank=RANK)
    slots.write(0, reader.read("a", str(save_adapter(folder / "a", tensors, rank=RANK))))
    layer, x = model.layers[0], torch.ones(rows, model.hidden_size)
    rotary = model.rotary(torch.arange(rows))
    product = torch.zeros(rows, 2 * model.num_kv_heads * model.head_dim)
    wrote, attended, fed, headed = Largest(), Largest(), Largest(), Largest()
    with model.adapting.sampling(RowSlots.of([0], [rows])):
        layer.attention.keys_values(x, rotary, product, wrote)
        _, k, v = layer.attention.split(product)
        keys = AttentionLayout.of([Span(0, rows, 0, rows)], "cpu")
        layer.attention.attend(x, rotary, [KeySource(k, v, keys)], None, attended)
        layer.mlp_stage.feed_forward(x, fed)
        model.compute_logits(model.final_norm(x, headed), headed)
    assert x.isfinite().all()
    shape = model_shape(config)
    assert shape.adapted is not None
    footprint = Footprint(shape.adapted)
    seen = set[str]()
    for scratch, phases in (
        (wrote, footprint.keys_values(layout)),
        (attended, footprint.attend(layout, is_packed=False)),
        (fed, footprint.feed_forward(layout)),
        (headed, footprint.logits(layout, is_packed=False)),
    ):
        planned = dict[str, int]()
        for buffer in (buffer for phase in phases for buffer in phase):
            planned[buffer.name] = max(planned.get(buffer.name, 0), rows * buffer.row_bytes)
        assert scratch.taken.keys() <= planned.keys()
        assert all(taken <= planned[name] for name, taken in scratch.taken.items())
        seen |= scratch.taken.keys()
    return seen


def test_plans_count_adapters_only_in_their_steps(case_path: Callable[[str], Path]) -> None:
    path, rows = case_path("gqa"), 512
    plain = model_shape(engine_config(path))
    shape = model_shape(engine_config(path, enable_lora=True, max_lora_rank=128))
    step = StepShape(rows, 64, rows)

    def peak(planner: Planner, step: StepShape) -> int:
        return planner.plan(step).predicted_peak_bytes

    before, planner = (Planner(own, 1 << 30, 4096) for own in (plain, shape))
    assert peak(planner, step) == peak(before, step)
    adapted = peak(planner, step._replace(adapts=True))
    # Each row has the numbers of gate and up between both products.
    assert adapted >= peak(planner, step) + rows * 2 * 128 * 4


def test_host_memory_for_adapters_is_not_used_for_caches(
    case_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every rank has all adapters, whose tensors here are those of the highest rank."""
    path = case_path("gqa")
    folder = save_adapter(tmp_path, random_adapter(path, rank=RANK), rank=RANK)
    config = engine_config(path, enable_lora=True, max_cpu_loras=3, max_lora_rank=RANK)
    adapter = reader_of(config).read("some", str(folder))
    num_bytes = sum(pair.down.nbytes + pair.up.nbytes for pair in adapter.low_ranks.values())
    plain, adapting = (make_planner(one, 1 << 30, CPU) for one in (engine_config(path), config))
    assert plain.host_bytes - adapting.host_bytes == 3 * num_bytes
