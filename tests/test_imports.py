# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: no circles, rooms import themselves alone, tests only helpers."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGES = ("vllm", "flash_sample", "vmm_allocator", "vllm_add_llada", "gather_gemm")


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """Modules of one circle, the first one again at the end; nothing where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_a_circle_is_seen() -> None:
    assert set(circle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_there_is_no_circle() -> None:
    grimp = pytest.importorskip("grimp")  # of the tests' requirements, where only serving's are
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    assert "vllm.diffusion.sampling.sampler" in graph.modules
    imports = {name: set(graph.find_modules_directly_imported_by(name)) for name in graph.modules}
    assert not circle_of(imports)


def test_no_test_module_imports_another() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("tests", cache_dir=None)
    tests = {name for name in graph.modules if name.rpartition(".")[2].startswith("test_")}
    assert __name__ in tests
    imported = {name: graph.find_modules_that_directly_import(name) for name in tests}
    assert {name: by for name, by in imported.items() if by} == {}


# ---- Native rooms import torch and themselves, never vllm or each other ----


ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("flash_sample", "vllm_add_llada", "vmm_allocator", "gather_gemm")


def imported_packages(source: str) -> set[str]:
    """Top-level packages of every absolute import, those inside functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_neither_vllm_nor_another_room(room: str) -> None:
    forbidden = {"vllm", *ROOMS} - {room}
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"{room} has no Python file"
    found = {
        str(file.relative_to(ROOT)): both
        for file in files
        if (both := imported_packages(file.read_text(encoding="utf-8")) & forbidden)
    }
    assert not found


def test_the_test_sees_imports() -> None:
    source = "import torch.nn\ndef f():\n    from vllm.config import x\n    from . import y\n"
    assert imported_packages(source) == {"torch", "vllm"}
