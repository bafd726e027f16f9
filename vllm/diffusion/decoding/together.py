# SPDX-License-Identifier: Apache-2.0
"""Batched choices of many rules: the device waits while the requests of a step commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.diffusion.decoding.base import ScorePick

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.decoding.base import Array, ForwardTarget


class BatchedCommit(NamedTuple):
    """A commit that was chosen in place of a rule, and the positions that stay masked.

    Attributes:
        positions, tokens: [K] int64, as in `Commit`.
        left: [L] int64, ascending: eligible positions that are masked after the commit.
        has_changes: whether tokens other than the mask token are committed.
        eligible: [R] int64, positions of all candidates, if log probabilities are needed.
        logprobs: [rows, R] float64, as in `Candidates`.
    """

    positions: Array
    tokens: Array
    left: Array
    has_changes: bool
    eligible: Array | None = None
    logprobs: Array | None = None


class BatchedChoice:
    """Picks of several rules, with everything that can be computed before their forwards end.

    Args:
        picks: picks of the rules; None for rules that choose by themselves.
        targets: targets of the forwards.
        mask_id: the mask token.
    """

    def __init__(
        self, picks: Sequence[ScorePick | None], targets: Sequence[ForwardTarget], mask_id: int
    ) -> None:
        self._has_pick = [pick is not None for pick in picks]
        self._mask_id = mask_id
        self._counts = counts = np.array([target.eligible.size for target in targets])
        self._starts = counts.cumsum() - counts
        self._owners = np.repeat(np.arange(counts.size), counts)
        self._positions = np.concatenate([target.eligible for target in targets])
        quotas, thresholds, in_order = zip(*[pick or ScorePick(0) for pick in picks], strict=True)
        self._quotas = np.array(quotas)
        self._thresholds = np.repeat(thresholds, counts)
        self._has_scores = ~np.repeat(in_order, counts)
        # One row per rule: its candidates first, then NaN.

        self._keys = np.full((counts.size, counts.max()), np.nan)
        self._cells = np.arange(counts.max()) < counts[:, None]

    def decide(self, tokens: Array, scores: Array) -> list[BatchedCommit | None]:
        """Return the choice for each rule; None for rules that choose by themselves.

        Args:
            tokens: [R] int64, tokens of the candidates, rule after rule.
            scores: [R] float64, in the same order; NaN is the least certain.
        """
        counts, is_sure = self._counts, scores > self._thresholds
        num_sure = np.bincount(self._owners[is_sure], minlength=counts.size)
        num_chosen = np.minimum(np.maximum(self._quotas, num_sure), counts)
        self._keys[self._cells] = np.where(self._has_scores, -scores, 0)
        order = self._keys.argsort(axis=1, kind="stable")  # NaN comes last
        is_chosen = np.arange(order.shape[1]) < num_chosen[:, None]
        chosen = order[is_chosen] + np.repeat(self._starts, num_chosen)
        filled = chosen[tokens[chosen] != self._mask_id]
        num_filled = np.bincount(self._owners[filled], minlength=counts.size)
        is_left = np.ones(scores.size, dtype=np.bool_)
        is_left[filled] = False

        positions, left = self._positions[chosen], self._positions[is_left]
        chosen_tokens = tokens[chosen]
        ends, left_ends = num_chosen.cumsum().tolist(), (counts - num_filled).cumsum().tolist()
        choices: list[BatchedCommit | None] = []
        start = left_start = 0
        for has_pick, end, left_end, num in zip(
            self._has_pick, ends, left_ends, num_filled.tolist(), strict=True
        ):
            part = slice(start, end)
            choice = BatchedCommit(
                positions[part], chosen_tokens[part], left[left_start:left_end], num > 0
            )
            choices.append(choice if has_pick else None)
            start, left_start = end, left_end
        return choices
