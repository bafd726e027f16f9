# SPDX-License-Identifier: Apache-2.0
"""A server with a small activation pool: who never fits gets a 400 on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.server.process import MODEL_NAME, SERVER, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

POOL_BYTES = 150_000


@pytest.fixture(scope="module")
def small(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    command = [
        *SERVER,
        *("--model", str(model_dir), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
    ]
    log = tmp_path_factory.mktemp("small") / "server.log"
    process = ServerProcess(command, log, VLLM_ACTIVATION_POOL_SIZE_BYTES=str(POOL_BYTES))
    try:
        process.wait_until_healthy()
        with process.client() as http:
            yield http
    finally:
        process.kill()


def test_requests_that_never_fit_are_refused_on_every_route(small: httpx.Client) -> None:
    wanted = r"prompt + gen_length: given 300; its steps need "
    body = {"prompt": [5] * 44, "gen_length": 256}
    refused = small.post("/generate", json=body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith(wanted) and "tokens" in message
    completion = {"model": MODEL_NAME, "prompt": [5] * 44, "max_tokens": 256}
    refused = small.post("/v1/completions", json=completion)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(wanted)
    longest = int(message.split("wanted at most ")[1].split()[0])
    assert 44 + 16 <= longest < 300


def test_an_answer_says_what_its_largest_step_took(small: httpx.Client) -> None:
    report = small.post("/generate", json={"prompt": [5] * 20, "gen_length": 16}).json()[
        "diffusion"
    ]
    assert 0 < report["average_bytes"] <= report["peak_bytes"] <= report["budget_bytes"]
    assert report["budget_bytes"] < POOL_BYTES
