# SPDX-License-Identifier: Apache-2.0
"""The wheel: its contents, and its effect on the path of an environment."""

import os
import shutil
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.programs import ROOT, output_of, run_python

SCRIPT = ROOT / "scripts" / "installed" / "mosaic_overlay_path.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IN_OVERLAY = (
    *("vllm/__init__.py", "vllm/diffusion/plugin.py"),
    *("flash_sample/__init__.py", "vmm_allocator/__init__.py"),
    "vllm_add_llada/cuda_kernels/fused_ops/__init__.py",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel on a simulated machine without a compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    copied = folder / "source"
    for name in ("vllm", "flash_sample", "gather_gemm", "vllm_add_llada", "vmm_allocator"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, copied / name, ignore=ignored)
    (copied / "scripts").mkdir()
    shutil.copytree(SCRIPT.parent, copied / "scripts" / "installed")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied)
    command = ("setup.py", "-q", "bdist_wheel", "-d", folder)
    done = run_python(*command, cwd=copied, env={**os.environ, "CUDA_HOME": "/nonexistent"})
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("not compiled: ")]
    assert "flash_sample, vllm_add_llada, vmm_allocator: nvcc not found" in line
    assert "on a GPU slower" in line  # the consequence
    assert not list(copied.glob("*.egg-info"))  # Python would find a second project there
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_no_file_of_upstreams_is_in_it(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"mosaic-{PROJECT['version']}.dist-info"
    assert tops == {"mosaic.pth", "mosaic_overlay", "mosaic_overlay_path.py", info}
    assert {f"mosaic_overlay/{name}" for name in IN_OVERLAY} <= set(names)
    pages = (path for path in (ROOT / "vllm").rglob("static/**/*") if path.is_file())
    assert {f"mosaic_overlay/{path.relative_to(ROOT)}" for path in pages} <= set(names)
    assert not [name for name in names if name.endswith(("setup.py", ".cu", ".pyc"))]


def test_it_and_a_source_tree_say_the_same(wheel: zipfile.ZipFile) -> None:
    (tree,) = ROOT.glob("mosaic-*.dist-info")
    assert tree.name == f"mosaic-{PROJECT['version']}.dist-info"
    assert f"Version: {PROJECT['version']}\n" in (tree / "METADATA").read_text()
    namespace: dict[str, str] = {}
    exec((ROOT / "vllm" / "diffusion" / "__init__.py").read_text(), namespace)
    assert namespace["__version__"] == PROJECT["version"]
    results = []
    for text in (
        wheel.read(f"{tree.name}/entry_points.txt").decode(),
        (tree / "entry_points.txt").read_text(),
    ):
        parser = ConfigParser()
        parser.read_string(text)
        results.append({name: dict(parser[name]) for name in parser.sections()})
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("plugins", "is_there"),
    [
        (None, True),
        ("", True),
        ("dllm_endpoints,other", True),
        ("other", False),  # a list of other plugins excludes ours
    ],
)
def test_the_overlay_stands_before_upstream(
    plugins: str | None, is_there: bool, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path)
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    env |= {} if plugins is None else {"VLLM_PLUGINS": plugins}
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print(*sys.path, sep='\\n')"
    path = output_of(sys.executable, "-S", "-c", code, env=env).splitlines()
    overlay = str(tmp_path / "mosaic_overlay")
    assert (overlay in path) == is_there
    if is_there:
        assert path.index(overlay) < path.index(str(tmp_path))
