# SPDX-License-Identifier: Apache-2.0
"""What upstream learns about our model classes, in a process of its own that it starts for that."""

from __future__ import annotations

import pytest
from vllm.model_executor.models import ModelRegistry

from vllm.diffusion.plugin import register
from vllm.diffusion.request.families import ARCHITECTURES


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_upstream_sees_a_text_generation_model(architecture: str) -> None:
    register()
    info = ModelRegistry.models[architecture].inspect_model_cls()
    assert info.is_text_generation_model
    assert not info.is_pooling_model
    assert not info.supports_multimodal
    assert not info.supports_pp
    assert not info.has_inner_state
