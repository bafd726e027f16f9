# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without weights have the released shapes, and an engine runs them."""

import gc
import json
from pathlib import Path
from typing import Any

import make_dummy_checkpoint
import pytest
from make_dummy_checkpoint import PRESETS, DummyCheckpointError, configuration

from tests.gemma import VISION

SHRINK = {"llada": 32, "dream": 28, "llada-moe": 16, "sdar-moe": 32}  # divisors to one head
# Billions of parameters as published. SDAR-4B has its own head, unlike its parent, which ties it.
BILLIONS = {
    ("llada", "8b"): 8.0,
    ("dream", "7b"): 7.6,
    ("llada-moe", "7b-a1b"): 7.4,
    ("llada2", "mini"): 16.3,
    ("llada2", "flash"): 102.9,
    ("llada22", "mini"): 16.3,
    ("llada22", "flash"): 102.9,
    ("sdar", "8b"): 8.2,
    ("sdar", "4b"): 4.4,
    ("idlm", "8b"): 8.2,
    ("sdar-moe", "30b-a3b"): 30.5,
    ("fast-dllm", "7b"): 7.6,
    ("stable-diffcoder", "8b"): 8.25,
    ("a2d", "0.6b"): 0.6,
    ("nemotron", "8b"): 8.5,
    ("nemotron", "3b"): 3.8,
    ("nemotron", "14b"): 13.5,
}
# The released config.json of these families does not name the mask token.
WITHOUT_MASK = ("llada2", "llada22", "fast-dllm", "diffusion-gemma")


@pytest.mark.parametrize(("family", "size"), [key for key in PRESETS if key in BILLIONS])
def test_parameters_are_as_many_as_published(family: str, size: str) -> None:
    """All layers from the second one on have the same size."""
    config = configuration(family, size)
    num_layers = config.get("num_hidden_layers") or config["n_layers"]
    two, three = (_num_parameters(family, size, layers) for layers in (2, 3))
    count = two + (num_layers - 2) * (three - two)
    assert count / 1e9 == pytest.approx(BILLIONS[family, size], rel=0.01)


def test_parameters_of_diffusion_gemma() -> None:
    """Its layers differ in size, so transformers counts the parameters of its text part."""
    import torch
    from transformers.models.diffusion_gemma import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
    )

    text = configuration("diffusion-gemma")
    for key in ("architectures", "model_type", "canvas_length", "torch_dtype"):
        del text[key]
    with torch.device("meta"):
        network = DiffusionGemmaForBlockDiffusion(
            DiffusionGemmaConfig(text_config=text, vision_config=dict(VISION))
        )
    parameters = dict(network.named_parameters())
    count = sum(p.numel() for name, p in parameters.items() if "vision" not in name)
    assert count / 1e9 == pytest.approx(25.25, rel=0.01)


def _num_parameters(family: str, size: str, num_layers: int) -> int:
    from tests.checkpoints import checkpoint_shapes

    shapes = checkpoint_shapes(configuration(family, size, num_layers=num_layers))
    return sum(_product(shape) for shape in shapes.values())


@pytest.mark.parametrize(("family", "size"), PRESETS)
def test_configuration_is_accepted_at_full_size(family: str, size: str) -> None:
    from vllm.diffusion.models.config import DiffusionConfig

    config = DiffusionConfig.from_dict(configuration(family, size))
    assert config.head_dim == (256 if family == "diffusion-gemma" else 128)
    ids = PRESETS[family, size].token_ids.values()
    assert getattr(config, "mask_token_id", None) in ([None] if family in WITHOUT_MASK else ids)


# Tests of benchmarks run the other families.
@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("family", SHRINK)
def test_engine_runs_a_shrunk_one_with_dummy_weights(family: str, tmp_path: Path) -> None:
    from vllm import LLM, SamplingParams

    status = make_dummy_checkpoint.main(
        [
            *("--family", family, "--num-layers", "1"),
            *("--shrink", str(SHRINK[family]), str(tmp_path)),
        ]
    )
    assert status == 0
    llm = LLM(model=str(tmp_path), load_format="dummy", dtype="float32", max_model_len=128)
    try:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, extra_args={"steps": 2}
        )
        question = [{"role": "user", "content": "Bytes: \u00e4"}]
        answer = llm.chat(question, sampling, use_tqdm=False)[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    assert len(answer.outputs[0].token_ids) == 8
    ids = PRESETS[family, _size(family)].token_ids
    assert set(answer.prompt_token_ids) & set(ids.values()), "the template's special tokens"


def test_layers_and_widths_can_be_fewer() -> None:
    config = configuration("llada-moe", num_layers=3, shrink=4)
    assert config["num_hidden_layers"] == 3
    assert config["moe_layer_freq"] == [1, 1, 1]
    assert (config["hidden_size"], config["num_attention_heads"]) == (512, 4)
    assert (config["num_experts"], config["vocab_size"]) == (64, 157184)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--family", "llada", "--size", "7b"], "--size: wanted one of 8b for llada, got 7b"),
        (["--family", "llada", "--num-layers", "0"], "--num-layers: wanted at least 1, got 0"),
        (["--family", "dream", "--shrink", "3"], "--shrink: wanted a divisor of"),
    ],
)
def test_refusals_name_the_option(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    assert make_dummy_checkpoint.main([*arguments, str(output)]) == 1
    assert named in capsys.readouterr().err
    assert not output.exists()


def test_a_folder_with_weights_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DummyCheckpointError, match="without weights"):
        make_dummy_checkpoint.write_checkpoint(tmp_path, "llada")
    assert json.loads((tmp_path / "config.json").read_text()) == {}


def _size(family: str) -> str:
    return next(size for name, size in PRESETS if name == family)


def _product(shape: Any) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
