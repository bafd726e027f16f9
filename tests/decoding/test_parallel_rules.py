# SPDX-License-Identifier: Apache-2.0
"""Rules that fill one block after the other, as many positions at a time as they dare."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.support import EOS, MASK, MODEL, Case, Row, candidates, decided, of_ours
from tests.reference.dinfer import select_threshold_eligible
from vllm.diffusion.decoding import make_rule
from vllm.diffusion.decoding.credit import Credit

NAN = float("nan")
SCORES = st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.75, 0.9, 0.95, 1.0]), min_size=1)


def committed(positions: list[int], scores: list[float], **asked: Any) -> list[int]:
    """Positions that one forward commits; the sequence is one token and one block."""
    rule = asked.pop("algorithm", "local_leap")
    return sorted(positions[i] for i in of_ours(rule, Case(scores, set(), asked, positions)))


def test_what_is_no_number_is_the_last() -> None:
    assert committed([1, 2, 3], [NAN, 0.3, NAN], algorithm="factor") == [2]
    assert committed([1, 2, 4], [NAN, 0.1, NAN], algorithm="hierarchy") == [2]


# ---- LocalLeap ---------------------------------------------------------------------------------


def test_local_leap_stops_early_after_a_block() -> None:
    asked = decided(gen_length=6, block_length=2, algorithm="local_leap", early_stop=True)
    row = Row(asked, [EOS])  # that of the prompt does not count
    assert row.eligible() == [1, 2]
    row.see([1, 2], [0.5, 0.4], [3, 4])
    assert row.eligible() == [2]
    row.see([2], [0.4], [4])
    assert row.eligible() == [3, 4]
    row.see([3, 4], [0.95, 0.94], [EOS, 5])
    assert row.eligible() == []
    assert row.works[-1].fill == (5, EOS)
    assert row.tokens.tolist() == [EOS, 3, 4, EOS, 5, EOS, EOS]
    assert row.eligible() is None


# ---- entropy -----------------------------------------------------------------------------------


def test_entropies_are_as_the_source_computes_them() -> None:
    scoring = make_rule(decided(algorithm="EntropyThreshold"), 1).scoring
    assert (scoring.score, scoring.epsilon) == ("negative_entropy", 1e-8)


# ---- credit ------------------------------------------------------------------------------------


def test_credits_by_hand() -> None:
    """Two forwards of one position, in plain numbers."""
    rule = Credit(decided(gen_length=2, block_length=2, algorithm="credit"), 1)
    tokens = np.array([1, MASK, MASK])
    assert rule.prepare(tokens) is not None
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    first = rule.adjust_logits(logits.clone(), torch.tensor([0, 1]))
    p = math.exp(1) / (math.exp(1) + 2)
    credit = p**0.2
    assert first[0].tolist() == pytest.approx([1 + 0.7 * math.log(credit + 1), 0, 0])
    q = math.exp(2) / (math.exp(2) + 2)
    assert float(first[1, 1]) == pytest.approx(2 + 0.7 * math.log(q**0.2 + 1))
    tokens[2] = 3
    assert rule.prepare(tokens) is not None
    second = rule.adjust_logits(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0]))
    faded, earned = 0.8 * credit, p**0.2
    wanted = [0.7 * math.log(faded + 1), 1 + 0.7 * math.log(earned + 1), 0]
    assert second[0].tolist() == pytest.approx(wanted)


def test_credits_do_not_depend_on_chunks_and_end_with_their_block() -> None:
    asked = decided(gen_length=6, block_length=3, algorithm="credit")
    logits = [torch.randn(3, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    whole, parts = Credit(asked, 2), Credit(asked, 2)
    tokens = np.array([1, 1] + [MASK] * 6)
    for step in range(2):
        found = []
        for rule, chunks in ((whole, [[0, 1, 2]]), (parts, [[0], [1, 2]])):
            assert rule.prepare(tokens) is not None
            outs = [
                rule.adjust_logits(logits[step][rows].clone(), torch.tensor(rows))
                for rows in chunks
            ]
            found.append(torch.cat(outs))
        assert torch.equal(*found)
    tokens[2:5] = 3
    assert whole.prepare(tokens) is not None
    fresh = Credit(asked, 2)
    assert fresh.prepare(tokens) is not None
    rows = torch.tensor([3, 4, 5])
    assert torch.equal(
        whole.adjust_logits(logits[2].clone(), rows), fresh.adjust_logits(logits[2].clone(), rows)
    )
    tokens[5:] = 3
    assert whole.prepare(tokens) is None
    assert whole._credits is None


@settings(max_examples=200, deadline=None)
@given(SCORES, st.data())
def test_credit_accepts_as_the_reference(scores: list[float], data: st.DataObject) -> None:
    tokens = data.draw(
        st.lists(st.sampled_from([2, 3, MASK]), min_size=len(scores), max_size=len(scores))
    )
    scores[-1] += data.draw(st.sampled_from([0.0, 5e-6, 2e-5]))
    rule = Credit(decided(gen_length=len(scores), algorithm="credit", threshold=0.9), 0)
    chosen = rule.select(candidates(list(range(len(scores))), scores, tokens))
    wanted = select_threshold_eligible(tokens, scores, 0.9, MASK)
    assert sorted(chosen.tolist()) == sorted(wanted)
    assert rule.forbid_mask == (not wanted)


# ---- caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    ["threshold", "factor", "local_leap", "entropy_threshold", "hierarchy", "credit"],
)
@pytest.mark.parametrize(
    ("cache", "rows"),
    [
        ("none", [(0, 8), (0, 8), (0, 8)]),
        ("prefix", [(0, 8), (2, 8), (0, 8)]),
        ("dual", [(0, 8), (2, 5), (0, 8)]),
    ],
)
def test_rows_that_a_forward_computes(
    algorithm: str, cache: str, rows: list[tuple[int, int]]
) -> None:
    """A block's first forward is whole; masks before the block compete in it only."""
    lengths = {"gen_length": 6, "block_length": 3, "allow_infill": True}
    row = Row(decided(algorithm=algorithm, cache=cache, model=MODEL, **lengths), [1, 1])
    row.tokens[1] = MASK
    for _ in range(2):
        positions = row.eligible()
        assert positions is not None
        row.see(positions, [{2: -1.0}.get(p, -2.0 - p) for p in positions], None)
    assert row.works[0].eligible.tolist() == [1, 2, 3, 4]
    assert (1 in row.works[1].eligible.tolist()) == (cache == "none")
    row.tokens[1:5] = 3
    assert row.eligible() == [5, 6, 7]
    assert [work.rows for work in row.works] == rows
