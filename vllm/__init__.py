# SPDX-License-Identifier: Apache-2.0
"""Entry of the overlay: `import vllm` finds this folder first and upstream's package second.

This folder contains only what diffusion language models add. Everything else, including the public
names of `vllm`, is upstream's: its `__init__.py` is executed in this module's namespace.
"""

import os as _os
import pkgutil as _pkgutil
import sys as _sys

__path__ = _pkgutil.extend_path(__path__, __name__)

_upstream = next(
    (path for path in __path__[1:] if _os.path.isfile(_os.path.join(path, "_version.py"))), None
)
if _upstream is None:
    raise ImportError(
        "the upstream vllm package is not installed; scripts/quickstart.sh installs what is needed"
    )

from vllm.diffusion.process import deferred_imports as _deferred_imports  # noqa: E402
from vllm.diffusion.process import environment as _environment  # noqa: E402
from vllm.diffusion.process import preflight as _preflight  # noqa: E402
from vllm.diffusion.process import prestart as _prestart  # noqa: E402

_prestart.keep_title()
_prestart.hide_interrupts()
_environment.keep_bytecode(is_server=_prestart.serves(_sys.orig_argv))
_prestart.silence_torch_warnings()
_preflight.check()
_environment.allow_our_plugins()
_environment.limit_thread_spinning()
_environment.take_stop_strings()
# It runs before the server's own imports, so that both import at the same time.
_prestart.begin()

_deferred_imports.replace_upstreams_command()
_init = _os.path.join(_upstream, "__init__.py")
with _prestart.without_collecting(), _deferred_imports.without_the_compiler(), open(_init) as _file:
    exec(compile(_file.read(), _init, "exec"))
