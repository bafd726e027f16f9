# SPDX-License-Identifier: Apache-2.0
"""Limits on the code's structure: short functions, and unique names of classes and modules."""

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "vllm/diffusion"
NATIVE_PACKAGES = ("flash_sample", "vmm_allocator", "vllm_add_llada", "gather_gemm")
FOLDERS = ("vllm", *NATIVE_PACKAGES, "scripts", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MAX_LINES = 60
# Each package may have its own configuration, base or file of a family.
SHARED_NAMES = {"__init__", "config", "base", "dream"}


def twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parent.name != "reference"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_functions_fit_on_a_screen(path: Path) -> None:
    """Triton's kernels and published loops are exempt, because they can hardly be divided."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert is_kernel or (node.end_lineno or 0) - node.lineno < MAX_LINES, node.name


def test_modules_stand_in_packages() -> None:
    names = {path.stem for path in OURS.glob("*.py")}
    assert names == {"__init__", "config", "metrics", "plugin"}


def test_a_name_stands_once() -> None:
    files = sorted(OURS.rglob("*.py"))
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    assert not twice(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert not twice(path.stem for path in files if path.stem not in SHARED_NAMES)
