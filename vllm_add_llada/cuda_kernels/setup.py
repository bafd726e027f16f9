# SPDX-License-Identifier: Apache-2.0
"""Build only this package: ``python setup.py build_ext --inplace``, by the root's setup.py."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
runpy.run_path(
    str(ROOT / "setup.py"), init_globals={"NATIVE_PACKAGE": "vllm_add_llada"}, run_name="__main__"
)
