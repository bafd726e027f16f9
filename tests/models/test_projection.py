# SPDX-License-Identifier: Apache-2.0
"""Projections compute their definition, and use exactly the memory that they report."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

from tests.models.support import (
    Recorder,
    empty_packed,
    fp8_layer,
    meant,
    packed_layer,
    rounded,
)
from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import Buffer, row_bytes
from vllm.diffusion.models.transformer import order_products
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.packed import quantise_packed

ROWS, DEPTH, COLUMNS = 5, 32, 16
CPU = torch.device("cpu")


class HalfMethod(LinearMethodBase):  # type: ignore[misc]
    """A method that stores a weight divided by two."""

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
FIXED = torch.tensor([0.004])  # scale of the inputs


def projection_of(
    kind: str, bias: Tensor | None
) -> tuple[ops.Projection, Tensor, Callable[[Tensor], Tensor]]:
    """Return a projection, its weight in float64, and a function that rounds its inputs."""
    weight = numbers(COLUMNS, DEPTH, seed=1)
    if kind in METHODS:
        projection = ops.projection_of(layer_of(METHODS[kind], bias))
        return projection, weight.double(), torch.Tensor.double
    if kind in ("int4", "nf4"):
        packed = empty_packed(COLUMNS, DEPTH, 16, kind)
        quantise_packed(weight, packed)
        projection = ops.PackedProjection(packed_layer(packed, bias))
        return projection, meant(packed).double(), torch.Tensor.double
    fixed = FIXED if kind == "fp8 fixed" else None
    layer = fp8_layer(weight, bias, fixed)
    stored = layer.weight.double() * layer.weight_scale.double()[:, None]
    return ops.Fp8Projection(layer), stored, partial(rounded, scale=fixed)


def use_it(
    use: ops.ProjectionKind,
    projection: ops.Projection,
    rows: Any,
    product: Tensor,
    scratch: Recorder,
) -> tuple[Tensor, Tensor]:
    """Return the result of a use, and the expected result in float64."""
    if use is ops.ProjectionKind.PROJECT:
        given, wanted = torch.empty(ROWS, 3), product[:, 2:5]
        projection.project(rows, given, scratch, slice(2, 5))
    elif use is ops.ProjectionKind.GATED:
        gate, up = product.chunk(2, dim=1)
        given, wanted = torch.empty(ROWS, COLUMNS // 2), functional.silu(gate) * up
        projection.gated(rows, given, scratch)
    else:
        given = numbers(ROWS, COLUMNS, seed=4)
        wanted = given + product
        projection.add_to(given, rows, scratch)
    return given.double(), wanted


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", [*METHODS, "int4", "nf4", "fp8", "fp8 fixed"])
@pytest.mark.parametrize("use", ops.ProjectionKind)
def test_every_use_computes_its_product_and_takes_what_it_says(
    use: ops.ProjectionKind, kind: str, has_bias: bool
) -> None:
    bias = numbers(COLUMNS, seed=2) if has_bias else None
    projection, weight, seen = projection_of(kind, bias)
    x, scratch = numbers(ROWS, DEPTH, seed=3), Recorder()
    product = functional.linear(seen(x), weight, None if bias is None else bias.double())
    given, wanted = use_it(use, projection, x, product, scratch)
    tolerance = 1e-4 if kind.startswith("fp8") else 1e-5
    torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)
    workspace = projection.workspace(use, ops.WeightSpec(COLUMNS, DEPTH, x.dtype, has_bias, CPU))
    assert workspace.most_rows is None
    if kind.startswith("fp8"):
        most = row_bytes((*stages.quantised_rows(x.dtype, DEPTH).quantised, *workspace.buffers))
        assert sum(scratch.taken.values()) <= ROWS * most
    else:
        assert scratch.taken == {
            buffer.name: ROWS * buffer.row_bytes for buffer in workspace.buffers
        }


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "fp8 fixed"])
@pytest.mark.parametrize("use", ops.ProjectionKind)
def test_the_norm_before_may_write_fp8(use: ops.ProjectionKind, kind: str, has_bias: bool) -> None:
    bias = numbers(COLUMNS, seed=2) if has_bias else None
    projection, weight, seen = projection_of(kind, bias)
    x, gain, scratch = numbers(ROWS, DEPTH, seed=3), torch.ones(DEPTH), Recorder()
    buffer = Buffer("normed", (DEPTH,), x.dtype)
    rows: Any = projection.rows(buffer, ROWS, Recorder())
    ops.rms_norm_quantised(x, gain, 0.0, rows)
    normed = seen(ops.rms_norm(x, gain, 0.0))
    product = functional.linear(normed, weight, None if bias is None else bias.double())
    given, wanted = use_it(use, projection, rows, product, scratch)
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
    workspace = projection.workspace(use, ops.WeightSpec(COLUMNS, DEPTH, x.dtype, has_bias, CPU))
    assert sum(scratch.taken.values()) <= ROWS * row_bytes(workspace.buffers)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fp8", "int4"])  # an int4 group exceeds a part
def test_features_are_added_part_by_part(kind: str, has_bias: bool) -> None:
    bias = numbers(COLUMNS, seed=2) if has_bias else None
    projection, weight, seen = projection_of(kind, bias)
    h, x = numbers(ROWS, DEPTH, seed=3), numbers(ROWS, COLUMNS, seed=4)
    wanted = x.double() + (0 if bias is None else bias.double())
    for part in (slice(0, 8), slice(8, 24), slice(24, 32)):
        wanted = wanted + seen(h[:, part]) @ weight[:, part].t()
        projection.add_to(x, h[:, part], Recorder(), part)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-4, atol=1e-4)


def test_kinds_that_a_model_may_have() -> None:
    assert ops.kinds_of(None) == (ops.PlainProjection,)
    assert set(ops.kinds_of(object())) == {ops.PlainProjection, ops.QuantisedProjection}
    assert ops.PlainProjection.can_slice and not ops.QuantisedProjection.can_slice


# ---- memory that a GPU does not need ----

BF16 = ops.WeightSpec(24576, 4096, torch.bfloat16, False, torch.device("cuda", 0))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the kernels and the multiprocessors of an H200."""
    card = dispatch.DeviceInfo(dispatch.KernelTier.HOPPER, 132)
    monkeypatch.setattr(dispatch, "card_of", lambda _: card)


@pytest.mark.usefixtures("hopper")
def test_long_chunks_need_no_gate_and_up_where_one_kernel_always_serves() -> None:
    gated = ops.PlainProjection.workspace(ops.ProjectionKind.GATED, BF16)
    assert gated == ops.Workspace((stages.gate_up(torch.bfloat16, 24576),), most_rows=1544)
    for other in (
        BF16._replace(device=torch.device("cuda")),  # the GPU itself must not be queried
        BF16._replace(device=CPU),
        BF16._replace(dtype=torch.float16),
        BF16._replace(has_bias=True),
        BF16._replace(columns=256, depth=64),  # too small to occupy the GPU
    ):
        assert ops.PlainProjection.workspace(ops.ProjectionKind.GATED, other).most_rows is None


@pytest.mark.usefixtures("hopper")
def test_long_chunks_of_quantised_weights_store_no_gate_and_up() -> None:
    """One kernel computes both. For fp8 it stores rows, which another kernel quantises."""
    packed = ops.PackedProjection.workspace(ops.ProjectionKind.GATED, BF16)
    assert packed.most_rows == 1544 and packed.beyond == ()
    assert [buffer.name for buffer in packed.buffers] == ["gate and up"]
    fp8 = ops.Fp8Projection.workspace(ops.ProjectionKind.GATED, BF16)
    quantised = row_bytes(buffer for buffer in fp8.buffers if buffer.name != "gate and up")
    assert row_bytes(fp8.buffers) == quantised + 2 * 24576
    assert (fp8.most_rows, row_bytes(fp8.beyond)) == (1544, quantised + 24576)
    biased = BF16._replace(has_bias=True)
    assert ops.Fp8Projection.workspace(ops.ProjectionKind.GATED, biased).most_rows is None


def test_products_are_added_in_place_on_a_gpu_of_its_own() -> None:
    def added(**changes: Any) -> tuple[Buffer, ...]:
        return ops.PlainProjection.workspace(
            ops.ProjectionKind.ADD_TO, BF16._replace(**changes)
        ).buffers

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
    workspace = ops.PlainProjection.workspace(ops.ProjectionKind.GATED, BF16)
    if workspace.most_rows is not None and rows > workspace.most_rows:
        assert not scratch.taken
    assert scratch.taken.get("gate and up", 0) <= rows * row_bytes(workspace.buffers)


class DeviceRecorder(Recorder):
    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return super().take(name, shape, dtype).cuda()


@pytest.mark.parametrize(("name", "is_dense"), [("mha", True), ("moe_one_expert", False)])
def test_projections_are_told_what_follows_them(
    name: str, is_dense: bool, case_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[tuple[ops.Projection, ops.Projection]] = []
    monkeypatch.setattr(ops.Projection, "precedes", lambda *pair: reports.append(pair))
    model = case_model(name)
    order_products(model.layers)
    attention = [layer.attention for layer in model.layers]
    wanted = [(stage.qkv_proj, stage.out_proj) for stage in attention]
    if is_dense:  # the experts that are read are only known at run time
        chain = [
            p
            for layer in model.layers
            for p in (*layer.attention.products, *layer.mlp_stage.products)
        ]
        wanted = list(pairwise(chain))
        assert len(wanted) == 4 * len(model.layers) - 1
    assert reports == wanted
