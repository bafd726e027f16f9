# SPDX-License-Identifier: Apache-2.0
"""Set-up in scripts/lib.sh: requirements of the machine, the source of torch, and the path."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.programs import ROOT, add_program, output_of, run
from tests.scripts.repository import add_recorder

INFO = "mosaic-0.3.0.dist-info"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def run_in(home: Path, step: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a step of scripts/lib.sh."""
    command = ("/bin/bash", "-c", f"source scripts/lib.sh; {step}")
    return run(*command, cwd=home, env={"PATH": os.environ["PATH"], **env})


class TestMachine:
    """Each missing requirement of the machine gives one line."""

    def path_with(self, home: Path, **programs: str) -> str:
        """Return a PATH that only has the shell's helpers and the given programs."""
        folder = home / "bin"
        folder.mkdir()
        for name in ("bash", "cat", "dirname", "grep", "sha256sum", "sh", "timeout"):
            (folder / name).symlink_to(shutil.which(name) or name)
        for name, text in programs.items():
            add_program(folder / name, text)
        return str(folder)

    def test_no_python(self, home: Path) -> None:
        done = run_in(home, "setup", PATH=self.path_with(home))
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "Python 3.11" in done.stderr
        assert "apt-get install python3" in done.stderr

    def test_python_without_venv(self, home: Path) -> None:
        """The interpreter has the right version, but cannot import ensurepip."""
        python3 = (
            f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
        )
        done = run_in(home, "setup", PATH=self.path_with(home, python3=python3))
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "apt-get install python3-venv" in done.stderr

    def test_unknown_device(self, home: Path) -> None:
        add_recorder(home)
        done = run_in(home, "setup", MOSAIC_DEVICE="tpu")
        assert done.returncode == 1
        assert done.stderr == "error: MOSAIC_DEVICE: given 'tpu'; wanted cpu or cuda\n"

    def test_kernels_are_compiled_where_they_can_run(self, home: Path) -> None:
        """Without a GPU, kernels are only compiled for the tests, or on request."""
        (home / "requirements").mkdir()
        for name in ("cpu", "build", "test"):
            (home / "requirements" / f"{name}.txt").write_text("torch==2.14.0\n")
        log = home / "log"
        add_recorder(home, f'#!/bin/sh\necho "$NATIVE_CUDA_ARCHS $@" >>{log}\n')
        env = {"PATH": self.path_with(home, nvcc="#!/bin/sh\n"), "MOSAIC_DEVICE": "cpu"}
        (home / "bin" / "c++").symlink_to("/bin/true")

        def compiled(*words: str, **more: str) -> list[str]:
            log.write_text("")
            done = run_in(home, " ".join(["setup", *words]), **env, **more)
            assert done.returncode == 0, done.stderr
            actual = [line for line in log.read_text().splitlines() if "build_ext" in line]
            assert ("scripts/setup.sh --all-gpus compiles them" in done.stderr) == (not actual)
            return [line.partition(" setup.py")[0] for line in actual]

        assert compiled() == []
        assert compiled("test") == [""]
        assert compiled(NATIVE_CUDA_ARCHS="90a") == ["90a"]
        assert compiled("--all-gpus") == ["80 89 90a 100 120"]
        env["MOSAIC_DEVICE"] = "cuda"
        (home / "requirements" / "cuda.txt").write_text("torch==2.14.0\n")
        assert compiled() == [""]

    def test_installs_once_per_content_of_the_requirement_files(self, home: Path) -> None:
        """A recorder in place of Python logs the calls. The second run installs nothing."""
        requirements = home / "requirements"
        requirements.mkdir()
        (requirements / "cpu.txt").write_text("torch==2.14.0\nvllm==0.33.0\n")
        log = home / "pip.log"
        add_recorder(home, f'#!/bin/sh\necho "$@" >>{log}\n')
        env = {"PATH": self.path_with(home), "MOSAIC_DEVICE": "cpu", "CUDA_HOME": "/nowhere"}

        def installs() -> list[str]:
            log.write_text("")
            assert run_in(home, "setup", **env).returncode == 0
            return [line for line in log.read_text().splitlines() if "install_packages" in line]

        first = installs()
        assert any("torch==2.14.0" in line for line in first)
        assert any("--no-deps" in line for line in first)
        assert installs() == []
        (requirements / "cpu.txt").write_text("torch==2.14.0\nvllm==0.33.0\nx==1\n")
        assert any("--no-deps" in line for line in installs())


@pytest.fixture
def venv(home: Path) -> Path:
    """Make a virtual environment with pip, and return its site-packages."""
    pip = pytest.importorskip("pip")
    output_of(sys.executable, "-m", "venv", "--without-pip", home / ".venv")
    (folder,) = home.glob(".venv/lib/python3*/site-packages")
    (folder / "pip").symlink_to(Path(pip.__file__).parent)
    return folder


class TestTorch:
    """Which build of torch the CPU set-up installs, from local indexes and a folder."""

    VERSION = "2.14.0"

    def add_wheel(self, folder: Path, version: str) -> None:
        folder.mkdir(parents=True)
        name = f"torch-{version}"
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("torch.py", f"__file__ = {str(folder)!r}\n")
            info = f"{name}.dist-info"
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")

    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[str]:
        """Serve PyPI with the CUDA build, and an index of CPU builds: /pypi and /cpu."""
        folder = tmp_path / "index"
        self.add_wheel(folder / "pypi" / "torch", self.VERSION)
        self.add_wheel(folder / "cpu" / "torch", f"{self.VERSION}+cpu")
        handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()

    def install(
        self, home: Path, index: str, cpu_builds: str, *, patience_s: int = 5, **env: str
    ) -> str:
        """Set up with `cpu_builds` as PyTorch's index, and return the output."""
        (home / "requirements").mkdir()
        (home / "requirements" / "cpu.txt").write_text(f"torch=={self.VERSION}\n")
        lib = home / "scripts" / "lib.sh"
        assert CPU_BUILDS in lib.read_text()
        patience = "--timeout 5 "
        assert patience in lib.read_text()
        text = lib.read_text().replace(patience, f"--timeout {patience_s} ")
        lib.write_text(text.replace(CPU_BUILDS, cpu_builds))
        done = run_in(
            home,
            "setup",
            MOSAIC_DEVICE="cpu",
            CUDA_HOME="/nowhere",
            PIP_CONFIG_FILE=os.devnull,
            PIP_NO_CACHE_DIR="1",
            PIP_INDEX_URL=f"{index}/pypi",
            **env,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def installed(self, venv: Path) -> str:
        """Return the folder of the installed wheel and its version."""
        (info,) = venv.glob("torch-*.dist-info")
        return info.name.removesuffix(".dist-info").removeprefix("torch-")

    def test_of_the_index_of_cpu_builds(self, home: Path, venv: Path, index: str) -> None:
        output = self.install(home, index, f"{index}/cpu")
        assert self.installed(venv) == f"{self.VERSION}+cpu"
        assert "CUDA build" not in output
        assert "not compiled: the native packages, because nvcc was not found" in output

    def test_of_the_users_own_folder(self, home: Path, venv: Path, index: str) -> None:
        self.add_wheel(home / "wheels", f"{self.VERSION}+cpu")
        self.install(home, index, f"{index}/cpu", PIP_FIND_LINKS=str(home / "wheels"))
        assert self.installed(venv) == f"{self.VERSION}+cpu"
        assert str(home / "wheels") in (venv / "torch.py").read_text()

    def test_of_what_pip_finds(self, home: Path, venv: Path, index: str) -> None:
        """PyTorch's index does not answer, so that the size of the download is named first."""
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            output = self.install(home, index, url, patience_s=1)  # PyPI has no CPU build, either
        assert self.installed(venv) == self.VERSION
        assert output.index("GB to download") < output.index("==> torch")


class TestPath:
    """Every program of .venv finds this repository without PYTHONPATH, from any folder."""

    PLUGINS = (
        "from importlib.metadata import entry_points as all;"
        "print(*(e.name for e in all(group='vllm.general_plugins') if 'dllm' in e.name))"
    )

    @pytest.fixture
    def home(self, home: Path, venv: Path) -> Path:
        """Set up a repository with the packages of this process."""
        for actual in (ROOT / INFO, *(file.parent for file in ROOT.glob("*/__init__.py"))):
            (home / actual.name).symlink_to(actual)
        packages = [path for path in sys.path if path and not Path(path, INFO).exists()]
        (venv / "packages.pth").write_text("\n".join(packages))
        run_in(home, "put_on_path")
        return home

    def ask(self, home: Path, code: str, **env: str) -> str:
        python = home / ".venv" / "bin" / "python"
        return output_of(python, "-c", code, cwd="/", env={"HOME": str(home), **env}).strip()

    def test_processes_find_us_too(self, home: Path) -> None:
        """An engine's process is spawned, and another one inspects a model for upstream."""
        find = "import importlib.util as util; print(util.find_spec('vllm').origin)"
        code = f"""
import multiprocessing, subprocess, sys
{find}
subprocess.run([sys.executable, "-c", {find!r}], check=True)
child = multiprocessing.get_context("spawn").Process(target=exec, args=({find!r},))
child.start()
child.join()
"""
        assert self.ask(home, code).split() == [str(home / "vllm" / "__init__.py")] * 3

    def test_plugins_are_found_once_where_pythonpath_is_set_too(self, home: Path) -> None:
        once = "register_dllm_models"
        assert self.ask(home, self.PLUGINS) == once
        assert self.ask(home, self.PLUGINS, PYTHONPATH=str(home)) == once

    def test_pythonpath_comes_first(self, home: Path, tmp_path: Path) -> None:
        other = tmp_path / "other" / "vllm"
        other.mkdir(parents=True)
        (other / "__init__.py").touch()
        code = "import vllm; print(vllm.__file__)"
        assert self.ask(home, code, PYTHONPATH=str(other.parent)) == str(other / "__init__.py")

    def test_a_moved_repository_is_found(self, home: Path, tmp_path: Path) -> None:
        moved = home.rename(tmp_path / "moved")
        assert self.ask(moved, self.PLUGINS) == "register_dllm_models"
