# SPDX-License-Identifier: Apache-2.0
"""The context-length benchmark with a fake server, and its parts on their own."""

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import harness, server_process
from benchmarks.context_length import runner
from benchmarks.context_length.measure import Request, ordinary_ids
from benchmarks.context_length.memory import GpuMemory
from benchmarks.context_length.records import NOT_STARTED, OK, Results, SettingsDiffer
from benchmarks.context_length.runner import LengthRange, Range, search
from tests.programs import ROOT, wait_for

STAND_IN = ROOT / "tests" / "benchmarks" / "stand_in_server.py"
DRAW = harness.draw
CONFIG = {"vocab_size": 64, "mask_token_id": 3, "eos_token_id": 60, "bos_token_id": None}


# --- the search ------------------------------------------------------------------------------


def tried_lengths(limit: int, lengths: Range) -> tuple[list[int], LengthRange]:
    """Return the lengths that are tried if lengths up to `limit` run, and the result."""
    tried: list[int] = []

    def runs(length: int, left: int) -> bool:
        tried.append(length)
        lefts.append(left)
        return length <= limit

    lefts: list[int] = []
    actual = search(lengths, runs)
    assert len(tried) == len(set(tried))
    failed = next((i for i, length in enumerate(tried) if length > limit), len(tried))
    bisected = lefts[failed + 1 :]
    assert all(left >= len(bisected) - i for i, left in enumerate(bisected))
    return tried, actual


def test_without_a_failure_there_are_linear_steps_only() -> None:
    assert tried_lengths(100, Range(10, 20, 60, 1)) == ([10, 30, 50], LengthRange(50, None))
    assert tried_lengths(100, Range(20, 20, 60, 1)) == ([20, 40, 60], LengthRange(60, None))


@pytest.mark.parametrize("limit", range(10, 50))
@pytest.mark.parametrize("precision", [1, 4, 50])
def test_after_a_failure_the_limit_is_found_to_the_precision(limit: int, precision: int) -> None:
    tried, actual = tried_lengths(limit, Range(10, 20, 1000, precision))
    assert actual.longest is not None
    assert actual.failure is not None
    assert actual.longest <= limit < actual.failure
    assert actual.failure - actual.longest <= max(precision, 1) or precision == 50
    linear = [10, 30, 50][: (limit - 10) // 20 + 2]
    assert tried[: len(linear)] == linear
    assert all(linear[-2] < length < linear[-1] for length in tried[len(linear) :])
    assert bool(tried[len(linear) :]) == (precision < 20)


# --- the request -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "alpha", "prompt"), [(204800, 0.5, 102400), (7, 0.5, 4), (2, 0.9, 1), (9, 0.01, 1)]
)
def test_prompt_and_canvas_make_up_the_length(length: int, alpha: float, prompt: int) -> None:
    body = Request("llada", length, alpha, 4, 60.0).body([5, 6])
    assert len(body["prompt"]) == prompt
    canvas = length - prompt
    assert body["gen_length"] == body["output_length"] == body["block_length"] == canvas
    assert (body["steps"], body["temperature"], body["ignore_eos"]) == (4, 0, True)


def test_every_family_is_asked_in_its_own_way() -> None:
    bodies = {
        family: Request(family, 64, 0.5, 1, 60.0).body([5]) for family in ("dream", "llada-moe")
    }
    assert bodies["dream"]["algorithm"] == "dream"
    assert "algorithm" not in bodies["llada-moe"]
    assert bodies["llada-moe"]["remasking"] == "low_confidence"


def test_prompts_have_no_special_tokens(project: Path) -> None:
    ids = ordinary_ids(project / "model")
    assert sorted(ids) == [n for n in range(32) if n != 3]
    prompts = [Request("llada", length, 0.5, 1, 60.0).body(ids)["prompt"] for length in (64, 65)]
    assert prompts[0] != prompts[1][:32]
    assert prompts[0] == Request("llada", 64, 0.5, 8, 60.0).body(ids)["prompt"]


# --- whole runs ------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a server script, a model's configuration, and a place for records."""
    script = tmp_path / "scripts" / "run_llada_server.sh"
    script.parent.mkdir()
    script.write_text(f'exec "{sys.executable}" "{STAND_IN}" "$@"\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("STAND_IN_FOLDER", str(tmp_path))
    monkeypatch.setattr(server_process, "POLL_S", 0.02)
    monkeypatch.setattr(harness, "draw", lambda *_, **__: None)  # one test draws the plot
    return tmp_path


def arguments(project: Path, **changed: Any) -> list[str]:
    folders = {"project-path": project, "model-path": project / "model"}
    lengths = {"start": 64, "step": 64, "max": 192, "precision": 16, "steps": 3}
    options = {**folders, "output-dir": project / "out", **lengths, "shutdown-timeout": 0.05}
    options |= {name.replace("_", "-"): value for name, value in changed.items()}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def points(project: Path) -> list[dict[str, Any]]:
    content = json.loads((project / "out" / "context_length.json").read_text())
    actual: list[dict[str, Any]] = content["points"]
    return actual


def measured_lengths(project: Path) -> list[int]:
    """Return the lengths of all requests to the servers."""
    path = project / "asked.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["length"] for line in lines]


def process_ids(project: Path) -> list[int]:
    """Return the process ids of all servers and engines so far."""
    path = project / "pids"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def living(project: Path) -> list[int]:
    results = []
    for process_id in process_ids(project):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
                results.append(process_id)
    return results


def test_all_lengths_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "draw", DRAW)
    assert runner.main("llada", arguments(project)) == 0
    actual = points(project)
    assert [(p["length"], p["status"]) for p in actual] == [(64, OK), (128, OK), (192, OK)]
    for point in actual:
        length = point["length"]
        assert (point["prompt_tokens"], point["gen_tokens"]) == (length // 2, length // 2)
        steps = (point["num_steps"], point["first_ms"], point["median_ms"], point["last_ms"])
        assert steps == (3, length, length + 1, length + 2)
        assert point["activation_peak_bytes"] == 24576 * length
        assert point["activation_average_bytes"] == 20480 * length
        assert point["plan"] == f"plan for T = {length} with 1.00 GiB: rows a chunk: attend 2"
        assert point["host_peak_bytes"] >= point["host_idle_bytes"] > 0
        assert point["startup_s"] > 0
    with (project / "out" / "context_length.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    medians = [(row["length"], row["median_ms"]) for row in rows]
    assert medians == [("64", "65.0"), ("128", "129.0"), ("192", "193.0")]
    assert (project / "out" / "context_length.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "longest length that runs: 192" in printed.out
    assert "24.00     1.20 ok" in printed.out
    assert "shortest that fails" not in printed.out
    assert f"MODEL_DIR={project / 'model'}" in printed.out
    assert "3/3" in printed.err
    assert len(process_ids(project)) == 6, "a server of its own for each length"
    assert not living(project)


def test_options_reach_the_server(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"gpu": 1, "load-format": "dummy", "activation-pool-size-bytes": 5000}
    assert runner.main("llada", arguments(project, max=64, **changed)) == 0
    log = (project / "out" / "logs" / "server_64.log").read_text()
    assert "arguments: ['--load-format', 'dummy']" in log
    assert "GPU 1, length 64" in log
    assert "VLLM_ACTIVATION_POOL_SIZE_BYTES=5000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        ("refuse", "refused", "400: a prompt and canvas of 128; wanted at most 100"),
        ("no memory", "out of memory", "CUDA out of memory. Tried to allocate 3.00 GiB"),
        ("error", "failed", "500: ZeroDivisionError: division by zero"),
        ("die", "server died", "ValueError: the engine broke; its log ends with:"),
        ("hang", "timeout", "no answer within 2 s"),
        ("cut", "failed", "wanted 64 tokens in the answer, got 1"),
    ],
)
def test_a_failure_is_kept(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: str,
    status: str,
    message: str,
) -> None:
    monkeypatch.setenv("STAND_IN_LIMIT", "100")
    monkeypatch.setenv("STAND_IN_FAILURE", failure)
    changed = {"request-timeout": 2} if failure == "hang" else {}
    options = arguments(project, max=256, precision=64, **changed)
    assert runner.main("llada", options) == 0
    assert measured_lengths(project) == [64, 128]
    runs, fails = points(project)
    assert (runs["status"], fails["status"]) == (OK, status)
    assert message in fails["reason"]
    assert f"shortest that fails: 128 ({status}: " in capsys.readouterr().out
    assert not living(project)


def test_a_run_goes_on_where_it_ended(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN_LIMIT", "100")
    monkeypatch.setenv("MOSAIC_COMMIT", "0123abcd")
    assert runner.main("llada", arguments(project)) == 0
    assert measured_lengths(project) == [64, 128, 96, 112]
    path = project / "out" / "context_length.json"
    content = json.loads(path.read_text())
    content["points"] = [point for point in content["points"] if point["length"] != 96]
    path.write_text(json.dumps(content))
    capsys.readouterr()
    monkeypatch.setenv("MOSAIC_COMMIT", "4567cdef")
    assert runner.main("llada", arguments(project)) == 0
    assert measured_lengths(project) == [64, 128, 96, 112, 96]
    assert [point["length"] for point in points(project)] == [64, 96, 112, 128]
    printed = capsys.readouterr().out
    assert printed.count("(measured before)") == 3
    assert "note: the lengths so far were measured at commit 0123abcd" in printed


def test_other_settings_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main("llada", arguments(project, max=64)) == 0
    monkeypatch.setenv("EXTRA_VLLM_ARGS", "--enforce-eager")
    assert runner.main("llada", arguments(project, max=64, steps=4)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "steps: 3 then, 4 now" in error
    assert "extra_vllm_args: '' then, '--enforce-eager' now" in error
    assert "another --output-dir" in error
    assert measured_lengths(project) == [64]


def test_a_server_that_does_not_start_ends_the_run_and_is_tried_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setenv("STAND_IN_FAILURE", "no start")
        assert runner.main("llada", arguments(project, max=64)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "ended at its start; ValueError: no such checkpoint" in error
    assert "server_64.log" in error
    assert [point["status"] for point in points(project)] == [NOT_STARTED]
    assert runner.main("llada", arguments(project, max=64)) == 0
    assert [point["status"] for point in points(project)] == [OK]


def test_a_first_length_that_fails_is_an_error(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN_LIMIT", "10")
    assert runner.main("llada", arguments(project)) == 1
    assert measured_lengths(project) == [64]
    assert "the first length, 64 tokens, already fails" in capsys.readouterr().err


def test_what_cannot_lead_to_a_server_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for changed, message in (
            ({"project-path": project / "none"}, "--project-path: wanted a repository with"),
            ({"model-path": project / "none"}, "--model-path: no config.json"),
            ({"port": port}, f"--port: {port} is in use"),
        ):
            assert runner.main("llada", arguments(project, **changed)) == 1
            assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not process_ids(project)


# --- a runner that ends before its time --------------------------------------------------------


@contextlib.contextmanager
def hanging_runner(
    project: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a runner as a user does; its request of 128 tokens hangs."""
    monkeypatch.setenv("STAND_IN_LIMIT", "100")
    monkeypatch.setenv("STAND_IN_FAILURE", "hang")
    entry = ROOT / "benchmarks" / "llada" / "run_benchmark.py"
    process = subprocess.Popen(
        [sys.executable, str(entry), *arguments(project, **changed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_signals,
    )
    try:
        wait_for(lambda: 128 in measured_lengths(project))
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def hanging(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    with hanging_runner(project, monkeypatch) as process:
        yield process


def hear_signals() -> None:
    """Restore the default of signals, which a shell without job control or nohup ignores."""
    for number in runner.SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_run_ends_its_server_and_goes_on(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    hanging: subprocess.Popen[str],
    number: signal.Signals,
) -> None:
    assert len(living(project)) == 2
    hanging.send_signal(number)
    printed, _ = hanging.communicate(timeout=60)
    assert hanging.returncode == 128 + number, printed
    assert not living(project), "nothing outlives the runner"
    assert "error: interrupted; the same command goes on in" in printed
    assert [point["length"] for point in points(project)] == [64]
    monkeypatch.setenv("STAND_IN_LIMIT", "1000")
    assert runner.main("llada", arguments(project)) == 0
    assert measured_lengths(project) == [64, 128, 128, 192]


def test_a_second_interruption_kills_a_server_that_does_not_end(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STUBBORN", "1")
    changed = {"start": 128, "shutdown-timeout": 600}
    with hanging_runner(project, monkeypatch, **changed) as process:
        process.send_signal(signal.SIGTERM)
        log = project / "out" / "logs" / "server_128.log"
        wait_for(lambda: "told to end" in log.read_text())
        assert process.poll() is None, "it waits for the server"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert not living(project)


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runner.interrupting([signal.SIGHUP, signal.SIGTERM]):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with pytest.raises(runner.Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_killed_runner_leaves_no_process(project: Path, hanging: subprocess.Popen[str]) -> None:
    guards = psutil.Process(hanging.pid).children()
    assert len(living(project)) == 2
    hanging.kill()
    wait_for(lambda: not living(project))
    psutil.wait_procs(guards, timeout=60)
    assert not any(guard.is_running() for guard in guards)


# --- memory ----------------------------------------------------------------------------------


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, apps: str) -> None:
    """Install an nvidia-smi that records its arguments, lists `apps` and reports growing use."""
    script = folder / "bin" / "nvidia-smi"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        f"""#!/bin/sh
echo "$@" >>{folder}/queries
case "$*" in
  *compute-apps*) printf '{apps}' ;;
  *) echo $((1000 + $(grep -c memory.used {folder}/queries))) ;;
esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")


def test_gpu_memory_of_listed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, r"11, 300\n12, 40\n99, 7000\n")
    gpu = GpuMemory("2")
    assert gpu.used_by([11, 12, 13]) == 340 * 2**20
    assert all(line.startswith("-i 2 ") for line in (tmp_path / "queries").read_text().splitlines())


def test_gpu_memory_where_processes_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "")
    gpu = GpuMemory(None)
    assert gpu.used_by([11]) == 2**20


# --- records ---------------------------------------------------------------------------------


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "context_length.json").write_text("[]")
    with pytest.raises(SettingsDiffer, match="no result of this benchmark"):
        Results(tmp_path, {}, {})
    assert (tmp_path / "context_length.json").read_text() == "[]"
