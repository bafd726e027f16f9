# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: its files, its settings, and its behaviour in a browser."""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.programs import ROOT, output_of
from tests.server.browser import Browser
from tests.server.client import ANSWER, GENERATE, PUZZLE, QUESTION, Client
from tests.server.process import ServerProcess
from vllm.diffusion import __version__
from vllm.diffusion.api.documentation.offline_docs import OPEN_PATHS as DOCUMENTATION_PATHS
from vllm.diffusion.api.documentation.offline_docs import STATIC as DOCUMENTATION
from vllm.diffusion.api.page.options import page_options
from vllm.diffusion.api.page.site import OPEN_PATHS, STATIC
from vllm.diffusion.request.algorithms import ALGORITHMS, BLOCK_ALGORITHMS
from vllm.diffusion.request.families import (
    DIFFUSION_GEMMA,
    DREAM,
    IDLM,
    LLADA,
    LLADA2,
    LLADA21,
    LLADA22,
    NEMOTRON,
    SDAR,
    Family,
)
from vllm.diffusion.request.fields import BY_NAME
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

# Any address from which a file could be loaded. The name of SVG's namespace is no address.
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")
VENDOR = STATIC / "vendor"  # third-party files
OWN_FILES = [p for p in (*STATIC.iterdir(), *DOCUMENTATION.iterdir()) if p.is_file()]
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
PHONE, DESK = (390, 844), (1280, 800)


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(OWN_FILES), ids=lambda file: file.name)
def test_nothing_is_loaded_from_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not ADDRESS.findall(text)


def test_files_of_others_are_as_published() -> None:
    text = (VENDOR / "VERSIONS.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^([0-9a-f]{64})  (\S+)  \S+@[\d.]+ \S+  \S+$", text, re.M)
    versions = set(re.findall(r"@([\d.]+) ", text))
    documented = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [version for version in versions if version not in documented] == []
    files = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    licences = {f"{path.name}/LICENSE.txt" for path in VENDOR.iterdir() if path.is_dir()}
    assert {name for _, name in listed} | licences | {"VERSIONS.txt"} == files
    for digest, name in listed:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name


def test_files_need_no_key_and_are_not_sent_twice(client: Client) -> None:
    for path in OPEN_PATHS | DOCUMENTATION_PATHS - {"/openapi.json"}:
        answer = client.http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        again = client.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.http.get("/page/routes.py").status_code == 404
    assert client.http.get("/").headers["content-type"] == "text/html; charset=utf-8"


def test_versions(client: Client) -> None:
    assert client.http.get("/version").json() == {"version": "0.33.0", "mosaic": __version__}


# ---- settings ----------------------------------------------------------------------------------


CAUSAL = {"self_speculation", "autoregressive"}
STRICT = {"introspective", "autoregressive"}
OPEN = {"entropy_bound"}
NOT_CAUSAL = BLOCK_ALGORITHMS.keys() - CAUSAL - STRICT - OPEN


def model_of(family: Family, **defaults: Any) -> ServedModel:
    ids = SpecialIds(mask=1, eos=2, eot=None, stop=frozenset({2}))
    return ServedModel(family, ids, max_model_len=64, vocab_size=9, defaults=defaults)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (DREAM, ALGORITHMS.keys()),
        (SDAR, NOT_CAUSAL - {"hierarchy_block", "levenshtein"}),
        (LLADA22, NOT_CAUSAL - {"hierarchy_block"}),
        (NEMOTRON, {"low_confidence_dynamic", "semi_ar"} | CAUSAL),
        (IDLM, STRICT),
        (DIFFUSION_GEMMA, OPEN),
    ],
    ids=["full", "block-causal", "edits", "causal", "strict", "open"],
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


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        (LLADA, ("pinned", "noise", "edit_threshold", "max_edits", "slack")),
        (LLADA21, ("pinned",)),
        (LLADA22, ("pinned",)),
        (SDAR, ("pinned", "noise", "edit_threshold", "max_edits", "slack")),
        (NEMOTRON, None),
    ],
)
def test_what_limits_a_revision(family: Family, limits: tuple[str, ...] | None) -> None:
    assert page_options(model_of(family), "m", "1")["revises"] == limits


def test_defaults_are_those_that_act() -> None:
    def default(family: Family, algorithm: str, field: str, **server: Any) -> Any:
        offered = page_options(model_of(family, **server), "m", "1")
        fields = offered["algorithms"][algorithm]["fields"]
        (actual,) = [f for f in fields if f["name"] == field]
        return actual.get("default")

    assert default(SDAR, "low_confidence_dynamic", "threshold") == 0.85  # the family's default
    assert default(LLADA2, "joint_threshold", "threshold") == 0.95  # the algorithm's default
    assert default(DREAM, "multi_block", "threshold") == 0.9  # default of shifted logits
    assert default(DREAM, "threshold", "cache", cache="dual") == "dual"  # the server's default
    assert default(DREAM, "dream", "cache", cache="dual") == "none"  # `dream` supports no cache
    assert default(DREAM, "dream", "steps", steps=8) == 8
    assert default(SDAR, "low_confidence_dynamic", "gen_length") == 32  # half of the longest
    assert default(DREAM, "dream", "gen_length") is None  # the canvas grows


def test_the_length_is_left_to_the_server_where_the_canvas_can_grow() -> None:
    def length(family: Family, algorithm: str, **server: Any) -> Any:
        offered = page_options(model_of(family, **server), "m", "1")
        return offered["algorithms"][algorithm]["auto_length"]

    assert length(DREAM, "threshold") == {"canvas": "grow", "first": 256, "max_tokens": 32}
    assert length(DREAM, "threshold", canvas="fixed")["canvas"] == "fixed"  # the server's default
    assert length(DREAM, "dream")["canvas"] == "grow"
    own = dataclasses.replace(model_of(DREAM), default_max_tokens=32)
    algorithms = page_options(own, "m", "1")["algorithms"]
    assert algorithms["dream"]["auto_length"]["canvas"] == "fixed"  # it cannot grow
    assert algorithms["threshold"]["auto_length"]["canvas"] == "grow"
    assert length(LLADA, "daedal") == {"first": 64, "max_tokens": 32}  # the model chooses it
    assert length(SDAR, "low_confidence_dynamic") is None


def test_what_the_server_offers(client: Client) -> None:
    offered = client.http.get("/page/options.json").json()
    assert (offered["model"], offered["family"]) == ("llada-tiny", "llada")
    assert offered["algorithms"].keys() == ALGORITHMS.keys()
    assert len(offered["end_ids"]) == 2


# ---- status ------------------------------------------------------------------------------------


def test_who_runs_and_how_far(client: Client) -> None:
    client.wait_for_num_requests(0)  # requests of earlier tests have ended
    idle = client.http.get("/status.json").json()
    assert idle["requests"] == [] and idle["products"].startswith(("PyTorch's", "kernels"))
    assert idle["pool_bytes"]["budget"] > idle["pool_bytes"]["used_pages"] == 0
    long = {"gen_length": 1024, "block_length": 4, "cache": "dual", "ignore_eos": True}
    body = {"prompt": QUESTION, **long, "stream": True, "stream_canvas": True}
    headers = {"X-Request-Id": "watched"}
    with client.http.stream("POST", GENERATE, json=body, headers=headers) as response:
        lines = response.iter_lines()
        for _ in range(5):  # an event and an empty line each
            next(lines)
        content = client.http.get("/status.json").json()
        (request,) = content["requests"]
        assert (request["id"], request["state"]) == ("watched-0", "running")
        assert (request["canvas_tokens"], request["cache"]) == (1024, "dual")
        assert 1 <= request["committed"] < 1024
        assert request["committed"] == request["forwards"]  # one token per step
        assert 0 < request["kept_bytes"] <= content["pool_bytes"]["used_pages"]
        assert request["seconds"] > 0
        assert request["waits_for"] is None
        assert (content["row_budget"], content["max_requests"]) == (8192, 128)
        alone = {"prompt": QUESTION, "gen_length": 8, "force_single_batch": True, "stream": True}
        with client.http.stream(
            "POST", GENERATE, json=alone, headers={"X-Request-Id": "alone"}
        ) as waiting:
            client.wait_for_metric("vllm:num_requests_waiting", 1)
            states = {r["id"]: r for r in client.http.get("/status.json").json()["requests"]}
            assert states["alone-0"]["state"] == "waiting"
            assert states["alone-0"]["waits_for"] == "others"
            text = client.http.get("/metrics").text
            assert re.search(
                r'^dllm:requests_waiting\{.*waits_for="others"\} 1', text, re.MULTILINE
            )
            waiting.close()
    client.wait_for_num_requests(0)


def test_the_status_is_asked_for_at_the_same_time(client: Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: client.http.get("/status.json"), range(64)))
    assert {answer.status_code for answer in answers} == {200}


# ---- in a browser ------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_its_logic() -> None:
    output_of("node", "--test", ROOT / "tests" / "server" / "page_logic.mjs")


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Browser]:
    """Open the page as for a first visit; then check for errors and for foreign addresses."""
    browser.show()
    browser.errors.clear()
    browser.requested.clear()
    browser.open(f"{server.url}/status")  # the page stores its settings when it is left
    browser.run("sessionStorage.clear()")
    browser.forget(server.url)
    visit(browser, f"{server.url}/")
    yield browser
    assert browser.errors == []
    assert {
        url for url in browser.requested if not url.startswith((f"{server.url}/", "data:"))
    } <= {"about:blank"}


def visit(page: Browser, url: str) -> None:
    page.open("about:blank")
    page.open(url)
    page.wait_for("document.body.dataset.state === 'ready'")


def part(name: str, pane: int = 0) -> str:
    return f"document.querySelectorAll('.pane')[{pane}].querySelector('[data-part={name}]')"


def text_of(page: Browser, name: str, pane: int = 0) -> str:
    actual: str = page.run(f"{part(name, pane)}.textContent")
    return actual


def choose(page: Browser, name: str, value: str, pane: int = 0) -> None:
    """Set one of the settings, as a user does."""
    page.run(
        f"{{ const c = document.querySelectorAll('.pane')[{pane}].querySelector('[name={name}]');"
        f"c.value = {json.dumps(value)};"
        "c.dispatchEvent(new Event(c.tagName === 'TEXTAREA' ? 'input' : 'change')); }"
    )


def begin(page: Browser, question: str) -> None:
    """Send a question with the keyboard only."""
    page.run("document.getElementById('question').focus()")
    page.type(question)
    page.key("Enter")


def wait_for_answer(page: Browser) -> None:
    page.wait_for("document.getElementById('send').textContent === 'Send'")
    page.wait_for("document.querySelector('.turn:last-of-type .text:not(.open)')")


def ask(page: Browser, question: str) -> None:
    begin(page, question)
    wait_for_answer(page)


def answers(page: Browser) -> list[str]:
    actual: list[str] = page.run(
        "[...document.querySelectorAll('.answer .text')].map(a => a.innerText)"
    )
    return actual


def questions(page: Browser) -> list[str]:
    actual: list[str] = page.run("[...document.querySelectorAll('.mine')].map(q => q.textContent)")
    return actual


def press(page: Browser, label: str) -> None:
    page.run(f"document.querySelector('[aria-label=\"{label}\"]').click()")


def first_position(page: Browser) -> str:
    """Return the readout of the first position in the step that the page shows."""
    page.run("document.querySelector('.scroller canvas').focus()")
    page.key("Home")
    return text_of(page, "readout")


def test_a_question_is_answered_and_every_step_can_be_seen_again(page: Browser) -> None:
    ask(page, QUESTION)
    assert answers(page) == [ANSWER]
    assert text_of(page, "committed") == "32/32"
    assert text_of(page, "forwards") == "32"
    page.run(f"{part('slider')}.focus()")
    committed = text_of(page, "committed")
    for _ in range(4):  # from the end past the last step; a slow page joins steps
        if committed == "32/32":
            page.key("ArrowLeft")
            committed = text_of(page, "committed")
    assert committed != "32/32"
    assert committed.endswith("/32")
    actual = first_position(page)
    if actual.endswith("masked"):  # a slow page has joined the steps that commit the position
        page.run(f"{part('slider')}.focus()")
        page.key("ArrowRight")
        actual = first_position(page)
    assert re.fullmatch(r'position 1, block 1: "The" \w[\w ]*, confidence 0\.\d+|.* 1\.000', actual)


def test_two_settings_on_one_question_and_the_link_to_it(
    page: Browser, server: ServerProcess
) -> None:
    page.run("document.getElementById('compare').click()")
    choose(page, "algorithm", "threshold", pane=1)
    ask(page, QUESTION)
    page.wait_for("document.querySelectorAll('.text:not(.open)').length === 2")
    assert answers(page) == [ANSWER, ANSWER]
    forwards = int(text_of(page, "forwards", 1))
    assert forwards < 32
    page.run("document.getElementById('link').click()")
    page.wait_for("location.hash.startsWith('#ask=')")
    link = page.run("location.href")
    page.open(f"{server.url}/status")
    page.run("sessionStorage.clear()")
    visit(page, link)
    assert page.run("document.getElementById('question').value") == QUESTION
    assert page.run("document.querySelectorAll('select[name=algorithm]')[1].value") == "threshold"
    ask(page, "")
    page.wait_for("document.querySelectorAll('.text:not(.open)').length === 2")
    assert int(text_of(page, "forwards", 1)) == forwards


def test_a_refusal_is_told_and_the_picture_is_a_file(page: Browser) -> None:
    choose(page, "gen_length", "7000")
    begin(page, QUESTION)
    page.wait_for(f"!{part('error')}.hidden")
    assert "gen_length" in text_of(page, "error")
    page.errors.clear()  # the browser logs status 400
    choose(page, "gen_length", "32")
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


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("gen_length", "-5", "length (gen_length): given -5; wanted at least 1"),
        ("gen_length", "1e12", "length (gen_length): given 1e12; wanted at most 4096"),
        ("gen_length", "3000000000", "length (gen_length): given 3000000000; wanted at most 4096"),
        ("gen_length", "1.5", "length (gen_length): given 1.5; wanted a whole number"),
        ("cfg_scale", "-1", "guidance (cfg_scale): given -1; wanted at least 0.0"),
        ("steps", "0", "steps: given 0; wanted at least 1"),
    ],
)
def test_a_number_that_cannot_be_sent_is_told_at_its_control(
    page: Browser, name: str, value: str, wanted: str
) -> None:
    choose(page, name, value)
    begin(page, QUESTION)
    page.wait_for(f"!{part('error')}.hidden")
    assert text_of(page, "error").replace(".0", "") == wanted.replace(".0", "")
    assert wanted.replace(".0", "").endswith(
        page.run("document.querySelector('.fault').textContent").replace(".0", "")
    )
    assert page.run(f"document.querySelector('[name={name}]').ariaInvalid") == "true"
    assert page.run("document.querySelector('.fault').checkVisibility()")
    assert page.run("document.getElementById('send').textContent") == "Send"
    assert not any(url.endswith("/generate") for url in page.requested)
    choose(page, name, "")
    assert page.run("document.querySelector('.fault')") is None
    ask(page, QUESTION)
    assert answers(page)[-1] == ANSWER


def test_letters_in_a_number_are_told(page: Browser) -> None:
    page.run("document.querySelector('.settings').open = true")
    page.run("document.querySelector('[name=steps]').focus()")
    page.type("e")
    page.run("document.querySelector('[name=steps]').blur()")
    page.wait_for("document.querySelector('.fault')")
    begin(page, QUESTION)
    page.wait_for(f"!{part('error')}.hidden")
    assert text_of(page, "error") == "steps: given no number; wanted a number"


def test_an_error_of_a_script_leaves_the_page_usable(page: Browser) -> None:
    page.run("window.fetch = () => { throw new RangeError('broken'); }")
    begin(page, QUESTION)
    page.wait_for(f"!{part('error')}.hidden")
    assert text_of(page, "error") == "broken"
    assert page.run("document.getElementById('send').textContent") == "Send"
    page.run("window.AbortController = function () { throw new RangeError('worse'); }")
    begin(page, QUESTION)
    page.wait_for(f"{part('error')}.textContent === 'worse'")
    assert page.run("document.getElementById('send').textContent") == "Send"
    page.errors.clear()


def link_to(server: ServerProcess, state: Any) -> str:
    """Return the address of the page with a state, as *Copy link* makes it."""
    coded = base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    return f"{server.url}/#ask={coded}"


@pytest.mark.parametrize(
    "state",
    [
        [1],
        {"turns": 5},
        {"turns": [{"question": 3, "answers": None}]},
        {"panes": [{"settings": None}]},
        {"panes": [{"settings": {"structured_outputs": {}}}], "question": "x"},
    ],
)
def test_a_link_that_cannot_be_read_leaves_the_page_usable(
    page: Browser, server: ServerProcess, state: Any
) -> None:
    visit(page, link_to(server, state))
    ask(page, QUESTION)
    assert answers(page) == [ANSWER]


def test_what_there_is_nothing_for_is_disabled(page: Browser) -> None:
    parts = ("play", "svg", "density", "curl", "slider")
    assert [page.run(f"{part(name)}.disabled") for name in parts] == [True] * 5
    assert page.run("document.activeElement.id") == "question"
    ask(page, QUESTION)
    assert [page.run(f"{part(name)}.disabled") for name in parts] == [False] * 5
    page.run("document.getElementById('system').value = 'x'")
    choose(page, "steps", "16")
    page.run("document.getElementById('clear').click()")
    assert [page.run(f"{part(name)}.disabled") for name in parts] == [True] * 5
    assert page.run("document.querySelector('[name=steps]').value") == ""
    assert page.run("document.getElementById('system').value") == ""


def test_a_run_begins_with_an_empty_timeline_and_a_stopped_answer_is_not_said(
    page: Browser,
) -> None:
    page.run(LISTEN)
    ask(page, QUESTION)
    assert int(page.run(f"{part('slider')}.max")) > 0
    for name in ("gen_length", "block_length"):
        choose(page, name, "2048")
    begin(page, PUZZLE)
    page.wait_for("window.sent.length === 2")
    assert page.run("window.timelines") == [0, 0]
    page.key("Escape")
    page.wait_for(f"{part('error')}.textContent === 'Stopped.'")
    assert page.run(f"{part('error')}.dataset.bad") == "false"
    said = "[...document.querySelectorAll('.answer')].map((a) => a.dataset.said)"
    assert page.run(said) == ["true", "false"]
    for name in ("gen_length", "block_length"):
        choose(page, name, "32")
    ask(page, "What is 3 plus 4?")
    assert [m["content"] for m in page.run("window.sent")[2]["messages"]] == [
        QUESTION,
        ANSWER,
        "What is 3 plus 4?",
    ]


def test_without_a_length_the_canvas_grows_with_the_answer(page: Browser) -> None:
    page.run(LISTEN)
    assert page.run("document.querySelector('[name=gen_length]').placeholder") == "auto"
    assert page.run("document.querySelector('[name=canvas]').selectedOptions[0].text") == "auto"
    choose(page, "answer", "regex")
    choose(page, "language", r"(The capital of France is Paris\. ){40}")
    choose(page, "steps", "8")
    ask(page, QUESTION)
    (sent,) = page.run("window.sent")
    assert "gen_length" not in sent
    assert (sent["canvas"], sent["max_tokens"]) == ("grow", 2048)
    assert answers(page)[0].count("Paris") == 40
    committed, length = map(int, text_of(page, "committed").split("/"))
    assert 320 <= committed <= length
    page.run(f"{part('slider')}.focus()")
    page.key("Home")
    page.key("ArrowRight")
    assert int(text_of(page, "committed").split("/")[1]) < length
    page.run("document.querySelector('.scroller canvas').focus()")
    page.key("End")
    assert text_of(page, "readout") == f"position {length}, block {length // 32}: " + (
        "not part of the canvas yet"
    )
    choose(page, "answer", "")
    choose(page, "steps", "")
    choose(page, "canvas", "fixed")
    ask(page, QUESTION)
    assert page.run("window.sent")[1]["canvas"] == "fixed"
    assert text_of(page, "committed").endswith("/32")  # max_new_tokens of the checkpoint


def test_an_algorithm_that_chooses_the_length_has_no_kind_of_canvas(page: Browser) -> None:
    page.run(LISTEN)
    choose(page, "algorithm", "daedal")
    assert page.run("document.querySelector('[name=canvas]')") is None
    ask(page, QUESTION)
    assert answers(page) == [ANSWER]
    (sent,) = page.run("window.sent")
    assert "canvas" not in sent and "gen_length" not in sent
    assert int(text_of(page, "committed").split("/")[1]) >= 64  # the length that the model chose


def test_canvases_side_by_side_begin_at_one_height(page: Browser) -> None:
    page.run("document.getElementById('compare').click()")
    choose(page, "algorithm", "multi_block", pane=1)
    ask(page, QUESTION)
    tops = "[...document.querySelectorAll('.scroller')].map((s) => s.getBoundingClientRect().top)"
    first, second = page.run(tops)
    assert first == second


def test_an_answer_that_must_match_is_shown_to_match(page: Browser) -> None:
    choose(page, "answer", "choice")
    assert page.run("document.querySelector('textarea[name=language]').value").startswith("Paris")
    ask(page, QUESTION)
    offered = page.run("document.querySelector('textarea[name=language]').value").split("\n")
    assert answers(page)[0] in offered
    assert page.run("document.querySelector('.verdict').textContent") == "matches: one of"
    choose(page, "language", "")
    begin(page, QUESTION)
    page.wait_for(f"!{part('error')}.hidden")
    assert text_of(page, "error") == "one of: wanted one choice per line"


def test_an_answer_that_ends_early_leaves_nothing_grey(page: Browser) -> None:
    """No cell after the end stays grey, and the rate does not count end tokens."""
    choose(page, "gen_length", "64")
    choose(page, "block_length", "16")
    ask(page, QUESTION)
    masked = (
        "(() => { const c = document.querySelector('.scroller canvas');"
        "const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const style = getComputedStyle(c);"
        "const of = (n) => style.getPropertyValue('--' + n).match(/\\w\\w/g)"
        ".map((v) => parseInt(v, 16)); const ink = of('ink'), paper = of('paper');"
        "let found = 0; for (let i = 0; i < data.length; i += 4)"
        " if (data[i + 3] && data[i + 3] < 40"
        " && [0, 1, 2].every((k) => Math.abs(data[i + k] - ink[k]) < 24)) found++;"
        "return found; })()"
    )
    page.wait_for(f"{masked} === 0")
    rate, seconds = float(text_of(page, "rate")), float(text_of(page, "seconds").removesuffix(" s"))
    assert 5 < rate * seconds < 9  # seven tokens count, of sixteen committed ones
    page.run("document.querySelector('.scroller canvas').focus()")
    page.key("End")
    assert "not needed" in text_of(page, "readout")
    page.run(f"{part('slider')}.focus()")
    page.key("Home")
    page.wait_for(f"{masked} > 1000")  # pixels of the empty canvas


def test_a_short_run_is_played_once_at_a_pace_that_can_be_read(page: Browser) -> None:
    page.show(still=False)
    choose(page, "gen_length", "32")
    choose(page, "steps", "4")
    page.run(
        "window.seen = []; window.plays = 0;"
        f"{{ const slider = {part('slider')}, play = {part('play')};"
        "new MutationObserver(() => seen.push([performance.now(), Number(slider.value)]))"
        ".observe(slider, { attributes: true });"
        "new MutationObserver(() => { if (play.textContent === 'Pause') plays++; })"
        ".observe(play, { attributes: true }); }"
    )
    ask(page, QUESTION)
    page.wait_for(f"plays && {part('play')}.textContent === 'Replay'")
    assert page.run("plays") == 1
    steps = int(page.run(f"{part('slider')}.max"))
    seen = page.run("seen")[-steps - 1 :]
    assert [value for _, value in seen] == list(range(steps + 1))
    assert seen[-1][0] - seen[0][0] > 200 * steps  # milliseconds
    assert text_of(page, "committed") == "32/32"


def test_a_phone_shows_the_conversation_first_and_send_at_once(page: Browser) -> None:
    page.show(*PHONE)
    visible = (
        "(() => { const b = document.getElementById('send').getBoundingClientRect();"
        "return b.top >= 0 && b.bottom <= innerHeight && document.elementFromPoint("
        "(b.left + b.right) / 2, (b.top + b.bottom) / 2).id === 'send'; })()"
    )
    order = (
        "document.getElementById('log').getBoundingClientRect().bottom <= "
        "document.getElementById('stage').getBoundingClientRect().top"
    )
    assert page.run(visible)
    assert page.run(order)
    ask(page, QUESTION)
    assert page.run(visible)
    assert page.run(order)
    seen = "document.querySelector('.answer').getBoundingClientRect()"
    assert page.run(f"{seen}.top >= 0 && {seen}.bottom < innerHeight / 2")
    page.run("scrollTo(0, document.body.scrollHeight)")
    assert page.run(visible)


def test_the_first_view_shows_the_question_and_nothing_that_is_idle(page: Browser) -> None:
    def visible(selector: str) -> bool:
        return bool(page.run(f"document.querySelector('{selector}').checkVisibility()"))

    assert page.run("document.activeElement.id") == "question"
    assert page.run("document.getElementById('send').disabled")
    assert visible(".settings summary") and visible(".legend") and visible(".example")
    assert not visible(".controls") and not visible(".counters") and not visible(".replay")
    ask(page, QUESTION)
    assert not visible(".controls")
    assert visible(".counters") and visible(".replay")
    speed = page.run("document.querySelector('.speed').textContent")
    assert re.fullmatch(r"[\d.]+ tokens/s · [\d.]+ s · 32 steps", speed)


THEME = "document.documentElement.dataset.theme"


def test_the_theme_is_the_systems_or_chosen(page: Browser, server: ServerProcess) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.run(paper)
    page.show(dark=True)
    page.wait_for(f"{THEME} === 'dark'")
    dark = page.run(paper)
    assert dark != light
    page.run("document.getElementById('theme').click()")
    assert page.run("document.getElementById('theme').ariaLabel") == "Theme: light"
    assert page.run(paper) == light
    assert page.run(CONTRAST) == []
    page.run("document.getElementById('theme').click()")
    page.show(dark=False)
    assert page.run(paper) == dark
    visit(page, f"{server.url}/")
    assert page.run(paper) == dark
    page.open(f"{server.url}/status")
    assert page.run(paper) == dark
    page.run("document.getElementById('theme').click()")
    assert page.run("document.getElementById('theme').title") == "Theme: system"
    assert page.run(paper) == light


def test_keys_do_what_the_list_says(page: Browser) -> None:
    ask(page, QUESTION)
    page.key("ArrowUp")
    assert page.run("document.getElementById('question').value") == QUESTION
    assert page.run("document.getElementById('edited').textContent") == "Editing question 1"
    page.key("Escape")
    assert page.run("document.getElementById('question').value") == ""
    page.key("/", control=True)
    assert page.run("document.getElementById('shortcuts').open")
    listed = page.run("[...document.querySelectorAll('.keys div')].map((row) => row.innerText)")
    assert any("stop the answer" in row and "Esc" in row for row in listed)
    assert all(len(row.split()) > 2 for row in listed)
    page.key("Escape")
    assert not page.run("document.getElementById('shortcuts').open")
    page.key("k", control=True)
    page.wait_for("document.getElementById('history').open")
    page.key("Escape")
    page.key("o", control=True, shift=True)
    page.wait_for("document.querySelectorAll('.turn').length === 0")
    assert titles(page) == [QUESTION]


def check_look(page: Browser, width: int) -> None:
    """Text has WCAG's contrast of 4.5, elements have names, and nothing is wider than the page."""
    assert page.run(CONTRAST) == []
    assert page.nameless() == []
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_all_text_can_be_read(
    page: Browser, server: ServerProcess, size: tuple[int, int], dark: bool
) -> None:
    """Every state of the page, and /status, can be read and is named for screen readers."""
    page.show(*size, dark=dark)
    page.wait_for(f"{THEME} === '{'dark' if dark else 'light'}'")
    check_look(page, size[0])
    page.run("document.querySelectorAll('details').forEach((box) => box.open = true)")
    choose(page, "gen_length", "1024")
    choose(page, "block_length", "1024")
    begin(page, PUZZLE)
    page.wait_for(f"parseInt({part('committed')}.textContent) > 1")
    check_look(page, size[0])
    page.key("Escape")
    page.wait_for(f"{part('error')}.textContent === 'Stopped.'")
    choose(page, "gen_length", "32")
    choose(page, "block_length", "32")
    choose(page, "answer", "regex")
    ask(page, QUESTION)
    press(page, "Regenerate answer 2")
    wait_for_answer(page)
    press(page, "Edit question 2")
    page.run("document.getElementById('compare').click()")
    check_look(page, size[0])
    page.key("/", control=True)
    check_look(page, size[0])
    page.key("Escape")
    titles(page)
    press(page, f"More for {PUZZLE}")
    check_look(page, size[0])
    press(page, f"Rename {PUZZLE}")
    check_look(page, size[0])
    page.key("Escape")
    page.wait_for("!document.querySelector('.title')")
    press(page, f"Delete {PUZZLE}")
    check_look(page, size[0])
    page.open(f"{server.url}/status")
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    check_look(page, size[0])


def test_a_conversation_survives_a_reload(page: Browser, server: ServerProcess) -> None:
    ask(page, QUESTION)
    page.run(
        "{ const s = document.getElementById('system'); s.value = 'Be brief.';"
        "s.dispatchEvent(new Event('input')); }"
    )
    choose(page, "steps", "16")
    visit(page, f"{server.url}/")
    assert answers(page) == [ANSWER]
    assert page.run("document.querySelector('.mine').textContent") == QUESTION
    assert page.run("document.getElementById('system').value") == "Be brief."
    assert page.run("document.querySelector('[name=steps]').value") == "16"
    page.run("document.getElementById('clear').click()")
    visit(page, f"{server.url}/")
    assert answers(page) == []


LISTEN = (
    "{ const send = window.fetch; window.sent = []; window.timelines = [];"
    "window.fetch = (path, options) => { if (options?.body) {"
    "window.sent.push(JSON.parse(options.body));"
    f"window.timelines.push(Number({part('slider')}.max)); }} return send(path, options); }};"
    "navigator.clipboard.writeText = async (text) => { window.copied = text; }; }"
)


def test_questions_are_edited_and_answers_made_again_and_copied(page: Browser) -> None:
    page.run(LISTEN)
    ask(page, QUESTION)
    ask(page, "What is 3 plus 4?")
    press(page, "Copy answer 1")
    assert page.run("window.copied") == ANSWER
    press(page, "Edit question 2")
    assert page.run("document.getElementById('question').value") == "What is 3 plus 4?"
    page.run("document.getElementById('question').value = ''")
    page.run(
        "{ const s = document.getElementById('system'); s.value = 'Be brief.';"
        "s.dispatchEvent(new Event('input')); }"
    )
    ask(page, "What is 2 plus 2?")
    press(page, "Regenerate answer 1")
    wait_for_answer(page)
    assert questions(page) == [QUESTION]
    assert len(answers(page)) == 1
    sent = [
        [(m["role"], m["content"]) for m in body["messages"]] for body in page.run("window.sent")
    ]
    first = [("user", QUESTION), ("assistant", ANSWER)]
    system = ("system", "Be brief.")
    assert sent[:3] == [
        [("user", QUESTION)],
        [*first, ("user", "What is 3 plus 4?")],
        [system, *first, ("user", "What is 2 plus 2?")],
    ]
    assert sent[3] == [system, ("user", QUESTION)]


def test_a_question_asked_again_is_a_branch_and_nothing_is_lost(
    page: Browser, server: ServerProcess
) -> None:
    other = "What is 3 plus 4?"
    ask(page, QUESTION)
    ask(page, other)
    press(page, "Regenerate answer 1")
    wait_for_answer(page)
    assert questions(page) == [QUESTION]
    assert page.run("document.querySelector('.count').ariaLabel") == "Version 2 of 2"
    press(page, "Edit question 1")
    page.run("document.getElementById('question').value = ''")
    ask(page, "Which city is the capital of Japan?")
    assert page.run("document.querySelector('.count').textContent") == "3/3"
    assert page.run("document.querySelector('[aria-label=\"Next version of turn 1\"]').disabled")
    page.run("document.querySelector('[aria-label=\"Previous version of turn 1\"]').focus()")
    page.key("Enter")
    page.key("Enter")  # the focus has stayed
    assert questions(page) == [QUESTION, other]
    assert len(answers(page)) == 2
    assert page.run("document.activeElement.ariaLabel") == "Next version of turn 1"
    visit(page, f"{server.url}/")
    assert questions(page) == [QUESTION, other]
    page.run(LISTEN)
    ask(page, "and Japan?")
    contents = [m["content"] for m in page.run("window.sent")[0]["messages"]]
    assert contents[::2] == [QUESTION, other, "and Japan?"]


def test_an_answer_is_revised_beside_it_and_locked_parts_stay(page: Browser) -> None:
    page.run(LISTEN)
    ask(page, QUESTION)
    press(page, "Revise answer 1")
    page.run(
        "{ const b = document.getElementById('revised');"
        "b.value = b.value.replace('Paris', 'Rome');"
        "b.dispatchEvent(new Event('input')); b.setSelectionRange(0, 11);"
        "document.querySelector('[name=lock]').click(); }"
    )
    assert page.run("document.querySelector('.locked mark').textContent") == ANSWER[:11]
    page.run("document.querySelector('[name=revise]').click()")
    # The click returns first. Then the browser reports that the dialog is closed, and the page
    # sends the request.
    page.wait_for("document.querySelector('.count')")
    wait_for_answer(page)
    assert answers(page) == [ANSWER]
    assert page.run("document.querySelector('.count').ariaLabel") == "Version 2 of 2"
    text = ANSWER.replace("Paris", "Rome")
    assert page.run("document.querySelector('.diff').textContent").splitlines() == [
        f"-{text}",
        f"+{ANSWER}",
    ]
    body = page.run("window.sent")[1]
    assert (body["canvas_text"], body["pinned"]) == (text, [[0, 11]])
    assert "gen_length" not in body and "max_tokens" not in body


def test_a_text_that_is_not_sent_yet_is_kept(page: Browser, server: ServerProcess) -> None:
    box = "document.getElementById('question').value"
    ask(page, QUESTION)
    page.type("half a question")
    press(page, "Edit question 1")
    assert page.run(box) == QUESTION
    page.key("Escape")
    assert page.run(box) == "half a question"
    visit(page, f"{server.url}/")
    assert page.run(box) == "half a question"
    assert questions(page) == [QUESTION]


def titles(page: Browser) -> list[str]:
    """Open the list of conversations and return their titles."""
    page.run("document.getElementById('past').click()")
    page.wait_for("document.getElementById('history').open")
    actual: list[str] = page.run(
        "[...document.querySelectorAll('.open span')].map(t => t.innerText)"
    )
    return actual


def test_conversations_are_kept_listed_renamed_and_deleted(
    page: Browser, server: ServerProcess
) -> None:
    other = "What is 3 plus 4?"
    assert titles(page) == []
    assert page.run("document.querySelector('#history .none').checkVisibility()")
    page.key("Escape")
    for question in (QUESTION, other):
        page.run("document.getElementById('clear').click()")
        ask(page, question)
    assert titles(page) == [other, QUESTION]
    assert page.run("document.querySelector('[aria-current]').innerText").startswith(other)
    page.run("document.querySelectorAll('.past .open')[1].click()")
    assert answers(page) == [ANSWER]
    assert page.run("document.getElementById('history').open") is False
    titles(page)
    press(page, f"Rename {QUESTION}")
    page.run("document.querySelector('.title').value = ''")
    page.type("Capitals")
    page.key("Enter")
    page.wait_for("!document.querySelector('.title')")
    page.run("document.querySelector('#history .close').click()")
    visit(page, f"{server.url}/")
    assert answers(page) == [ANSWER]
    assert titles(page) == [other, "Capitals"]
    press(page, "Rename Capitals")
    page.type("Nothing")
    page.key("Escape")
    page.wait_for("!document.querySelector('.title')")
    assert page.run("document.getElementById('history').open")
    press(page, "Delete Capitals")
    page.run("document.querySelector('#sure .quiet').click()")
    assert titles(page) == [other, "Capitals"]
    press(page, "Delete Capitals")
    page.run("document.querySelector('#sure .main').click()")
    page.wait_for("document.querySelectorAll('.past').length === 1")
    assert questions(page) == []  # it was the one that is shown
    visit(page, f"{server.url}/")
    assert questions(page) == []
    assert titles(page) == [other]


def test_a_conversation_that_is_left_while_it_runs_keeps_its_question(page: Browser) -> None:
    for name in ("gen_length", "block_length"):
        choose(page, name, "2048")
    begin(page, PUZZLE)
    page.wait_for(f"parseInt({part('committed')}.textContent) >= 0")
    page.run("document.getElementById('clear').click()")
    ask(page, QUESTION)  # at once, while the first request ends
    assert answers(page) == [ANSWER]
    assert page.run(f"{part('error')}.hidden")
    assert titles(page) == [QUESTION, PUZZLE]
    page.run("document.querySelectorAll('.past .open')[1].click()")
    assert questions(page) == [PUZZLE]
    assert page.run("document.querySelector('.note').textContent").startswith("Stopped.")


SAVED = (
    "{ const make = URL.createObjectURL.bind(URL); window.files = [];"
    "URL.createObjectURL = (blob) => {"
    "blob.text().then((t) => window.files.push(t)); return make(blob); } }"
)


def test_a_conversation_is_saved_as_files(page: Browser) -> None:
    page.run(SAVED)
    ask(page, QUESTION)
    press(page, "Regenerate answer 1")
    wait_for_answer(page)
    titles(page)
    press(page, f"Save JSON of {QUESTION}, with all branches")
    page.wait_for("window.files.length === 1")
    press(page, f"Save Markdown of {QUESTION}")
    page.wait_for("window.files.length === 2")
    data, text = page.run("window.files")
    assert [turn["answers"]["A"]["text"] for turn in json.loads(data)["turns"]] == [ANSWER] * 2
    assert text == f"# {QUESTION}\n\n## Question\n\n{QUESTION}\n\n## Answer\n\n{ANSWER}\n"
    load(page, "{}")
    page.wait_for("!document.querySelector('#history .error').hidden")
    assert page.run("document.querySelector('#history .error').textContent") == (
        "This file holds no conversation: no turns"
    )
    load(page, data.replace(QUESTION, "Where is Paris?"))
    page.wait_for("!document.getElementById('history').open")
    page.wait_for("document.querySelector('.mine').textContent === 'Where is Paris?'")
    assert page.run("document.querySelector('.count').textContent") == "2/2"
    assert sorted(titles(page)) == [QUESTION, "Where is Paris?"]


def load(page: Browser, text: str) -> None:
    """Choose a file in the list of conversations."""
    page.run(
        "{ const files = document.querySelector('[type=file]'), chosen = new DataTransfer();"
        f"chosen.items.add(new File([{json.dumps(text)}], 'saved.json'));"
        "files.files = chosen.files; files.dispatchEvent(new Event('change')); }"
    )


def test_two_tabs_do_not_overwrite_each_other(page: Browser) -> None:
    """A conversation that another tab has continued meanwhile is kept next to this tab's."""
    ask(page, QUESTION)
    actual = page.run(
        "(async () => { const { openStore } = await import('/page/store.js');"
        "const { Conversation } = await import('/page/conversation.js');"
        "const store = await openStore(); const [record] = await store.all();"
        "const other = new Conversation(record); other.begin(1, 'elsewhere');"
        "await store.put(other); return (await store.all()).length; })()"
    )
    assert actual == 1
    ask(page, "What is 3 plus 4?")
    assert titles(page) == [QUESTION, QUESTION]
    page.run("document.querySelector('.open:not([aria-current])').click()")
    assert questions(page) == [QUESTION]
    assert page.run("document.getElementById('question').value") == "elsewhere"


EVIL = (
    "**B** `c` <img src=x onerror=ran=1><script>ran=1</script>"
    "[j](javascript:ran=1)[h](http://h/)![i](http://h/i)"
)


def test_an_answer_that_must_match_is_shown_as_it_is(page: Browser) -> None:
    """The format forces the model to return the markup."""
    choose(page, "gen_length", "128")
    choose(page, "answer", "choice")
    choose(page, "language", EVIL)
    ask(page, QUESTION)
    assert answers(page) == [EVIL]
    assert page.run("document.querySelector('.verdict').dataset.match") == "true"
    assert page.run("document.querySelectorAll('.text *').length") == 0
    assert page.run("typeof ran") == "undefined"


def test_markdown_of_an_answer_is_drawn_and_its_html_shown(
    page: Browser, server: ServerProcess
) -> None:
    turn = {"question": QUESTION, "answers": {"A": {"text": EVIL, "isWhole": True}}}
    visit(page, link_to(server, {"turns": [turn]}))
    assert answers(page)[0].startswith("B c <img src=x onerror=ran=1><script>ran=1</script>j")
    parts = "[...document.querySelectorAll('.text *')].map((e) => [e.tagName, e.textContent])"
    assert page.run(parts)[1:3] == [["STRONG", "B"], ["CODE", "c"]]
    assert page.run("document.querySelectorAll('.text img, .text script').length") == 0
    links = "[...document.querySelectorAll('.text a[href]')].map((a) => [a.href, a.rel])"
    assert page.run(links) == [["http://h/", "noopener noreferrer"]]
    assert page.run("typeof ran") == "undefined"


def test_markdown_becomes_elements_and_nothing_else_does(page: Browser) -> None:
    def html(text: str) -> str:
        actual: str = page.run(
            "import('/page/markdown.js').then(({ elementsOf }) => { const box = "
            "document.createElement('div'); document.body.append(box);"
            f"box.append(elementsOf({json.dumps(text)})); return box.innerHTML; }})"
        )
        return actual

    assert '<pre tabindex="0"><code>a &lt; b\n</code></pre>' in html("```\na < b\n```")
    assert html("- a\n- b") == "<ul>\n<li>a</li>\n<li>b</li>\n</ul>\n"
    assert "<td>1</td>" in html("| a |\n|---|\n| 1 |")
    assert html("a\nb").startswith("<p>a<br>b</p>")
    for evil in (
        "<svg onload=ran=1>",
        "<iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
        "<a href='javascript:ran=1'>x</a>",
        "[x](JaVaScRiPt:ran=1)",
        "[x](data:text/html,<script>ran=1</script>)",
        '[x](http://h/ "onmouseover=ran=1")',
        "![x](x onerror=ran=1)",
        "<style>*{display:none}</style>",
        "<form action=//h><button>x</button></form>",
    ):
        actual = html(evil)
        assert not re.search(r"<(?!/?(?:p|a|br)\b)", actual), actual
        assert not re.search(r"<[^>]*(?:javascript|data):", actual, re.I), actual
    assert page.run("typeof ran") == "undefined"


REPLY = r"""A sum of $5 and $10 takes $O(n^2)$ or \(a_1 * b_1\), but not `$x$` and $\frac{$.

$$
\boxed{x = 7}
$$

```python
def area(r: int) -> str:
    return f"<b>{r}"
```

```unknown
<i>plain</i>
```
"""


def test_code_is_coloured_and_formulas_are_set(page: Browser, server: ServerProcess) -> None:
    turn = {"question": QUESTION, "answers": {"A": {"text": REPLY, "isWhole": True}}}
    visit(page, link_to(server, {"turns": [turn]}))
    page.run(LISTEN)
    page.wait_for("document.querySelector('.hljs-keyword') && document.querySelector('.katex')")
    formulas = page.run("[...document.querySelectorAll('[role=math]')].map((f) => f.ariaLabel)")
    assert formulas == ["O(n^2)", "a_1 * b_1", r"\boxed{x = 7}"]
    assert page.run("document.querySelectorAll('.katex-display').length") == 1
    first = page.run("document.querySelector('.text p').innerText")
    assert first.startswith("A sum of $5 and $10 takes ")
    assert first.endswith(r"but not $x$ and $\frac{$.")
    page.wait_for(
        "[...document.fonts].some((f) => f.family === 'KaTeX_Main' && f.status === 'loaded')"
    )
    blocks = "[...document.querySelectorAll('.code pre')].map((c) => c.textContent)"
    assert page.run(blocks) == [
        'def area(r: int) -> str:\n    return f"<b>{r}"\n',
        "<i>plain</i>\n",
    ]
    page.run("document.querySelectorAll('[aria-label=\"Copy this code\"]')[0].click()")
    page.wait_for("window.copied")
    assert page.run("window.copied").startswith("def area(r: int)")
    check_look(page, DESK[0])
    page.show(*PHONE, dark=True)
    page.wait_for(f"{THEME} === 'dark'")
    check_look(page, PHONE[0])


def test_an_empty_answer_says_so(page: Browser) -> None:
    choose(page, "answer", "regex")
    choose(page, "language", r"\n")
    ask(page, QUESTION)
    note = page.run("document.querySelector('.note').textContent")
    assert re.fullmatch(r"empty answer: \d+ end tokens?", note)


def test_a_server_that_is_gone_is_named(page: Browser, server: ServerProcess) -> None:
    line = f"The server does not answer at {server.url}/"
    page.disconnect()
    begin(page, QUESTION)
    page.wait_for(f"!{part('error')}.hidden")
    assert text_of(page, "error") == line
    assert page.run("document.querySelector('.note').textContent") == line
    page.disconnect(False)
    page.open(f"{server.url}/status")
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    page.disconnect()
    page.wait_for("!document.getElementById('trouble').hidden")
    assert page.run("document.getElementById('trouble').textContent") == line
    page.disconnect(False)
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    page.errors.clear()  # the browser logs failed loads


def test_examples_ask_themselves(page: Browser) -> None:
    page.run("document.querySelector('.example').click()")
    wait_for_answer(page)
    assert answers(page) == [ANSWER]
    assert page.run("document.querySelector('.examples').checkVisibility()") is False


def test_every_algorithm_is_explained(page: Browser) -> None:
    for name, record in ALGORITHMS.items():
        choose(page, "algorithm", name)
        shown = page.run("document.querySelector('.about').textContent")
        assert shown == f"Commits {record.commits.replace('`', '')}."


def test_the_status_page(page: Browser, server: ServerProcess) -> None:
    page.open(f"{server.url}/status")
    page.wait_for("document.getElementById('state').textContent === 'ready'")
    assert "for steps" in page.run("document.getElementById('pool').getAttribute('aria-label')")
    assert page.run("document.getElementById('none').hidden") is False
