# SPDX-License-Identifier: Apache-2.0
"""Hinge of the overlay: `import vllm` finds this folder first and upstream's package second.

This folder holds only what diffusion language models add. Everything else, the public names of
`vllm` included, is upstream's: its `__init__.py` is executed in this module's namespace.
"""

import importlib.metadata as _metadata
import os as _os
import pkgutil as _pkgutil

__path__ = _pkgutil.extend_path(__path__, __name__)

_upstream = next(
    (path for path in __path__[1:] if _os.path.isfile(_os.path.join(path, "_version.py"))), None
)
if _upstream is None:
    raise ImportError(
        "the upstream vllm package is not installed; scripts/quickstart.sh installs what is needed"
    )


def _allow_our_plugins() -> None:
    """Put our entry points on upstream's allow-list, `VLLM_PLUGINS`.

    Upstream serves the HTTP routes of a plugin only when the variable names it, and once the
    variable is set it filters every plugin group. So if it is unset or empty, it is set to all
    installed names (except third-party HTTP routes, which upstream wants named by the user) plus
    ours, and a user's own list is completed with ours. Child processes inherit the result.
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
        for entry in _metadata.entry_points(group=group):
            if entry.value.startswith("vllm.diffusion."):
                ours.append(entry.name)
            elif group != "vllm.endpoint_plugins":
                others.append(entry.name)
    named = [name for name in _os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    _os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*(named or others), *ours]))


from vllm.diffusion.process import deferred_imports as _late  # noqa: E402
from vllm.diffusion.process import preflight as _preflight  # noqa: E402
from vllm.diffusion.process import prestart as _early  # noqa: E402

_early.keep_title()
_early.say_nothing_twice()
_preflight.check()
_allow_our_plugins()

# Before torch loads OpenMP. Threads that spin for milliseconds while they wait, as is the default,
# starve the other processes of a server on a busy machine with few cores; threads that sleep at
# once make steps on an idle one half as long again.
if "OMP_WAIT_POLICY" not in _os.environ:
    _os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Before the server's own imports, so that both go on at the same time.
_early.begin()

_late.read_models_once()
_late.replace_upstreams_command()
_init = _os.path.join(_upstream, "__init__.py")
with _early.without_collecting(), _late.without_the_compiler(), open(_init) as _file:
    exec(compile(_file.read(), _init, "exec"))
