# SPDX-License-Identifier: Apache-2.0
"""Projections by themselves: what they compute, and that they take what they say."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

from tests.models.support import Recorder
from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.buffers import row_bytes
from vllm.diffusion.ops import dispatch

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.buffers import Buffer

ROWS, DEPTH, COLUMNS = 5, 12, 8
CPU = torch.device("cpu")


class HalfMethod(LinearMethodBase):  # type: ignore[misc]
    """A weight that is stored halved."""

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, 2 * layer.half_weight, bias)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(method: Any, bias: Tensor | None) -> Any:
    weight = numbers(COLUMNS, DEPTH, seed=1)
    return SimpleNamespace(
        quant_method=method,
        weight=weight,
        half_weight=weight / 2,
        bias=bias,
        output_size_per_partition=COLUMNS,
    )


METHODS = {"plain": UnquantizedLinearMethod(), "quantised": HalfMethod()}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("use", ops.Use)
def test_every_use_computes_its_product_and_takes_what_it_says(
    use: ops.Use, kind: str, has_bias: bool
) -> None:
    bias = numbers(COLUMNS, seed=2) if has_bias else None
    layer, x, scratch = layer_of(METHODS[kind], bias), numbers(ROWS, DEPTH, seed=3), Recorder()
    made = ops.projection_of(layer)
    product = functional.linear(x, layer.weight, bias)
    if use is ops.Use.PROJECT:
        given, wanted = torch.empty(ROWS, 3), product[:, 2:5]
        made.project(x, given, scratch, slice(2, 5))
    elif use is ops.Use.GATED:
        gate, up = product.chunk(2, dim=1)
        given, wanted = torch.empty(ROWS, COLUMNS // 2), functional.silu(gate) * up
        made.gated(x, given, scratch)
    else:
        given = numbers(ROWS, COLUMNS, seed=4)
        wanted = given + product
        made.add_to(given, x, scratch)
    torch.testing.assert_close(given, wanted)
    matrix = ops.Matrix(COLUMNS, DEPTH, torch.float32, has_bias, CPU)
    said = ops.kind_of(layer).workspace(use, matrix)
    assert scratch.taken == {buffer.name: ROWS * buffer.row_bytes for buffer in said.buffers}
    assert said.most_rows is None


@pytest.mark.parametrize("has_bias", [False, True])
def test_features_are_added_part_by_part(has_bias: bool) -> None:
    bias = numbers(COLUMNS, seed=2) if has_bias else None
    layer, h = layer_of(METHODS["plain"], bias), numbers(ROWS, DEPTH, seed=3)
    x = numbers(ROWS, COLUMNS, seed=4)
    wanted = x + functional.linear(h, layer.weight, bias)
    made = ops.projection_of(layer)
    for features in (slice(0, 4), slice(4, 8), slice(8, 12)):
        made.add_to(x, h[:, features], Recorder(), features)
    torch.testing.assert_close(x, wanted)


def test_kinds_that_a_model_may_have() -> None:
    assert ops.kinds_of(None) == (ops.PlainProjection,)
    assert set(ops.kinds_of(object())) == {ops.PlainProjection, ops.QuantisedProjection}
    assert ops.PlainProjection.can_slice and not ops.QuantisedProjection.can_slice


# ---- what a GPU does without ----

BF16 = ops.Matrix(24576, 4096, torch.bfloat16, False, torch.device("cuda", 0))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and the multiprocessors of an H200."""
    monkeypatch.setattr(dispatch, "multiprocessors", lambda _: 132)


@pytest.mark.usefixtures("hopper")
def test_long_chunks_need_no_gate_and_up_where_one_kernel_always_serves() -> None:
    gated = ops.PlainProjection.workspace(ops.Use.GATED, BF16)
    assert gated == ops.Workspace((stages.gate_up(torch.bfloat16, 24576),), most_rows=1544)
    for other in (
        BF16._replace(device=torch.device("cuda")),  # nothing may be asked of the card
        BF16._replace(device=CPU),
        BF16._replace(dtype=torch.float16),
        BF16._replace(has_bias=True),
        BF16._replace(columns=256, depth=64),  # never fills the card
    ):
        assert ops.PlainProjection.workspace(ops.Use.GATED, other).most_rows is None


def test_products_are_added_in_place_on_a_gpu_of_its_own() -> None:
    def added(**changes: Any) -> tuple[Buffer, ...]:
        return ops.PlainProjection.workspace(ops.Use.ADD_TO, BF16._replace(**changes)).buffers

    projected = stages.projected(torch.bfloat16, 24576)
    assert added() == ()
    assert added(has_bias=True) == added(is_summed=True) == (projected,)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 100, 300, 1544, 1545, 4096])
def test_a_gpu_takes_no_more_than_is_said(rows: int) -> None:
    layer = layer_of(METHODS["plain"], None)
    layer.weight = torch.randn(24576, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, 12288, device="cuda", dtype=torch.bfloat16)
    scratch = DeviceRecorder()
    ops.projection_of(layer).gated(x, out, scratch)
    gate, up = functional.linear(x, layer.weight).chunk(2, dim=1)
    torch.testing.assert_close(out, functional.silu(gate) * up, rtol=0.02, atol=0.5)
    said = ops.PlainProjection.workspace(ops.Use.GATED, BF16)
    if said.most_rows is not None and rows > said.most_rows:
        assert not scratch.taken
    assert scratch.taken.get("gate and up", 0) <= rows * row_bytes(said.buffers)


class DeviceRecorder(Recorder):
    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return super().take(name, shape, dtype).cuda()


@pytest.mark.parametrize(("name", "is_dense"), [("mha", True), ("moe_one_expert", False)])
def test_projections_are_told_what_follows_them(
    name: str, is_dense: bool, case_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[ops.Projection, ops.Projection]] = []
    monkeypatch.setattr(ops.Projection, "precedes", lambda *pair: told.append(pair))
    model = case_model(name)
    model.order_products()
    attention = [layer.attention for layer in model.layers]
    wanted = [(stage.qkv_proj, stage.out_proj) for stage in attention]
    if is_dense:  # which experts are read is not known before
        chain = [
            p
            for layer in model.layers
            for p in (*layer.attention.products, *layer.mlp_stage.products)
        ]
        wanted = list(pairwise(chain))
        assert len(wanted) == 4 * len(model.layers) - 1
    assert told == wanted
