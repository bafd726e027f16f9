# SPDX-License-Identifier: Apache-2.0
"""Products with LoRA adapters, compared with checkpoints into which the adapters are merged.

Weights are wide, so that the adapters' first matrices are appended to some of them, and one product
computes both.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapter_files import merge, random_adapter, save_adapter
from tests.checkpoints import make_checkpoint
from tests.models.support import add_slots, engine_config
from vllm.diffusion.adapters.adapted_rows import RowSlots
from vllm.diffusion.core.spans import AttentionLayout, KeySource, Span
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.models.base import DiffusionModel

# Divisor of the maximum rank of the adapter in each slot, and the end of the module that it leaves
# as it is.
ADAPTERS = {0: (1, "nothing"), 1: (2, "q_proj")}
# Dtype, sizes of rows, maximum rank and tolerance
CPU = pytest.param(("float32", 512, 512, 16, 1e-5), id="cpu")
GPU = pytest.param(("bfloat16", 1024, 6144, 16, 0.05), id="gpu", marks=pytest.mark.gpu)
HIGH_RANK = pytest.param(("bfloat16", 2048, 6144, 64, 0.05), id="high rank", marks=pytest.mark.gpu)

Models = tuple[dict[int | None, DiffusionModel], float]


@pytest.fixture(scope="module", params=[CPU, GPU, HIGH_RANK])
def models(
    request: pytest.FixtureRequest,
    load_model: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Models]:
    """Yield a model with both adapters (None), one of each merged checkpoint, and a tolerance."""
    dtype, hidden, intermediate, max_rank, tolerance = request.param
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    path = make_checkpoint(folder / "checkpoint", family="dream", seed=5, **sizes)
    options = {"enable_lora": True, "max_lora_rank": max_rank, "max_loras": 2}
    found: dict[int | None, DiffusionModel] = {None: load_model(path, dtype, **options)}
    slots, reader = add_slots(found[None], engine_config(path, dtype, **options), num_slots=2)
    for slot, (divisor, left) in ADAPTERS.items():
        rank = max_rank // divisor
        changes = random_adapter(path, rank=rank, seed=slot)
        changes = {name: tensor for name, tensor in changes.items() if f"{left}." not in name}
        adapter = save_adapter(folder / f"adapter{slot}", changes, rank=rank)
        slots.write(slot, reader.read(f"adapter{slot}", str(adapter)))
        found[slot] = load_model(merge(path, adapter, folder / f"merged{slot}"), dtype)
    yield found, tolerance


def runs(num_rows: int) -> dict[int | None, slice]:
    """Return the rows of both adapters, and the rows between them, without empty ranges."""
    first, second = num_rows // 3, num_rows // 2
    found = {0: slice(0, first), None: slice(first, second), 1: slice(second, num_rows)}
    return {slot: rows for slot, rows in found.items() if rows.start < rows.stop}


def check(
    models: Models, num_rows: int, compute: Callable[[DiffusionModel, slice], Tensor]
) -> None:
    """Compare `compute` of all rows, each with its adapter, with that of the merged checkpoints.

    Rows without an adapter are compared with the same model while no row has one.
    """
    found, tolerance = models
    model = found[None]
    assert model.adapting is not None
    places = runs(num_rows)
    with model.adapting.sampling(RowSlots.of(places, [rows.stop for rows in places.values()])):
        given = compute(model, slice(0, num_rows))
    assert given.isfinite().all()
    for slot, rows in places.items():
        expected = compute(found[slot], rows).double()
        error = (given[rows].double() - expected).norm() / expected.norm()
        assert error < tolerance, (slot, rows, float(error))


def random_rows(model: DiffusionModel, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, model.hidden_size, generator=generator)
    return x.to(model.rotary_frequencies.device, model.dtype)


def scratch_of(model: DiffusionModel) -> FreshBuffers:
    return FreshBuffers(model.rotary_frequencies.device)


NUM_ROWS = [1, 40, 64, 70, 300, 2100]


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@torch.no_grad()
def test_mlp(models: Models, num_rows: int) -> None:
    """The second matrices of gate and up are a tail of their product, if the GPU has its kernel."""

    def compute(model: DiffusionModel, rows: slice) -> Tensor:
        x = random_rows(model, num_rows)[rows]
        model.layers[0].mlp_stage.feed_forward(x, scratch_of(model))
        return x

    check(models, num_rows, compute)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@torch.no_grad()
def test_attention(models: Models, num_rows: int) -> None:
    places = runs(num_rows)

    def compute(model: DiffusionModel, rows: slice) -> Tensor:
        x, attention = random_rows(model, num_rows)[rows], model.layers[0].attention
        own = [run for run in places.values() if rows.start <= run.start < run.stop <= rows.stop]
        ends = [(run.start - rows.start, run.stop - rows.start) for run in own]
        layout = AttentionLayout.of([Span(*end, *end) for end in ends], x.device)
        rotary = model.rotary(torch.arange(rows.start, rows.stop, device=x.device))
        product = x.new_zeros(len(x), 2 * model.num_kv_heads * model.head_dim)
        attention.keys_values(x, rotary, product, scratch_of(model))
        _, k, v = attention.split(product)
        attention.attend(x, rotary, [KeySource(k, v, layout)], None, scratch_of(model))
        return torch.cat([x, product], dim=1)

    check(models, num_rows, compute)


@pytest.mark.parametrize("num_rows", [1, 70, 300])
@torch.no_grad()
def test_head(models: Models, num_rows: int) -> None:
    def compute(model: DiffusionModel, rows: slice) -> Tensor:
        x = random_rows(model, num_rows)[rows]
        return model.compute_logits(x, scratch_of(model))

    check(models, num_rows, compute)


@torch.no_grad()
def test_shared_experts(load_model: Callable[..., Any], tmp_path: Path) -> None:
    """Without an adapter the bits are those of a model that takes no adapters."""
    path = make_checkpoint(tmp_path / "checkpoint", family="llada2", seed=5)
    options = {"enable_lora": True, "max_lora_rank": 8}
    model = load_model(path, "float32", **options)
    slots, reader = add_slots(model, engine_config(path, "float32", **options), num_slots=1)
    adapter = save_adapter(tmp_path / "adapter", random_adapter(path, rank=8, seed=1), rank=8)
    slots.write(0, reader.read("adapter", str(adapter)))
    others = (
        load_model(path, "float32"),
        load_model(merge(path, adapter, tmp_path / "merged"), "float32"),
    )

    def compute(other: DiffusionModel, num_rows: int) -> Tensor:
        x = random_rows(model, num_rows)
        other.layers[-1].mlp_stage.feed_forward(x, scratch_of(model))
        return x

    for num_rows in (1, 40, 300):
        plain, merged = (compute(other, num_rows) for other in others)
        assert torch.equal(compute(model, num_rows), plain)
        with model.adapting.sampling(RowSlots.of([0], [num_rows])):
            given = compute(model, num_rows)
        assert (given - merged).norm() < 1e-5 * merged.norm()
        assert (given - plain).norm() > 0.01 * plain.norm()
