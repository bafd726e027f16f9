#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Report what another version of vLLM changes of the names that Mosaic uses.

    scripts/check_upstream.py 0.33.0
    scripts/check_upstream.py path/to/vllm-0.33.0-*.whl

The script downloads the wheel without its dependencies, reads its source and imports nothing. It
looks at every name of vLLM that Mosaic imports, and at every class attribute that docs/upstream.md
names. Names are `missing`, `moved`, changed in their `signature`, or changed in their `text` only.
The exit status is 1 if a name is missing, moved or has another signature.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
OWN = ("vllm.diffusion", "vllm.entrypoints.api_server")  # modules of the overlay
TABLES = ROOT / "docs" / "upstream.md"
KINDS = ("missing", "moved", "signature", "text")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Name(NamedTuple):
    """A name of vLLM: its module, and the path of the name in it ("Class.method")."""

    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}" if self.path else self.module


class Source:
    """The source of one version of vLLM.

    Args:
        folder: the folder that contains the package `vllm`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if there is none."""
        if name not in self._modules:
            base = self._folder.joinpath(*name.split("."))
            files = [base / "__init__.py", base.with_suffix(".py")]
            file = next((file for file in files if file.is_file()), None)
            tree = None if file is None else ast.parse(file.read_text("utf-8"))
            self._modules[name] = tree
        return self._modules[name]

    def node(self, name: Name) -> ast.AST | None:
        """Return the definition of a name; follows imports from other modules of vLLM."""
        tree = self.module(name.module)
        if tree is None or not name.path:
            return tree
        first, *rest = name.path.split(".")
        for node in _statements(tree):
            if first not in _names_of(node):
                continue
            if isinstance(node, ast.ImportFrom):
                module = self._origin(node, name.module)
                actual = next(a.name for a in node.names if first in (a.asname, a.name))
                return self.node(Name(module, ".".join([actual, *rest])))
            return self._inside(node, rest, name.module)
        for node in _statements(tree):
            if isinstance(node, ast.ImportFrom) and "*" in _names_of(node):
                definition = self.node(Name(self._origin(node, name.module), name.path))
                if definition is not None:
                    return definition
        inner = self.module(f"{name.module}.{first}")
        return inner if inner is not None and not rest else None

    def _inside(self, node: ast.AST, path: list[str], module: str) -> ast.AST | None:
        """Return the member of a class, which a base class of vLLM may define."""
        if not path or not isinstance(node, ast.ClassDef):
            return None if path else node
        for member in ast.walk(node):
            if path[0] in _names_of(member):
                return self._inside(member, path[1:], module)
        bases = (ast.unparse(base).split("[")[0] for base in node.bases)
        inherited = (self.node(Name(module, ".".join([base, *path]))) for base in bases)
        return next((member for member in inherited if member is not None), None)

    def _origin(self, node: ast.ImportFrom, module: str) -> str:
        """Return the absolute name of the module from which `module` imports."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self._folder.joinpath(*parts, "__init__.py").is_file()
        parents = parts[: len(parts) - node.level + is_package]
        return ".".join([*parents, *([node.module] if node.module else [])])

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """Return the modules that define each top-level name, by this name."""
        places: dict[str, list[str]] = {}
        for file in sorted((self._folder / "vllm").rglob("*.py")):
            module = ".".join(file.relative_to(self._folder).with_suffix("").parts)
            for node in ast.parse(file.read_text("utf-8")).body:
                if not isinstance(node, ast.ImportFrom | ast.Import):
                    for name in _names_of(node):
                        places.setdefault(name, []).append(module.removesuffix(".__init__"))
        return places


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements of a module, also those under conditions."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            waiting += ast.iter_child_nodes(node)


def _names_of(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target).removeprefix("self.")]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target).removeprefix("self.") for target in node.targets]
    return []


def used_names() -> list[Name]:
    """Return the names of vLLM that the overlay imports or that docs/upstream.md lists."""
    names = set[Name]()
    for file in sorted((ROOT / "vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and _is_upstreams(node.module or ""):
                names |= {Name(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {Name(a.name, "") for a in node.names if _is_upstreams(a.name)}
    modules = {name.path: name.module for name in names}
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)", TABLES.read_text("utf-8")):
        if owner in modules:
            names.add(Name(modules[owner], f"{owner}.{member}"))
    return sorted(names)


def _is_upstreams(module: str) -> bool:
    return module.split(".")[0] == "vllm" and not module.startswith(OWN)


def difference(name: Name, before: Source, after: Source) -> tuple[str, str] | None:
    """Return the kind of a change and a note; None if the name is unchanged."""
    old, new = before.node(name), after.node(name)
    if old is None:
        return None  # it is set at run time, or re-exported in a way that source does not show
    if new is None:
        last = name.path.split(".")[0]
        places = after.places.get(last, [])
        return ("moved", f"to {', '.join(places)}") if places else ("missing", "")
    if isinstance(old, ast.Module) or ast.dump(old) == ast.dump(new):
        return None
    old_signature, new_signature = _signature(old), _signature(new)
    if old_signature == new_signature:
        return "text", ""
    gone = [f"- {part}" for part in sorted(old_signature - new_signature)]
    added = [f"+ {part}" for part in sorted(new_signature - old_signature)]
    return "signature", "; ".join([*gone, *added])


def _signature(node: ast.AST) -> set[str]:
    """Return the parameters of a function, or the bases, methods and fields of a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {ast.unparse(node.args)}
    if isinstance(node, ast.ClassDef):
        members = {f"({', '.join(map(ast.unparse, node.bases))})"}
        for member in node.body:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                members.add(f"{member.name}({ast.unparse(member.args)})")
            elif isinstance(member, ast.AnnAssign):
                members.add(ast.unparse(member.target))
        return members
    return set()


def unpacked_wheel(version: str, folder: Path) -> Path:
    """Unpack the Python files of a wheel, which is downloaded unless `version` is its path."""
    wheel = Path(version)
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, f"vllm=={version}"], check=True)
        wheel = next(folder.glob("vllm-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder / "source", sources)
    return folder / "source"


def installed() -> Path:
    """Return the folder that contains vLLM's installed package."""
    folder = Path(sysconfig.get_paths()["purelib"])
    if not (folder / "vllm").is_dir():
        raise SystemExit(f"error: vllm: expected a package in {folder}, got none")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("version", help="a version on the package index, or the path of a wheel")
    parser.add_argument("--all", action="store_true", help="also list names whose text differs")
    args = parser.parse_args()
    names, counts = used_names(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        before, after = Source(installed()), Source(unpacked_wheel(args.version, Path(folder)))
        rows = []
        for name in names:
            changed = difference(name, before, after)
            if changed is not None:
                kind, note = changed
                counts[kind] += 1
                rows.append((KINDS.index(kind), str(name), note))
    for index, changed_name, note in sorted(rows):
        if KINDS[index] != "text" or args.all:
            details = f"\n           {note[:300]}" if note else ""
            print(f"{KINDS[index]:<10} {changed_name}{details}")
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    print(f"{len(names)} names: {summary}, {len(names) - counts.total()} unchanged")
    return int(any(counts[kind] for kind in KINDS[:3]))


if __name__ == "__main__":
    sys.exit(main())
