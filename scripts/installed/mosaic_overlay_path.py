# SPDX-License-Identifier: Apache-2.0
"""Start-up code of every Python in an environment that the wheel is installed in.

It puts the overlay before upstream's package, whose files are not touched. A VLLM_PLUGINS that
names other plugins only leaves the overlay out.
"""

import os
import sys

_OURS = {"register_dllm_models", "dllm_platform", "dllm_endpoints"}
_HERE = os.path.dirname(os.path.abspath(__file__))

_named = {name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name}
if not _named or _named & _OURS:
    _place = sys.path.index(_HERE) if _HERE in sys.path else 0
    sys.path.insert(_place, os.path.join(_HERE, "mosaic_overlay"))
