# SPDX-License-Identifier: Apache-2.0
"""The GSM8K benchmark with a stub of `POST /generate`."""

import csv
import json
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.stub_server import Stub

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gsm8k  # noqa: E402

PROBLEMS = [
    ("Ann has 2 pens and buys 3. How many has she?", "2 + 3 = <<2+3=5>>5\n#### 5"),
    ("A car costs $1,000 and a van $500 more. What costs the van?", "It is more.\n#### 1,500"),
    ("It is 4 degrees and falls by 7. How cold is it?", "4 - 7 = -3\n#### -3"),
]
# The stub's answer to each question: right, right with another spelling, wrong.
TEXTS = ["The answer is 5.", "1000 + 500: the answer is $1,500.00.", "Cold, 4 of course."]
REPORT = {"num_forwards": 10, "tokens_per_forward": 3.2}


class Server(Stub):
    """Answers as `POST /generate` does."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 200
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.all_there = threading.Event()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.posted]

    def reply(self, _: str, body: Any) -> tuple[int, Any]:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            if len(self.posted) == len(PROBLEMS):
                self.all_there.set()
        if body.get("wait_for_all"):
            self.all_there.wait(30)
        with self.lock:
            self.running -= 1
        return self.status, self.answer(body)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.status != 200:
            return {"error": {"message": "given 3; wanted 4", "param": "steps", "code": 400}}
        text = next(t for (q, _), t in zip(PROBLEMS, TEXTS, strict=True) if q in body["prompt"])
        answer = {"model": "stub", "text": [text], "finish_reason": ["stop"]}
        return {**answer, "usage": {"completion_tokens": 20}, "diffusion": REPORT}


@pytest.fixture
def stub() -> Iterator[Server]:
    with Server().serving() as server:
        yield server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    lines = [json.dumps({"question": q, "answer": a}) for q, a in PROBLEMS]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


def run(stub: Server, data: Path, *arguments: str) -> int:
    output = data.parent / "results"
    return gsm8k.main(
        ["--host", stub.url, "--data", str(data), "--output-dir", str(output), *arguments]
    )


def results(data: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Return the rows of answers.csv in the order of the problems, and the summary."""
    folder = data.parent / "results"
    with (folder / "answers.csv").open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["index"]))
    return rows, json.loads((folder / "summary.json").read_text())


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("#### 1,234", "1234"),
        ("It costs $5.50", "5.50"),
        ("-7", "-7"),
        ("-$7", "-7"),
        ("3-4", "4"),
        ("(2)-1", "1"),
        ("x = -4", "-4"),
        ("a lot: .5", "0.5"),
        ("10, 20, 30, and so on", "30"),
        ("**42**", "42"),
        ("70%", "70"),
        ("2/3", "3"),
    ],
)
def test_last_number(text: str, number: str) -> None:
    assert gsm8k.last_number(text) == Decimal(number)


# --- the whole command -----------------------------------------------------------------------


def test_figures(stub: Server, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub, data) == 0
    rows, summary = results(data)
    assert [row["right"] for row in rows] == ["True", "True", "False"]
    assert [row["expected"] for row in rows] == ["5", "1500", "-3"]
    assert [row["predicted"] for row in rows] == ["5", "1500.00", "4"]
    assert [row["text"] for row in rows] == TEXTS
    assert [row["question"] for row in rows] == [question for question, _ in PROBLEMS]
    captured = capsys.readouterr()
    assert json.loads(captured.out) == summary
    assert "3/3" in captured.err  # the progress bar
    assert (summary["problems"], summary["right"], summary["accuracy"]) == (3, 2, 0.6667)
    assert summary["completion_tokens"] == 60
    assert summary["forwards_per_answer"] == 10
    assert summary["tokens_per_forward"] == 3.2
    assert summary["tokens_per_s"] > 0


def test_the_request(stub: Server, data: Path) -> None:
    assert run(stub, data, "--limit", "1") == 0
    (body,) = stub.bodies
    assert PROBLEMS[0][0] in body["prompt"]
    assert "step by step" in body["prompt"]
    del body["prompt"]
    assert body == {"apply_chat_template": True, "gen_length": 256, "temperature": 0.0}


def test_every_parameter_reaches_the_server(stub: Server, data: Path) -> None:
    options = [
        *("--limit", "1", "--gen-length", "64", "--steps", "32", "--block-length", "16"),
        *("--algorithm", "threshold", "--temperature", "0.5", "--prompt", "Q: {question} A:"),
        *("threshold=0.8", "cache=dual", "ignore_eos=true"),
    ]
    assert run(stub, data, *options) == 0
    wanted: dict[str, Any] = {"prompt": f"Q: {PROBLEMS[0][0]} A:", "apply_chat_template": True}
    wanted |= {"gen_length": 64, "steps": 32, "block_length": 16, "algorithm": "threshold"}
    wanted |= {"temperature": 0.5, "threshold": 0.8, "cache": "dual", "ignore_eos": True}
    assert stub.bodies == [wanted]
    assert results(data)[1]["request"]["threshold"] == 0.8


def test_requests_run_side_by_side(stub: Server, data: Path) -> None:
    assert run(stub, data, "--concurrency", "3", "wait_for_all=true") == 0
    assert stub.most_running == 3


# --- refusals --------------------------------------------------------------------------------


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line of stderr; a progress bar may precede it."""
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    errors = [line for line in lines if "error:" in line or "Traceback" in line]
    assert errors == [lines[-1]]
    return lines[-1]


def test_a_refused_request_ends_the_run(stub: Server, data: Path, capsys: Any) -> None:
    stub.status = 400
    assert run(stub, data, "--concurrency", "1") == 1
    assert "refused the request (400): steps: given 3; wanted 4" in one_error(capsys)


def test_an_absent_server(data: Path, capsys: Any) -> None:
    arguments = ["--host", "http://127.0.0.1:1", "--data", str(data)]
    assert gsm8k.main([*arguments, "--output-dir", str(data.parent / "results")]) == 1
    assert "no server answers at http://127.0.0.1:1/generate" in one_error(capsys)


def test_another_server(stub: Server, data: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Server, "answer", lambda *_: {"choices": []})
    assert run(stub, data) == 1
    assert "sent an answer that POST /generate does not have" in one_error(capsys)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"question": "q"}',
        '{"question": "q", "answer": "5"}',
        '{"question": "q", "answer": "#### five"}',
        '{"question": 3, "answer": "#### 5"}',
        '{"question": "q", "answer": 5}',
    ],
)
def test_a_bad_line_is_named(stub: Server, data: Path, capsys: Any, line: str) -> None:
    first, rest = data.read_text().split("\n", 1)
    data.write_text("\n".join([first, line, rest]))
    assert run(stub, data) == 1
    error = one_error(capsys)
    assert f"{data}, line 2: given" in error
    assert '"answer": "... #### NUMBER"' in error
    assert not stub.bodies


def test_an_empty_and_a_missing_file(stub: Server, data: Path, capsys: Any) -> None:
    data.write_text("\n")
    assert run(stub, data) == 1
    assert "holds no problem" in one_error(capsys)
    data.unlink()
    assert run(stub, data) == 1
    assert "No such file" in one_error(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "wanted at least 1"),
        (["--host", "localhost:8901"], "wanted http://HOST:PORT"),
        (["threshold"], "wanted KEY=VALUE"),
        (["--prompt", "hello"], "wanted a text with {question}"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        gsm8k.main(["--data", "x.jsonl", *arguments])
    assert message in capsys.readouterr().err
