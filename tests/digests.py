# SPDX-License-Identifier: Apache-2.0
"""A digest of Python code, which decides whether slow tests must run again."""

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def digest_of(paths: Iterable[Path]) -> str:
    """Return a digest of the code of sorted files, without comments and docstrings."""
    trees = (_without_docstrings(ast.parse(path.read_bytes())) for path in sorted(paths))
    return hashlib.sha256("\n".join(map(ast.dump, trees)).encode()).hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return tree
