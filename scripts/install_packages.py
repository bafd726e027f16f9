#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Install packages into the environment of this interpreter: with uv, or else with pip.

    scripts/install_packages.py [arguments of `pip install`]

uv needs a tenth of pip's time for the packages of Mosaic. It does not read pip's configuration, so
this program passes it on: indexes, folders of wheels, constraints, certificates, proxy and time
limit, from pip's files and from its `PIP_...` variables. pip installs the packages if its
configuration holds a setting without an equivalent in uv, if uv is neither installed nor available
from the index, or if uv fails.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UV = "uv==0.13.9"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

# pip's settings, and the environment variables by which uv receives them.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "no-index": ("UV_NO_INDEX",),
    "constraint": ("UV_CONSTRAINT",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
COMMA_SEPARATED = ("find-links",)
# Settings of pip that do not change what is installed.
IGNORED = frozenset(
    {
        *("break-system-packages", "cache-dir", "config-file", "disable-pip-version-check"),
        *("no-cache-dir", "no-color", "no-input", "no-warn-conflicts", "no-warn-script-location"),
        *("progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "verbose"),
    }
)


class UnsupportedSetting(Exception):
    """pip has a setting that uv has no equivalent for."""


def main(arguments: Sequence[str]) -> int:
    """Install packages; return the exit status."""
    uv = find_uv()
    if uv is not None:
        try:
            variables = uv_variables(pip_settings())
        except UnsupportedSetting as setting:
            print(f"pip installs the packages, because uv has no setting {setting}", flush=True)
        else:
            command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
            # Uv then chooses versions as pip does
            command += ["--index-strategy", "unsafe-best-match", *arguments]
            if (
                subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
                == 0
            ):
                return 0
            print("uv could not install the packages (see above): trying pip", flush=True)
    command = [*PIP, "install", "-qq", "--no-warn-conflicts", *arguments]
    return subprocess.run(command, check=False).returncode


def find_uv() -> str | None:
    """Return the path of uv; if uv is missing, install it next to this interpreter."""
    folder = str(Path(sys.executable).parent)
    if found := shutil.which("uv") or shutil.which("uv", path=folder):
        return found
    command = [*PIP, "install", "-qqq", "--retries", "0", "--timeout", "15", UV]
    subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    return shutil.which("uv", path=folder)


def pip_settings() -> dict[str, str]:
    """Return pip's own settings for `pip install`, from its files and from the environment."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return {name: value for section in sections.values() for name, value in section.items()}


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Return uv's environment variables for pip's settings.

    Raises:
        UnsupportedSetting: a setting has no equivalent in uv.
    """
    variables = {}
    for name, value in settings.items():
        if name not in VARIABLES and name not in IGNORED:
            raise UnsupportedSetting(name)
        separator = "," if name in COMMA_SEPARATED else " "
        for variable in VARIABLES.get(name, ()):
            variables[variable] = separator.join(value.split())
    return variables


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
