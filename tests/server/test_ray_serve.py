# SPDX-License-Identifier: Apache-2.0
"""Two replicas on Ray Serve, one of which is killed. CI does not run this, as it has no Ray."""

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.programs import ROOT, wait_for
from tests.server.client import ANSWER, GENERATE, PUZZLE, Client
from tests.server.process import PATIENCE_S, free_port, named

ray = pytest.importorskip("ray", reason="needs ray[serve]")
REPLICA = "ServeReplica"


@pytest.fixture(scope="module")
def http(model_dir: Path) -> Iterator[httpx.Client]:
    from ray import serve

    app = importlib.import_module("docs.examples.deploy.ray_serve")
    port = free_port()
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    serve.start(http_options={"port": port})
    server = app.Mosaic.options(autoscaling_config=None, num_replicas=2)
    serve.run(server.bind(str(model_dir), "--no-page"))
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client
    serve.shutdown()
    ray.shutdown()


def replicas() -> set[int]:
    return {p.pid for p in named(psutil.Process().children(recursive=True), REPLICA)}


def test_our_routes_and_fields_are_there(http: httpx.Client) -> None:
    answer = Client(http).ask(gen_length=32, steps=8)
    assert (answer["text"], answer["diffusion"]["steps"]) == ([ANSWER], 8)
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.post(GENERATE, json={"prompt": "hello", "stepz": 1}).status_code == 400


def test_a_killed_replica_is_not_felt_and_replaced(http: httpx.Client) -> None:
    started = replicas()
    assert len(started) == 2
    body = {"prompt": PUZZLE, "gen_length": 64, "steps": 64, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: http.post(GENERATE, json=body).status_code, range(24))
        psutil.Process(min(started)).kill()
        assert list(answers) == [200] * 24
    wait_for(lambda: len(replicas() - {min(started)}) >= 2)
    assert Client(http).ask(gen_length=32)["text"] == [ANSWER]
