# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.models.base import DiffusionModel


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
