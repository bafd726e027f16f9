# SPDX-License-Identifier: Apache-2.0
"""Tests; not only pytest imports them, and they import what lies in scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
