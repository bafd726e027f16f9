# SPDX-License-Identifier: Apache-2.0
"""Decisions under a server's settings, and of families with shifted logits or blocks."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_python
from tests.server.client import Client, refusal
from tests.server.process import MODEL_NAME, SERVER, ServerProcess, healthy

ROUTE = "/v1/decisions"
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Is it?"},
    {
        "type": "choice",
        "name": "kind",
        "instructions": "Which?",
        "choices": [{"value": True}, {"value": "true"}],
    },
    {"type": "score", "instructions": "Much?", "levels": [{"label": "a"}, {"label": "b"}]},
]
CALIBRATION = {
    "model": MODEL_NAME,
    "types": {"predicate": {"temperature": 2.0, "bias": {"yes": 0.5}}, "score": {"temperature": 3}},
}
CLOSE = {"rel": 0, "abs": 3e-6}


@pytest.fixture(scope="module")
def clients(
    model_dir: Path, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Client]]:
    """Serve a model with settings of decisions, one with shifted logits, and one with blocks."""
    folder = tmp_path_factory.mktemp("decisions")
    file = folder / "calibration.json"
    file.write_text(json.dumps(CALIBRATION))
    settings = {"decisions_joint": False, "decision_calibration": str(file)}
    servers = {
        "settings": ["--additional-config", json.dumps({"dllm": settings})],
        "dream": ["--max-model-len", "1024"],
        "llada2": ["--enable-prefix-caching"],
    }
    processes = {}
    for name, more in servers.items():
        model = model_dir if name == "settings" else checkpoint(name)
        command = [*SERVER, "--model", str(model), "--served-model-name", MODEL_NAME]
        command += ["--dtype", "float32", *more]
        log = folder / f"{name}.log"
        processes[name] = ServerProcess(command, log, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    with healthy(*processes.values()), ExitStack() as stack:
        yield {
            name: Client(stack.enter_context(process.client()))
            for name, process in processes.items()
        }
        for process in processes.values():
            assert "Traceback" not in process.log()


def decide(client: Client, **body: Any) -> dict[str, Any]:
    return client.answer(ROUTE, {"input": "x", "questions": QUESTIONS, **body})


def numbers(answer: dict[str, Any]) -> list[float]:
    return [
        number
        for one in answer["answers"]
        for number in (
            [one["probability"]]
            if "probability" in one
            else [pair["probability"] for pair in one["probabilities"]]
        )
    ]


def test_the_servers_default_of_joint(clients: dict[str, Client]) -> None:
    client = clients["settings"]
    assert decide(client)["diffusion"]["joint"] is False
    joint = decide(client, joint=True)["diffusion"]
    assert (joint["joint"], joint["num_forwards"]) == (True, 1)


def test_a_calibration_applies_unless_a_request_turns_it_off(clients: dict[str, Client]) -> None:
    client = clients["settings"]
    plain, scaled = decide(client, calibrated=False), decide(client)
    assert (plain["diffusion"]["calibrated"], scaled["diffusion"]["calibrated"]) == (False, True)
    before, after = numbers(plain), numbers(scaled)
    odds = (before[0] / (1 - before[0])) ** 0.5 * 2.718281828**0.5
    assert after[0] == pytest.approx(odds / (1 + odds), **CLOSE)
    assert after[1:3] == before[1:3]
    odds = (before[3] / before[4]) ** (1 / 3)
    assert after[3] == pytest.approx(odds / (1 + odds), **CLOSE)
    masses = [[one["label_mass"] for one in answer["diagnostics"]] for answer in (plain, scaled)]
    assert masses[0] == pytest.approx(masses[1])
    assert client.http.get(f"{ROUTE}/calibration").json() == CALIBRATION


def test_a_calibration_of_another_model_ends_the_start(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**CALIBRATION, "model": "other"}))
    settings = json.dumps({"dllm": {"decision_calibration": str(file)}})
    arguments = ["--model", str(model_dir), "--additional-config", settings]
    result = run_python(*SERVER[1:], *arguments)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "decision_calibration" in line
    assert "model: given 'other'" in line


@pytest.mark.parametrize("name", ["dream", "llada2"])
def test_every_family_answers(clients: dict[str, Client], name: str) -> None:
    client = clients[name]
    answer = decide(client)
    assert [one["type"] for one in answer["answers"]] == ["predicate", "choice", "score"]
    values = [pair["value"] for pair in answer["answers"][1]["probabilities"]]
    assert [(type(value), value) for value in values] == [(bool, True), (str, "true")]
    is_joint = name == "dream"
    assert answer["diffusion"]["joint"] is is_joint
    assert answer["diffusion"]["num_forwards"] == (1 if is_joint else 3)
    separate = decide(client, joint=False)
    lone = [decide(client, questions=[question]) for question in QUESTIONS]
    wanted = [number for one in lone for number in numbers(one)]
    assert numbers(separate) == pytest.approx(wanted, **CLOSE)


def test_blocks_read_each_question_by_itself(clients: dict[str, Client]) -> None:
    client = clients["llada2"]
    for fields, param in (({"joint": True}, "joint"), ({"passes": 2}, "passes")):
        body = {"input": "x", "questions": QUESTIONS, **fields}
        error = refusal(client.http.post(ROUTE, json=body))
        assert error["param"] == param
        assert error["message"].endswith("this model reads each question by itself")


def test_states_of_blocks_are_kept_and_salted(clients: dict[str, Client]) -> None:
    client = clients["llada2"]
    body: dict[str, Any] = {"input": "The state of the matter. " * 6}
    plain = decide(client, **body)
    for fields, num_cached in (({}, 256), ({"cache_salt": "a"}, 0), ({"cache_salt": "a"}, 256)):
        answer = decide(client, **body, **fields)
        assert answer["answers"] == plain["answers"]
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= num_cached
        assert bool(num_cached) is bool(answer["usage"]["input_tokens_details"]["cached_tokens"])
