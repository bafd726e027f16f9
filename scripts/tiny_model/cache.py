# SPDX-License-Identifier: Apache-2.0
"""Manifest of a checkpoint directory: whether it is complete and made by these sources.

This module needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatch
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiny_model.settings import Plan

MANIFEST_NAME = "tiny_model_manifest.json"
_OWN_FILES = (
    MANIFEST_NAME,
    "config.json",
    "facts.jsonl",
    "generation_config.json",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_PACKAGES = ("torch", "tokenizers", "safetensors", "transformers")


def recipe(sources: Iterable[Path], family: str, seed: int, plan: Plan) -> dict[str, Any]:
    """Return everything that the result depends on.

    This is the source digest, package versions, family, seed and plan.

    Raises:
        PackageNotFoundError: A package is not installed (`importlib.metadata`).
    """
    digest = hashlib.sha256()
    for source in sorted(sources, key=lambda path: path.name):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return {
        "family": family,
        "packages": {package: version(package) for package in _PACKAGES},
        "plan": repr(plan),
        "seed": seed,
        "sources_sha256": digest.hexdigest(),
    }


def write_manifest(directory: Path, recipe: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Seal `directory`: write the recipe, the results and a digest of every file in it."""
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    manifest = {"files": files, "recipe": recipe, "results": results}
    text = json.dumps(manifest, indent=2, sort_keys=True)
    (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of `directory`.

    The result is None unless every listed file exists and is unchanged.
    """
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST_NAME).read_bytes())
        intact = all(_sha256(directory / name) == sum_ for name, sum_ in manifest["files"].items())
        complete = intact and {"recipe", "results"} <= manifest.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if complete else None


def foreign_files(directory: Path) -> list[str]:
    """Return the names in `directory` that no tiny model has.

    Replacing the directory would destroy these files.
    """
    names = (path.name for path in directory.iterdir()) if directory.exists() else ()
    return sorted(n for n in names if not any(fnmatch(n, pattern) for pattern in _OWN_FILES))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
