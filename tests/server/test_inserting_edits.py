# SPDX-License-Identifier: Apache-2.0
"""The edit route of a model that deletes and inserts tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.process import MODEL_NAME, SERVER, ServerProcess, healthy

CODE = "alpha = 1\nbeta = 2\ngamma = 3\n"


def test_tokens_are_inserted_and_deleted(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    command = [*SERVER, "--model", str(checkpoint("llada22")), "--served-model-name", MODEL_NAME]
    server = ServerProcess([*command, "--dtype", "float32"], tmp_path / "server.log")
    with healthy(server), server.client() as http:

        def edit(**fields: Any) -> Any:
            region = CODE.replace("beta", "be<|cursor|>ta")
            content = f"<|code_to_edit|>\n{region}<|/code_to_edit|>"
            body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}]}
            return http.post("/v1/edit/completions", json={**body, **fields}).json()

        answer = edit(max_post_steps=4)
        edits = answer["diffusion"]["edits"][0]
        assert answer["choices"][0]["message"]["content"].startswith("```\n")
        assert any(len(edit["old_ids"]) != len(edit["new_ids"]) for edit in edits)
        same = edit(editing_threshold=1.0)
        assert same["choices"][0]["message"]["content"] == f"```\n{CODE}\n```"
        assert same["diffusion"]["num_forwards"] == 1
        message = "slack: given 4; wanted 0: the model inserts tokens"
        assert edit(slack=4)["error"]["message"] == message
        server.terminate()
        assert server.wait() == 0, server.log()
