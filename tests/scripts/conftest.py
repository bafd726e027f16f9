# SPDX-License-Identifier: Apache-2.0
"""A repository that contains only the scripts."""

import shutil
from pathlib import Path

import pytest

from tests.programs import ROOT


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a repository that contains only the scripts."""
    home = tmp_path / "home"
    shutil.copytree(
        ROOT / "scripts", home / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    return home
