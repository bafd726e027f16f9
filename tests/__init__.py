# SPDX-License-Identifier: Apache-2.0
"""Tests. The package puts the folder scripts on the import path, also for other programs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
