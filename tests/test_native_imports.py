# SPDX-License-Identifier: Apache-2.0
"""Native rooms import torch and themselves, never vllm or each other.

import-linter checks our own modules only; it cannot see upstream's `vllm.*`, so imports are read
from the syntax trees here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

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
