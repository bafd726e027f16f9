# SPDX-License-Identifier: Apache-2.0
"""What trainers do over HTTP: pause, change weights, go on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.client import GENERATE, PUZZLE, ROUTES, Client, body_for
from tests.server.process import MODEL_NAME, PATIENCE_S, SERVER, ServerProcess, healthy

SLOW = {"gen_length": 512, "steps": 512, "block_length": 32, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with upstream's routes for trainers."""
    folder = tmp_path_factory.mktemp("rollouts")
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32"]
    process = ServerProcess(command, folder / "server.log", VLLM_SERVER_DEV_MODE="1")
    with healthy(process), process.client() as http:
        yield Client(http)


def is_paused(client: Client) -> bool:
    found: bool = client.http.get("/is_paused").json()["is_paused"]
    return found


def test_a_pause_keeps_requests_and_they_go_on(trained: Client) -> None:
    """The one that runs, and one that arrives meanwhile."""
    slow = {"prompt": PUZZLE, **SLOW}
    wanted = trained.generate(**slow)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(trained.generate, **slow)
        trained.wait_for_num_requests(1)
        paused = trained.http.post("/pause", params={"mode": "keep"}, timeout=PATIENCE_S)
        assert paused.status_code == 200 and is_paused(trained)
        waiting = threads.submit(trained.generate, **slow)
        with pytest.raises(TimeoutError):
            running.result(0.3)
        assert trained.http.post("/resume").status_code == 200
        for answer in (running, waiting):
            found = answer.result(PATIENCE_S)
            assert found["token_ids"] == wanted["token_ids"]
            assert found["diffusion"]["num_forwards"] == 512
    assert not is_paused(trained)


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_a_pause_ends_what_runs_while_somebody_waits(
    trained: Client, mode: str, reason: str
) -> None:
    slow = {"prompt": PUZZLE, **SLOW}
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(trained.generate, **slow)
        trained.wait_for_num_requests(1)
        paused = threads.submit(trained.http.post, "/pause", params={"mode": mode})
        if mode == "abort":
            assert paused.result(PATIENCE_S).status_code == 200
        waiting = threads.submit(trained.generate, prompt=PUZZLE, gen_length=32)
        assert paused.result(PATIENCE_S).status_code == 200
        assert running.result(PATIENCE_S)["finish_reason"] == [reason]
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        assert trained.http.post("/resume").status_code == 200
        assert waiting.result(PATIENCE_S)["finish_reason"][0] != "abort"


DRAWN = {"return_trajectory": True, "temperature": 1.0, "seed": 7, "n": 2}
SHORT = {"gen_length": 16, "block_length": 8, "steps": 8, "ignore_eos": True}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_every_choice_has_its_trajectory(client: Client, route: str, is_stream: bool) -> None:
    body = body_for(route, **SHORT, **DRAWN)
    answer = client.events(route, body)[-1] if is_stream else client.answer(route, body)
    own = answer if route == GENERATE else answer["diffusion"]
    found = own["trajectory" if route == GENERATE else "trajectories"]
    assert [trajectory["seed"] for trajectory in found] == [7, 8]
    for trajectory in found:
        assert sorted(trajectory["commit_steps"]) == [1 + i // 2 for i in range(16)]
        assert all(logprob < 0 for logprob in trajectory["logprobs"])
        assert trajectory["weight_version"] == "default"
    assert "trajectories" not in answer["diffusion"] or route != GENERATE
    plain = client.answer(route, body_for(route, **SHORT))
    assert "trajectory" not in plain and "trajectories" not in plain["diffusion"]
