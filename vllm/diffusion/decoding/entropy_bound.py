# SPDX-License-Identifier: Apache-2.0
"""Denoising of canvases without a mask token (DiffusionGemma; Ben-Hamu et al., arXiv:2505.24857).

A canvas begins as random tokens of the whole vocabulary. Every step predicts all of its positions
at a temperature that falls from step to step. Positions with the lowest entropies take a drawn
token, and all others become noise again. The canvas ends when the most likely tokens stay the same
and are certain enough, or with the last step; then it is the most likely tokens. Its successor
begins behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import NOISE
from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Commit, DecodingRule, ForwardTarget
from vllm.diffusion.decoding.filters import filtered

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.decoding.base import Array, Candidates, Mask
    from vllm.diffusion.request.params import DiffusionParams


# The end of a canvas is drafted if its mean entropy is at most this multiple of the threshold.
_NEAR_END = 8.0
_NOISE_STEPS = 8  # steps whose noise is drawn at once


class EntropyBound(DecodingRule):
    """Accepts positions while the sum of the entropies before them is at most a bound.

    Attributes:
        start, step: start of the current canvas, and number of its steps so far.
        accepted: [L] bool, the positions whose tokens the latest step has kept.
        note_logits: receives the logits [R, V] fp32 at the step's temperature, and the canvas
            positions [R]; None if nothing needs them.
    """

    # The epsilon only prevents the logarithm of probabilities that round to 0.
    scoring = CandidateScoring(
        score="negative_entropy", epsilon=1e-30, greedy=True, adjusts_first=True
    )
    adjusts_logits = True

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self.note_logits: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.start = prompt_length
        self.step = 0
        self._num_steps = params.steps_per_block or 1
        # Tokens of the latest steps of the canvas, and mean entropy of the latest one.
        self._most_likely: list[Array] = []
        self._mean_entropy = np.inf
        # Canvas and first step of the drawn noise [steps, L].
        self._drawn_at, self._drawn = (-1, -1), np.zeros((0, 0), dtype=np.int64)
        self.accepted: Mask = np.zeros(params.block_length, dtype=np.bool_)
        self._end = prompt_length + params.gen_length
        self._count_unconfirmed()

    @property
    def _positions(self) -> Array:
        return np.arange(self.start, self.start + self.params.block_length)

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        if self.start >= self._end:
            return None
        target = ForwardTarget(self._positions, (self.start, self.start + self.params.block_length))
        if tokens[self.start] != self._mask:
            return target
        given = self.params.canvas_token_ids
        is_given = self.start == self.prompt_length and given
        first = np.array(given) if is_given else self._noise(0)
        return target._replace(fill=(self.start, first), fill_end=target.rows[1])

    def _noise(self, step: int) -> Array:
        """Return uniformly random tokens of the canvas, [L] int64.

        They are drawn for several steps at once, which takes little longer than for one.
        """
        first, seed = step - step % _NOISE_STEPS, self.params.seed
        assert seed is not None  # the engine draws one
        if self._drawn_at != (self.start, first):
            self._drawn_at = self.start, first
            positions = torch.from_numpy(self._positions - self.prompt_length)
            steps = torch.arange(first, first + _NOISE_STEPS).repeat_interleave(len(positions))
            rows = positions.repeat(_NOISE_STEPS)
            uniform = ops.philox_uniform(seed, NOISE, steps, rows, range(1))[:, 0]
            drawn = (uniform * self.params.vocab_size).floor().long()
            self._drawn = drawn.view(_NOISE_STEPS, -1).numpy()
        noise: Array = self._drawn[step - first]
        return noise

    def num_settled(self, tokens: Array) -> int:
        return self.start

    def decided(self, tokens: Array) -> Array:
        return np.where(np.arange(len(tokens)) < self.start, tokens, self._mask)

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        params = self.params
        logits = filtered(logits, params)
        share = (self._num_steps - self.step) / self._num_steps
        logits = logits.div_(params.t_min + (params.t_max - params.t_min) * share)
        if self.note_logits is not None:
            self.note_logits(logits, positions)
        return logits

    def choose(self, candidates: Candidates) -> Array:
        return self.accept(-candidates.scores).nonzero()[0]

    def accept(self, entropies: Array) -> Mask:
        """Return which positions keep their drawn token, [L] bool."""
        order = entropies.argsort(kind="stable")
        ordered = entropies[order]
        before = np.cumsum(ordered) - ordered
        accepted = np.zeros(order.size, dtype=np.bool_)
        accepted[order[before <= self.params.entropy_bound]] = True
        return accepted

    def decide(self, candidates: Candidates) -> Commit:
        most_likely, entropies = candidates.greedy, -candidates.scores
        assert most_likely is not None  # the scoring requires it
        self.step += 1
        if self.step == self._num_steps or self._is_stable(most_likely, entropies):
            self._end_canvas()
            self.accepted = np.ones(most_likely.size, dtype=np.bool_)
            return Commit(candidates.positions, most_likely)
        self.accepted = self.accept(entropies)
        tokens = np.where(self.accepted, candidates.tokens, self._noise(self.step))
        return Commit(candidates.positions, tokens)

    def _end_canvas(self) -> None:
        self.first_step += self.step
        self.start, self.step = self.start + self.params.block_length, 0
        self._most_likely, self._mean_entropy = [], np.inf
        self._count_unconfirmed()

    @property
    def is_near_end(self) -> bool:
        """Whether the next step may end the canvas, if it finds the same most likely tokens."""
        params, earlier = self.params, self._most_likely
        if not earlier or self.start + params.block_length >= self._end:
            return False
        is_stable = len(earlier) == params.stability_threshold and all(
            (tokens == earlier[0]).all() for tokens in earlier
        )
        is_certain = self._mean_entropy <= _NEAR_END * params.confidence_threshold
        return self.step + 1 == self._num_steps or (is_stable and is_certain)

    def end_now(self, tokens: Array) -> tuple[EntropyBound, Array]:
        """Return the rule and the tokens after a step that ends the canvas with its latest tokens.

        The next canvas is not begun. This rule and `tokens` do not change.
        """
        ended, filled = self.fork(), tokens.copy()
        filled[self.start : self.start + self.params.block_length] = self._most_likely[-1]
        ended.step += 1
        ended._end_canvas()
        return ended, filled

    def _is_stable(self, most_likely: Array, entropies: Array) -> bool:
        """Whether the canvas ends: its most likely tokens stay the same, and are certain."""
        count, earlier = self.params.stability_threshold, self._most_likely
        is_same = len(earlier) == count and all((most_likely == e).all() for e in earlier)
        self._most_likely = [*earlier, most_likely][-count:] if count else []
        self._mean_entropy = float(entropies.mean())
        return is_same and bool(entropies.mean() < self.params.confidence_threshold)

    def _count_unconfirmed(self) -> None:
        left = self._end - self.start
        self.num_unconfirmed = max(min(self.params.block_length, left), 0)
