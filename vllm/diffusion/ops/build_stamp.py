# SPDX-License-Identifier: Apache-2.0
"""Stamp of a native package's interface: its compiled module has it, and a start compares it.

`setup.py` runs this file by its path, so it imports nothing of ours.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_COMMON = "vllm_add_llada/cuda_kernels/common"  # headers that all packages share


def stamp_of(root: Path, folder: str) -> int | None:
    """Return the stamp of the headers and bindings in a folder; None for a wheel, without sources.

    Args:
        root: the root of the repository.
        folder: the folder of the package that holds the compiled module, relative to the root.
    """
    bindings = root / folder / "bindings.cpp"
    if not bindings.is_file():
        return None
    headers = [path for name in (folder, _COMMON) for path in sorted((root / name).glob("*.h"))]
    texts = [path.read_bytes() for path in (bindings, *headers)]
    return int(hashlib.sha256(b"".join(texts)).hexdigest()[:15], 16)
