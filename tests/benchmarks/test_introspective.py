# SPDX-License-Identifier: Apache-2.0
"""The benchmark of introspective decoding with given shares of right drafts, at tiny widths."""

import json
from pathlib import Path

import pytest

from benchmarks import introspective

pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.mark.parametrize(("share", "num_forwards"), [(1.0, 2 + 6), (0.0, 1 + 2 * 12)])
def test_forward_passes_follow_the_share(tmp_path: Path, share: float, num_forwards: int) -> None:
    """24 tokens: one after the prompt, one after masks, then 4 a pass or 1 each."""
    scale = ("--num-layers", "2", "--shrink", "32", "--dtype", "float32", "--rounds", "1")
    sizes = ("--clients", "1", "--context", "20", "--gen-length", "24")
    output = ("--output-dir", str(tmp_path))
    assert introspective.main([*scale, *sizes, "--share", str(share), *output]) == 0
    (row,) = json.loads((tmp_path / "introspective.json").read_text())["rows"]
    assert row["clients"] == 1
    assert row["tokens_per_forward"] == pytest.approx(24 / num_forwards, rel=0.1)
    assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["one_by_one"])
