# SPDX-License-Identifier: Apache-2.0
"""Build this room alone: ``python setup.py build_ext --inplace``; the root's setup.py does it."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
runpy.run_path(str(ROOT / "setup.py"), init_globals={"ROOM": "gather_gemm"}, run_name="__main__")
