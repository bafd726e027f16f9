# SPDX-License-Identifier: Apache-2.0
"""DiffuLLaMA: recognised llama checkpoints, and a forward pass equal to the plain reference."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.checkpoint_files import change_json
from tests.checkpoints import EOS_ID, MASK_ID, VOCAB_SIZE, make_checkpoint
from tests.models.support import assert_same_logits, engine_config, logits
from vllm.diffusion.config import WORKER, served_model
from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.models.diffullama import DiffuLlamaConfig
from vllm.diffusion.request.families import DIFFULLAMA

NAMED = {"architectures": ["DiffuLlamaForCausalLM"]}


def forget_the_mask_token(path: Path) -> Path:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path / name).exists():
            content = json.loads((path / name).read_text())
            content.pop("mask_token", None)
            (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture
def plain_llama(tmp_path: Path) -> Path:
    return forget_the_mask_token(make_checkpoint(tmp_path, family="diffullama", seed=12))


def assert_is_ours(config: VllmConfig) -> None:
    model = config.model_config
    assert type(model.hf_config) is type(model.hf_text_config) is DiffuLlamaConfig
    assert model.hf_config.family is DIFFULLAMA
    assert model.architectures == [model.architecture] == list(DIFFULLAMA.architectures)
    assert config.parallel_config.worker_cls == WORKER
    assert pickle.loads(pickle.dumps(model.hf_config)).to_dict() == model.hf_config.to_dict()
    assert model.hf_config.unknown_keys == ()


def test_a_mask_token_of_the_tokenizer_makes_it_ours(case_path: Callable[[str], Path]) -> None:
    assert_is_ours(engine_config(case_path("diffullama")))


def test_a_mask_token_of_the_configuration_makes_it_ours(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="diffullama", mask_token_id=MASK_ID)
    assert_is_ours(engine_config(forget_the_mask_token(path)))


def test_it_can_be_said(plain_llama: Path) -> None:
    config = engine_config(plain_llama, hf_overrides={**NAMED, "mask_token_id": MASK_ID})
    assert_is_ours(config)
    assert served_model(config).ids.mask == MASK_ID
    config = engine_config(plain_llama, hf_overrides=NAMED)
    assert_is_ours(config)
    with pytest.raises(ModelConfigError, match="mask_token_id"):
        served_model(config)


def test_any_other_llama_stays_upstreams(plain_llama: Path, with_upstreams_kernels: None) -> None:
    config = engine_config(plain_llama)
    assert type(config.model_config.hf_config) is LlamaConfig
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert config.parallel_config.worker_cls != WORKER


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_options_that_change_the_forward_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family="diffullama", seed=12)
    change_json(path, **{key: value})
    with pytest.raises(Exception, match="is supported"):
        engine_config(path)


@pytest.mark.parametrize(
    "described", [{"rope_theta": 5.0}, {"full_attention": {"rope_theta": 5.0}}]
)
def test_the_base_of_transformers_5(described: dict[str, Any], tmp_path: Path) -> None:
    """transformers rewrites these keys before our configuration receives them."""
    path = make_checkpoint(tmp_path, family="diffullama", seed=12, rope_parameters=described)
    with pytest.raises(Exception, match=r"rope_theta: given 10000\.0; the 5\.0 of rope_parameters"):
        engine_config(path)
    change_json(path, rope_theta=None)
    assert engine_config(path).model_config.hf_config.rope_theta == 5.0


def test_overrides_are_checked_as_well(case_path: Callable[[str], Path]) -> None:
    path = case_path("dream")
    assert engine_config(path, hf_overrides={"rope_theta": 5.0}).model_config.hf_config
    for override in ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"alibi": True}):
        with pytest.raises(Exception, match="is supported"):
            engine_config(path, hf_overrides=override)


def test_what_is_served(case_path: Callable[[str], Path]) -> None:
    args = EngineArgs(model=str(case_path("diffullama")), dtype="float32", enforce_eager=True)
    config = args.create_engine_config()
    served = served_model(config)
    assert (served.family, served.ids.mask, served.ids.eos) == (DIFFULLAMA, MASK_ID, EOS_ID)
    assert served.ids.stop == {EOS_ID}
    assert config.model_config.get_diff_sampling_param()["temperature"] == 0.9


@pytest.mark.parametrize("length", [1, 23])
def test_logits_equal_the_reference(
    length: int, case_path: Callable[[str], Path], case_model: Callable[[str], Any]
) -> None:
    ids = torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length))
    ids[length // 2 :: 2] = MASK_ID
    reference = load_reference(case_path("diffullama"))
    assert_same_logits(logits(case_model("diffullama"), ids), reference.logits(ids[None])[0])
