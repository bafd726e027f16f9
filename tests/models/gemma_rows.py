# SPDX-License-Identifier: Apache-2.0
"""Cases for the row-wise operations of Gemma's layers, compared with float64."""

import torch
from torch.nn import functional

from vllm.diffusion.layers.gemma_rows import (
    Scalars,
    add_branches,
    add_normed,
    gelu_mul,
    rounded_softmax,
    soft_cap,
)
from vllm.diffusion.layers.norm import RMSNorm

SHAPES = ((1, 8, 1), (5, 40, 3), (3, 1030, 8))  # rows, columns, terms of a row


def check_rows(device: str, dtype: torch.dtype, limit: float) -> None:
    """Run all operations on all shapes; `limit` is the largest relative error of a result."""
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def norm() -> RMSNorm:
        made = RMSNorm(columns, 1e-6).to(device, dtype)
        made.weight.data.copy_(drawn(columns))
        return made

    def normed(x: torch.Tensor, gains: RMSNorm) -> torch.Tensor:
        wide = x.double()
        scale = (wide.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        return wide * scale * gains.weight.double()

    for rows, columns, count in SHAPES:
        x, result, gains = drawn(rows, columns + 3)[:, :columns], drawn(rows, columns), norm()
        wanted = x.double() + normed(result, gains)
        add_normed(x, result, gains)
        assert_close(x, wanted, limit)

        norms = norm(), norm(), norm()
        terms, factors = drawn(rows, count, columns), torch.rand(rows, count, generator=generator)
        scalars = Scalars(drawn(1), drawn(1))
        marks = (torch.rand(rows, generator=generator) < 0.5).to(device)
        for shares, is_block in ((factors.to(device), marks), (None, None)):
            wide = terms.double() if shares is None else terms.double() * shares[:, :, None]
            both = normed(result, norms[0]) + normed(wide.sum(dim=1), norms[1])
            scalar = scalars.in_block.double().expand(rows)
            if is_block is not None:
                scalar = torch.where(is_block, scalar, scalars.in_context.double())
            wanted = (x.double() + normed(both, norms[2])) * scalar[:, None]
            given = x.clone()
            add_branches(given, result, terms, shares, norms, scalars, is_block)
            assert_close(given, wanted, limit)

        gate_up = drawn(rows, 2 * columns)
        gate, up = gate_up.double().chunk(2, dim=-1)
        wanted = functional.gelu(gate, approximate="tanh") * up
        assert_close(gelu_mul(gate_up), wanted, limit)

        logits = torch.randn(rows, columns, generator=generator).to(device) * 40
        logits[:, :3] = torch.tensor([0.0, 1e4, -1e4], device=device)
        wanted = torch.tanh(logits.double() / 30) * 30
        assert_close(soft_cap(logits, 30.0), wanted, 1e-6)

        logits[:, 3:5] = -torch.inf  # filters leave such logits
        wanted = logits.to(dtype).double().softmax(dim=-1)
        shares = rounded_softmax(logits, dtype)
        assert shares.dtype == dtype
        assert_close(shares, wanted, limit)
    # several steps of a program, the first without a finite logit
    logits = torch.randn(2, 20_000, generator=generator).to(device) * 3
    logits[0, :9_000] = -torch.inf
    wanted = logits.to(dtype).double().softmax(dim=-1)
    assert_close(rounded_softmax(logits, dtype), wanted, limit)


def assert_close(given: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    error = (given.double() - wanted).norm() / wanted.norm()
    assert error <= limit, float(error)
