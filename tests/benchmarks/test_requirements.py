# SPDX-License-Identifier: Apache-2.0
"""scripts/quickstart.sh installs every package that benchmarks, scripts and examples import."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"yaml": "pyyaml"}  # modules whose package has another name
OF_THE_READER = {"langchain_openai", "ray"}  # users of these examples have installed them


def imported(file: Path) -> set[str]:
    """Return the top-level modules of every import, including imports inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "docs/examples"])
def test_what_is_imported_is_installed_to_serve(folder: str) -> None:
    text = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    installed = set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))
    names = {name for file in (ROOT / folder).rglob("*.py") for name in imported(file)}
    ours = {path.stem for path in [*ROOT.iterdir(), *(ROOT / "scripts").iterdir()]}
    known = ours | OF_THE_READER | sys.stdlib_module_names
    packages = {PACKAGES.get(name, name) for name in names - known}
    assert {"torch"} <= packages or folder == "docs/examples"
    assert packages <= installed


def test_the_cuda_set_draws_too() -> None:
    assert "matplotlib==" in (ROOT / "requirements" / "cuda.txt").read_text(encoding="utf-8")
