# SPDX-License-Identifier: Apache-2.0
"""Packages are installed by uv with pip's settings, or by pip if uv cannot install them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, add_program, run

SCRIPT = ROOT / "scripts" / "install_packages.py"
UV = """#!/bin/sh
printf '%s\\n' "$@" >{log}
env | grep -E '^(UV_|SSL_CERT_FILE|HTTPS?_PROXY)' >>{log}
exit {status}
"""


class Uv:
    """A uv on PATH that records its arguments and variables."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "uv.log"
        self._program = folder / "bin" / "uv"

    def install(
        self, *arguments: str, status: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the script with this uv in front of all others."""
        add_program(self._program, UV.format(log=self._log, status=status))
        path = f"{self._program.parent}:{os.environ['PATH']}"
        env = {"PATH": path, "PIP_CONFIG_FILE": os.devnull, **variables}
        return run(sys.executable, SCRIPT, *arguments, env=env)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def uv(tmp_path: Path) -> Uv:
    return Uv(tmp_path)


def test_uv_receives_the_settings_of_pip(uv: Uv, tmp_path: Path) -> None:
    """Settings come from pip's variables and from its file; a variable has precedence."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://first\nextra-index-url = https://a\n https://b\n"
        "[install]\nproxy = http://p\n[list]\nformat = json\n"
    )
    done = uv.install(
        *("--no-deps", "-r", "some.txt"),
        PIP_CONFIG_FILE=str(file),
        PIP_INDEX_URL="https://second",
        PIP_FIND_LINKS="/x /y",
        PIP_CERT="/c.pem",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 0, done.stderr
    assert uv.calls[:3] == ["pip", "install", "--quiet"]
    assert uv.calls[uv.calls.index("--no-deps") :][:3] == ["--no-deps", "-r", "some.txt"]
    assert sys.executable in uv.calls
    assert {line for line in uv.calls if "=" in line} >= {
        "UV_DEFAULT_INDEX=https://second",
        "UV_INDEX=https://a https://b",
        "UV_FIND_LINKS=/x,/y",
        "SSL_CERT_FILE=/c.pem",
        "HTTP_PROXY=http://p",
        "HTTPS_PROXY=http://p",
    }


def test_pip_installs_under_settings_that_uv_lacks(uv: Uv) -> None:
    done = uv.install("--help", PIP_CLIENT_CERT="/x.pem")
    assert done.returncode == 0
    assert "uv has no setting client-cert" in done.stdout
    assert uv.calls == []


def test_pip_installs_where_uv_fails(uv: Uv) -> None:
    done = uv.install("--no-index", "no-such-package-of-anybody==1", status=1)
    assert done.returncode == 1
    assert "trying pip" in done.stdout
    assert "no-such-package-of-anybody" in done.stderr
    assert uv.calls[-1] == "no-such-package-of-anybody==1"
