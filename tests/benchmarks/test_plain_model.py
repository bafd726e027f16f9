# SPDX-License-Identifier: Apache-2.0
"""Plain models and loops of the benchmarks equal the reference, and FLOP of a forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from make_dummy_checkpoint import configuration
from reference.decode import SpecialIds, semi_ar
from reference.models import load_reference
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import plain_model
from benchmarks.plain_model import PlainModel, load_model, random_model
from benchmarks.shapes import Shape, forward_work
from tests.checkpoints import EOS_ID, MASK_ID, checkpoint_shapes, make_checkpoint, random_prompt

FULL_SIZE = ("llada", "dream", "llada-moe")
SHRUNK = [("llada", 16), ("dream", 14), ("llada-moe", 16)]  # divisors that the heads allow


@pytest.fixture(params=["llada", "dream", "moe"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PlainModel, Any]:
    """Return a plain model and the reference of the same checkpoint, in fp32."""
    folder = make_checkpoint(tmp_path / "model", family=request.param, seed=5)
    plain = load_model(folder, "cpu", torch.float32)
    return plain, load_reference(folder)


@pytest.mark.parametrize("steps", [6, 16])
def test_loop_gives_the_references_tokens(pair: tuple[PlainModel, Any], steps: int) -> None:
    plain, reference = pair
    prompt, num_forwards = random_prompt(9), 0

    def count() -> None:
        nonlocal num_forwards
        num_forwards += 1

    tokens = plain_model.generate(
        plain,
        prompt,
        canvas=16,
        block_length=8,
        steps=steps,
        confidence_dtype=torch.float32,
        after_step=count,
    )
    ids = SpecialIds(mask=MASK_ID, eos=EOS_ID)
    expected = semi_ar(reference, prompt, gen_length=16, block_length=8, steps=steps, ids=ids)
    assert tokens == expected[0]
    assert num_forwards == steps


@pytest.mark.parametrize("family", FULL_SIZE)
def test_weights_counted_are_the_checkpoints(family: str) -> None:
    config = configuration(family)
    work = forward_work(Shape.of(config), num_rows=1)
    matrices = {
        name: shape
        for name, shape in checkpoint_shapes(config).items()
        if len(shape) == 2 and not name.endswith(("wte.weight", "embed_tokens.weight"))
    }
    assert work.weight_bytes == 2 * sum(rows * columns for rows, columns in matrices.values())


@pytest.mark.parametrize(("family", "divisor"), SHRUNK)
def test_flops_counted_are_those_that_torch_counts(family: str, divisor: int) -> None:
    model = random_model(configuration(family, num_layers=1, shrink=divisor), "cpu", torch.float32)
    shape, num_sequences = model.shape, 3
    ids = torch.randint(0, 1000, (num_sequences, 40))
    with (
        torch.inference_mode(),
        sdpa_kernel(SDPBackend.MATH),  # the counter supports its products
        FlopCounterMode(display=False) as counted,
    ):
        model(ids)
    work = forward_work(shape, 40, num_sequences, head_rows=40)
    total = work.matmul_flops + work.attention_flops
    # An expert runs on whole rows, so that the products do not depend on the routing.
    assert total == pytest.approx(counted.get_total_flops(), rel=1e-6)


@torch.inference_mode()
def test_experts_are_counted_layer_by_layer() -> None:
    model = random_model(configuration("llada-moe", num_layers=2, shrink=16), "cpu", torch.float32)
    shape = model.shape
    with plain_model.counted_experts(model) as counts:
        model(torch.tensor([[5]]))
        model(torch.arange(200)[None])
    assert counts[:2] == [shape.num_chosen] * 2
    assert all(shape.num_chosen < count <= shape.num_experts for count in counts[2:])
    model(torch.tensor([[5]]))
    assert len(counts) == 4
    fewer = forward_work(shape, 32, touched_experts=10).weight_bytes
    assert fewer < forward_work(shape, 32).weight_bytes
