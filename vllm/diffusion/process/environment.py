# SPDX-License-Identifier: Apache-2.0
"""Environment variables that must be set before upstream and torch read them at import.

Child processes inherit them. Nothing here imports torch or upstream.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path


def allow_our_plugins() -> None:
    """Add our entry points to upstream's allow-list, `VLLM_PLUGINS`.

    Upstream serves the HTTP routes of a plugin only if the variable names it, and once the
    variable is set it filters every plugin group. So if it is unset or empty, it is set to all
    installed names plus ours, except third-party HTTP routes, which upstream requires the user to
    name. A user's own list is extended with ours.
    """
    groups = (
        "vllm.general_plugins",
        "vllm.platform_plugins",
        "vllm.io_processor_plugins",
        "vllm.stat_logger_plugins",
        "vllm.endpoint_plugins",
    )
    ours: list[str] = []
    others: list[str] = []
    for group in groups:
        for entry in metadata.entry_points(group=group):
            if entry.value.startswith("vllm.diffusion."):
                ours.append(entry.name)
            elif group != "vllm.endpoint_plugins":
                others.append(entry.name)
    named = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*(named or others), *ours]))


def limit_thread_spinning() -> None:
    """Limit how long OpenMP's threads spin while they wait, unless the user has set a wait policy.

    Threads that spin for milliseconds, as by default, starve the other processes of a server on a
    busy machine with few cores. Threads that sleep at once make steps on an idle machine half as
    long again.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def take_stop_strings() -> None:
    """Allow more stop strings in OpenAI's and Anthropic's bodies than upstream's default of 4.

    Editors that complete code send up to ten. The texts are compared once per new token.
    """
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "1024")


def keep_bytecode(*, is_server: bool) -> None:
    """Make a server store the bytecode of its modules if Python would compile them at every start.

    Compiling takes half of the start: 4,400 modules in each of two processes. It happens if the
    installed packages have no bytecode and cannot get any, because their folder is not writable or
    `PYTHONDONTWRITEBYTECODE` is set. The bytecode is then stored in a folder of upstream's cache,
    which child processes inherit. A user's `PYTHONPYCACHEPREFIX` is kept.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("VLLM_CACHE_ROOT") or Path(caches) / "vllm"
    ours = str(Path(root) / "bytecode")
    if is_server and sys.pycache_prefix is None and not _gets_bytecode("torch"):
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = ours
    if sys.pycache_prefix == ours:
        sys.dont_write_bytecode = False


def _gets_bytecode(package: str) -> bool:
    """Return whether a package, if installed, has bytecode or will have it after its import."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
