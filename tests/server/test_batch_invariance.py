# SPDX-License-Identifier: Apache-2.0
"""A server with `--batch-invariant` states what its answers' bits rest on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.server.process import MODEL_NAME, SERVER, ServerProcess, healthy


def test_all_answers_have_the_fingerprint(model_dir: Path, tmp_path: Path) -> None:
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--batch-invariant"]
    server = ServerProcess(command, tmp_path / "server.log")
    with healthy(server), server.client() as http:
        status = http.get("/status.json").json()
        assert status["batch_invariant"] is True
        fingerprint = status["fingerprint"]
        assert f"fingerprint {fingerprint}" in server.log()

        def ask(question: str) -> httpx.Response:
            messages = [{"role": "user", "content": question}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "logprobs": True}
            return http.post("/v1/chat/completions", json=body)

        questions = ["What is the capital of France?", "Hello!"]
        alone = [ask(question).json() for question in questions]
        with ThreadPoolExecutor(2) as threads:
            together = [answer.json() for answer in threads.map(ask, questions)]
        for answer in (*alone, *together):
            assert answer["system_fingerprint"] == fingerprint
            assert answer["diffusion"]["fingerprint"] == fingerprint
            assert answer["diffusion"]["batch_invariant"] is True
            assert "refreshed_early" not in answer["diffusion"]
        assert [a["choices"] for a in alone] == [a["choices"] for a in together]
        server.terminate()
        assert server.wait() == 0, server.log()
