# SPDX-License-Identifier: Apache-2.0
"""Rules that fill one block after the other, with several positions per forward pass."""

from typing import Any

import numpy as np
import torch

from tests.decoding.support import EOS, MASK, Case, Row, decided, of_ours
from vllm.diffusion.decoding.credit import Credit

NAN = float("nan")


def committed(positions: list[int], scores: list[float], **parameters: Any) -> list[int]:
    """Return the positions that a forward pass commits, after a prompt of one token."""
    rule = parameters.pop("algorithm", "local_leap")
    return sorted(positions[i] for i in of_ours(rule, Case(scores, set(), parameters, positions)))


def test_what_is_no_number_is_the_last() -> None:
    assert committed([1, 2, 3], [NAN, 0.3, NAN], algorithm="factor") == [2]
    assert committed([1, 2, 4], [NAN, 0.1, NAN], algorithm="hierarchy") == [2]


# ---- LocalLeap ---------------------------------------------------------------------------------


def test_local_leap_stops_early_after_a_block() -> None:
    params = decided(gen_length=6, block_length=2, algorithm="local_leap", early_stop=True)
    row = Row(params, [EOS])  # EOS in the prompt does not count
    assert row.eligible() == [1, 2]
    row.see([1, 2], [0.5, 0.4], [3, 4])
    assert row.eligible() == [2]
    row.see([2], [0.4], [4])
    assert row.eligible() == [3, 4]
    row.see([3, 4], [0.95, 0.94], [EOS, 5])
    assert row.eligible() == []
    assert row.targets[-1].fill == (5, EOS)
    assert row.tokens.tolist() == [EOS, 3, 4, EOS, 5, EOS, EOS]
    assert row.eligible() is None


# ---- credit ------------------------------------------------------------------------------------


def test_credits_do_not_depend_on_chunks_and_end_with_their_block() -> None:
    params = decided(gen_length=6, block_length=3, algorithm="credit")
    logits = [torch.randn(3, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    whole, parts = Credit(params, 2), Credit(params, 2)
    tokens = np.array([1, 1] + [MASK] * 6)
    for step in range(2):
        results = []
        for rule, chunks in ((whole, [[0, 1, 2]]), (parts, [[0], [1, 2]])):
            assert rule.prepare(tokens) is not None
            outs = [
                rule.adjust_logits(logits[step][rows].clone(), torch.tensor(rows))
                for rows in chunks
            ]
            results.append(torch.cat(outs))
        assert torch.equal(*results)
    tokens[2:5] = 3
    assert whole.prepare(tokens) is not None
    fresh = Credit(params, 2)
    assert fresh.prepare(tokens) is not None
    rows = torch.tensor([3, 4, 5])
    assert torch.equal(
        whole.adjust_logits(logits[2].clone(), rows), fresh.adjust_logits(logits[2].clone(), rows)
    )
    tokens[5:] = 3
    assert whole.prepare(tokens) is None
    assert whole._credits is None
