# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: its files, what it offers, and how it works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from tests.server.browser import CHROMIUM, Browser
from tests.server.client import ANSWER, GENERATE, QUESTION
from tests.server.process import ROOT
from vllm.diffusion import __version__
from vllm.diffusion.algorithms import ALGORITHMS, BLOCK_ALGORITHMS
from vllm.diffusion.api.page.options import page_options
from vllm.diffusion.api.page.routes import OPEN_PATHS, STATIC
from vllm.diffusion.families import DREAM, LLADA2, SDAR
from vllm.diffusion.fields import BY_NAME
from vllm.diffusion.params import ServedModel, SpecialIds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tests.server.client import Client
    from tests.server.process import ServerProcess
    from vllm.diffusion.families import Family

# Where anything could be loaded from; the name of SVG's namespace is no address.
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda file: file.name)
def test_nothing_is_loaded_from_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not ADDRESS.findall(text)


def test_files_need_no_key_and_are_not_sent_twice(client: Client) -> None:
    for path in OPEN_PATHS:
        found = client.http.get(path)
        assert found.status_code == 200, path
        assert "default-src 'none'" in found.headers["content-security-policy"]
        again = client.http.get(path, headers={"If-None-Match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.http.get("/page/routes.py").status_code == 404
    assert client.http.get("/").headers["content-type"] == "text/html; charset=utf-8"


def test_versions(client: Client) -> None:
    assert client.http.get("/version").json() == {"version": "0.32.0", "mosaic": __version__}


# ---- what is offered ---------------------------------------------------------------------------


def model_of(family: Family, **defaults: Any) -> ServedModel:
    ids = SpecialIds(mask=1, eos=2, eot=None, stop=frozenset({2}))
    return ServedModel(family, ids, max_model_len=64, vocab_size=9, defaults=defaults)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (DREAM, ALGORITHMS.keys()),
        (SDAR, BLOCK_ALGORITHMS.keys() - {"hierarchy_block"}),
    ],
    ids=["full", "block-causal"],
)
def test_the_controls_are_the_tables(family: Family, names: set[str]) -> None:
    offered = page_options(model_of(family), "m", "1")
    assert offered["algorithm"] == family.default_algorithm
    assert offered["algorithms"].keys() == set(names)
    kind = family.is_block_causal
    records = BLOCK_ALGORITHMS if kind else ALGORITHMS
    for name, algorithm in offered["algorithms"].items():
        fields = {field["name"]: field for field in algorithm["fields"]}
        assert fields.keys() >= set(records[name].parameters)
        assert tuple(fields["cache"]["choices"]) == records[name].caches
        for field in fields:
            assert BY_NAME[field].is_used_by(name, is_block_causal=kind)
            assert fields[field]["doc"] == BY_NAME[field].doc


def test_defaults_are_those_that_act() -> None:
    def default(family: Family, algorithm: str, field: str, **server: Any) -> Any:
        offered = page_options(model_of(family, **server), "m", "1")
        fields = offered["algorithms"][algorithm]["fields"]
        (found,) = [f for f in fields if f["name"] == field]
        return found.get("default")

    assert default(SDAR, "low_confidence_dynamic", "threshold") == 0.85  # the family's
    assert default(LLADA2, "joint_threshold", "threshold") == 0.95  # the algorithm's
    assert default(DREAM, "multi_block", "threshold") == 0.9  # of families that shift logits
    assert default(DREAM, "threshold", "cache", cache="dual") == "dual"  # the server's
    assert default(DREAM, "dream", "cache", cache="dual") == "none"  # which dream has not
    assert default(DREAM, "dream", "steps", steps=8) == 8


def test_what_the_server_offers(client: Client) -> None:
    offered = client.http.get("/page/options.json").json()
    assert (offered["model"], offered["family"]) == ("llada-tiny", "llada")
    assert offered["algorithms"].keys() == ALGORITHMS.keys()


# ---- status ------------------------------------------------------------------------------------


def test_who_runs_and_how_far(client: Client) -> None:
    client.wait_for_num_requests(0)  # of tests before
    idle = client.http.get("/status.json").json()
    assert idle["requests"] == []
    assert idle["pool_bytes"]["budget"] > idle["pool_bytes"]["used_pages"] == 0
    long = {"gen_length": 1024, "block_length": 4, "cache": "dual", "ignore_eos": True}
    body = {"prompt": QUESTION, **long, "stream": True, "stream_canvas": True}
    headers = {"X-Request-Id": "watched"}
    with client.http.stream("POST", GENERATE, json=body, headers=headers) as response:
        lines = response.iter_lines()
        for _ in range(5):  # an event and an empty line each
            next(lines)
        found = client.http.get("/status.json").json()
        (request,) = found["requests"]
        assert (request["id"], request["state"]) == ("watched-0", "running")
        assert (request["canvas_tokens"], request["cache"]) == (1024, "dual")
        assert 1 <= request["committed"] < 1024
        assert request["committed"] == request["forwards"]  # one token a step
        assert 0 < request["kept_bytes"] <= found["pool_bytes"]["used_pages"]
        assert request["seconds"] > 0
    client.wait_for_num_requests(0)


# ---- in a browser ------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_its_logic() -> None:
    command = ["node", "--test", str(ROOT / "tests" / "server" / "page_logic.mjs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Browser]:
    browser.open(f"{server.url}/?{id(object())}")
    browser.wait_for("!document.getElementById('send').disabled")
    yield browser
    assert browser.errors == []


def part(name: str, pane: int = 0) -> str:
    return f"document.querySelectorAll('.pane')[{pane}].querySelector('[data-part={name}]')"


def ask(page: Browser, question: str) -> None:
    """By the keyboard alone."""
    page.run("document.getElementById('question').focus()")
    page.type(question)
    page.key("Enter")
    page.wait_for("[...document.querySelectorAll('.pane')].every(p => p.dataset.state === 'done')")


@needs_chromium
def test_a_question_is_answered_and_every_step_can_be_seen_again(page: Browser) -> None:
    ask(page, QUESTION)
    assert page.run("document.querySelector('.answer').textContent") == ANSWER
    assert page.run(f"{part('committed')}.textContent") == "32/32"
    assert page.run(f"{part('forwards')}.textContent") == "32"
    page.run(f"{part('slider')}.focus()")
    page.key("ArrowLeft")
    committed = page.run(f"{part('committed')}.textContent")
    assert committed != "32/32"
    assert committed.endswith("/32")
    page.run("document.querySelector('.scroller canvas').focus()")
    page.key("ArrowRight")
    told = page.run(f"{part('readout')}.textContent")
    assert re.fullmatch(r'position 1, block 1: "The" \w[\w ]*, confidence 0\.\d+|.* 1\.000', told)


@needs_chromium
def test_two_settings_on_one_question_and_the_link_to_it(
    page: Browser, server: ServerProcess
) -> None:
    page.run("document.getElementById('compare').click()")
    page.run(
        "{ const s = document.querySelectorAll('select[name=algorithm]')[1];"
        "s.value = 'threshold'; s.dispatchEvent(new Event('change')); }"
    )
    ask(page, QUESTION)
    answers = "[...document.querySelectorAll('.answer')].map(a => a.textContent)"
    assert page.run(answers) == [ANSWER, ANSWER]
    forwards = int(page.run(f"{part('forwards', 1)}.textContent"))
    assert forwards < 32
    page.run("document.getElementById('link').click()")
    page.wait_for("location.hash.startsWith('#ask=')")
    link = page.run("location.href")
    page.open("about:blank")
    page.open(link)
    page.wait_for("!document.getElementById('send').disabled")
    assert page.run("document.getElementById('question').value") == QUESTION
    assert page.run("document.querySelectorAll('select[name=algorithm]')[1].value") == "threshold"
    ask(page, "")
    assert int(page.run(f"{part('forwards', 1)}.textContent")) == forwards


@needs_chromium
def test_a_refusal_is_told_and_the_picture_is_a_file(page: Browser) -> None:
    page.run(
        "{ const s = document.querySelector('input[name=gen_length]');"
        "s.value = 7000; s.dispatchEvent(new Event('change')); }"
    )
    page.run("document.getElementById('question').focus()")
    page.type(QUESTION)
    page.key("Enter")
    page.wait_for(f"!{part('error')}.hidden")
    assert "gen_length" in page.run(f"{part('error')}.textContent")
    page.errors.clear()  # the browser logs a 400
    page.run(
        "{ const s = document.querySelector('input[name=gen_length]');"
        "s.value = 32; s.dispatchEvent(new Event('change')); }"
    )
    ask(page, QUESTION)
    page.run(
        "{ const make = URL.createObjectURL.bind(URL); URL.createObjectURL = (blob) => {"
        "blob.text().then((t) => window.saved = t); return make(blob); } }"
    )
    page.run(f"{part('svg')}.click()")
    page.wait_for("window.saved")
    picture = ElementTree.fromstring(page.run("window.saved"))
    texts = ["".join(t.itertext()) for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"The", "Paris"} <= set(texts)


@needs_chromium
def test_an_answer_that_must_match_is_shown_to_match(page: Browser) -> None:
    page.run(
        "{ const s = document.querySelector('select[name=answer]');"
        "s.value = 'choice'; s.dispatchEvent(new Event('change')); }"
    )
    assert page.run("document.querySelector('textarea[name=language]').value").startswith("Paris")
    ask(page, QUESTION)
    assert page.run("document.querySelector('.answer p').textContent") == "Paris"
    assert page.run("document.querySelector('.verdict').textContent") == "matches: one of"
    page.run(
        "{ const s = document.querySelector('textarea[name=language]');"
        "s.value = ''; s.dispatchEvent(new Event('input')); }"
    )
    page.run("document.getElementById('question').focus()")
    page.type(QUESTION)
    page.key("Enter")
    page.wait_for(f"!{part('error')}.hidden")
    assert page.run(f"{part('error')}.textContent") == "one of: wanted one choice a line"


@needs_chromium
def test_the_status_page(page: Browser, server: ServerProcess) -> None:
    page.open(f"{server.url}/status")
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    assert "for steps" in page.run("document.getElementById('pool').getAttribute('aria-label')")
    assert page.run("document.getElementById('none').hidden") is False
