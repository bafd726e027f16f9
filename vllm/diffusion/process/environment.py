# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are set before upstream and torch are imported, which read them.

Child processes inherit them. Nothing here imports torch or upstream.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path


def allow_our_plugins() -> None:
    """Put our entry points on upstream's allow-list, `VLLM_PLUGINS`.

    Upstream serves the HTTP routes of a plugin only when the variable names it, and once the
    variable is set it filters every plugin group. So if it is unset or empty, it is set to all
    installed names (except third-party HTTP routes, which upstream wants named by the user) plus
    ours, and a user's own list is completed with ours.
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
    """Limit how long OpenMP's threads spin while they wait, unless the user has said how they wait.

    Threads that spin for milliseconds, as is the default, starve the other processes of a server on
    a busy machine with few cores; threads that sleep at once make steps on an idle one half as long
    again.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def take_stop_strings() -> None:
    """Let OpenAI's and Anthropic's bodies have more stop strings than upstream's default of 4.

    Editors that complete code send up to ten. The texts are compared once per new token.
    """
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "1024")


def keep_bytecode(*, is_server: bool) -> None:
    """Let a server keep the bytecode of its modules where Python would compile them at every start.

    That is half of a start: 4,400 modules in each of two processes. It happens where the installed
    packages have no bytecode and cannot get any, as their folder is not writable or
    `PYTHONDONTWRITEBYTECODE` is set. A folder of upstream's cache then has it. A
    `PYTHONPYCACHEPREFIX` of the user's is kept to.

    Args:
        is_server: whether this program is the server. Its child processes inherit the folder.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("VLLM_CACHE_ROOT") or Path(caches) / "vllm"
    ours = str(Path(root) / "bytecode")
    if is_server and sys.pycache_prefix is None and not _gets_bytecode("torch"):
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = ours
    if sys.pycache_prefix == ours:
        sys.dont_write_bytecode = False


def _gets_bytecode(package: str) -> bool:
    """Whether a package, if it is installed, has bytecode or will have it once it is imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
