# SPDX-License-Identifier: Apache-2.0
"""The requests of trainers over HTTP: pause, change weights, resume."""

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.checkpoint_files import weights_of
from tests.programs import ROOT, output_of, wait_for
from tests.server.client import ANSWER, GENERATE, PUZZLE, ROUTES, Client, body_for, refusal
from tests.server.process import (
    MODEL_NAME,
    PATIENCE_S,
    SERVER,
    ServerProcess,
    environment,
    healthy,
)

SLOW = {"gen_length": 256, "steps": 256, "block_length": 32, "ignore_eos": True, "seed": 3}


NUM_UPDATES = 100
MAX_DRIFT_BYTES = 24 << 20  # bytes that the allocator of a process may retain


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updates")


@pytest.fixture(scope="module")
def process(model_dir: Path, updates: Path) -> Iterator[ServerProcess]:
    """Start a server with upstream's routes for trainers."""
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    settings = {"dllm": {"weight_update_root": str(updates)}}
    command += ["--dtype", "float32", "--weight-transfer-config", '{"backend": "disk"}']
    command += [
        "--additional-config",
        json.dumps(settings),
        "--enable-sleep-mode",
        "--enable-scale-out",
    ]
    process = ServerProcess(command, updates / "server.log", VLLM_SERVER_DEV_MODE="1")
    with healthy(process):
        yield process


@pytest.fixture(scope="module")
def trained(process: ServerProcess) -> Iterator[Client]:
    with process.client() as http:
        yield Client(http)


def post(client: Client, route: str, body: Any = None, **query: str) -> Any:
    response = client.http.post(route, json=body, params=query, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()


def update(client: Client, path: str, version: str | None = None) -> None:
    """Update the weights with upstream's client for trainers."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    trainer = HTTPVLLMWeightSyncClient(str(client.http.base_url), timeout=PATIENCE_S)
    trainer.start_weight_update()
    trainer.update_weights({"path": path})
    trainer.finish_weight_update(version)


def write_weights(model_dir: Path, folder: Path, factor: float = 1.0) -> None:
    """Write the model's weights, with the logit head multiplied by `factor`."""
    weights = weights_of(model_dir)
    head = weights["model.transformer.ff_out.weight"]
    weights["model.transformer.ff_out.weight"] = head * factor
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")


def is_paused(client: Client) -> bool:
    answer: bool = client.http.get("/is_paused").json()["is_paused"]
    return answer


def test_an_answer_is_as_long_as_its_stop_string_leaves_it(trained: Client) -> None:
    """An answer ends at its stop string, even if the step wrote more text after it."""
    parameters = {
        "prompt": PUZZLE,
        "gen_length": 32,
        "steps": 2,
        "block_length": 32,
        "ignore_eos": True,
    }
    stop = trained.generate(**parameters)["text"][0][4:7]
    parameters |= {"stop": [stop], "return_trajectory": True}
    answer = trained.generate(**parameters)
    (report,) = answer["trajectory"]
    assert report["finish_reason"] == "stop"
    assert report["stop_length"] == len(answer["token_ids"][0]) < 32
    parameters |= {"model": MODEL_NAME, "max_tokens": parameters.pop("gen_length"), "stream": True}
    streamed = trained.http.post("/v1/completions", json=parameters).text
    (last,) = [line for line in streamed.splitlines() if '"trajectories"' in line]
    (again,) = json.loads(last.removeprefix("data: "))["diffusion"]["trajectories"]
    assert again["stop_length"] == report["stop_length"]


MISSPELT = [
    (
        ("/abort_requests", {"ids": ["a"]}, {}),
        "ids: given ['a']; unknown parameter; the nearest are request_ids",
    ),
    (("/abort_requests", {"request_id": "a"}, {}), "did you mean request_ids?"),
    (("/pause", None, {"mod": "keep"}), "mod: given 'keep'; unknown parameter; did you mean"),
    (("/finish_weight_update", {"weights_version": "1"}, {}), "did you mean weight_version?"),
    (("/wake_up", None, {"tags": "weight"}), "tags: given 'weight'; wanted one of kv_cache"),
]


def test_a_misspelt_field_does_nothing(trained: Client) -> None:
    """A request with an unknown field is refused, and does not act as if the field were missing."""
    paths = trained.http.get("/openapi.json").json()["paths"]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(trained.generate, prompt=PUZZLE, **SLOW)
        trained.wait_for_num_requests(1)
        for (route, body, query), message in MISSPELT:
            assert paths[route]["post"]["tags"] == ["Train"]
            response = trained.http.post(route, json=body, params=query, timeout=PATIENCE_S)
            assert message in refusal(response)["message"]
        assert not running.done()
        assert running.result(PATIENCE_S)["finish_reason"] == ["length"]


def test_a_pause_keeps_requests_and_they_go_on(trained: Client) -> None:
    """A running request, and one that arrives during the pause, complete after it."""
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
            actual = answer.result(PATIENCE_S)
            assert actual["token_ids"] == wanted["token_ids"]
            assert actual["diffusion"]["num_forwards"] == 256
    assert not is_paused(trained)


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_a_pause_ends_what_runs_and_refuses_what_arrives(
    trained: Client, mode: str, reason: str
) -> None:
    slow = {"prompt": PUZZLE, **SLOW}
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(trained.generate, **slow)
        trained.wait_for_num_requests(1)
        paused = threads.submit(trained.http.post, "/pause", params={"mode": mode})
        if mode == "abort":
            assert paused.result(PATIENCE_S).status_code == 200
        wait_for(lambda: is_paused(trained))  # from now on, new requests are refused
        try:
            for route in ROUTES:
                assert_refused_while_paused(trained, route)
            assert paused.result(PATIENCE_S).status_code == 200
            assert running.result(PATIENCE_S)["finish_reason"] == [reason]
        finally:
            assert trained.http.post("/resume").status_code == 200
    assert trained.generate(prompt=PUZZLE, gen_length=32)["finish_reason"][0] != "abort"


def assert_refused_while_paused(trained: Client, route: str) -> None:
    """A whole answer is refused with its status, a stream with an event."""
    body = body_for(route, gen_length=32)
    response = trained.http.post(route, json=body, timeout=PATIENCE_S)
    assert response.status_code == 503
    assert "paused" in refusal(response, 503)["message"]
    events = trained.http.post(route, json={**body, "stream": True}, timeout=PATIENCE_S)
    assert events.status_code == 503 or '"code":503' in events.text.replace(" ", "")


DRAWN = {"return_trajectory": True, "temperature": 1.0, "seed": 7, "n": 2}
SHORT = {"gen_length": 16, "block_length": 8, "steps": 8, "ignore_eos": True}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_every_choice_has_its_trajectory(client: Client, route: str, is_stream: bool) -> None:
    body = body_for(route, **SHORT, **DRAWN)
    answer = client.events(route, body)[-1] if is_stream else client.answer(route, body)
    own = answer if route == GENERATE else answer["diffusion"]
    actual = own["trajectory" if route == GENERATE else "trajectories"]
    assert [trajectory["seed"] for trajectory in actual] == [7, 8]
    for trajectory in actual:
        assert sorted(trajectory["commit_steps"]) == [1 + i // 2 for i in range(16)]
        assert all(logprob < 0 for logprob in trajectory["logprobs"])
        assert trajectory["weight_version"] == "default"
    assert "trajectories" not in answer["diffusion"] or route != GENERATE
    plain = client.answer(route, body_for(route, **SHORT))
    assert "trajectory" not in plain and "trajectories" not in plain["diffusion"]


def test_an_update_is_told_checked_and_undone(
    trained: Client, model_dir: Path, updates: Path
) -> None:
    write_weights(model_dir, updates / "flat", 0.0)
    write_weights(model_dir, updates / "own")
    own = post(trained, "/weight_checker", {"action": "checksum"})["checksums"]
    answer = trained.ask(**SHORT, return_trajectory=True)
    assert trained.http.get("/get_world_size").json() == {"world_size": 1}
    update(trained, "flat", "flat")
    assert trained.http.get("/weight_info").json() == {"weight_version": "flat"}
    other = trained.ask(**SHORT, return_trajectory=True)
    assert other["text"] != answer["text"]
    assert other["trajectory"][0]["weight_version"] == "flat"
    compared = {"action": "compare", "baseline": own}
    actual = post(trained, "/weight_checker", compared)
    assert not actual["match"] and len(actual["mismatches"]) == 1
    post(trained, "/weight_checker", {"action": "reset"})
    assert len(post(trained, "/weight_checker", compared)["mismatches"]) == len(own)
    update(trained, "own", "own")
    assert post(trained, "/weight_checker", compared) == {"match": True, "mismatches": []}
    again = trained.ask(**SHORT, return_trajectory=True)
    assert again["token_ids"] == answer["token_ids"]
    assert again["trajectory"][0]["logprobs"] == answer["trajectory"][0]["logprobs"]
    post(trained, "/update_weight_version", {"new_version": "default"})
    (updates / "cut").mkdir()
    (updates / "cut" / "model.safetensors").write_bytes(b"\x08")
    last = {"Connection": "close"}  # the server closes the connection after this error as well
    refused = [("../other", "weight_update_root"), ("missing", "safetensors"), ("cut", "header")]
    refused += [(name, "wanted a file of safetensors, or a folder") for name in ("\0", "x" * 5000)]
    for path, message in refused:  # no weight has changed, so that steps go on
        post(trained, "/start_weight_update")
        body = {"update_info": {"path": path}}
        assert message in trained.http.post("/update_weights", json=body, headers=last).text
        assert trained.http.get("/ready").json() == {"status": "ready"}
        assert trained.ask(**SHORT)["token_ids"] == answer["token_ids"]
    # After a part of the tensors was loaded, a failure pauses the engine.
    post(trained, "/start_weight_update")
    post(trained, "/update_weights", {"update_info": {"path": "own"}})
    body = {"update_info": {"path": "missing"}}
    assert "missing" in trained.http.post("/update_weights", json=body, headers=last).text
    assert trained.http.get("/ready").json() == {"status": "paused"}
    post(trained, "/finish_weight_update", {"weight_version": "default"})
    update(trained, "own", "default")
    assert trained.http.get("/ready").json() == {"status": "ready"}
    assert trained.ask(**SHORT)["token_ids"] == answer["token_ids"]


@pytest.mark.parametrize("route", ["/abort_requests", "/collective_rpc", "/update_weights"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"a":', "wanted JSON: Expecting value after 5 "), (b"[" * 5000, "nested too deeply")],
)
def test_bodies_that_are_no_json(trained: Client, route: str, content: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    error = refusal(trained.http.post(route, content=content, headers=headers))
    assert error["message"].startswith("body: given ") and message in error["message"]
    assert (error["param"], error["type"]) == ("body", "BadRequestError")


@pytest.mark.parametrize("method", ["__class__", "_hold", "get_model"])
def test_calls_that_return_no_data_are_refused(trained: Client, method: str) -> None:
    last = {"Connection": "close"}
    actual = trained.http.post("/collective_rpc", json={"method": method}, headers=last)
    assert f"method: given {method!r}" in actual.text
    assert post(trained, "/collective_rpc", {"method": "weight_generation"})["results"]
    assert trained.ask()["text"] == [ANSWER]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
    ],
)
def test_other_sites_cannot_pause(trained: Client, headers: dict[str, str]) -> None:
    for route in ("/pause", "/sleep", "/abort_requests"):
        actual = trained.http.post(route, headers=headers)
        assert "--allowed-origins" in refusal(actual, 403)["message"]
    assert not is_paused(trained)
    own = {"Origin": str(trained.http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert trained.http.post("/resume", headers=own).status_code == 200


def test_replicas_fail_together_in_an_update(
    model_dir: Path, updates: Path, tmp_path: Path
) -> None:
    """A replica that loaded its part waits, like the failed one, until another update has ended."""
    command = [*SERVER, "--model", str(model_dir), "--data-parallel-size", "2"]
    settings = {"dllm": {"weight_update_root": str(updates)}}
    command += ["--weight-transfer-config", '{"backend": "disk"}']
    command += ["--additional-config", json.dumps(settings)]
    write_weights(model_dir, updates / "whole")
    server = ServerProcess(command, tmp_path / "server.log", VLLM_SERVER_DEV_MODE="1")
    with healthy(server), server.client() as http, ThreadPoolExecutor(4) as pool:
        client = Client(http)
        short = [{"prompt": "Hi", "gen_length": 8, "timeout_s": 1.0}] * 4
        for update_info in ([{"path": "whole"}, {"path": "missing"}], [{"path": "whole"}]):
            post(client, "/start_weight_update")
            for route, body in (
                ("/update_weights", {"update_info": update_info}),
                ("/finish_weight_update", {"weight_version": "half"}),
            ):
                last = {"Connection": "close"}
                assert http.post(route, json=body, headers=last).status_code == 500
            actual = pool.map(lambda body: http.post(GENERATE, json=body), short)
            assert [response.status_code for response in actual] == [504] * 4
        update(client, "whole", "whole")
        assert client.ask(**SHORT)["token_ids"]


@pytest.mark.parametrize("level", ["1", "2"])
def test_memory_is_lent_over_http(
    trained: Client, model_dir: Path, updates: Path, level: str
) -> None:
    wanted = trained.ask(**SHORT)["token_ids"]
    assert post(trained, "/sleep", level=level)["status"] == "sleeping"
    assert trained.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert post(trained, "/wake_up", tags="weights")["status"] == "sleeping"
    if level == "2":
        write_weights(model_dir, updates / "again")
        update(trained, "again", "default")
    assert post(trained, "/wake_up")["status"] == "awake"
    assert trained.ask(**SHORT)["token_ids"] == wanted


def test_all_answers_of_a_request_are_aborted(trained: Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(trained.generate, prompt=PUZZLE, **SLOW, n=3)
        trained.wait_for_num_requests(3)
        assert post(trained, "/abort_requests", {})["aborted"] == 3
        assert running.result(PATIENCE_S)["finish_reason"] == ["abort"] * 3


def test_tokens_go_in_and_come_out_with_their_trajectory(trained: Client) -> None:
    """This is upstream's route for clients that tokenize by themselves."""
    extra = {**SHORT, "return_trajectory": True}
    parameters = {"temperature": 0.0, "max_tokens": 16, "extra_args": extra}
    body = {"token_ids": [5, 6, 7], "sampling_params": parameters}
    actual = post(trained, "/inference/v1/generate", body)
    trajectory = actual["kv_transfer_params"]["dllm"]["trajectory"]
    assert trajectory["token_ids"] == actual["choices"][0]["token_ids"]


def test_the_example_trains(
    trained: Client, process: ServerProcess, model_dir: Path, updates: Path, tmp_path: Path
) -> None:
    """Two iterations of docs/examples/rl_tiny.py run; it checks log probabilities itself."""
    script, curve = ROOT / "docs" / "examples" / "rl_tiny.py", tmp_path / "curve.png"
    arguments = ["--server", process.url, "--updates", updates, "--curve", curve]
    arguments += ["--iterations", "2", "--questions", "4", "--answers", "4"]
    output = output_of(sys.executable, script, *map(str, arguments), env=environment())
    assert output.count("mean reward") == 3 and curve.stat().st_size > 1000
    write_weights(model_dir, updates / "as before")
    update(trained, "as before", "default")


def test_many_updates_under_load(
    trained: Client, process: ServerProcess, model_dir: Path, updates: Path
) -> None:
    """No request is lost, answers with several versions report them, and memory does not grow."""
    versions = {"even": 1.0, "odd": 0.5}
    for name, factor in versions.items():
        write_weights(model_dir, updates / name, factor)
    results: list[dict[str, Any]] = []
    is_over, lock = threading.Event(), threading.Lock()

    def ask(number: int) -> None:
        body = {"prompt": PUZZLE, "gen_length": 64, "steps": 16, "block_length": 32, "n": 2}
        body |= {"ignore_eos": True, "return_trajectory": True, "seed": number}
        while not is_over.is_set():
            answer = trained.generate(**body, cache=("none", "dual", "frozen")[number % 3])
            with lock:
                results.extend(answer["trajectory"])

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, number) for number in range(4)]
        for number in range(NUM_UPDATES):
            if number == NUM_UPDATES // 5:
                before = process.engine().memory_info().rss
            name = ("even", "odd")[number % 2]
            if number % 3:
                update(trained, name, f"{name}-{number}")
                continue
            post(trained, "/pause", mode="keep")
            update(trained, name, f"{name}-{number}")
            post(trained, "/resume")
        is_over.set()
        for future in asking:
            future.result(PATIENCE_S)
    assert len(results) > 8 and None not in results
    assert process.engine().memory_info().rss - before < MAX_DRIFT_BYTES
    generations = {generation for t in results for generation, _ in t["weight_steps"]}
    assert len(generations) > NUM_UPDATES / 10
    for trajectory in results:
        assert -1 not in trajectory["commit_steps"]
        mixed = len(trajectory["weight_steps"]) > 1
        assert not mixed or trajectory["weight_version"] is None
    update(trained, "even", "default")
