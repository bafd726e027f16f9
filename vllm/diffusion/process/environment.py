# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are set before upstream and torch are imported, which read them.

Child processes inherit them. Nothing here imports torch or upstream.
"""

from __future__ import annotations

import os
from importlib import metadata


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


def let_threads_sleep_soon() -> None:
    """Limit how long OpenMP's threads spin while they wait, unless the user has said how they wait.

    Threads that spin for milliseconds, as is the default, starve the other processes of a server on
    a busy machine with few cores; threads that sleep at once make steps on an idle one half as long
    again.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
