# SPDX-License-Identifier: Apache-2.0
"""A block-causal family over HTTP: what was found of a prompt is told without being asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import make_case, random_prompt
from tests.server.process import SERVER, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("sdar")
    model = make_case(folder / "model", "sdar")
    command = [*SERVER, "--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"]
    process = ServerProcess(command, folder / "server.log")
    try:
        process.wait_until_healthy()
        yield process
    finally:
        process.kill()


def body(**asked: Any) -> dict[str, Any]:
    prompt = random_prompt(130, 1)
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **asked}


@pytest.mark.slow
def test_cached_tokens_are_told_on_the_openai_routes(served: ServerProcess) -> None:
    with served.client() as http:
        first, second = (http.post("/v1/completions", json=body()).json() for _ in range(2))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        asked = body(stream=True, stream_options={"include_usage": True})
        lines = http.post("/v1/completions", json=asked).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        metrics = http.get("/metrics").text
        assert "vllm:prefix_cache_hits_total" in metrics
