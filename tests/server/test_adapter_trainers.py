# SPDX-License-Identifier: Apache-2.0
"""Trainers that send adapters to a server: the calls of TRL's asynchronous GRPO, an example."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_files import random_adapter, save_adapter
from tests.checkpoints import random_prompt
from tests.programs import ROOT, output_of
from tests.server.client import Client
from tests.server.process import (
    MODEL_NAME,
    PATIENCE_S,
    SERVER,
    ServerProcess,
    environment,
    healthy,
)

STALENESS = 2  # versions that a rollout may be behind
NUM_UPDATES = 20
PROMPT = random_prompt(20)
PARAMETERS: dict[str, Any] = {"gen_length": 32, "block_length": 8, "steps": 32, "seed": 3}
PARAMETERS |= {"ignore_eos": True, "return_trajectory": True}


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the two adapters that alternate."""
    folder = tmp_path_factory.mktemp("policies")
    for seed in range(2):
        save_adapter(folder / str(seed), random_adapter(model_dir, seed=seed, gain=2.0))
    return folder


@pytest.fixture(scope="module")
def process(model_dir: Path, folder: Path) -> Iterator[ServerProcess]:
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--enable-lora", "--max-loras", str(STALENESS + 2)]
    command += ["--max-cpu-loras", "6", "--lora-modules", f"a={folder / '0'}", f"b={folder / '1'}"]
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    process = ServerProcess(command, folder / "server.log", **variables)
    with healthy(process):
        yield process
        assert "Traceback" not in process.log()


@pytest.fixture(scope="module")
def client(process: ServerProcess) -> Iterator[Client]:
    with process.client() as http:
        yield Client(http)


def post(client: Client, route: str, body: Any = None, **query: str) -> None:
    response = client.http.post(route, json=body, params=query, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text


def test_trls_client_reads_the_limits(client: Client) -> None:
    info = client.http.get("/server_info", params={"config_format": "json"}).json()
    lora, parallel = (info["vllm_config"][name] for name in ("lora_config", "parallel_config"))
    assert (lora["max_loras"], lora["max_lora_rank"]) == (STALENESS + 2, 16)
    assert parallel["data_parallel_size"] == 1


def test_trls_updates_under_load(client: Client, model_dir: Path, folder: Path) -> None:
    """Each update loads a policy under a new name; requests keep the policy that they name."""
    wanted = [client.generate(prompt=PROMPT, model=m, **PARAMETERS)["token_ids"] for m in "ab"]
    assert wanted[0] != wanted[1]
    newest, is_over, failures = 0, threading.Event(), list[str]()
    answered = set[int]()

    def ask() -> None:
        while not is_over.is_set():
            version = newest
            name = f"trl-policy-v{version}"
            answer = client.generate(prompt=PROMPT, model=name, **PARAMETERS)
            (trajectory,) = answer["trajectory"]
            told = answer["model"], trajectory["adapter"], trajectory["adapter_steps"]
            if answer["token_ids"] != wanted[version % 2] or told != (name, name, [[0, 1]]):
                failures.append(f"{name}: {told}")
            answered.add(version)

    def publish(version: int) -> None:
        post(client, "/pause", mode="keep", clear_cache="false")
        tensors = random_adapter(model_dir, seed=version % 2, gain=2.0)
        path = save_adapter(folder / f"v{version}", tensors)
        name = f"trl-policy-v{version}"
        post(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        post(client, "/resume")

    publish(0)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(1, NUM_UPDATES + 1):
        publish(version)
        newest = version
        while version not in answered:  # its requests run before the next update
            threading.Event().wait(0.01)
            assert all(thread.is_alive() for thread in threads)
        if version > STALENESS:
            old = f"trl-policy-v{version - STALENESS - 1}"
            post(client, "/v1/unload_lora_adapter", {"lora_name": old})
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert answered >= set(range(1, NUM_UPDATES + 1))
    for version in range(NUM_UPDATES - STALENESS, NUM_UPDATES + 1):
        post(client, "/v1/unload_lora_adapter", {"lora_name": f"trl-policy-v{version}"})


def test_the_example_trains_an_adapter(
    client: Client, process: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    """Two iterations of docs/examples/rl_tiny.py run; it checks log probabilities itself."""
    script, curve = ROOT / "docs" / "examples" / "rl_tiny.py", tmp_path / "curve.png"
    arguments = ["--server", process.url, "--updates", folder, "--curve", curve, "--lora", "8"]
    arguments += ["--iterations", "2", "--questions", "4", "--answers", "4"]
    output = output_of(sys.executable, script, *map(str, arguments), env=environment())
    assert output.count("mean reward") == 3
    assert len(json.loads(curve.with_suffix(".json").read_text())) == 2
    post(client, "/v1/unload_lora_adapter", {"lora_name": "step-2"})
    assert [card["id"] for card in client.http.get("/v1/models").json()["data"]] == [
        MODEL_NAME,
        "a",
        "b",
    ]
