# SPDX-License-Identifier: Apache-2.0
"""Linear self-speculation and autoregressive decoding, for families with causal context.

After a block has been drafted, one causal forward predicts the token after each of its tokens. The
confirmed draft tokens, and the next predicted token, are exactly the tokens that the model would
have written one by one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Array, Candidates, Commit, DecodingRule, ForwardTarget
from vllm.diffusion.decoding.prediction import Prediction
from vllm.diffusion.decoding.seeded_block import ThinkingBudget
from vllm.diffusion.decoding.until_filled import with_best

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams

# Numbers of a report: drafts from the prediction, and right ones among them.
PREDICTED = ("prediction_tried", "prediction_held")


class SelfSpeculation(DecodingRule):
    """Drafts the masks of a block after its seed, then commits what a causal forward confirms.

    The seed is the latest token of the answer. A forward of the block, whose rows attend to each
    other, fills all masks whose confidence reaches the threshold, and always the best one; this
    repeats until no mask is left. Then row i of a causal forward predicts the token after position
    i. All draft tokens before the first mismatch are committed, and the predicted token replaces
    the mismatch and becomes the next seed. Draft and confirmation use the same random numbers,
    which depend on the position alone, so that the answer does not depend on the drafts. The mask
    token is never proposed.
    """

    has_positional_noise = True

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self.forbid_mask = True
        if params.is_strictly_causal:  # draws as other Qwen models: from the filtered distribution
            self.scoring = CandidateScoring(draw="filtered", scores_all=True)
        self._next = prompt_length  # position of the next token; all earlier positions are settled
        self._end = prompt_length + params.gen_length
        self._budget = ThinkingBudget(params, prompt_length)
        self._think_end: int | None = None
        self._is_drafting = False  # whether some masks of the block have been filled
        # [B - 1] draft tokens after the seed; None while masks are left.
        self._drafted: Array | None = None
        self._threshold = math.nextafter(params.threshold, -math.inf)
        self._prediction: Prediction | None = None
        if params.predicted_token_ids:
            self._prediction = Prediction(params.predicted_token_ids)
            self.report = {**self.report, **dict.fromkeys(PREDICTED, 0)}
        self._is_predicted = False  # whether the drafts of this forward come from the prediction

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        if self._drafted is None and not self._is_drafting:
            self._pass_known(tokens)
        start, length = self._next, self.params.block_length
        if start >= self._end:
            return None
        self._think_end = self._budget.ends_at(tokens, start, start + length)
        if start == self.prompt_length:  # there is no seed yet
            self._drafted = tokens[:0]
            return ForwardTarget(np.array([start]), (0, start), is_causal=True)
        if self._drafted is None and not self._is_drafting:
            predicted = self._predicted(tokens, length - 1)
            # The last token needs no draft.
            if predicted.size or (self._prediction is not None and start == self._end - 1):
                self._drafted = predicted
                return self._verifying(predicted)
        rows = (start - 1, start - 1 + length)
        block = tokens[start : rows[1]]
        masked = (block == self._mask).nonzero()[0]
        if masked.size:
            self._is_drafting = True
            return ForwardTarget(start + masked, rows, tail_start=rows[0])
        self._drafted = block.copy()
        return ForwardTarget(np.arange(start, start + length), rows, is_causal=True)

    def _predicted(self, tokens: Array, count: int) -> Array:
        """Return the at most `count` tokens [R] that the client expects next."""
        if self._prediction is None:
            return tokens[:0]
        answer = tokens[self.prompt_length : self._next]
        predicted = self._prediction.after(answer, min(count, self._end - self._next - 1))
        self._is_predicted = predicted.size > 0
        self.num_unconfirmed = predicted.size
        return predicted

    def _verifying(self, drafts: Array) -> ForwardTarget:
        """Return the target of a causal forward that verifies given drafts [R]."""
        start, stop = self._next, self._next + drafts.size
        eligible, rows = np.arange(start, stop + 1), (start - 1, stop)
        return ForwardTarget(eligible, rows, fill=(start, drafts), fill_end=stop, is_causal=True)

    def _count_predicted(self, num_drafts: int, num_right: int) -> None:
        """Add drafts from the prediction to the report, if this forward had some."""
        if self._is_predicted:
            new = dict(zip(PREDICTED, (num_drafts, num_right), strict=True))
            self.report = {name: n + new.get(name, 0) for name, n in self.report.items()}
        self._is_predicted = False

    def _pass_known(self, tokens: Array) -> None:
        """Skip the fixed prefix of every answer."""
        masked = (tokens[self._next : self._end] == self._mask).nonzero()[0]
        self._next = self._next + int(masked[0]) if masked.size else self._end

    def num_settled(self, tokens: Array) -> int:
        return self._next

    def choose(self, candidates: Candidates) -> Array:
        scores = candidates.scores
        chosen: Array = with_best(scores > self._threshold, scores).nonzero()[0]
        return chosen

    def decide(self, candidates: Candidates) -> Commit:
        tokens = candidates.tokens
        if self._think_end is not None:
            tokens = self._with_think_end(candidates)
        if self._drafted is None:
            chosen = self.select(candidates)
            self.num_unconfirmed += int((candidates.positions[chosen] < self._end).sum())
            return Commit(candidates.positions[chosen], tokens[chosen])
        self.forbade_mask = True
        differ = (self._drafted != tokens[: self._drafted.size]).nonzero()[0]
        count = int(differ[0]) + 1 if differ.size else tokens.size
        self._count_predicted(self._drafted.size, int(differ[0]) if differ.size else count - 1)
        # Draft tokens after the committed ones are masked again.
        written = np.where(np.arange(tokens.size) < count, tokens, self.params.mask_id)
        written = written[: max(count, self._drafted.size)]
        self._next, self._drafted = self._next + count, None
        self._is_drafting, self.num_unconfirmed = False, 0
        return Commit(candidates.positions[: written.size], written)

    def _with_think_end(self, candidates: Candidates) -> Array:
        """Return the proposed tokens, with a forced end of thinking unless it ends earlier."""
        is_place = candidates.positions == self._think_end
        before = candidates.tokens[candidates.positions < self._think_end]
        if self._drafted is not None and (before == self._budget.end_id).any():
            return candidates.tokens
        return np.where(is_place, self._budget.end_id, candidates.tokens)


class Autoregressive(SelfSpeculation):
    """Commits the token that the causal forward predicts: blocks of one token, the seed."""
