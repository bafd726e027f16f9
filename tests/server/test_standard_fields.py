# SPDX-License-Identifier: Apache-2.0
"""Fields that every client sends, on every family, with the documented commands unchanged."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoints import make_case, random_prompt
from tests.programs import ROOT, output_of
from tests.server.client import CHAT, COMPLETIONS, GENERATE, ROUTES, Client, body_for, refusal
from tests.server.process import MODEL_NAME, SERVER, ServerProcess, environment, healthy

EDIT, FIM = "/v1/edit/completions", "/v1/fim/completions"
DOCUMENT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").replace("\\\n", "")
COMMANDS = {
    family: next(
        line
        for line in DOCUMENT.splitlines()
        if line.startswith("scripts/test_api_request.py") and f"--model-family {family} " in line
    )
    for family in ("llada", "dream", "llada-moe", "llada2", "sdar", "fast-dllm")
}
FULL = ("llada", "dream", "llada-moe")  # the other families are block-causal
CANVAS = {"gen_length": 32, "steps": 8}
RANDOM = {"llada-moe": "moe", "fast-dllm": "fast_dllm"}  # names of their checkpoints


@pytest.fixture(scope="module", params=list(COMMANDS))
def served(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: Any
) -> Iterator[tuple[str, ServerProcess]]:
    """Yield a family and its server.

    Tests of scripts check that the family's script does the same.
    """
    family = request.param
    if family == "llada":
        yield family, server
        return
    folder = tmp_path_factory.mktemp(family)
    model = make_case(folder / "model", RANDOM.get(family, family))
    command = [*SERVER, "--model", str(model), "--served-model-name", MODEL_NAME]
    process = ServerProcess([*command, "--dtype", "float32"], folder / "server.log")
    with healthy(process):
        yield family, process


def test_the_command_of_the_readme(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    words = shlex.split(COMMANDS[family])
    address = words.index("--host") + 1
    assert re.fullmatch(r"http://127\.0\.0\.1:(8901|8701|10001|890[234])", words[address])
    words[address] = server.url  # the free port is the only change
    report = json.loads(output_of(*words, cwd=ROOT, env=environment()))["diffusion"]
    wanted = {"llada2": 32, "sdar": 32, "fast-dllm": None}  # fast-dllm has no fixed number of steps
    assert report["steps"] == wanted.get(family, 8)
    ignored = {"dream": ["block_length", "remasking"], "fast-dllm": ["steps"]}
    assert report["ignored"] == ignored.get(family, [])


@pytest.mark.parametrize("route", ROUTES)
def test_what_cannot_act_is_named_on_every_route(
    served: tuple[str, ServerProcess], route: str
) -> None:
    """A block length that does not divide the canvas is listed if the algorithm has no blocks."""
    family, server = served
    if family not in FULL:
        pytest.skip("its rules have blocks of any length")
    parameters = {**CANVAS, "algorithm": "dream", "block_length": 7, "cfg_scale": 0.0}
    with server.client() as http:
        client = Client(http)
        plain = client.answer(route, body_for(route, **parameters))
        assert plain["diffusion"]["ignored"] == ["block_length"]
        *_, last = client.events(route, body_for(route, **parameters))
        assert last["diffusion"]["ignored"] == ["block_length"]
        without = {name: value for name, value in parameters.items() if name != "block_length"}
        same = client.answer(route, body_for(route, **without))
        assert same["diffusion"]["ignored"] == []
        for key in ("choices", "token_ids"):
            assert plain.get(key) == same.get(key)
        if family == "dream":
            del parameters["algorithm"]
            assert client.answer(route, body_for(route, **parameters))["diffusion"]["ignored"]


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


def test_what_a_family_cannot_do_with_texts(served: tuple[str, ServerProcess]) -> None:
    family, server = served
    edit = "<|code_to_edit|>\na<|cursor|>\n<|/code_to_edit|>"
    bodies: list[tuple[str, dict[str, Any], str]] = []
    if family not in FULL:
        wanted = f"wanted none, or fim_template: true: a model of family {family} does not see"
        suffix = {"prompt": "a", "suffix": "b", "max_tokens": 4}
        bodies += [(route, suffix, f"suffix: given 'b'; {wanted}") for route in (COMPLETIONS, FIM)]
    if family == "fast-dllm":
        message = f"model: given '{family}'; /v1/edit/completions revises texts; wanted llada, "
        bodies += [(EDIT, {"messages": [{"role": "user", "content": edit}]}, message)]
    with server.client() as http:
        for route, body, message in bodies:
            error = refusal(http.post(route, json=body))
            assert error["message"].startswith(message)
            assert error["param"] == message.partition(":")[0]


def test_cached_tokens_are_told_on_the_openai_routes(served: tuple[str, ServerProcess]) -> None:
    """A block-causal family reports cached prompt tokens without a request for them."""
    family, server = served
    if family != "sdar":
        pytest.skip("one family for all")
    body = {"prompt": random_prompt(130, 1), "max_tokens": 8, "ignore_eos": True}
    with server.client() as http:
        client = Client(http)
        first, second = (client.answer(COMPLETIONS, {"model": MODEL_NAME, **body}) for _ in "12")
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        parameters = {"model": MODEL_NAME, **body, "stream_options": {"include_usage": True}}
        chunks = client.events(COMPLETIONS, parameters)
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert "vllm:prefix_cache_hits_total" in http.get("/metrics").text
