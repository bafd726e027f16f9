# SPDX-License-Identifier: Apache-2.0
"""Modules have no import cycles, and tests import no other tests."""

from graphlib import CycleError, TopologicalSorter

import pytest

PACKAGES = ("vllm", "flash_sample", "vmm_allocator", "vllm_add_llada", "gather_gemm")


def circle_of(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle, with the first one again at the end, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_a_circle_is_seen() -> None:
    assert set(circle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_there_is_no_circle() -> None:
    grimp = pytest.importorskip("grimp")  # missing if only a server's requirements are installed
    # A type may name a module that imports this one: a guest has the runner, which has guests.
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
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
