# SPDX-License-Identifier: Apache-2.0
"""scripts/check_upstream.py compares the installed vLLM with a wheel."""

import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT, run_python

INTERFACE = "vllm/v1/core/sched/interface.py"
MOVED = "vllm/v1/request.py"
SAME = "vllm/v1/kv_cache_interface.py"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Return a wheel with one interface changed, one module moved and one unchanged."""
    package = Path(sysconfig.get_paths()["purelib"])
    texts = {
        name: (package / name).read_text("utf-8")
        for name in ("vllm/__init__.py", INTERFACE, MOVED, SAME)
    }
    texts["vllm/v1/requests/one.py"] = texts.pop(MOVED)
    texts[INTERFACE] = texts[INTERFACE].replace(
        "    def get_num_unfinished_requests(",
        "    def has_turn(self, request_id: str): ...\n\n    def get_num_unfinished_requests(",
    )
    path = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def test_changes_are_told_apart(wheel: Path) -> None:
    done = run_python(ROOT / "scripts" / "check_upstream.py", wheel)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    changed = lines.index("signature  vllm.v1.core.sched.interface.SchedulerInterface")
    assert lines[changed + 1].strip() == "+ has_turn(self, request_id: str)"
    moved = lines.index("moved      vllm.v1.request.Request")
    assert lines[moved + 1].strip() == "to vllm.v1.requests.one"
    assert not any("kv_cache_interface.FullAttentionSpec" in line for line in lines)
    assert "missing    vllm.platforms.interface.Platform" in lines
    assert " names: " in lines[-1]
