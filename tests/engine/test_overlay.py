# SPDX-License-Identifier: Apache-2.0
"""The overlay adds our models to upstream and leaves upstream's other models unchanged."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import llada_config, make_checkpoint
from tests.engine.harness import engine_config
from tests.server.fork_server import ForkServer
from tests.server.process import START_S, environment

OURS = "register_dllm_models"


# ---- allowed plugins ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "", "foreign", OURS, f"foreign,{OURS}"])
def test_our_plugins_are_always_on_the_allow_list(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    from vllm.diffusion.process import environment

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    environment.allow_our_plugins()
    names = os.environ["VLLM_PLUGINS"].split(",")
    assert OURS in names
    assert len(names) == len(set(names))
    assert ("foreign" in names) == ("foreign" in (given or ""))
    if not given:
        # The overlay excludes no plugin that works without the variable.
        assert "lora_filesystem_resolver" in names
    if given == OURS:
        assert "lora_filesystem_resolver" not in names
    before = os.environ["VLLM_PLUGINS"]
    environment.allow_our_plugins()  # a child process calls this again
    assert os.environ["VLLM_PLUGINS"] == before


TOKENIZERS = """
import sys
from transformers import AutoTokenizer
from vllm.plugins import load_general_plugins
load_general_plugins()
for folder in sys.argv[1:]:
    AutoTokenizer.from_pretrained(folder)
"""


def test_tokenizers_know_their_types_before_upstream_reads_a_configuration(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    script, log = tmp_path / "tokenizers.py", tmp_path / "log"
    script.write_text(TOKENIZERS)
    folders = [str(checkpoint(case)) for case in ("mha", "dream", "moe")]
    status = ForkServer([str(script), *folders], log, environment()).wait(START_S)
    assert status == 0, log.read_text()
    assert "You are using a model of type" not in log.read_text()


# ---- other models ------------------------------------------------------------------------------


def test_versions_are_upstreams() -> None:
    import importlib.metadata

    from vllm._version import __version__

    import vllm

    assert vllm.__version__ == __version__ == importlib.metadata.version("vllm")


def test_an_autoregressive_model_keeps_upstreams_classes(
    llama: Path, with_upstreams_kernels: None
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    config = engine_config(llama)
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert "diffusion" not in str(config.parallel_config.worker_cls)
    assert issubclass(config.scheduler_config.get_scheduler_cls(), Scheduler)
    assert not config.model_config.logits_processors
    assert "temperature" not in config.model_config.override_generation_config


def test_without_upstreams_kernels_another_model_is_refused_in_one_line(llama: Path) -> None:
    # Pydantic wraps the error; the server prints its line alone.
    with pytest.raises(ValueError, match=f"model {llama}: given LlamaForCausalLM; wanted one of "):
        engine_config(llama)


@pytest.mark.parametrize("is_ours", [True, False], ids=["our model", "another model"])
def test_decisions_are_ours_for_our_models_alone(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream serves `POST /v1/decisions`, too: for other models the route stays upstream's."""
    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from vllm.entrypoints.openai.decisions import api_router
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    from vllm.diffusion.api.server import endpoint

    monkeypatch.setattr("vllm.plugins.load_endpoint_plugins", lambda _: [ours])
    monkeypatch.setattr(endpoint, "is_installed", lambda: is_ours)
    app, ours = FastAPI(), endpoint.DiffusionEndpoint()
    api_router.register_decisions_api_router(app)
    attach_endpoint_plugins(app, ("generate",))
    (served,) = [
        route
        for route in app.routes
        if isinstance(route, APIRoute) and route.path == "/v1/decisions" and "POST" in route.methods
    ]
    wanted = endpoint.answer_questions if is_ours else api_router.create_decision
    assert served.endpoint is wanted


BITSANDBYTES = """
import sys
from vllm.plugins import load_general_plugins
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
load_general_plugins()
assert "bitsandbytes" not in QUANTIZATION_METHODS
assert "int4" not in QUANTIZATION_METHODS
from vllm.engine.arg_utils import EngineArgs
EngineArgs(sys.argv[1], quantization="int4").create_engine_config()
assert "bitsandbytes" in QUANTIZATION_METHODS
"""


def test_our_formats_are_registered_for_our_models_alone(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    script, log = tmp_path / "formats.py", tmp_path / "log"
    script.write_text(BITSANDBYTES)
    status = ForkServer([str(script), str(checkpoint("mha"))], log, environment()).wait(START_S)
    assert status == 0, log.read_text()


def test_no_module_of_upstream_is_shadowed() -> None:
    """No file of ours has the name of an upstream file, except the two hinges."""
    import vllm

    ours, upstream = (Path(path) for path in vllm.__path__[:2])
    same = {
        str(file.relative_to(ours))
        for file in ours.rglob("*.py")
        if (upstream / file.relative_to(ours)).exists()
    }
    assert same == {"__init__.py", str(Path("entrypoints", "__init__.py"))}


# ---- our models --------------------------------------------------------------------------------


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_our_models_get_our_classes(tmp_path: Path, trust_remote_code: bool) -> None:
    """Our classes are used even if the checkpoint names remote code that would be trusted."""
    from vllm.diffusion.config import SCHEDULER, WORKER
    from vllm.diffusion.models.llada import LLaDAConfig

    folder = make_checkpoint(
        tmp_path,
        auto_map={
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        },
    )
    bomb = "raise AssertionError('remote code was run')\n"
    (folder / "configuration_llada.py").write_text(bomb)
    (folder / "modeling_llada.py").write_text(bomb)
    config = engine_config(folder, trust_remote_code=trust_remote_code)
    assert type(config.model_config.hf_config) is LLaDAConfig
    assert config.parallel_config.worker_cls == WORKER
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.async_scheduling is False
    assert config.cache_config.enable_prefix_caching is False


def test_the_alias_of_the_architecture(tmp_path: Path) -> None:
    from vllm.diffusion.config import WORKER

    (tmp_path / "config.json").write_text(
        json.dumps(llada_config(architectures=["LLaDAForDiffusionLM"]))
    )
    assert engine_config(tmp_path).parallel_config.worker_cls == WORKER


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"additional_config": {"dllm": {"threshold_": 0.5}}}, "threshold_"),
        ({"additional_config": {"dllm": [1]}}, "dllm"),
        ({"additional_config": {"dllm": {"threshold": "high"}}}, "threshold"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llada_config()))
    with pytest.raises(Exception, match=message) as error:
        engine_config(tmp_path, **arguments)
    assert message in str(error.value)


def test_server_wide_defaults_reach_the_served_model(tmp_path: Path) -> None:
    from vllm.diffusion.config import served_model

    folder = make_checkpoint(tmp_path)
    config = engine_config(
        folder, additional_config={"dllm": {"algorithm": "Threshold", "block_size": 16}}
    )
    served = served_model(config)
    assert served.defaults.items() >= {"algorithm": "threshold", "block_length": 16}.items()
    assert served.max_model_len == 64


def test_a_gpu_guesses_unless_it_is_told_not_to(tmp_path: Path) -> None:
    from vllm.diffusion.config import served_model

    folder = make_checkpoint(tmp_path)
    report = {"dllm": {"num_speculative_states": 2}}
    configs = engine_config(folder), engine_config(folder, additional_config=report)
    for device, wanted in ("cuda", [7, 2]), ("cpu", [None, 2]):
        for config in configs:
            config.device_config.device_type = device
        actual = [served_model(config).defaults.get("num_speculative_states") for config in configs]
        assert actual == wanted
