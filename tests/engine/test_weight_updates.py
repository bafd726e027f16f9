# SPDX-License-Identifier: Apache-2.0
"""Weights that change in place: tensor by tensor, by engine, by route."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engine.harness import Engine


def weights_of(folder: Path) -> dict[str, object]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def checksums(engine: Engine) -> dict[str, str]:
    return {
        name: digest
        for found in engine.llm.collective_rpc("compute_weight_checksums")
        for name, digest in found.items()
    }


@pytest.mark.parametrize("name", ["model.transformer.wte.weight", "model.transformer.ln_f.weight"])
def test_one_tensor_is_loaded_alone(
    name: str, engine: Engine, checkpoint: Callable[[str], Path]
) -> None:
    """And nothing else changes; a tensor of another shape, or of no module, is still refused."""
    before, weights = checksums(engine), weights_of(checkpoint("mha"))
    model = engine.runner.model
    assert len(model.load_weights([(name, weights[name] * 2)])) == 1
    after = checksums(engine)
    assert sum(before[key] != after[key] for key in before) == 1
    for given, match in ((weights[name][:8], "given shape"), (weights[name], "not part of")):
        wrong = name if match == "given shape" else f"other.{name}"
        with pytest.raises(ValueError, match=match):
            model.load_weights([(wrong, given)])
    model.load_weights([(name, weights[name])])
    assert checksums(engine) == before
