# SPDX-License-Identifier: Apache-2.0
"""Start-up code of every Python process in an environment where the wheel is installed.

It puts the overlay before upstream's package on the path; upstream's files are not changed. If
VLLM_PLUGINS is set and names none of our plugins, the overlay is left out.
"""

import os
import sys

_OURS = {"register_dllm_models", "dllm_platform", "dllm_endpoints"}
_HERE = os.path.dirname(os.path.abspath(__file__))

_named = {name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name}
if not _named or _named & _OURS:
    _place = sys.path.index(_HERE) if _HERE in sys.path else 0
    sys.path.insert(_place, os.path.join(_HERE, "mosaic_overlay"))
