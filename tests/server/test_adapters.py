# SPDX-License-Identifier: Apache-2.0
"""A server with LoRA adapters: names of models on every route, loads and unloads."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.adapter_files import merge, random_adapter, save_adapter
from tests.checkpoints import random_prompt
from tests.engine.harness import Request, running
from tests.server.browser import Browser
from tests.server.client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    ROUTES,
    Client,
    body_for,
    refusal,
    text_of,
)
from tests.server.process import MODEL_NAME, SERVER, ServerProcess, healthy

TAKING = (GENERATE, CHAT, COMPLETIONS, MESSAGES)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PARAMETERS: dict[str, Any] = {
    "gen_length": 32,
    "block_length": 8,
    "steps": 16,
    "seed": 3,
    "ignore_eos": True,
}
PROMPT = random_prompt(20)
DEVELOPMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def root(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write adapters 0, 1 and 2, and the merged checkpoints of the first two."""
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(3):
        tensors = random_adapter(model_dir, seed=seed, gain=2.0)
        save_adapter(root / str(seed), tensors)
    resolved = {"base_model_name_or_path": str(model_dir)}
    save_adapter(root / "resolved", random_adapter(model_dir, seed=1, gain=2.0), **resolved)
    too_wide = random_adapter(model_dir, rank=32)
    save_adapter(root / "too-wide", too_wide, rank=32, **resolved)
    for seed in range(2):
        merge(model_dir, root / str(seed), root / f"merged {seed}")
    return root


@pytest.fixture(scope="module")
def expected(model_dir: Path, root: Path) -> list[list[int]]:
    """Return the answers of the two merged checkpoints, and of the served one."""
    answers = []
    for folder in (root / "merged 0", root / "merged 1", model_dir):
        with running(folder) as engine:
            (answer,) = engine.ask(Request(PROMPT, PARAMETERS))
            answers.append(answer.token_ids)
    assert len({tuple(ids) for ids in answers}) == 3
    return answers


@pytest.fixture(scope="module")
def process(model_dir: Path, root: Path) -> Iterator[ServerProcess]:
    """Start a server with the adapter `a`; further adapters are loaded below `root`."""
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3"]
    command += ["--lora-modules", f"a={root / '0'}", "--enable-scale-out"]
    command += ["--additional-config", json.dumps({"dllm": {"adapter_root": str(root)}})]
    variables = {"VLLM_LORA_RESOLVER_CACHE_DIR": str(root), **DEVELOPMENT}
    plugins = ("register_dllm_models", "dllm_platform", "dllm_endpoints")
    variables |= {"VLLM_PLUGINS": ",".join([*plugins, "lora_filesystem_resolver"])}
    process = ServerProcess(command, root / "server.log", **variables)
    with healthy(process):
        yield process
        assert "Traceback" not in process.log()


@pytest.fixture(scope="module")
def adapted(process: ServerProcess) -> Iterator[Client]:
    with process.client() as http:
        yield Client(http)


def load(client: Client, name: str, path: Path | str, **more: Any) -> httpx.Response:
    return client.http.post(LOAD, json={"lora_name": name, "lora_path": str(path), **more})


def unload(client: Client, name: str) -> httpx.Response:
    return client.http.post(UNLOAD, json={"lora_name": name})


def ids_of(client: Client, model: str | None) -> list[int]:
    answer = client.generate(prompt=PROMPT, model=model, **PARAMETERS)
    assert answer["model"] == model or model is None
    ids: list[int] = answer["token_ids"][0]
    return ids


def test_generate_answers_as_merged(adapted: Client, expected: list[list[int]]) -> None:
    assert ids_of(adapted, "a") == expected[0]
    assert ids_of(adapted, MODEL_NAME) == expected[2]
    assert ids_of(adapted, None) == expected[2]


@pytest.mark.parametrize("route", [GENERATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_every_route_takes_the_name(route: str, adapted: Client) -> None:
    body = body_for(route) if route != RESPONSES else {"model": MODEL_NAME, "input": "Hello there"}
    plain, answer = (adapted.answer(route, {**body, "model": m}) for m in (MODEL_NAME, "a"))
    assert (plain["model"], answer["model"]) == (MODEL_NAME, "a")
    assert text_of(plain) != text_of(answer)
    if route in ROUTES:
        streamed = adapted.events(route, {**body, "model": "a"})
        assert text_of(streamed[-1] if route == GENERATE else answer) == text_of(answer)


def test_scores_are_those_of_the_adapter(adapted: Client, root: Path) -> None:
    body = {"context": "What is", "continuation": " it?", "masks": [[0], [1]]}
    plain, answer = (
        adapted.answer("/v1/loglikelihood", {**body, "model": m}) for m in (MODEL_NAME, "a")
    )
    assert answer["model"] == "a"
    assert plain["logprobs"] != answer["logprobs"]
    echo = {"prompt": "What is it?", "echo": True, "logprobs": 1, "max_tokens": 0}
    first, second = (
        adapted.answer(COMPLETIONS, {**echo, "model": m})["choices"][0]["logprobs"]
        for m in (MODEL_NAME, "a")
    )
    assert first["token_logprobs"] != second["token_logprobs"]
    scoring = {"query": "Is it", "items": [" blue", " red"], "label_token_ids": [40, 41]}
    values = [
        adapted.answer("/generative_scoring", {**scoring, "model": m}) for m in (MODEL_NAME, "a")
    ]
    assert values[0]["data"] != values[1]["data"]
    tokens = adapted.answer("/tokenize", {"model": "a", "prompt": "What is it?"})
    assert tokens["count"]
    choice = {
        "input": "The sky is blue.",
        "questions": [{"type": "predicate", "name": "q", "instructions": "Is it blue?"}],
    }
    decided = [adapted.answer("/v1/decisions", {**choice, "model": m}) for m in (MODEL_NAME, "a")]
    assert decided[0]["answers"] != decided[1]["answers"]
    assert decided[1]["model"] == "a"


def test_the_list_of_models(adapted: Client, root: Path) -> None:
    cards = adapted.http.get("/v1/models").json()["data"]
    found = {card["id"]: (card["root"], card["parent"]) for card in cards}
    assert found["a"] == (str(root / "0"), MODEL_NAME)
    assert adapted.http.get("/v1/models/a").json()["id"] == "a"


@pytest.mark.parametrize("route", [*TAKING, "/tokenize", "/v1/loglikelihood"])
def test_unknown_names(route: str, adapted: Client) -> None:
    body = body_for(route)
    if route == "/v1/loglikelihood":
        body = {"context": "What", "continuation": " is"}
    response = adapted.http.post(route, json={**body, "model": "x"})
    assert response.status_code == 404
    assert f"model: given 'x'; wanted one of: {MODEL_NAME}, a" in response.text


def test_load_replace_and_unload(adapted: Client, root: Path, expected: list[list[int]]) -> None:
    place = shutil.copytree(root / "1", root / "moving")
    response = load(adapted, "b", place)
    assert (response.status_code, response.text) == (
        200,
        "Success: LoRA adapter 'b' added successfully.",
    )
    assert ids_of(adapted, "b") == expected[1]
    assert load(adapted, "b", place).status_code == 400
    save_adapter(place, random_adapter(Path(served_path(adapted)), seed=0, gain=2.0))
    assert load(adapted, "b", place, load_inplace=True).status_code == 200
    assert ids_of(adapted, "b") == expected[0]
    shutil.rmtree(place)
    assert ids_of(adapted, "b") == expected[0]
    assert unload(adapted, "b").text == "Success: LoRA adapter 'b' removed successfully."
    assert adapted.http.post(GENERATE, json={"prompt": PROMPT, "model": "b"}).status_code == 404
    assert unload(adapted, "b").status_code == 404
    assert ids_of(adapted, "a") == expected[0]


def served_path(client: Client) -> str:
    return str(client.http.get("/v1/models").json()["data"][0]["root"])


def test_refusals(adapted: Client, root: Path, model_dir: Path) -> None:
    wide = save_adapter(root / "wide", random_adapter(model_dir, rank=32), rank=32)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"lora_path": str(root / "nowhere")}, 404, "lora_path: given"),
        ({"lora_path": str(wide)}, 400, "r: given 32; wanted at most max_lora_rank 16"),
        ({"lora_path": "/tmp"}, 400, "wanted a folder below adapter_root"),
        ({"lora_name": "a"}, 400, "lora_name: given 'a'; wanted another name, or load_inplace"),
        ({"lora_name": MODEL_NAME}, 400, "the served model has it"),
        ({"is_3d_lora_weight": True}, 400, "experts take no adapters"),
        ({"inplace": True}, 400, "inplace"),
        ({"lora_name": ""}, 400, "lora_name: given ''"),
        ({"lora_name": "c\nd"}, 400, r"lora_name: given 'c\nd'; wanted a name without control"),
        ({"lora_name": "c\x1b"}, 400, r"lora_name: given 'c\x1b'; wanted a name without control"),
    ]
    for more, status, line in cases:
        body = {"lora_name": "c", "lora_path": str(root / "1"), **more}
        response = adapted.http.post(LOAD, json=body)
        error = refusal(response, status)
        assert line in error["message"]
        assert error["param"] == next(iter(more))
    assert [c["id"] for c in adapted.http.get("/v1/models").json()["data"]] == [MODEL_NAME, "a"]


def test_a_resolver_finds_adapters_by_their_names(
    adapted: Client, expected: list[list[int]]
) -> None:
    assert ids_of(adapted, "resolved") == expected[1]
    for route in (GENERATE, CHAT):
        response = adapted.http.post(route, json={**body_for(route), "model": "too-wide"})
        assert response.status_code == 400
        assert "r: given 32; wanted at most max_lora_rank 16" in response.text
    assert unload(adapted, "resolved").status_code == 200


def test_a_load_while_paused(adapted: Client, root: Path, expected: list[list[int]]) -> None:
    assert adapted.http.post("/pause", params={"mode": "keep"}).status_code == 200
    assert load(adapted, "p", root / "1").status_code == 200
    assert adapted.http.post("/resume").status_code == 200
    assert ids_of(adapted, "p") == expected[1]
    assert unload(adapted, "p").status_code == 200


def test_a_request_ends_with_its_adapter(
    adapted: Client, root: Path, expected: list[list[int]]
) -> None:
    """A request that names an adapter ends with it, even if it is unloaded meanwhile."""
    assert load(adapted, "c", root / "1").status_code == 200
    answers = list[dict[str, Any]]()
    slow = {"prompt": PROMPT, "model": "c", "gen_length": 256, "steps": 256, "ignore_eos": True}
    slow |= {"block_length": 32, "seed": 3}
    wanted = adapted.generate(**slow)["token_ids"]
    thread = threading.Thread(target=lambda: answers.append(adapted.generate(**slow)))
    thread.start()
    adapted.wait_for_num_requests(1)
    (status,) = [a for a in adapted.http.get("/status.json").json()["adapters"] if a["name"] == "c"]
    assert status["rank"] == 8
    assert unload(adapted, "c").status_code == 200
    thread.join()
    assert answers[0]["token_ids"] == wanted
    assert adapted.metric("dllm:adapter_loads_total") >= 2
    assert adapted.metric("dllm:adapter_slot_bytes") > 0


def test_requests_of_several_adapters_under_load(
    adapted: Client, root: Path, expected: list[list[int]]
) -> None:
    """Adapters come and go next to requests that have others."""
    failures = list[str]()
    stop = threading.Event()

    def ask(name: str, wanted: list[int]) -> None:
        while not stop.is_set():
            ids = ids_of(adapted, name)
            if ids != wanted:
                failures.append(name)

    names = ("a", MODEL_NAME)
    threads = [
        threading.Thread(target=ask, args=(name, wanted))
        for name, wanted in zip(names, (expected[0], expected[2]), strict=True)
    ]
    for thread in threads:
        thread.start()
    for number in range(10):
        assert load(adapted, f"policy-{number}", root / "1").status_code == 200
        assert ids_of(adapted, f"policy-{number}") == expected[1]
        assert unload(adapted, f"policy-{number}").status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_upstreams_openai_client(process: ServerProcess, adapted: Client) -> None:
    with OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        assert "a" in [model.id for model in client.models.list()]
        answer = client.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert answer.model == "a"


def test_the_page_offers_adapters(
    process: ServerProcess, adapted: Client, browser: Browser
) -> None:
    """Two models side by side answer one question, and a reload keeps the choice."""
    assert adapted.http.get("/page/options.json").json()["adapters"] == ["a"]
    question = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 32}
    plain, answer = (adapted.generate(model=m, **question)["text"][0] for m in (MODEL_NAME, "a"))
    assert plain != answer
    browser.show()
    browser.errors.clear()
    browser.open(f"{process.url}/")
    browser.wait_for("document.body.dataset.state === 'ready'")
    browser.run("document.getElementById('compare').click()")
    models = "[...document.querySelectorAll('select[name=model]')]"
    assert (
        browser.run(f"{models}.map(m => [...m.options].map(o => o.value))")
        == [[MODEL_NAME, "a"]] * 2
    )
    browser.run(
        f"{{ const m = {models}[1]; m.value = 'a'; m.dispatchEvent(new Event('change')); }}"
    )
    browser.run(
        "for (const box of document.querySelectorAll('[name=gen_length]')) {"
        "box.value = 32; box.dispatchEvent(new Event('change')); }"
    )
    browser.run("document.getElementById('question').focus()")
    browser.type("What is 3 plus 4?")
    browser.key("Enter")
    shown = "[...document.querySelectorAll('.answer .text:not(.open)')].map(a => a.innerText)"
    browser.wait_for("document.getElementById('send').textContent === 'Send'")
    browser.wait_for(f"{shown}.filter(Boolean).length === 2")
    texts = browser.run(shown)
    assert texts[0] != texts[1]
    browser.open(f"{process.url}/")
    browser.wait_for("document.body.dataset.state === 'ready'")
    assert browser.run(f"{models}.map(m => m.value)") == [MODEL_NAME, "a"]
    assert browser.run("document.querySelectorAll('.settings summary')[1].textContent").count("a ·")
    assert browser.errors == []
    browser.open("about:blank")


def test_every_replica_has_the_adapter(
    model_dir: Path, root: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--data-parallel-size", "2", "--enable-lora"]
    process = ServerProcess(command, tmp_path / "server.log", **DEVELOPMENT)
    with healthy(process), process.client() as http:
        client = Client(http)
        place = shutil.copytree(root / "0", tmp_path / "a")
        assert load(client, "a", place).status_code == 200
        with ThreadPoolExecutor(4) as threads:
            answers = [*threads.map(lambda _: ids_of(client, "a"), range(8))]
        assert answers == [expected[0]] * 8
        shutil.rmtree(place)
        shutil.copytree(root / "1", place)
        assert load(client, "a", place, load_inplace=True).status_code == 200
        with ThreadPoolExecutor(4) as threads:
            answers = [*threads.map(lambda _: ids_of(client, "a"), range(8))]
        assert answers == [expected[1]] * 8
        checksums = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
        ours = {name: digest for name, digest in checksums.items() if ":adapter:a:" in name}
        assert {name.split(":")[0] for name in ours} == {"dp0", "dp1"}
        head = [
            digest for name, digest in ours.items() if name.endswith("transformer.ff_out.lora_A")
        ]
        assert len(head) == 2 and len(set(head)) == 1
        assert load(client, "b", root / "nowhere").status_code == 404
        assert unload(client, "a").status_code == 200


def test_a_replica_that_refuses(model_dir: Path, root: Path, tmp_path: Path) -> None:
    """A replica whose place on the host is in use refuses; the load is undone on the other."""
    command = [*SERVER, "--model", str(model_dir), "--served-model-name", MODEL_NAME]
    command += ["--dtype", "float32", "--data-parallel-size", "2", "--enable-lora"]
    process = ServerProcess(command, tmp_path / "server.log", **DEVELOPMENT)
    with healthy(process), process.client() as http:
        client = Client(http)
        assert load(client, "a", root / "0").status_code == 200
        slow = {"prompt": PROMPT, "model": "a", "gen_length": 512, "steps": 512}
        slow |= {"block_length": 32, "ignore_eos": True}
        thread = threading.Thread(target=lambda: client.generate(**slow))
        thread.start()
        client.wait_for_num_requests(1)
        response = load(client, "b", root / "1")
        assert response.status_code == 400, response.text
        assert "max_cpu_loras: given 1, all in use" in response.text
        checksums = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
        assert not [name for name in checksums if ":adapter:b:" in name]
        thread.join()
        assert load(client, "b", root / "1").status_code == 200
        assert client.generate(prompt=PROMPT, model="b", **PARAMETERS)["model"] == "b"


def test_the_route_of_sagemaker_refuses_in_the_same_form(adapted: Client) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "name, src: given nothing; wanted a value"),
        ({"name": 5}, "name: given 5; wanted a valid string"),
    ]
    for body, message in cases:
        error = refusal(adapted.http.post("/adapters", json=body))
        assert error["message"].startswith(message)
        assert error["param"] == message.partition(":")[0]
