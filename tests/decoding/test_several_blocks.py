# SPDX-License-Identifier: Apache-2.0
"""Rules that decode several blocks at once: when blocks start, and which tokens are forced."""

from typing import Any

from tests.decoding.support import EOS, MASK, SHIFTED, Row, decided
from vllm.diffusion.decoding import make_rule

SURE, UNSURE = -0.1, -3.0  # negative entropies


def row_of(algorithm: str, gen_length: int = 12, **parameters: Any) -> Row:
    lengths = {"gen_length": gen_length, "block_length": 4}
    return Row(decided(algorithm=algorithm, **{**lengths, **parameters}), [1])


def forward(row: Row, sure: list[int], tokens: dict[int, int] | None = None) -> list[int]:
    """Run a forward pass in which these positions are certain, and return its eligible ones."""
    positions = row.eligible()
    assert positions is not None
    scores = [SURE - 0.001 * p if p in sure else UNSURE - 0.001 * p for p in positions]
    row.see(positions, scores, [(tokens or {}).get(p, 2) for p in positions])
    return positions


# ---- full_attn_multi_block ---------------------------------------------------------------------


def test_blocks_start_and_become_full_by_progress() -> None:
    row = row_of(
        "FullAttnMultiBlock", block_add_threshold=0.5, decoded_token_threshold=0.75, gen_length=10
    )
    assert forward(row, [1]) == [1, 2, 3, 4]
    assert forward(row, [2]) == [2, 3, 4]  # a quarter is decoded: block 1 remains alone
    # Half is decoded, so block 2 starts. Block 1 gets a forced token, block 2 accepts only by
    # score.
    assert forward(row, [5]) == [3, 4, 5, 6, 7, 8]
    assert row.committed[-1] == [3, 5]
    # Three quarters of block 1 are decoded. Block 2 is full, but only the first such block is
    # forced.
    assert forward(row, []) == [4, 6, 7, 8]
    assert row.committed[-1] == [4]
    assert forward(row, [6]) == [6, 7, 8]
    assert row.committed[-1] == [6]
    # Half of block 2 is decoded, so the last, shorter block starts.
    assert forward(row, [7, 9]) == [7, 8, 9, 10]
    assert forward(row, []) == [8, 10]
    assert forward(row, []) == [10]
    assert row.eligible() is None


def test_steps_bound_the_forwards() -> None:
    for algorithm in ("full_attn_multi_block", "multi_block"):
        row = row_of(algorithm, steps=3)
        assert row.run(lambda position, _: (2, UNSURE - position)) == 3
        assert row.targets[-1].eligible.tolist() == sorted(row.targets[-1].eligible.tolist())
        assert MASK not in row.tokens.tolist()


# ---- multi_block -------------------------------------------------------------------------------


def test_where_no_block_is_full_the_best_is_taken() -> None:
    row = row_of("multi_block", model=SHIFTED, decoded_token_threshold=1.5)
    assert row.run(lambda position, _: (2, UNSURE)) == 12
    assert [len(part) for part in row.committed] == [1] * 12


def test_early_stop_fills_before_the_forward_what_still_competes_in_it() -> None:
    row = row_of("multi_block", early_stop=True, threshold=0.5)
    forward(row, [3], {3: EOS})
    positions = row.eligible()
    assert row.targets[-1].fill == (4, EOS)
    # All blocks after the end are complete. Positions that were masked before the forward pass
    # compete.
    assert positions == [1, 2, *range(4, 13)]
    row.see(positions, [SURE if p in (4, 9) else UNSURE for p in positions], [5] * len(positions))
    # 4 and 9 are above the threshold. 4 is in the first full block with masks, so no token is
    # forced.
    assert row.committed[-1] == [4, 9]
    assert row.tokens[3:].tolist() == [EOS, 5, EOS, EOS, EOS, EOS, 5, EOS, EOS, EOS]
    assert row.eligible() == [1, 2]
    assert row.targets[-1].fill == (4, EOS)
    row.see([1, 2], [SURE, SURE], None)
    assert row.tokens.tolist() == [1, 1, 1] + [EOS] * 10
    assert row.eligible() is None


def test_an_early_end_may_move_to_the_left() -> None:
    row = row_of("multi_block", early_stop=True, threshold=0.5)
    forward(row, [4], {4: EOS})
    forward(row, [2], {2: EOS})
    assert row.eligible() == [1, 3]
    assert row.targets[-1].fill == (3, EOS)
    row.see([1, 3], [SURE, SURE], [2, 5])
    # No mask is left, so no position is filled again: the tokens after the end are cut off anyway.
    assert row.tokens.tolist() == [1, 2, EOS, 5] + [EOS] * 9
    assert row.eligible() is None


def test_an_end_that_leaves_nothing_masked() -> None:
    row = row_of("multi_block", early_stop=True, threshold=0.5)
    forward(row, [1], {1: EOS})
    assert row.eligible() == []
    assert row.tokens.tolist() == [1] + [EOS] * 12
    assert row.eligible() is None


def test_without_early_stop_the_end_is_a_token_like_others() -> None:
    for more in ({}, {"early_stop": True, "ignore_eos": True}):
        row = row_of("multi_block", **more)
        assert row.run(lambda position, _: (EOS, UNSURE)) == 12
        assert all(target.fill is None for target in row.targets)


# ---- delayed cache -----------------------------------------------------------------------------


def test_masks_of_the_prompt_that_are_out_of_reach_are_filled_in_the_end() -> None:
    params = decided(
        gen_length=4,
        block_length=4,
        algorithm="multi_block",
        cache="delayed",
        cache_delay_iter=0,
        allow_infill=True,
    )
    row = Row(params, [MASK, 1])
    assert make_rule(params, 2).prepare(row.tokens) is not None
    row.run(lambda position, _: (3, UNSURE + position))
    assert row.tokens.tolist() == [3, 1, 3, 3, 3, 3]
