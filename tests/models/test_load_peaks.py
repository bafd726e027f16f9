# SPDX-License-Identifier: Apache-2.0
"""What a load takes beside its result while weights are quantised."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from tests.checkpoints import make_checkpoint
from vllm.diffusion.ops import loading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, INNER, AT_ONCE = 128, 8192, 1 << 14
WORDS = 8  # of 32 bits, for each number of those that are quantised at a time


@pytest.mark.parametrize("kind", ["fp8", "int4", "nf4"])
def test_a_load_takes_two_matrices_and_a_little_besides_its_result(
    kind: str, tmp_path: Path, load_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the allocator of the host saw it, which holds here what a device would hold too."""
    sizes = {"n_layers": 2, "d_model": WIDTH, "mlp_hidden_size": INNER}
    path = make_checkpoint(tmp_path / "wide", dtype=torch.bfloat16, num_shards=1, **sizes)
    model = load_model(path, "bfloat16", quantization=kind)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    monkeypatch.setattr(loading, "NUMBERS_AT_ONCE", AT_ONCE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    events = profiled.profiler.kineto_results.events()
    taken = list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    matrix = 2 * WIDTH * INNER  # as it comes, while the one before is not gone yet
    assert matrix < max(taken) <= 2 * matrix + 4 * WORDS * AT_ONCE
    assert taken[-1] == 0


def test_that_is_less_than_a_layer_of_a_large_model() -> None:
    """LLaDA-8B's, in bf16."""
    matrix = 2 * 4096 * 12288
    assert 2 * matrix + 4 * WORDS * loading.NUMBERS_AT_ONCE < 2 * 4 * 4096**2 + 3 * matrix
