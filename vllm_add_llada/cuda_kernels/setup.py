# SPDX-License-Identifier: Apache-2.0
"""Build this room alone: ``python setup.py build_ext --inplace``; the root's setup.py does it."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
runpy.run_path(str(ROOT / "setup.py"), init_globals={"ROOM": "vllm_add_llada"}, run_name="__main__")
