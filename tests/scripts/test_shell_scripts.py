# SPDX-License-Identifier: Apache-2.0
"""The shell scripts, in a copy of their folder: the programs that they run, and their messages.

A recorder replaces the virtual environment's Python, so that nothing is installed.
"""

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.programs import add_program
from tests.scripts.repository import add_recorder, run

# The default folder, port and length of each family's server.
SERVERS = {
    "llada": ("llada-8b-instruct", 8901, 204800),
    "dream": ("dream-v0-instruct-7b", 8701, 4096),
    "llada-moe": ("llada-moe-7b-a1b", 10001, 8192),
    "llada2": ("llada2.0-mini", 8902, 32768),
    "sdar": ("sdar-8b-chat", 8903, 32768),
    "fast-dllm": ("fast-dllm-v2-7b", 8904, 32768),
    "llada22": ("llada2.2-mini", 8905, 131072),
    "nemotron": ("nemotron-labs-diffusion-8b", 8906, 131072),
    "stable-diffcoder": ("stable-diffcoder-8b-instruct", 8907, 8192),
    "a2d": ("qwen3-0.6b-diffusion-mdlm", 8909, 32768),
    "idlm": ("i-dlm-8b", 8920, 40960),
    "diffusion-gemma": ("diffusiongemma-26b-a4b-it", 8908, 32768),
}
SERVER_SCRIPTS = {family: f"run_{family.replace('-', '_')}_server.sh" for family in SERVERS}
WITH_HELP = (
    *("quickstart.sh", "setup.sh", "test.sh", "gpu_tests.sh", "check", "lint", "clean"),
    *SERVER_SCRIPTS.values(),
)


@pytest.mark.parametrize("name", WITH_HELP)
def test_help(home: Path, name: str) -> None:
    done = run(home / "scripts" / name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: scripts/{name}" in done.stdout
    assert "SPDX" not in done.stdout


@pytest.mark.parametrize("name", ["quickstart.sh", "lint", "clean", "check"])
def test_unknown_argument_is_one_line(home: Path, name: str) -> None:
    done = run(home / "scripts" / name, "--surely-not")
    assert done.returncode != 0
    assert "--surely-not" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("family", list(SERVERS))
def test_defaults_of_a_family(home: Path, family: str) -> None:
    script, (name, port, length) = SERVER_SCRIPTS[family], SERVERS[family]
    variable = f"{family.upper().replace('-', '_')}_MODEL_DIR"
    add_recorder(home)
    for folder in (home / "models" / name, home / "mine"):
        folder.mkdir(parents=True)
    done = run(home / "scripts" / script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("-m", "vllm.entrypoints.api_server", "--model", str(home / "models" / name)),
        *("--family", family, "--served-model-name", name, str(home / "models" / name)),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(length)),
        *("--gpu-memory-utilization", "0.92", f"PYTHONPATH={home}", "LONG=1"),
    ]
    done = run(home / "scripts" / script, env={variable: str(home / "mine")})
    assert done.stdout.splitlines()[3] == str(home / "mine")
    (home / "models" / name).rmdir()
    done = run(home / "scripts" / script)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    others = {"stable-diffcoder": "llada", "a2d": "llada"}  # have no tiny model
    like = others.get(family, family)
    tiny = (f"make_tiny_model.py --family {like}", f"models/{like}-tiny")
    if family == "diffusion-gemma":
        assert "make_tiny_model.py" not in done.stderr
        tiny = ()
    for word in ("MODEL_DIR", variable, "MOSAIC_MODEL_ROOT", str(home / "models" / name), *tiny):
        assert word in done.stderr
    help_text = run(home / "scripts" / script, "--help").stdout
    for word in (variable, name, str(port), str(length)):
        assert word in help_text


class TestServer:
    """The common part of the server scripts, tested with scripts/run_llada_server.sh."""

    def serve(
        self, home: Path, *arguments: str, **env: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        done = run(home / "scripts" / "run_llada_server.sh", *arguments, env=env)
        return done, done.stdout.splitlines()

    def test_variables_and_arguments(self, home: Path) -> None:
        add_recorder(home)
        (home / "m").mkdir()
        env = {"MODEL_DIR": str(home / "m"), "HOST": "0.0.0.0", "PORT": "1", "MAX_MODEL_LEN": "64"}
        env |= {"GPU_MEMORY_UTILIZATION": "0.5", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "0"}
        more = "--dtype float32 --additional-config '{\"dllm\": {\"a\": 1}}' --x '*'"
        env |= {"PYTHONPATH": "/mine", "EXTRA_VLLM_ARGS": more}
        done, words = self.serve(home, "--seed", "1", **env)
        assert done.returncode == 0, done.stderr
        assert words[6:] == [
            *("--served-model-name", "m", str(home / "m")),
            *("--host", "0.0.0.0", "--port", "1", "--max-model-len", "64"),
            *("--gpu-memory-utilization", "0.5", "--dtype", "float32"),
            *("--additional-config", '{"dllm": {"a": 1}}', "--x", "*", "--seed", "1"),
            *(f"PYTHONPATH={home}:/mine", "LONG=0"),
        ]

    def test_help_on_arguments_needs_no_model(self, home: Path) -> None:
        add_recorder(home)
        done, words = self.serve(home, "--help=Diffusion")
        assert (done.returncode, done.stderr) == (0, "")
        assert words[:4] == [
            "-m",
            "vllm.entrypoints.api_server",
            "--help=Diffusion",
            f"PYTHONPATH={home}",
        ]

    def test_precedence_of_the_model_directory(self, home: Path) -> None:
        add_recorder(home)
        for name in ("direct", "family", "root/llada-8b-instruct"):
            (home / name).mkdir(parents=True)
        env = {
            "MOSAIC_MODEL_ROOT": str(home / "root"),
            "LLADA_MODEL_DIR": str(home / "family"),
            "MODEL_DIR": str(home / "direct"),
        }
        _, words = self.serve(home, "Org/Model", "--seed", "1", **env)
        assert words[3] == "Org/Model"
        assert words[words.index("--seed") :][:2] == ["--seed", "1"]
        assert words.count("Org/Model") == 1
        for wanted in ("direct", "family", "root/llada-8b-instruct"):
            _, words = self.serve(home, **env)
            assert words[3] == str(home / wanted)
            env.popitem()

    def test_mosaic_home_names_the_repository(self, home: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        (other / "models" / "llada-8b-instruct").mkdir(parents=True)
        add_recorder(other)
        _, words = self.serve(home, MOSAIC_HOME=str(other))
        assert words[3] == str(other / "models" / "llada-8b-instruct")
        assert f"PYTHONPATH={other}" in words

    @pytest.mark.parametrize("name", ["GSAI-ML/LLaDA-1.5", "/none/of/these"])
    def test_what_is_no_folder_is_handed_on(self, home: Path, name: str) -> None:
        """Only the server can decide whether the name is one on the hub."""
        add_recorder(home)
        done, words = self.serve(home, MODEL_DIR=name, EXTRA_VLLM_ARGS="--revision x")
        assert (done.returncode, done.stderr) == (0, "")
        assert words[2:4] == ["--model", name]
        assert words[words.index("--revision") + 1] == "x"

    def test_unbalanced_quote_stops_the_start(self, home: Path) -> None:
        add_recorder(home)
        done, words = self.serve(home, MODEL_DIR=str(home), EXTRA_VLLM_ARGS="--x 'open")
        assert done.returncode == 1
        assert words == []
        assert "EXTRA_VLLM_ARGS" in done.stderr

    def test_signals_reach_the_server(self, home: Path) -> None:
        add_recorder(home, "#!/bin/sh\necho ready\nexec sleep 60\n")
        process = subprocess.Popen(
            [str(home / "scripts" / "run_llada_server.sh")],
            env={"PATH": os.environ["PATH"], "MODEL_DIR": str(home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            assert process.wait(timeout=30) == -signal.SIGTERM


class TestClean:
    """scripts/clean."""

    PRODUCTS = (
        "build/native/x.o",
        "flash_sample/_C.cpython-311-x86_64-linux-gnu.so",
        "results/quickstart/server.log",
        "vllm/diffusion/__pycache__/a.cpython-311.pyc",
        ".mypy_cache/x",
    )
    KEPT = (
        ".venv/bin/__pycache__/a.pyc",
        "models/llada-tiny/model.safetensors",
        "vllm/diffusion/models/llada.py",
        "scripts/lib.sh",
    )

    @pytest.fixture
    def filled(self, home: Path) -> Path:
        for name in self.PRODUCTS + self.KEPT:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()
        return home

    def present(self, home: Path) -> set[str]:
        return {name for name in self.PRODUCTS + self.KEPT if (home / name).exists()}

    def test_leaves_code_models_and_venv(self, filled: Path) -> None:
        assert run(filled / "scripts" / "clean").returncode == 0
        assert self.present(filled) == set(self.KEPT)
        again = run(filled / "scripts" / "clean")
        assert (again.returncode, again.stderr) == (0, "==> nothing to remove\n")

    def test_dry_run_removes_nothing(self, filled: Path) -> None:
        done = run(filled / "scripts" / "clean", "--all", "--dry-run")
        assert {"build", ".venv", "models"} <= set(done.stdout.splitlines())
        assert self.present(filled) == set(self.PRODUCTS + self.KEPT)

    @pytest.mark.parametrize(
        ("option", "gone"),
        [("--venv", KEPT[:1]), ("--models", KEPT[1:2]), ("--all", KEPT[:2])],
    )
    def test_options(self, filled: Path, option: str, gone: tuple[str, ...]) -> None:
        assert run(filled / "scripts" / "clean", option).returncode == 0
        assert self.present(filled) == set(self.KEPT) - set(gone)


def python_log(home: Path, kind: str, line: str) -> Path:
    """Set up a kind of machine with a shell line in place of Python, and return the line's log."""
    (home / "requirements").mkdir()
    for name in (kind, "test"):
        (home / "requirements" / f"{name}.txt").write_text("torch==2.14.0\n")
    add_recorder(home, f"#!/bin/sh\n{line.replace('LOG', str(home / 'python.log'))}\n")
    return home / "python.log"


LOADFILE = "--dist loadfile --no-loadscope-reorder"


@pytest.mark.parametrize(
    ("kind", "memory_gib", "arguments", "options"),
    [
        ("cpu", 22, "", f"-n 3 {LOADFILE}"),
        ("cpu", 11, "", f"-n 2 {LOADFILE}"),
        ("cpu", 3, "", f"-n 1 {LOADFILE}"),
        ("cpu", 22, "--fast", f"-m not slow -n 3 {LOADFILE}"),
        ("cpu", 22, "tests/test_docs.py -x", "tests/test_docs.py -x"),
        ("cuda", 22, "", ""),
    ],
)
def test_all_tests_run_in_several_processes_where_no_gpu_is_shared(
    home: Path, kind: str, memory_gib: int, arguments: str, options: str
) -> None:
    """There is one process more than the two cores, if each has 4 GiB of memory."""
    log = python_log(home, kind, 'echo "$@" >>LOG')
    for name, output in (("nproc", "2"), ("free", f"Mem: 32 1 1 0 1 {memory_gib}")):
        add_program(home / "bin" / name, f"#!/bin/sh\necho {output}\n")
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    env = {"MOSAIC_DEVICE": kind, "CUDA_HOME": "/nowhere", "PATH": path}
    assert run(home / "scripts" / "test.sh", *arguments.split(), env=env).returncode == 0
    assert log.read_text().splitlines()[-1].split() == ["-m", "pytest", *options.split()]


def test_gpu_tests_share_a_card_but_those_that_run_alone(home: Path) -> None:
    """Only files with GPU tests are imported."""
    (home / "tests" / "b").mkdir(parents=True)
    files = {"test_a": "gpu", "b/test_c": "alone\n@pytest.mark.gpu", "test_d": "slow"}
    for name, mark in files.items():
        (home / "tests" / f"{name}.py").write_text(f"@pytest.mark.{mark}\n")
    log = python_log(home, "cuda", 'echo "$VLLM_ACTIVATION_POOL_SIZE_BYTES:$*" >>LOG\nexit 1')
    env = {"MOSAIC_DEVICE": "cuda", "CUDA_HOME": "/nowhere"}
    processes = min(14, len(os.sched_getaffinity(0)))
    wanted = [
        f"{4 << 30}:-m pytest --require-gpu -m gpu and not alone -n {processes}"
        " --no-loadscope-reorder tests/b/test_c.py tests/test_a.py -x",
        ":-m pytest --require-gpu -m gpu and alone tests/b/test_c.py -x",
    ]
    assert run(home / "scripts" / "gpu_tests.sh", "-x", env=env).returncode == 1
    assert log.read_text().splitlines() == wanted


@pytest.mark.parametrize(
    ("test", "part"),
    [
        ("tests/engine/test_chunks.py::test_long[0]", "tests/engine/test_chunks.py::test_long[0]"),
        ("tests/native/test_routing.py::test_one[bf16]", "tests/native/test_routing.py::test_one"),
        ("tests/native/test_routing.py::test_two", "tests/native/test_routing.py::test_two"),
    ],
)
def test_cases_of_a_gpu_test_share_a_process_unless_it_starts_engines(test: str, part: str) -> None:
    given = {"--require-gpu": True, "tx": ["2*popen"]}
    config: Any = SimpleNamespace(getoption=given.get, getvalue=given.get)
    assert conftest.pytest_xdist_make_scheduler(config, None)._split_scope(test) == part
    given["--require-gpu"] = False
    assert conftest.pytest_xdist_make_scheduler(config, None) is None


def test_the_longest_gpu_tests_come_first() -> None:
    """An engine counts as 100 cases of a kernel."""
    many, few = ([f"tests/native/test_{n}.py::test[{i}]" for i in range(n)] for n in (101, 9))
    engines = ["tests/engine/test_a.py::test[1]", "tests/server/test_b.py::test"]
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in (*few, engines[0], *many, engines[1])]
    conftest.sort_longest_first(items)
    assert [item.nodeid for item in items] == [*many, *engines, *few]
