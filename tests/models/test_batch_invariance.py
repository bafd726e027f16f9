# SPDX-License-Identifier: Apache-2.0
"""Operations of a batch-invariant engine: a row has the same bits alone and next to other rows."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.models.split_kernel import plain_attention
from tests.models.support import fp8_layer
from tests.pages import in_pages
from vllm.diffusion import ops
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.spans import AttentionLayout, Span
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.engine.worker.model_loading import load_everywhere
from vllm.diffusion.layers.invariant_attention import attend_invariantly
from vllm.diffusion.layers.split_attention import FIXED_PART_KEYS, split_attention
from vllm.diffusion.ops import collectives, dispatch
from vllm.diffusion.ops.collectives import HostCollectives
from vllm.diffusion.parallel.groups import ALONE, RankGroup

H200 = dispatch.DeviceInfo(dispatch.KernelTier.HOPPER, 132)
# Columns and depth of weights: qkv, output, gate and up, down, head.
USES = ("project", "add_to", "gated", "add_to", "head")
SHAPES = {
    "llada": [(12_288, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (126_464, 4096)],
    "dream": [(4608, 3584), (3584, 3584), (37_888, 3584), (3584, 18_944), (152_064, 3584)],
    "sdar": [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096)],
    "llada-moe": [(6144, 2048), (2048, 2048), (2048, 2048), (2048, 1024), (157_184, 2048)],
    "llada2": [(3072, 2048), (2048, 2048), (10_240, 2048), (2048, 5120), (157_184, 2048)],
}
# The parts of two tensor-parallel ranks; the ranks divide the depth of outputs.
SHAPES |= {
    "llada, 2 ranks": [(6144, 4096), (4096, 2048), (12_288, 4096), (4096, 6144), (63_232, 4096)],
    "sdar, 2 ranks": [(3072, 4096), (4096, 2048), (12_288, 4096), (4096, 6144), (75_968, 4096)],
    "llada2, 2 ranks": [(1536, 2048), (2048, 1024), (5120, 2048), (2048, 2560), (78_592, 2048)],
}
MOST_ROWS = 4096
MAX_NUMBERS = 1 << 27  # numbers of a product in these tests


def invariant(weight: Tensor, bias: Tensor | None = None, *, is_fp8: bool = False) -> Any:
    """Return a projection of a batch-invariant engine, whose weight is quantised if `is_fp8`."""
    if is_fp8:
        quantised = fp8_layer(weight.float(), bias)
        quantised.params_dtype = weight.dtype
        return ops.InvariantFp8Projection(quantised)
    layer: Any = SimpleNamespace(quant_method=UnquantizedLinearMethod(), weight=weight, bias=bias)
    return ops.InvariantProjection(layer)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal, the sign of zero included."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


# ---- the kernels of gated products ----


@pytest.mark.parametrize("shape", [shape for shapes in SHAPES.values() for shape in shapes])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_only_choose_among_gated_kernels_that_do_not_split(shape: Any, is_fp8: bool) -> None:
    for rows in range(1, 400):
        gated = dispatch.unsplit_gated_tiling(rows, *shape, card=H200, is_fp8=is_fp8)
        assert gated is not None and gated.split == 1
    assert dispatch.unsplit_gated_tiling(1, *shape, card=dispatch.NO_CARD) is None
    assert dispatch.unsplit_gated_tiling(1, 24, 64, card=H200) is None


# ---- the reference on the CPU ----


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_use_computes_its_product_whatever_the_other_rows(
    has_bias: bool, is_fp8: bool
) -> None:
    bias = numbers(48, seed=2) if has_bias else None
    projection = invariant(numbers(48, 64, seed=1), bias, is_fp8=is_fp8)
    scratch, error = FreshBuffers("cpu"), 0.6 if is_fp8 else 1e-4
    x, target = numbers(37, 64, seed=3), numbers(37, 48, seed=4)
    product = functional.linear(x, numbers(48, 64, seed=1), bias)

    def results(rows: slice) -> list[Tensor]:
        given, outs = x[rows], [torch.empty(len(x[rows]), width) for width in (48, 8, 24, 48)]
        projection.project(given, outs[0], scratch)
        projection.project(given, outs[1], scratch, slice(8, 16))
        projection.gated(given, outs[2], scratch)
        projection.multiply(given, outs[3], scratch)
        added = target[rows].clone()
        projection.add_to(added, given, scratch)
        return [*outs, added]

    whole = results(slice(None))
    gate, up = product.chunk(2, dim=1)
    wanted = [product, product[:, 8:16], functional.silu(gate) * up, product, target + product]
    for found, expected in zip(whole, wanted, strict=True):
        assert (found - expected).norm() < error * max(1.0, 0.1 * float(expected.norm()))
    for rows in (slice(0, 1), slice(5, 22), slice(36, 37)):
        assert all(is_same(a, b[rows]) for a, b in zip(results(rows), whole, strict=True))


def test_narrow_parts_are_copied_from_wider_products() -> None:
    """Parts of 1,500 rows are computed in several products, each of 1,024 columns."""
    weight, bias, x = numbers(1200, 8, seed=1), numbers(1200, seed=2), numbers(1500, 8, seed=3)
    projection, widths = invariant(weight, bias), set()
    whole, scratch = torch.empty(1500, 1200), FreshBuffers("cpu")
    projection.project(x, whole, scratch)
    with recorded_products(widths):
        for part in (slice(0, 40), slice(700, 1100), slice(-64, None), slice(100, 1150)):
            out = torch.empty(1500, len(range(1200)[part]))
            projection.project(x, out, scratch, part)
            torch.testing.assert_close(out, whole[:, part])
    assert widths == {1024, 1050}


@contextmanager
def recorded_products(widths: set[int]) -> Iterator[None]:
    """Record the columns of the products that are computed in the block."""
    plain = torch.addmm

    def addmm(*given: Any, **named: Any) -> Tensor:
        widths.add(named["out"].shape[1])
        return plain(*given, **named)

    with mock.patch.object(torch, "addmm", addmm):
        yield


# ---- sums over ranks ----


class Gathered(HostCollectives):
    """Collectives of a rank, with the parts of all ranks."""

    def __init__(self, *parts: Tensor) -> None:
        group: Any = SimpleNamespace(size=lambda: len(parts))
        super().__init__(group)
        self.parts = torch.stack(parts)

    def gather(self, part: Tensor) -> Tensor:
        return self.parts


@pytest.mark.parametrize(
    ("dtype", "parts", "residual", "wanted"),
    [
        # The second number is lost if it is added to the first, and kept in any other order.
        (torch.float32, (2.0**24, 1.0, -(2.0**24)), 0.5, 0.5),
        # Each addition would be rounded to 256, but their sum is not.
        (torch.bfloat16, (256.0, 1.0, 1.0), 2.0, 260.0),
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 4097])
def test_parts_of_ranks_are_added_in_rank_order_and_rounded_once(
    rows: int, dtype: torch.dtype, parts: tuple[float, ...], residual: float, wanted: float
) -> None:
    ranks = Gathered(*(torch.full((rows, 3), part, dtype=dtype) for part in parts))
    x = torch.full((rows, 3), residual, dtype=dtype)
    ranks.add_sum(x, lambda some, out: None, FreshBuffers("cpu"))
    assert (x == wanted).all()
    assert (ranks.sum(x) == wanted - residual).all()


def test_sums_by_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(world_size=2, device_group=SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(collectives, "get_tp_group", lambda: group)
    card = torch.device("cuda", 0)
    ops.join_ranks(card, 1 << 20, None)
    assert ops.tensor_parallel().num_ranks == 2
    with pytest.raises(ServerConfigError, match=r"batch_invariant: given 2 .* NCCL"):
        ops.join_ranks(card, 1 << 20, None, is_invariant=True)


class Others(RankGroup):
    """A group in which another rank refuses what this rank may accept."""

    def all_gather_object(self, text: str | None) -> list[str | None]:
        return [text, "batch_invariant: given torch 0"]


def test_a_rank_refuses_what_another_rank_refuses() -> None:
    loaded: Any = (object(), object())
    assert load_everywhere(ALONE, lambda: loaded) is loaded
    with pytest.raises(ServerConfigError, match="batch_invariant: given torch 0"):
        load_everywhere(Others(), lambda: loaded)


# ---- attention on the CPU ----


def test_attention_on_the_cpu_reads_row_by_row() -> None:
    spans = [Span(0, 9, 7, 177, 4, 161), Span(9, 14, 20, 100), Span(14, 15, 190, 200, 6, 3)]
    q = numbers(15, 4, 16, seed=1)
    k, v = (numbers(200, 2, 16, seed=seed) for seed in (2, 3))
    whole = attend_invariantly(q, k, v, AttentionLayout.of(spans, "cpu"))
    torch.testing.assert_close(
        whole.double(), plain_attention(q, k, v, spans), rtol=1e-5, atol=1e-5
    )
    part = AttentionLayout.of([Span(0, 5, 7, 177, 4, 165)], "cpu")
    assert is_same(attend_invariantly(q[4:9], k, v, part), whole[4:9])


# ---- equal bits on a GPU ----


def cases(seed: int, count: int, most_rows: int = MOST_ROWS) -> Iterator[tuple[int, int, slice]]:
    """Yield the rows of a larger batch, those of a smaller one, and their place in the former."""
    draw = random.Random(seed)
    for _ in range(count):
        few = draw.randint(1, min(300, most_rows))
        many = draw.choice((few, draw.randint(few, most_rows), min(few + 1, most_rows)))
        start = draw.randint(0, many - few)
        yield many, few, slice(start, start + few)


@pytest.fixture(autouse=True)
def _no_workspace() -> None:
    """Set cuBLAS up as a batch-invariant engine does."""
    ops.allow_workspace(False)


@pytest.fixture(scope="module")
def tensors() -> Callable[..., Tensor]:
    """Return a function that draws bf16 tensors on the GPU."""
    generator = torch.Generator("cuda").manual_seed(20261129)

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        drawn = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return drawn.normal_(std=std, generator=generator)

    return draw


CASES = sorted(
    {(use, *shape) for shapes in SHAPES.values() for use, shape in zip(USES, shapes, strict=True)}
)


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("use", "columns", "depth"), CASES)
def test_products_have_the_same_bits(
    tensors: Any, use: str, columns: int, depth: int, has_bias: bool, is_fp8: bool
) -> None:
    bias = tensors(columns) if has_bias else None
    projection = invariant(tensors(columns, depth, std=0.02), bias, is_fp8=is_fp8)
    scratch, most = FreshBuffers("cuda"), min(MOST_ROWS, MAX_NUMBERS // columns)
    x, target = tensors(most, depth), tensors(most, columns)

    def results(rows: slice) -> list[Tensor]:
        given, added = x[rows], target[rows].clone()
        out = torch.empty_like(added)
        projection.project(given, out, scratch)
        if use == "project":  # keys and values may be computed without queries
            last = out.new_empty(len(given), 1024)
            projection.project(given, last, scratch, slice(-1024, None))
            assert is_same(last, out[:, -1024:])
        elif use == "add_to":
            projection.add_to(added, given, scratch)
        elif use == "gated":
            added = added.new_empty(len(given), columns // 2)
            projection.gated(given, added, scratch)
        return [out, added]

    whole = results(slice(0, most))
    for many, few, place in cases(columns + depth, 6 if use == "head" else 25, most):
        alone, beside = results(slice(place.start, place.stop)), results(slice(0, many))
        for a, b, c in zip(alone, beside, whole, strict=True):
            assert is_same(a, c[place]), (many, few, place)
            assert is_same(b, c[:many]), (many, few, place)


@pytest.mark.gpu
def test_an_order_that_depends_on_rows_is_refused(tensors: Any, cublas_workspace: None) -> None:
    """With a workspace cuBLAS splits sums of some numbers of rows."""
    with pytest.raises(ServerConfigError, match=r"batch_invariant: .* a matrix \[4096, 12416\]"):
        invariant(tensors(4096, 12_416))


HEADS = [(32, 32), (28, 4), (16, 4)]


def attention_case(draw: random.Random, most_keys: int) -> tuple[list[Span], int]:
    """Draw sequences with windows anywhere, and with blocks of 0, 4 or 32; return the keys, too."""
    spans, row, key = [], 0, 0
    for _ in range(draw.randint(1, 9)):
        num_keys = draw.choice((draw.randint(1, 700), draw.randint(1, most_keys)))
        num_rows = min(draw.randint(1, 300), num_keys)
        block = draw.choice((0, 4, 32))
        first = num_keys - num_rows if block else 0
        spans.append(Span(row, row + num_rows, key, key + num_keys, block, first))
        row, key = row + num_rows, key + -(-num_keys // PAGE_SIZE) * PAGE_SIZE
    return spans, key


@pytest.mark.gpu
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_has_the_same_bits(tensors: Any, heads: tuple[int, int], is_paged: bool) -> None:
    draw = random.Random(sum(heads) + is_paged)
    num_heads, num_kv_heads = heads
    for number in range(30):
        spans, num_keys = attention_case(draw, 20_000 if number % 5 == 0 else 3000)
        q = tensors(spans[-1].q_end, num_heads, 128)
        k, v = tensors(num_keys, num_kv_heads, 128), tensors(num_keys, num_kv_heads, 128)
        pages = None
        if is_paged:
            k, v, pages = in_pages(k, v, PAGE_SIZE)
        whole = attend_invariantly(q, k, v, AttentionLayout.of(spans, "cuda", pages))
        bounded = AttentionLayout.of(spans, "cuda", pages)
        bounded = bounded._replace(max_keys=bounded.max_keys + draw.randint(0, 9000), spans=None)
        assert is_same(attend_invariantly(q, k, v, bounded), whole), (number, spans)
        for span in spans:
            start = draw.randint(span.q_start, span.q_end - 1)
            stop = draw.randint(start + 1, span.q_end)
            first = span.first + start - span.q_start if span.block_length else span.first
            part = span._replace(q_start=0, q_end=stop - start, first=first)
            if span.block_length:  # rows may end with any block
                end = span.keys_read_by(stop - 1 - span.q_start)
                part = part._replace(kv_end=span.kv_start + end)
            layout = AttentionLayout.of([part], "cuda", pages)
            found = attend_invariantly(q[start:stop], k, v, layout)
            assert is_same(found, whole[start:stop]), (number, span, start, stop)


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 500, 512, 513, 4000])
def test_attention_matches_its_definition(tensors: Any, num_keys: int) -> None:
    spans = [Span(0, 33, 0, num_keys), Span(33, 40, 0, num_keys, 4, max(num_keys - 7, 0))]
    q, k, v = tensors(40, 8, 128), tensors(num_keys, 4, 128), tensors(num_keys, 4, 128)
    wanted = plain_attention(q, k, v, spans)
    found = attend_invariantly(q, k, v, AttentionLayout.of(spans, "cuda"))
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 1.2e-2
    usual = split_attention(q, k, v, AttentionLayout.of(spans, "cuda"))
    if num_keys <= FIXED_PART_KEYS // 2:  # one part in both
        assert is_same(found, usual)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.0, None), (1.0, None), (1.0, ops.Filters(top_p=0.9)), (0.7, ops.Filters(top_k=40))],
)
def test_head_and_candidates_have_the_same_bits(
    tensors: Any, temperature: float, filters: Any
) -> None:
    vocab_size, most = 126_464, 700
    projection, scratch = invariant(tensors(vocab_size, 4096, std=0.02)), FreshBuffers("cuda")
    x = tensors(most, 4096)
    x[100:200, 1:] = 0  # many logits of these rows are equal
    positions = torch.arange(most, device="cuda")

    def sampled(rows: slice) -> tuple[Tensor, ...]:
        logits = x.new_empty(len(x[rows]), vocab_size)
        projection.project(x[rows], logits, scratch)
        drawn: Any = {"temperature": temperature, "seed": 7, "step": 3, "filters": filters}
        chosen = ops.Rows(**drawn, positions=positions[rows])
        found = ops.candidates(logits, chosen, "confidence", first_column=0, vocab_size=vocab_size)
        return found.token, found.score, found.greedy

    whole = sampled(slice(0, most))
    for many, _, place in cases(5, 25, most):
        alone, beside = sampled(place), sampled(slice(0, many))
        assert all(torch.equal(a, w[place]) for a, w in zip(alone, whole, strict=True))
        assert all(torch.equal(b, w[:many]) for b, w in zip(beside, whole, strict=True))


@pytest.mark.gpu
def test_norms_have_the_same_bits(tensors: Any) -> None:
    x, weight = tensors(MOST_ROWS, 4096), tensors(4096)
    whole = ops.rms_norm(x, weight, 1e-5)
    for many, _, place in cases(6, 100):
        assert is_same(ops.rms_norm(x[place], weight, 1e-5), whole[place])
        assert is_same(ops.rms_norm(x[:many], weight, 1e-5), whole[:many])


EXPERTS = [(64, 8, 2048, 1024, ops.SOFTMAX), (128, 8, 2048, 768, ops.Scoring(is_normalised=True))]
EXPERTS += [(64, 8, 2048, 512, ops.SOFTMAX)]  # half of the width, for two ranks
EXPERTS += [
    (256, 8, 2048, 512, ops.Scoring(True, 8, 4, is_normalised=True, scale=2.5, in_fp32=True))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "chosen", "width", "inner", "scoring"), EXPERTS)
def test_experts_have_the_same_bits(
    tensors: Any, count: int, chosen: int, width: int, inner: int, scoring: Any
) -> None:
    most = 3000
    gate = tensors(count, width, std=0.02)
    w1 = ops.DenseExperts(tensors(count, 2 * inner, width, std=0.02))
    w2 = ops.DenseExperts(tensors(count, width, inner, std=0.02))
    normed = tensors(most, width)
    # Near ties of experts, in which a change of one bit shows.
    normed[: most // 2] = normed[:1] + 1e-2 * normed[: most // 2]

    def results(rows: slice) -> tuple[Tensor, Tensor]:
        routing = ops.route_rows(normed[rows], gate, chosen, scoring=scoring, is_invariant=True)
        options: Any = {"is_weighted": not scoring.in_fp32, "is_invariant": True}
        return routing.weights, ops.expert_terms(normed[rows], routing, w1, w2, **options)

    whole = results(slice(0, most))
    for many, few, place in cases(count, 40, most):
        alone, beside = results(place), results(slice(0, many))
        for a, b, w in zip(alone, beside, whole, strict=True):
            assert is_same(a, w[place]) and is_same(b, w[:many]), (many, few, place)
