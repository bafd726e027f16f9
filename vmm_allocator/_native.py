# SPDX-License-Identifier: Apache-2.0
"""Import of the compiled module; if it is missing, the reason is kept for error messages."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from ._errors import NotBuiltError

if TYPE_CHECKING:
    from types import ModuleType

_module: ModuleType | None
_reason = "vmm_allocator is not built: run `python setup.py build_ext --inplace`"
try:
    _module = import_module("._vmm_allocator", __package__)
except ModuleNotFoundError:
    _module = None
except ImportError as error:
    _reason = f"vmm_allocator: the compiled module does not load: {error}"
    warnings.warn(_reason, stacklevel=2)
    _module = None


def is_built() -> bool:
    """Whether the compiled module is available; without it no arena can be created."""
    return _module is not None


def build_stamp() -> int | None:
    """Return the stamp of the sources that the compiled module was built from, if it has one."""
    return getattr(_module, "BUILD_STAMP", None)


def native() -> ModuleType:
    """Return the compiled module; raise NotBuiltError if it is missing."""
    if _module is None:
        raise NotBuiltError(_reason)
    return _module
