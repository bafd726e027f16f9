# SPDX-License-Identifier: Apache-2.0
"""Routing and the mixture of experts, without the rest of a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from gather_gemm import route
from tests.native.support import experts_of
from vllm.diffusion import ops
from vllm.diffusion.core.quantisation import ONLINE, PackedScheme
from vllm.diffusion.core.stages import FreshBuffers
from vllm_add_llada.cuda_kernels.fused_ops import unpack

NUM_EXPERTS, WIDTH, INNER = 6, 8, 16
SCRATCH = FreshBuffers(torch.device("cpu"))  # does not count bytes
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a single rank, because no group of ranks exists here."""
    monkeypatch.setattr(
        "vllm.diffusion.ops.experts.get_tensor_model_parallel_world_size", lambda: 1
    )


def matrices(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(NUM_EXPERTS, 2 * INNER, WIDTH, generator=generator)
    return w1, torch.randn(NUM_EXPERTS, WIDTH, INNER, generator=generator)


def plain_mixture(
    x: torch.Tensor, routing: ops.Routing, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Compute the definition, one row and expert at a time, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row, experts in enumerate(experts_of(routing, *routing.weights.shape).tolist()):
        for slot, expert in enumerate(experts):
            gate, up = (w1[expert].double() @ x[row].double()).chunk(2)
            term = w2[expert].double() @ (functional.silu(gate) * up)
            out[row] += routing.weights[row, slot].double() * term
    return out


@pytest.mark.parametrize("num_chosen", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_mixture_equals_its_definition(num_rows: int, num_chosen: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    normed = torch.randn(num_rows, WIDTH, generator=generator)
    routing = route(torch.randn(num_rows, NUM_EXPERTS, generator=generator), num_chosen)
    kept = normed.clone()
    wanted = x.double() + plain_mixture(normed, routing, *matrices())
    ops.add_experts(x, normed, routing, *map(ops.DenseExperts, matrices()), SCRATCH)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(normed, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_all_rows_with_one_expert(device: str) -> None:
    normed = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    logits = torch.zeros(5, NUM_EXPERTS, device=device)
    logits[:, -1] = 50.0
    routing = route(logits, 1)
    assert routing.ends.tolist() == [0] * (NUM_EXPERTS - 1) + [5]
    w1, w2 = (matrix.to(device) for matrix in matrices())
    x = torch.zeros_like(normed)
    ops.add_experts(x, normed, routing, ops.DenseExperts(w1), ops.DenseExperts(w2), SCRATCH)
    wanted = plain_mixture(normed, routing, w1, w2)
    torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_terms_are_added_in_ascending_order_in_the_model_dtype(device: str) -> None:
    """256 + 1 is 256 in bf16, so that the sum depends on the order of terms and their rounding."""
    normed = torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device)
    normed[0, 0] = 1.0
    w1 = torch.zeros(3, 2 * INNER, WIDTH, dtype=torch.bfloat16, device=device)
    w1[:, 0, 0] = 32.0  # silu(32) is 32 in bf16
    w1[:, INNER, 0] = 1.0
    w2 = torch.zeros(3, WIDTH, INNER, dtype=torch.bfloat16, device=device)
    w2[:, 0, 0] = torch.tensor([1.0, 256.0, 1.0]) / 32.0
    routing = route(torch.tensor([[1.0, 3.0, 2.0]], device=device), 3)
    routing.weights.fill_(1.0)
    routing = routing._replace(weights=routing.weights.to(torch.bfloat16))
    x = torch.zeros_like(normed)
    ops.add_experts(x, normed, routing, ops.DenseExperts(w1), ops.DenseExperts(w2), SCRATCH)
    assert x[0, 0] == 256.0  # another order or rounding gives 258


def test_ranks_with_a_part_of_the_width_sum_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of every expert's width. This test sums what the ranks would reduce."""
    generator = torch.Generator().manual_seed(3)
    normed = torch.randn(7, WIDTH, generator=generator)
    routing = route(torch.randn(7, NUM_EXPERTS, generator=generator), 2)
    w1, w2 = matrices()
    whole = torch.zeros_like(normed)
    ops.add_experts(whole, normed, routing, ops.DenseExperts(w1), ops.DenseExperts(w2), SCRATCH)
    parts: list[torch.Tensor] = []

    def add_sum(x: torch.Tensor, write: Any, _: Any) -> None:
        parts.append(torch.empty_like(x))
        for rows in (slice(0, 3), slice(3, None)):  # ranks with little memory use parts
            write(rows, parts[-1][rows])

    experts = "vllm.diffusion.ops.experts"
    ranks = SimpleNamespace(add_sum=add_sum)
    monkeypatch.setattr(f"{experts}.get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(f"{experts}.collectives.tensor_parallel", lambda: ranks)
    gate, up = w1.split(INNER, dim=1)
    for rank in range(2):
        mine = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
        sharded = torch.cat((gate[:, mine], up[:, mine]), dim=1)
        first, second = ops.DenseExperts(sharded), ops.DenseExperts(w2[:, :, mine])
        ops.add_experts(torch.zeros_like(normed), normed, routing, first, second, SCRATCH)
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "nf4"])
@pytest.mark.parametrize("num_rows", [1, 40, 700])
def test_a_gpu_unpacks_experts_one_stack_after_the_other(num_rows: int, kind: str) -> None:
    """Both stacks are unpacked into the same memory in turn; each product must read its own."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)

    sizes, scheme = ((32, 512, 256), (32, 256, 256)), ONLINE[kind]
    assert isinstance(scheme, PackedScheme)
    with torch.device("cuda"):
        packed = [ops.empty_packed(count * rows, depth, scheme) for count, rows, depth in sizes]
    ops.reserve(torch.device("cuda", 0), 32 * 512 * 256, torch.bfloat16)
    plain = []
    for size, some in zip(sizes, packed, strict=True):
        ops.quantise_packed(drawn(*size).flatten(0, 1) / 16, some)
        plain.append(torch.empty(size, dtype=torch.bfloat16, device="cuda"))
        unpack(some, plain[-1].flatten(0, 1))
    stacks = [ops.PackedExperts(some, 32) for some in packed]
    normed = drawn(num_rows, 256)
    routing = ops.route_rows(normed, drawn(32, 256), 4)
    wanted, given = torch.zeros_like(normed), torch.zeros_like(normed)
    for _ in range(20):
        ops.add_experts(wanted, normed, routing, *map(ops.DenseExperts, plain), SCRATCH)
        ops.add_experts(given, normed, routing, *stacks, SCRATCH)
    assert torch.equal(given, wanted)
