# SPDX-License-Identifier: Apache-2.0
"""Candidates of a request's latest step, from which its next states are drafted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.core.random_streams import REMASKING
from vllm.diffusion.decoding import Candidates

if TYPE_CHECKING:
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.ops import Array


def has_random_scores(canvas: Canvas) -> bool:
    """Whether the scores of a request are random numbers, which are known before the step."""
    return canvas.params.remasking == "random" and not canvas.rule.scoring.is_categorical


class CachedCandidates:
    """Candidates of the state that a request committed last, used to draft the next states.

    Args:
        canvas: the request.
        rows: sample rows of the step.
        samples: table of the step's samples.
        item_index: index of the state among the items of the batch.
    """

    def __init__(self, canvas: Canvas, rows: SampleRows, samples: Array, item_index: int) -> None:
        self._canvas, self._rows, self._samples = canvas, rows, samples
        self._item_index = item_index
        self._step = canvas.num_steps - 1  # step of these candidates
        self._num_extra_draws = rows.batch.items[item_index].num_extra_draws
        self._is_random = has_random_scores(canvas)
        self._known: dict[int, Candidates | None] = {}

    def at(self, depth: int) -> Candidates | None:
        """Return the candidates with the random numbers of a later step; see `CandidateSource`."""
        if depth not in self._known:
            self._known[depth] = self._drawn_at(depth)
        return self._known[depth]

    def _drawn_at(self, depth: int) -> Candidates | None:
        canvas, is_noisy = self._canvas, self._canvas.params.temperature > 0
        if is_noisy and depth > self._num_extra_draws:
            return None
        candidates = self._of_draw(depth if is_noisy else 0)
        positions, step = candidates.positions, self._step + depth
        if self._is_random and not is_noisy:
            scores = canvas.uniform(REMASKING, positions, step)
            if scores is not None:
                sign = -1 if canvas.rule.scoring.score == "negative_entropy" else 1
                candidates = candidates._replace(scores=sign * scores)
        return candidates._replace(draws=canvas.draws(positions, step))

    def _of_draw(self, draw: int) -> Candidates:
        """Return the candidates of an extra draw, from 1, or of the first draw, 0.

        This also works after a joint choice. The candidates have no log probabilities.
        """
        target, end = self._rows.batch.targets[self._item_index], self._rows.ends[self._item_index]
        table = self._samples[3 * draw : 3 * draw + 3, end - target.eligible.size : end]
        tokens, greedy = table[0].astype(np.int64), table[2].astype(np.int64)
        return Candidates(target.eligible, tokens, table[1], greedy)
