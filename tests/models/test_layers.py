# SPDX-License-Identifier: Apache-2.0
"""Rotary tables and norms by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from vllm.diffusion import ops
from vllm.diffusion.layers.rotary import Rotary, inverse_frequencies, rotary_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.models.base import DiffusionModel

HEAD_DIM = 8


def heads(rows: int, num_heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, num_heads, HEAD_DIM, generator=generator)


def tables(positions: torch.Tensor, theta: float = 10000.0) -> Rotary:
    return rotary_rows(positions, inverse_frequencies(theta, HEAD_DIM))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_tables_at_any_position(theta: float) -> None:
    positions = torch.tensor([0, 1, 7, 4095, 204799])
    rotary = tables(positions, theta)
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    angles = positions.double()[:, None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=1)
    # an fp32 angle is exact to a part in 2^23 or so: that much, in radians
    tolerance = 3e-7 * float(positions.max())
    torch.testing.assert_close(rotary.cos.double(), angles.cos(), rtol=0, atol=tolerance)
    torch.testing.assert_close(rotary.sin.double(), angles.sin(), rtol=0, atol=tolerance)
    assert torch.equal(rotary.rows(slice(1, 3)).cos, rotary.cos[1:3])
    assert torch.equal(rotary.rows(slice(1, 3)).sin, rotary.sin[1:3])


def test_rotary_tables_are_rounded_last() -> None:
    positions = torch.tensor([3, 100000])
    wide = tables(positions)
    narrow = rotary_rows(positions, inverse_frequencies(10000.0, HEAD_DIM), dtype=torch.bfloat16)
    assert torch.equal(narrow.cos, wide.cos.bfloat16())
    assert torch.equal(narrow.sin, wide.sin.bfloat16())


@pytest.mark.parametrize("case", ["mha", "dream", "moe_partial_clipped"])
def test_a_models_tables_follow_its_configuration(
    case: str, case_model: Callable[[str], DiffusionModel]
) -> None:
    """Whatever the default dtype was while the model was made, and nothing to load or store."""
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


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    rotary = tables(torch.tensor([3]))
    k = heads(1, 2, seed=4)
    turned = k.clone()
    ops.apply_rotary(None, turned, rotary.cos, rotary.sin)
    half = HEAD_DIM // 2
    as_complex = torch.complex(k[..., :half], k[..., half:])
    angles = 3.0 * 10000.0 ** -(torch.arange(half) * 2 / HEAD_DIM)
    wanted = as_complex * torch.polar(torch.ones(half), angles)
    torch.testing.assert_close(turned, torch.cat((wanted.real, wanted.imag), dim=-1))


def test_rotation_of_queries_alone_and_together() -> None:
    rotary = tables(torch.arange(5))
    q, k = heads(5, 4, seed=5), heads(5, 2, seed=6)
    alone_q, alone_k, both_q, both_k = q.clone(), k.clone(), q.clone(), k.clone()
    ops.apply_rotary(alone_q, None, rotary.cos, rotary.sin)
    ops.apply_rotary(None, alone_k, rotary.cos, rotary.sin)
    ops.apply_rotary(both_q, both_k, rotary.cos, rotary.sin)
    assert torch.equal(alone_q, both_q)
    assert torch.equal(alone_k, both_k)


def test_norm_casts_back_before_the_gain() -> None:
    x = torch.tensor([[1.0, 3.0, -2.0, 0.5]], dtype=torch.bfloat16)
    gain = torch.tensor([1.01, 0.99, 1.5, -1.0], dtype=torch.bfloat16)
    wide = x.float()
    normed = (wide / (wide.square().mean() + 1e-5).sqrt()).to(torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, gain, 1e-5), gain * normed)
