# SPDX-License-Identifier: Apache-2.0
"""The benchmark that finds wrong tokens of drafts by their scores."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import draft_scores


def test_auc_counts_ties_half() -> None:
    wrong, right = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.5, 0.7])
    assert draft_scores.auc(wrong, right) == pytest.approx((2 + 1.5 + 0) / 6)


def test_masked_copies_find_wrong_tokens(tmp_path: Path) -> None:
    """The probability of a token that the model reads does not show whether it is wrong."""
    sizes = ("--drafts", "40", "--stripes", "4", "--output-dir", str(tmp_path))
    assert draft_scores.main([*sizes]) == 0
    rows = json.loads((tmp_path / "draft_scores.json").read_text())["rows"]
    by_kind = {(row["wrong"], row["scoring"]): row for row in rows}
    for kind in ("random", "likely"):
        assert by_kind[kind, "striped 4"]["auc"] > 0.95
        assert by_kind[kind, "striped 4"]["auc"] > by_kind[kind, "direct"]["auc"] + 0.1
        assert by_kind[kind, "striped 4"]["num_rows"] == 4
