# SPDX-License-Identifier: Apache-2.0
"""Delay of upstream's slowest import, and additions to upstream's modules.

Upstream's `__init__` imports the compiler's table of lowerings, which delays a start by half a
second, to add its own list to it. If that import fails, upstream continues without it. So the
import fails at first, and the list is added when the table is imported later, which is when
something compiles.

Our additions to upstream's command are made when its module is imported.

Nothing here imports torch or upstream.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LOWERING = "torch._inductor.lowering"
COMMAND = "vllm.entrypoints.cli.serve"


class PostImportHook(MetaPathFinder):
    """Import hook that finds a module once, and calls a function when it is loaded.

    Args:
        module: its name.
        then: function that receives the loaded module.
        is_refused: whether its import fails for now; may be changed as an attribute.
    """

    def __init__(
        self, module: str, then: Callable[[ModuleType], None], *, is_refused: bool = False
    ) -> None:
        self._module, self._then, self.is_refused = module, then, is_refused

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        if self.is_refused:
            raise ImportError(f"{name} is imported later", name=name)
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            self._then(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def _register_fallbacks(table: ModuleType) -> None:
    importlib.import_module("vllm.env_override")._patch_inductor_fallback_allow_list()


def _replace(module: ModuleType) -> None:
    def commands() -> list[object]:
        return [importlib.import_module("vllm.diffusion.api.server.serve_command").ServeCommand()]

    module.cmd_init = commands  # type: ignore[attr-defined]


def replace_upstreams_command() -> None:
    """Replace `vllm serve` with our extended command, before upstream's is imported."""
    if COMMAND not in sys.modules:
        sys.meta_path.insert(0, PostImportHook(COMMAND, _replace))


@contextmanager
def without_the_compiler() -> Iterator[None]:
    """Make the import of the table fail while upstream's package is imported.

    Nothing changes if the table is already imported.
    """
    later = PostImportHook(LOWERING, _register_fallbacks, is_refused=True)
    if LOWERING not in sys.modules:
        sys.meta_path.insert(0, later)
    try:
        yield
    finally:
        later.is_refused = False
