# SPDX-License-Identifier: Apache-2.0
"""PyTorch's compiler is imported when something compiles, not with upstream's package.

Upstream's `__init__` imports the compiler's table of lowerings, a second of every process, to put a
list of its own into it. It does without where that import fails; so it fails at first, and the list
is put in place when the table is imported after all. Nothing here imports torch or upstream.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LOWERING = "torch._inductor.lowering"


class _Later(MetaPathFinder):
    """Refuses the table at first; afterwards finds it once, and tells upstream of it."""

    def __init__(self, table: str) -> None:
        self._table, self.is_refused = table, True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._table:
            return None
        if self.is_refused:
            raise ImportError(f"{name} is imported later", name=name)
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            importlib.import_module("vllm.env_override")._patch_inductor_fallback_allow_list()

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


@contextmanager
def without_the_compiler() -> Iterator[None]:
    """While upstream's package is imported; nothing changes where the table is there already."""
    later = _Later(LOWERING)
    if LOWERING not in sys.modules:
        sys.meta_path.insert(0, later)
    try:
        yield
    finally:
        later.is_refused = False
