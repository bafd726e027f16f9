# SPDX-License-Identifier: Apache-2.0
"""Diffusion models that have the name of another model are refused, in the documented order."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.checkpoint_files import change_json
from tests.checkpoints import make_checkpoint
from tests.models.support import engine_config
from vllm.diffusion.config import served_model
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.models.config_keys import suspicious_keys
from vllm.diffusion.process.other_names import missing_values, refuse_unsupported
from vllm.diffusion.request.families import IDLM, family_of

SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
A2D = {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
REFUSION = {"AutoModelForCausalLM": "modeling_qwen3_refusion.Qwen3ForCausalLM"}
PLAIN = {"AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM"}
MISSING = (
    "use_regular_causal: missing in config.json of a checkpoint with {}; wanted --hf-overrides "
    "'{{\"use_regular_causal\": true}}' for I-DLM, false for SDAR"
)
A_MASK = "this checkpoint is a diffusion model that is not supported; VLLM_DLLM_SERVE_AS_AR=1 "


def refuse(
    config: dict[str, Any],
    *,
    has_mask: bool = False,
    has_adapter: bool = False,
    generates: bool = True,
) -> None:
    refuse_unsupported(
        config,
        has_mask_token=lambda: has_mask,
        has_adapter=lambda: has_adapter,
        generates=generates,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # The relay is refused first, whatever else the file contains.
        ({**SDAR, "use_relay": True, "use_regular_causal": True}, "use_relay: given true; not"),
        ({**SDAR, "use_relay": True, "use_regular_causal": False}, "use_relay: given true; not"),
        *(({**SDAR, "block_size": n}, MISSING.format(f"block_size {n}")) for n in (1, 2, 3, 7)),
        (
            {**QWEN3, "mask_token_id": 151670},
            f"Qwen3ForCausalLM with mask_token_id 151670: {A_MASK}serves it as a plain Qwen3",
        ),
        ({**QWEN2, "mask_token_id": 7}, f"Qwen2ForCausalLM with mask_token_id 7: {A_MASK}"),
        (
            {"architectures": ["EfficientDLM"], "model_type": "qwen3"},
            "EfficientDLM: this checkpoint is Efficient-DLM, a diffusion model",
        ),
    ],
)
def test_other_models_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerConfigError) as caught:
        refuse(config)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_masked"),
    [
        ("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", True),
        ("/models/Qwen3-0.6B-diffusion-bd3lm-v0.1/", False),
        ("/models/BD3LM", False),
        ("/bd3lm/some", True),
        ("was-mdlm-now-bd3lm", False),
        ("was-bd3lm-now-mdlm", True),
    ],
)
def test_the_last_name_of_a_training_decides_for_a2d(name: str, is_masked: bool) -> None:
    assert missing_values(A2D, name) == ({} if is_masked else {"block_size": 32})
    assert missing_values({**A2D, "a2d_kind": "mdlm"}, name) == {}
    assert missing_values({**A2D, "a2d_kind": "bd3lm"}, name) == {"block_size": 32}
    assert missing_values({**A2D, "block_size": 16}, name) == {}
    assert missing_values({**A2D, "a2d_kind": "mdlm", "block_size": 4}, name) == {
        "block_size": None
    }
    assert missing_values(SDAR, name) == missing_values(QWEN3, name) == {}


def test_a_plain_qwen3_with_an_adapter_for_drafts_is_an_idlm() -> None:
    own = {"architectures": ["SDARForCausalLM"], "use_regular_causal": True}
    for config, mask in ((QWEN3, {"mask_token_id": 151669}), ({**QWEN3, "mask_token_id": 7}, {})):
        values = missing_values(config, "some", has_draft_adapter=True)
        assert values == own | mask
        assert family_of(values["architectures"], None, {**config, **values}) is IDLM
        refuse({**config, **values}, has_adapter=True)
    for other in (QWEN2, SDAR):
        assert missing_values(other, "some", has_draft_adapter=True) == {}


@pytest.mark.parametrize("block_size", [None, 4, 8, 16, 32, 64])
def test_sdars_own_checkpoints_pass(block_size: int | None) -> None:
    refuse({**SDAR, "block_size": block_size})
    for small in (1, 2, 3, 7):
        for is_causal in (False, True):
            config = {**SDAR, "block_size": small, "use_regular_causal": is_causal}
            refuse(config, has_adapter=True)
    with pytest.raises(ServerConfigError) as caught:
        refuse({**SDAR, "block_size": block_size}, has_adapter=True)
    assert str(caught.value) == MISSING.format("a folder adapter")


def test_remote_code_and_a_mask_token_together_are_refused() -> None:
    with pytest.raises(ServerConfigError, match="with modeling_qwen3_refusion and a mask token"):
        refuse({**QWEN3, "auto_map": REFUSION}, has_mask=True)
    refuse({**QWEN3, "auto_map": REFUSION})
    refuse({**QWEN3, "auto_map": PLAIN}, has_mask=True)
    refuse({**QWEN3, "auto_map": {"AutoConfig": "configuration_x.X"}}, has_mask=True)
    refuse(QWEN3, has_mask=True)
    refuse({**QWEN3, "mask_token_id": 5}, generates=False)
    refuse({"architectures": ["LlamaForCausalLM"], "mask_token_id": 5})


def test_a_variable_serves_it_as_autoregressive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DLLM_SERVE_AS_AR", "1")
    refuse({**QWEN3, "mask_token_id": 151670})
    with pytest.raises(ServerConfigError):
        refuse({**SDAR, "use_relay": True})


def test_an_engine_refuses_it_before_it_is_configured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "mask_token_id": 151670}))
    with pytest.raises(ServerConfigError, match="Qwen3ForCausalLM with mask_token_id 151670"):
        EngineArgs(model=str(tmp_path)).create_engine_config()


def test_an_override_decides_for_sdar(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "sdar", family="sdar", seed=3)
    change_json(path, block_size=2)
    with pytest.raises(ServerConfigError, match="with block_size 2"):
        engine_config(path)
    config = engine_config(path, hf_overrides={"use_regular_causal": False})
    assert config.model_config.hf_config.block_length == 2
    config = engine_config(path, hf_overrides={"use_regular_causal": True})
    assert config.model_config.hf_config.family is IDLM
    assert served_model(config).block_length == 2
    change_json(path, block_size=4)
    (path / "adapter").mkdir()
    (path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ServerConfigError, match="with a folder adapter"):
        engine_config(path)


def test_unknown_keys_that_may_change_the_forward_pass() -> None:
    values = {"block_causal_prompt": True, "logit_shift": False, "relay_x": 1, "new_norm": True}
    assert suspicious_keys(values, sorted(values)) == ("block_causal_prompt",)
