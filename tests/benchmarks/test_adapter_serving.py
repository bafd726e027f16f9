# SPDX-License-Identifier: Apache-2.0
"""The benchmark of servers with adapters, at tiny widths."""

import json
from pathlib import Path

import pytest

from benchmarks import adapter_serving

pytestmark = pytest.mark.usefixtures("quick_starts")

TINY = ("--family", "llada", "--num-layers", "2", "--shrink", "16", "--dtype", "float32")
SIZES = ("--prompt-length", "16", "--gen-length", "32", "--steps", "4", "--requests", "4")
LOADS = ("--rank", "4", "--load-ranks", "4", "8", "--loads", "3", "--load-clients", "3")


def test_servers_and_loads_are_measured(tmp_path: Path) -> None:
    clients = ("--clients", "1", "2", "--rounds", "1")
    arguments = [*TINY, *SIZES, *LOADS, *clients, "--output-dir", str(tmp_path)]
    assert adapter_serving.main(arguments) == 0
    content = json.loads((tmp_path / "adapter_serving.json").read_text())
    for row, count in zip(content["rows"], (1, 2), strict=True):
        assert row["clients"] == count
        assert min(row[name] for name in ("without", "none", "adapter")) > 0
    facts = {fact["measured"]: fact for fact in content["facts"]}
    gap, before = facts["longest gap during 3 loads"], facts["longest gap without loads"]
    assert gap["limit"] == pytest.approx(2 * before["value"] + 0.02)
    names = ("start without adapters", "start with adapters", "from a replacement to the next step")
    assert all(facts[name]["value"] > 0 for name in names)
    assert sum(name.startswith("first step, adapter") for name in facts) == 2
    assert sum(name.startswith("load of rank") for name in facts) == 2
