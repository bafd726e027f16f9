# SPDX-License-Identifier: Apache-2.0
"""Examples, programs and curl lines of the documents run unchanged with the tiny model."""

import contextlib
import csv
import json
import os
import pty
import re
import select
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, TIMEOUT_S, output_of, run_python
from tests.server.client import ANSWER, QUESTION, Client, text_of
from tests.server.fork_server import ForkServer
from tests.server.process import MODEL_NAME, ServerProcess, environment
from tests.stub_server import Stub
from vllm.diffusion.request import fields

CHAT = ROOT / "docs" / "examples" / "chat.py"
CURL = re.compile(r"^curl .*?(?=\n\n|\n\Z|\n[a-z])", re.MULTILINE | re.DOTALL)
DOCUMENTED_URL = "http://127.0.0.1:8901"
DIM = b"\x1b[2m"

needs_canvases = pytest.mark.skipif(
    "stream_canvas" not in {field.name for field in fields.FIELDS},
    reason="the server does not stream canvases",
)


def run(*command: str | Path, questions: str = "") -> str:
    """Run a program that must succeed and return its output."""
    variables = environment(NO_PROXY="127.0.0.1", HF_HUB_OFFLINE="1")
    return output_of(*command, input=questions, env=variables)


def test_the_openai_client(client: Client, server: ServerProcess) -> None:
    script = ROOT / "docs" / "examples" / "openai_client.py"
    actual = run(sys.executable, script, "--server", server.url)
    assert actual.splitlines() == [ANSWER, "3 plus 4 is 7."]


@pytest.mark.parametrize("option", ["--plain", "--local-leap"])
def test_chat_with_a_server(client: Client, server: ServerProcess, option: str) -> None:
    arguments = ["--server", server.url, "--plain", *({option} - {"--plain"})]
    actual = run(sys.executable, CHAT, *arguments, questions=f"\n{QUESTION}\n")
    assert actual == f"{ANSWER}\n"


# Runs a program with typed input, in a process that has imported vLLM.
TYPED = """
import io, runpy, sys
questions, sys.argv = sys.argv[1], sys.argv[2:]
sys.stdin, sys.stdout = io.StringIO(questions), open("said", "w")
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.close()
"""


def test_chat_with_an_engine_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    """The second question is sent with the first question and its answer."""
    script, log = tmp_path / "typed.py", tmp_path / "log"
    script.write_text(TYPED)
    questions = f"{QUESTION}\nAnd of Japan?\n"
    arguments = [str(CHAT), "--model", str(model_dir), "--local-leap", "--plain"]
    process = ForkServer([str(script), questions, *arguments], log, environment())
    assert process.wait(TIMEOUT_S) == 0, log.read_text()
    actual = (tmp_path / "said").read_text()
    assert actual.splitlines() == [ANSWER, "The capital of Japan is Tokyo."]


class Silent(Stub):
    """A server whose answers have no text."""

    def reply(self, path: str, body: Any) -> tuple[int, str]:
        last = {"object": "text_diffusion", "text": [""], "diffusion": {"num_end_tokens": 32}}
        return 200, f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"


def test_chat_says_that_an_answer_is_empty() -> None:
    with Silent().serving() as silent:
        actual = run(sys.executable, CHAT, "--server", silent.url, questions=QUESTION)
    assert actual == "empty answer: 32 end tokens\n"


def test_chat_passes_a_refusal_on(client: Client, server: ServerProcess) -> None:
    arguments = ("--server", server.url, "--plain", "--gen-length", "99999")
    done = run_python(CHAT, *arguments, input=QUESTION, env=environment(NO_PROXY="127.0.0.1"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: gen_length: given 99999")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--server", "http://127.0.0.1:1"), "error: no answer from http://127.0.0.1:1: "),
        (("--model", "/no/such/model"), "error: "),
    ],
)
def test_chat_without_a_model(arguments: tuple[str, str], message: str) -> None:
    done = run_python(CHAT, *arguments, input=QUESTION, env=environment(NO_PROXY="127.0.0.1"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr


@needs_canvases
def test_chat_shows_the_canvas_in_a_terminal(client: Client, server: ServerProcess) -> None:
    shown = in_a_terminal([sys.executable, str(CHAT), "--server", server.url], QUESTION)
    assert DIM in shown
    assert "·".encode() in shown
    assert re.search(rb"step \d+, \d+ of 32 tokens, [\d.]+ s, [\d.]+ s left", shown)
    assert shown.rstrip().endswith(b"you>")
    assert ANSWER.encode() in shown


def in_a_terminal(command: list[str], question: str) -> bytes:
    """Return the output of a program in a terminal from its first prompt to its second."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, environment(TERM="xterm", COLUMNS="200", NO_PROXY="*"))
    try:
        until_prompt(terminal)
        os.write(terminal, f"{question}\n".encode())
        return until_prompt(terminal)
    finally:
        with contextlib.suppress(OSError):
            os.write(terminal, b"\x04")
        os.close(terminal)
        os.waitpid(child, 0)


def until_prompt(terminal: int) -> bytes:
    shown = b""
    deadline = time.monotonic() + TIMEOUT_S
    while b"you> " not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 65536)
    return shown


def curl_lines() -> list[str]:
    files = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in CURL.findall(block)]


@pytest.mark.parametrize("line", curl_lines(), ids=lambda line: line.split()[2].split("8901")[-1])
def test_a_documented_curl_line(client: Client, server: ServerProcess, line: str) -> None:
    assert DOCUMENTED_URL in line
    actual = run("bash", "-c", line.replace(DOCUMENTED_URL, server.url))
    if '"stream": true' in line:
        *events, end = [event.removeprefix("data: ") for event in actual.split("\n\n") if event]
        assert end == "[DONE]"
    else:
        events = [actual]
    if "/v1/loglikelihood" in line or "/v1/systemone" in line:
        actual = json.loads(events[0])
        assert actual.get("loglikelihood", 0) < 0 or actual["answers"].keys() == {"country", "sure"}
        return
    text = "".join(text_of(json.loads(event)) for event in events)
    if "France" not in line and "3 plus 4" not in line:
        return
    expected = ("capital of France is Paris", "3 plus 4 is 7", '"Paris", "country": "France"')
    assert any(answer in text for answer in expected)


def test_the_readme_asks_every_kind_of_route() -> None:
    lines = curl_lines()
    assert len(lines) >= 3
    assert any("/v1/chat/completions" in line for line in lines)
    assert any('"stream": true' in line for line in lines)


def test_the_request_script_prints_the_raw_answer(client: Client, server: ServerProcess) -> None:
    """The script's own tests use a server that records its requests."""
    usual = (
        "--model-family",
        "llada",
        "--steps",
        "8",
        "--gen-length",
        "32",
        "--block-length",
        "32",
    )
    script = ROOT / "scripts" / "test_api_request.py"
    done = run_python(script, "--host", server.url, *usual, "--mask-id", "none", env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["text"] == [ANSWER]
    assert answer["diffusion"]["num_forwards"] == 8
    assert answer["usage"] == client.ask(gen_length=32, steps=8)["usage"]


def test_gsm8k_counts_sums_that_the_model_knows(server: ServerProcess, tmp_path: Path) -> None:
    sums = [(2, 3), (4, 4), (9, 8), (0, 1)]
    lines = [
        json.dumps({"question": f"What is {a} plus {b}?", "answer": f"Add.\n#### {a + b}"})
        for a, b in sums
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    output_of(
        *(sys.executable, ROOT / "benchmarks" / "gsm8k.py", "--host", server.url),
        *("--data", "sums.jsonl", "--output-dir", "out", "--concurrency", "2"),
        *("--gen-length", "32", "--block-length", "16", "--prompt", "{question}"),
        *("--algorithm", "threshold", "threshold=0.9"),
        cwd=tmp_path,
        env=environment(),
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["problems"], summary["right"]) == (4, 4)
    assert summary["tokens_per_forward"] > 1
    assert summary["tokens_per_s"] > 0
    with (tmp_path / "out" / "answers.csv").open(newline="") as file:
        texts = {row["text"] for row in csv.DictReader(file)}
    assert texts == {f"{a} plus {b} is {a + b}." for a, b in sums}


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="no langchain-openai here")
def test_langchain(server: ServerProcess) -> None:
    script = CHAT.with_name("langchain_client.py")
    text = run(sys.executable, script, "--server", server.url, "--model", MODEL_NAME)
    assert "capital of France is Paris" in text
    assert "3 plus 4 is 7" in text
