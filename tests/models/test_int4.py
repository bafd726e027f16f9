# SPDX-License-Identifier: Apache-2.0
"""4-bit weights: the error of quantisation, and the results of projections."""

import struct
from collections.abc import Callable
from itertools import product as pairs_of
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.random_weights import WEIGHT_STD, randomise
from tests.checkpoints import make_checkpoint
from tests.models.support import (
    Recorder,
    assert_same_logits,
    empty_packed,
    logits,
    meant,
    packed_layer,
    some_ids,
    staged_logits,
    visibility_of,
)
from vllm.diffusion import ops
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.models.weights import quantised_sizes
from vllm.diffusion.ops.packed import (
    NF4,
    NF4_ORDER,
    group_of,
    quantise_packed,
    reserve_unpacked,
)
from vllm.diffusion.ops.packed_checkpoints import OrderedProjection
from vllm_add_llada.cuda_kernels.fused_ops import Packed, look_up_table, pack, unpack


@pytest.mark.parametrize("group", [8, 64, 128])
def test_numbers_mean_what_was_packed(group: int) -> None:
    numbers = torch.randint(0, 16, (3, 2 * group), generator=torch.Generator().manual_seed(1))
    packed = empty_packed(3, 2 * group, group, "int4")
    packed.values.copy_(pack(numbers))
    packed.scales.copy_(torch.tensor([0.5, 2.0]))
    assert packed.zeros is not None
    packed.zeros.copy_(torch.tensor([8, 3]))
    first, second = numbers[:, :group] - 8, numbers[:, group:] - 3
    assert torch.equal(meant(packed), torch.cat((first * 0.5, second * 2.0), dim=1))


def test_a_thread_of_a_tensor_core_finds_its_numbers_in_16_bytes() -> None:
    """A thread has pairs of numbers of the same row: the left operand of 16-deep products."""
    numbers = torch.randint(0, 16, (1, 256), generator=torch.Generator().manual_seed(1))
    words = pack(numbers).view(torch.int32).view(2, 4, 4)  # strips, threads, words
    for strip, thread, word in pairs_of(range(2), range(4), range(4)):
        actual = [int(words[strip, thread, word]) >> 4 * i & 15 for i in range(8)]
        for i in range(4):
            first = 128 * strip + 32 * word + 8 * i + 2 * thread
            assert [actual[i], actual[i + 4]] == numbers[0, first : first + 2].tolist()


def looked_up(words: tuple[int, ...], number: int) -> float:
    """Return the result of the kernel's permutations of registers, computed bit by bit."""
    halves = []
    for low, high in ((words[0:2], words[2:4]), (words[4:6], words[6:8])):
        part = 0
        for table, selector in ((low, number), (high, number ^ 8)):
            byte = struct.pack("<2I", *table)[selector & 7]
            part ^= (255 * (byte >> 7)) if selector & 8 else byte
        halves.append(part)
    bits = halves[0] << 24 | halves[1] << 16
    actual: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return actual


def test_every_number_of_nf4_is_looked_up() -> None:
    table = [NF4[i] for i in NF4_ORDER]
    words = look_up_table(table)
    actual = [looked_up(words, number) for number in range(16)]
    assert actual == torch.tensor(table).bfloat16().tolist()
    with pytest.raises(ValueError, match="of one sign"):
        look_up_table(NF4)


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_each_number_is_the_nearest_there_is(kind: str) -> None:
    """The cases are extreme scales, groups of one sign, and zeros."""
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(2))
    weight[:10] *= torch.logspace(-12, 12, 10)[:, None]
    weight[10:20] = weight[10:20].abs()
    weight[20:30] = -weight[20:30].abs()
    weight[30:32] = 0
    packed = empty_packed(40, 256, 64, kind)
    quantise_packed(weight, packed)
    actual = meant(packed)
    groups, near = weight.unflatten(1, (-1, 64)), actual.unflatten(1, (-1, 64))
    largest = groups.abs().amax(dim=2, keepdim=True)
    # A tenth may be clipped on the side with 8 of the 16 numbers, and another eighth elsewhere.
    room = (0.22 if kind == "int4" else 0.16) * largest
    assert ((near - groups).abs() <= 1.01 * room).all()
    assert (actual[30:32] == 0).all()
    error = (near - groups).square().sum(dim=2)
    symmetric = (groups / (largest / 7).clamp(min=1e-30)).round() * largest / 7
    least = groups.amin(dim=2, keepdim=True).clamp(max=0)
    step = ((groups.amax(dim=2, keepdim=True).clamp(min=0) - least) / 15).clamp(min=1e-30)
    zero = (-least / step).round()
    spanned = (((groups / step).round() + zero).clamp(0, 15) - zero) * step
    for whole in (symmetric, spanned):  # quantised without clipping
        most = 1.001 * (whole - groups).square().sum(dim=2)
        assert (error[:30] <= most[:30]).all() or kind == "nf4"


def of_module(module: Any) -> Tensor:
    return meant(Packed(module.weight.data, module.weight_scale, module.weight_zero, module.table))


def dense_names(layer: Any) -> tuple[str, ...]:
    return () if hasattr(layer.mlp, "w1") else ("mlp.gate_up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llada", "int4"), ("llada", "nf4"), ("dream", "int4"), ("diffullama", "nf4")),
        *(("sdar", "int4"), ("fast_dllm", "nf4"), ("nemotron", "int4")),
    ],
)
def test_weights_become_4_bits_as_they_are_loaded(
    family: str, kind: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path / family, family=family, seed=3)
    plain, quantised = load_model(path), load_model(path, quantization=kind)
    count, num_bytes, plain_bytes = quantised_sizes(quantised, torch.bfloat16)
    assert count == 4 * len(plain.layers)
    assert num_bytes < 0.45 * plain_bytes  # groups of 32 and 64; below 0.3 with groups of 128
    module, like = quantised.layers[1].mlp.down_proj, plain.layers[1].mlp.down_proj
    assert ((of_module(module) - like.weight).norm() <= 0.12 * like.weight.norm()).item()
    ids = some_ids(40)
    given = logits(quantised, ids)
    assert not torch.equal(given, logits(plain, ids)) and given.isfinite().all()
    sees = visibility_of(plain)
    (actual,) = staged_logits(quantised, [ids], rows=7, keep_queries=False, visibility=sees)
    torch.testing.assert_close(actual, given, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llada", "int4"), ("llada", "nf4"), ("llada", "fp8"), ("moe", "fp8"), ("moe", "nf4")],
)
def test_benchmarks_draw_weights_to_be_quantised(
    family: str, kind: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    model = load_model(make_checkpoint(tmp_path, family=family, seed=3), quantization=kind)
    randomise(model)
    matrix = model.layers[0].mlp.w2 if family == "moe" else model.layers[0].mlp.down_proj
    if kind == "fp8":
        drawn = matrix.weight.float() * matrix.weight_scale[..., None]
    else:
        drawn = meant(matrix.matrices.packed) if family == "moe" else of_module(matrix)
    assert abs(drawn.std().item() - WEIGHT_STD) < 0.1 * WEIGHT_STD


def test_sizes_of_large_matrices() -> None:
    """A group of 128 weights of LLaDA-8B takes 69 bytes instead of 256."""
    packed = empty_packed(8, 4096, 128, "int4")
    assert packed.zeros is not None
    num_bytes = sum(part.nbytes for part in (packed.values, packed.scales, packed.zeros))
    assert num_bytes == 8 * 32 * 69 and num_bytes < 0.35 * 8 * 4096 * 2


def test_groups_divide_the_depth() -> None:
    assert [group_of(depth, 128) for depth in (4096, 192, 96, 8)] == [128, 64, 32, 8]
    with pytest.raises(ServerConfigError, match="depth 100; wanted a multiple of 8"):
        group_of(100, 128)


@pytest.mark.parametrize("kind", ["int4", "nf4"])
@pytest.mark.parametrize("family", ["moe", "llada2", "sdar_moe"])
def test_experts_become_4_bits_as_they_are_loaded(
    family: str, kind: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path / family, family=family, seed=9)
    plain, quantised = load_model(path), load_model(path, quantization=kind)
    num_mixtures = 0
    for layer, like in zip(quantised.layers, plain.layers, strict=True):
        if not hasattr(layer.mlp, "w1"):
            continue
        num_mixtures += 1
        for given, wanted in ((layer.mlp.w1, like.mlp.w1), (layer.mlp.w2, like.mlp.w2)):
            packed, num_experts = given.matrices
            stacked = wanted.weight.data[like.mlp.num_joined :]
            assert num_experts == len(stacked)
            lost = meant(packed) - stacked.flatten(0, 1)
            assert (0 < lost.norm() <= 0.12 * stacked.norm()).item()
            stacked.copy_(meant(packed).view_as(stacked))
        if layer.mlp.shared_experts is not None:
            for name, wanted in (("gate_up_proj", like.mlp.w1), ("down_proj", like.mlp.w2)):
                module = layer.mlp.shared_experts.get_submodule(name)
                wanted.weight.data[0].copy_(of_module(module))
    for layer, like in zip(quantised.layers, plain.layers, strict=True):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", *dense_names(layer)):
            like.get_submodule(name).weight.data.copy_(of_module(layer.get_submodule(name)))
    assert num_mixtures
    ids = some_ids(40)
    assert_same_logits(logits(quantised, ids), logits(plain, ids))
    count, num_bytes, plain_bytes = quantised_sizes(quantised, torch.bfloat16)
    assert count >= 2 * num_mixtures + 2 * len(plain.layers)
    assert num_bytes < 0.6 * plain_bytes  # groups of 16 and 32; below 0.3 with groups of 128


# ---- the kernel ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "nf4"])
@pytest.mark.parametrize(
    ("num_rows", "depth", "group"),
    [(5, 64, 16), (300, 1024, 128), (64, 96, 32), (7, 384, 32), (9, 4224, 64)],
)
def test_a_gpu_unpacks_the_same(kind: str, num_rows: int, depth: int, group: int) -> None:
    weight = torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(7))
    packed = empty_packed(num_rows, depth, group, kind, "cuda")
    quantise_packed(weight, packed)
    on_host = Packed(*(None if part is None else part.cpu() for part in packed))
    wanted = meant(on_host).bfloat16()
    out = torch.empty(num_rows, depth, device="cuda", dtype=torch.bfloat16)
    unpack(packed, out)
    assert torch.equal(out.cpu(), wanted)
    unpack(packed.rows(slice(1, 4)), out[1:4])
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.gpu
def test_a_gpu_widens_fp8_in_groups() -> None:
    generator = torch.Generator().manual_seed(9)
    values = (torch.randn(70, 384, generator=generator) * 100).to(torch.float8_e4m3fn)
    packed = Packed(values, torch.rand(70, 3, generator=generator))
    wanted = meant(packed).bfloat16()
    out = torch.empty(70, 384, device="cuda", dtype=torch.bfloat16)
    unpack(Packed(values.cuda(), packed.scales.cuda()), out)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 32, 300, 2500])
def test_a_gpu_computes_every_use(num_rows: int) -> None:
    """The matrix is unpacked in several slices."""
    generator = torch.Generator().manual_seed(8)
    packed = empty_packed(12288, 4096, 128, "int4", "cuda")
    quantise_packed(torch.randn(12288, 4096, generator=generator) / 64, packed)
    layer = packed_layer(packed)
    weight = torch.empty(12288, 4096, device="cuda", dtype=torch.bfloat16)
    unpack(packed, weight)
    x = torch.randn(num_rows, 4096, generator=generator).to("cuda", torch.bfloat16)
    product = x.double() @ weight.double().t()
    reserve_unpacked(x.device, 12288, 4096, x.dtype)
    made = ops.PackedProjection(layer)

    def assert_near(given: Tensor, wanted: Tensor) -> None:
        assert ((given.double() - wanted).norm() <= 0.01 * wanted.norm()).item()

    out = torch.empty(num_rows, 12288, device="cuda", dtype=torch.bfloat16)
    made.project(x, out, Recorder())
    assert_near(out, product)
    before = torch.randn_like(out)
    after = before.clone()
    made.add_to(after, x, Recorder())
    assert_near(after, before.double() + product)
    after = before.clone()
    made.add_to(after, x[:, :256].contiguous(), Recorder(), slice(0, 256))
    assert_near(after, before.double() + x[:, :256].double() @ weight[:, :256].double().t())
    gate, up = product.chunk(2, dim=1)
    out = torch.empty(num_rows, 6144, device="cuda", dtype=torch.bfloat16)
    scratch = Recorder()
    made.gated(x, out, scratch)
    assert_near(out, functional.silu(gate) * up)
    matrix = ops.WeightSpec(12288, 4096, x.dtype, has_bias=False, device=x.device)
    workspace = ops.PackedProjection.workspace(ops.ProjectionKind.GATED, matrix)
    buffers = (
        workspace.buffers if num_rows <= cast("int", workspace.most_rows) else workspace.beyond
    )
    assert set(scratch.taken) <= {buffer.name for buffer in buffers}


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1500, 4096])
def test_slices_change_nothing_of_gated_products(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = empty_packed(6144, 2048, 128, "int4", "cuda")
    quantise_packed(torch.randn(6144, 2048) / 64, packed)
    layer = packed_layer(packed)
    x = torch.randn(num_rows, 2048).to("cuda", torch.bfloat16)
    results = []
    for most in (6144, 1000):
        monkeypatch.setattr("vllm.diffusion.ops.packed._UNPACKED", most * 2048)
        reserve_unpacked(x.device, 6144, 2048, x.dtype)
        out = torch.empty(num_rows, 3072, device="cuda", dtype=torch.bfloat16)
        ops.PackedProjection(layer).gated(x, out, Recorder())
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [32, 300, 2500])
def test_a_gpu_puts_rows_into_the_order_of_groups(num_rows: int) -> None:
    packed = empty_packed(12288, 4096, 128, "int4", "cuda")
    quantise_packed(torch.randn(12288, 4096) / 64, packed)
    layer = packed_layer(packed)
    layer.order = torch.randperm(4096).cuda()
    reserve_unpacked(packed.values.device, 12288, 4096, torch.bfloat16)
    made = OrderedProjection(layer)
    weight = torch.empty(12288, 4096, device="cuda", dtype=torch.bfloat16)
    unpack(packed, weight)
    x = torch.randn(num_rows, 4096).to("cuda", torch.bfloat16)
    product = x.double()[:, layer.order] @ weight.double().t()
    gate, up = product.chunk(2, dim=1)
    wanted = functional.silu(gate) * up
    scratch = FreshBuffers(x.device)
    out = torch.empty(num_rows, 6144, device="cuda", dtype=torch.bfloat16)
    made.gated(x, out, scratch)
    assert ((out.double() - wanted).norm() <= 0.01 * wanted.norm()).item()
    after = torch.zeros(num_rows, 12288, device="cuda", dtype=torch.bfloat16)
    made.add_to(after, x, scratch)
    assert ((after.double() - product).norm() <= 0.01 * product.norm()).item()
