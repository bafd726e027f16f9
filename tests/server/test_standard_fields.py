# SPDX-License-Identifier: Apache-2.0
"""The fields that every client sends, on every family: the documented commands, word for word."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.client import CHAT, COMPLETIONS, GENERATE, ROUTES, Client, body_for
from tests.server.process import MODEL, ROOT, SERVER, ServerProcess, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCUMENT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").replace("\\\n", "")
COMMANDS = {
    family: next(
        line
        for line in DOCUMENT.splitlines()
        if line.startswith("scripts/test_api_request.py") and f"--model-family {family} " in line
    )
    for family in ("llada", "dream", "llada-moe", "llada2", "sdar", "fast-dllm")
}
FULL = ("llada", "dream", "llada-moe")  # the other ones see blocks alone
CANVAS = {"gen_length": 32, "steps": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every family; all but one are hardly trained."""
    import make_tiny_model
    from tiny_model.settings import DecodingSetting, Phase, Plan, TrainingSettings

    quick = Plan(
        training=TrainingSettings(phases=(Phase(2, (12,)),), tokens_per_batch=100),
        verifications=(DecodingSetting(canvas=8, steps=1, block_length=8),),
        required_share=0.0,
    )
    folder = tmp_path_factory.mktemp("models")
    others = [family for family in COMMANDS if family != "llada"]
    for family in others:
        make_tiny_model.make(folder / family, family, seed=0, plan=quick)
    return {"llada": MODEL, **{family: folder / family for family in others}}


@pytest.fixture(scope="module", params=list(COMMANDS))
def served(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: Any
) -> Iterator[tuple[str, ServerProcess]]:
    """A family and its server; tests/scripts says that the family's script runs the same."""
    family = request.param
    process = ServerProcess(
        [
            *(*SERVER, "--model", str(models[family]), "--dtype", "float32"),
            *("--served-model-name", "llada-tiny"),
        ],
        tmp_path_factory.mktemp(family) / "server.log",
    )
    try:
        process.wait_until_healthy()
        yield family, process
    finally:
        process.kill()


def test_the_command_of_the_readme(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    words = shlex.split(COMMANDS[family])
    address = words.index("--host") + 1
    assert re.fullmatch(r"http://127\.0\.0\.1:(8901|8701|10001|890[234])", words[address])
    words[address] = server.url  # a free port; all else is as written
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["diffusion"]
    wanted = {"llada2": 32, "sdar": 32, "fast-dllm": None}  # its rule alone counts forwards
    assert report["steps"] == wanted.get(family, 8)
    ignored = {"dream": ["block_length", "remasking"], "fast-dllm": ["steps"]}
    assert report["ignored"] == ignored.get(family, [])


@pytest.mark.parametrize("route", ROUTES)
def test_what_cannot_act_is_named_on_every_route(
    served: tuple[str, ServerProcess], route: str
) -> None:
    """Also a block length that does not divide the canvas, and where blocks have no meaning."""
    family, server = served
    if family not in FULL:
        pytest.skip("its rules have blocks of any length")
    asked = {**CANVAS, "algorithm": "dream", "block_length": 7, "cfg_scale": 0.0}
    with server.client() as http:
        client = Client(http)
        plain = client.answer(route, body_for(route, **asked))
        assert plain["diffusion"]["ignored"] == ["block_length"]
        *_, last = client.events(route, body_for(route, **asked))
        assert last["diffusion"]["ignored"] == ["block_length"]
        without = {name: value for name, value in asked.items() if name != "block_length"}
        same = client.answer(route, body_for(route, **without))
        assert same["diffusion"]["ignored"] == []
        for key in ("choices", "token_ids"):
            assert plain.get(key) == same.get(key)
        if family == "dream":
            del asked["algorithm"]
            assert client.answer(route, body_for(route, **asked))["diffusion"]["ignored"]


REFUSED = (
    ({"mask_id": 3}, "mask_id"),
    ({"algorithm": "dream", "remasking": "random"}, "remasking"),
    ({"algorithm": "dream", "threshold": 0.9}, "threshold"),
    ({"algorithm": "dream", "block_length": 0}, "block_length"),
    ({"algorithm": "semi_ar", "cache": "dual", "cfg_scale": 0.5}, "cache"),
)
REFUSED_OF_BLOCKS = (
    ({"mask_id": 3}, "mask_id"),
    ({"remasking": "random"}, "remasking"),
    ({"block_length": 0}, "block_length"),
    ({"cfg_scale": 0.5}, "cfg_scale"),
    ({"cache": "dual"}, "cache"),
)


def test_what_is_refused_all_the_same(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    with server.client() as http:
        for fields, name in REFUSED if family in FULL else REFUSED_OF_BLOCKS:
            for route in (GENERATE, CHAT, COMPLETIONS):
                response = http.post(route, json=body_for(route, **CANVAS, **fields))
                assert response.status_code == 400, fields
                assert response.json()["error"]["param"] == name
