# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks/fragmentation.py that need no GPU."""

from pathlib import Path

import pytest

from benchmarks import fragmentation
from benchmarks.performance_tables import section


def test_reserved_memory_is_set_against_what_was_used() -> None:
    actual = {"used": 2.0 * 2**30, "reserved": 3.0 * 2**30}
    assert fragmentation.row_of("PyTorch", actual) == ["PyTorch", 2.0, 3.0, 1.5]


def test_the_result_is_a_table_of_the_document(tmp_path: Path) -> None:
    options = fragmentation.parse_arguments(["--output-dir", str(tmp_path), "--requests", "7"])
    fragmentation.write_results(options, [["PyTorch", 2.0, 3.0, 1.5]])
    (path,) = tmp_path.iterdir()
    lines = section(path)
    assert lines[0] == "### 7 requests of 128 to 65536 tokens, 2 layers of LLaDA-8B"
    assert "| PyTorch | 2.00 | 3.00 | 1.50 |" in lines


@pytest.mark.parametrize("wrong", [["--requests", "0"], ["--shortest", "9", "--longest", "8"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        fragmentation.parse_arguments(wrong)
