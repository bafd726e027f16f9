# SPDX-License-Identifier: Apache-2.0
"""Canvases that begin with a text, which the request revises.

Models that were trained to replace tokens need no more than a rule (`decoding/text_scan.py`).

All other revisions have rounds. A round scores the tokens of the text (`editing/choice.py`), masks
the unlikely ones again, and leaves the masks to the decoding rule. The forwards that score compute
copies of the canvas in which a part of its tokens is masked. They commit nothing. `ScoringCopies`
(`scoring_copies.py`) computes several copies in one step.

In block-causal families only the first block with an unlikely token or a mask is masked and filled.
Then the blocks after it are scored again, because their tokens depend on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding import Commit, ForwardTarget, make_rule
from vllm.diffusion.decoding.text_scan import TextScan
from vllm.diffusion.editing.choice import StripedScores, choose
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.request.visibility import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from vllm.diffusion.decoding import BatchedCommit, Candidates, DecodingRule, ScorePick
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.visibility import Visibility
    from vllm.diffusion.sampling import RowEdits

_NOTHING = Commit(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def make_canvas(new: NewCanvas, visibility: Visibility) -> Canvas:
    """Create the canvas of a request that starts."""
    kind = Canvas
    if new.params.revision is not None:
        kind = TextCanvas if new.params.scores_directly else RevisedCanvas
    return kind(new, visibility=visibility)


class TextCanvas(Canvas):
    """A canvas that begins with a text; for the arguments see `Canvas`.

    With guidance, and for penalties, the text counts as a part of the answer.
    """

    def __init__(
        self, new: NewCanvas, cache: KeptSequence | None = None, visibility: Visibility = FULL
    ) -> None:
        # All that depends on the first masks is created before the text is written.
        super().__init__(new, cache, visibility)
        if self.params.revision is None:
            raise ValueError("revision: wanted a text, got None")
        self._revision = self.params.revision
        self._text = self._canvas[: self.params.num_open]  # a view: the positions of the answer
        # A format's prefix is no part of the text.
        rest = self.params.eos_id if self.params.ends_with_text else self.params.mask_id
        self._text[:] = rest
        self._text[: len(self._revision.token_ids)] = self._revision.token_ids
        self._text[list(self._revision.broken)] = self.params.mask_id
        for guest in self._guests:
            guest.begin(self.tokens)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        """Begin the next forward; a scan for blocks to repair ends where its window is cut."""
        target, window = super().next_forward()
        shorter = None if self._reaches_target else self._cut_scan(window.stop)
        if shorter is not None:
            self._target = target = shorter
            self._reaches_target = True
        return target, window

    def _cut_scan(self, stop: int) -> ForwardTarget | None:
        """Return the target of a scan that ends at position `stop`; None if nothing is scanned."""
        return self.rule.cut_scan(stop) if isinstance(self.rule, TextScan) else None


class RevisedCanvas(TextCanvas):
    """A canvas whose text is scored, masked and filled in rounds."""

    def __init__(
        self, new: NewCanvas, cache: KeptSequence | None = None, visibility: Visibility = FULL
    ) -> None:
        super().__init__(new, cache, visibility)
        self._original = self._text.copy()
        self._original[: len(self._revision.token_ids)] = self._revision.token_ids
        self._is_pinned = self._revision.is_pinned(self._text.size)
        self._rounds_left = self._revision.rounds
        self._known_texts = set[bytes]()
        self._num_remasked = len(self._revision.broken)
        self._use_rule(self.rule)
        self._scores: StripedScores | None = None
        # Positions that are scored or filled before any later one.
        self._part = range(self.prompt_length, self.length)
        self._most: int | None = None  # tokens that this round may still mask again
        self._has_chosen = False  # whether this round has masked a token again
        self._begin_round()

    def _begin_round(self) -> None:
        """Begin a round, unless the text was scored before or none of it may change."""
        self._rounds_left -= 1
        is_known = self._text.tobytes() in self._known_texts
        self._known_texts.add(self._text.tobytes())
        if is_known or not self._revision.changes_tokens:
            self._rounds_left = 0
            return
        self._has_chosen, noise = False, self._revision.noise
        if noise is not None:
            self._most = math.ceil(noise * self._find(self.prompt_length, is_mask=False).size)
        self._begin_part(self.prompt_length)

    def _begin_part(self, start: int) -> None:
        """Begin to score the text from position `start` on, or to fill what no score changes."""
        masked = self._find(start, is_mask=True)
        positions = self._find(start, is_mask=False)
        self._part = range(self.prompt_length, self.length)
        if masked.size and positions.size and self._block_of(masked[0]).stop <= positions[0]:
            self._part = self._block_of(masked[0])
        elif positions.size:
            self._scores, self.wants_logprobs = StripedScores(positions), True
            first = min([positions[0], *masked[:1]])
            self._part = range(self._block_of(first).start, self._block_of(positions[-1]).stop)
            if not self.params.is_block_causal:
                self.window.invalidate()  # copies read no cached keys

    def _find(self, start: int, *, is_mask: bool) -> Array:
        """Return the masks [N] from position `start` on, or the tokens that may be masked again.

        In block-causal families an answer is complete before later blocks are filled, so positions
        after an end token do not count.
        """
        is_found = self._text == self.params.mask_id
        if not is_mask:
            is_found = ~(is_found | self._is_pinned)
        if self.params.is_block_causal and self.params.stop_ids:
            ends = np.isin(self._text, list(self.params.stop_ids)).nonzero()[0]
            is_found[ends[0] + 1 if ends.size else self._text.size :] = False
        positions: Array = self.prompt_length + is_found.nonzero()[0]
        return positions[positions >= start]

    def _block_of(self, position: int) -> range:
        """Return the positions of a block, or of the whole sequence if the family has no blocks."""
        if not self.params.is_block_causal:
            return range(self.length)
        end = self._visibility.next_final(int(position))
        return range(max(end - self.params.block_length, 0), min(end, self.length))

    # ---- scoring ----

    @property
    def pending_copies(self) -> Sequence[Array]:
        """The masked positions [R] of each copy that is to be computed; the first one is next."""
        return () if self._scores is None else self._scores.pending

    def masked_at(self, positions: Array) -> tuple[Array, ...]:
        """Return the sequences [T] to compute with masks at `positions`."""
        tokens = self.tokens.copy()
        tokens[positions] = self.params.mask_id
        return self.sequences_of(tokens)

    def named_tokens(self, positions: Array) -> Array:
        """Return the tokens [R, 1] to score at canvas positions [R]."""
        named: Array = self._canvas[positions][:, None]
        return named

    def commit_copy(self, candidates: Candidates | BatchedCommit) -> None:
        """Commit the scores of another copy that the same step has computed."""
        self.begin()
        self.num_steps -= 1
        self.commit(candidates)

    @property
    def sequences(self) -> tuple[Array, ...]:
        pending = self.pending_copies
        return self.masked_at(pending[0]) if pending else super().sequences

    def token_ids(self, positions: Array) -> Array | None:
        return self.named_tokens(positions) if self.pending_copies else super().token_ids(positions)

    def edits(self, positions: Array, tokens: Array | None = None) -> RowEdits | None:
        """Return the changes of logits; none for scores."""
        return None if self.pending_copies else super().edits(positions, tokens)

    @property
    def adjust_logits(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        return None if self.pending_copies else super().adjust_logits

    # ---- commits ----

    @property
    def pick(self) -> ScorePick | None:
        """None, because the rule does not know that another part may begin after its block."""
        return None

    def _prepare(self) -> ForwardTarget:
        pending = self.pending_copies
        if not pending:
            return super()._prepare()
        return ForwardTarget(pending[0], (self._part.start, self._part.stop))

    def _cut_scan(self, stop: int) -> ForwardTarget | None:
        if self._scores is None or stop <= self._part.start:
            return None
        self._scores.cut(stop)
        self._part = range(self._part.start, stop)
        return self._prepare()

    def _chosen(self, candidates: Candidates) -> Commit:
        """Return the commit of a forward; after the last copy, the tokens to mask again."""
        scores = self._scores
        if scores is None:
            return super()._chosen(candidates)
        if candidates.logprobs is None:
            raise ValueError("logprobs: a scoring forward needs them, got None")
        scores.note(candidates.positions, candidates.logprobs[0])
        # No cache may keep the keys of the copy's masks.
        forward = self.window.end()
        if forward is not None and self.params.is_block_causal:
            self.window.computed(forward, self._num_settled())
        if scores.pending:
            return _NOTHING
        self._scores, self.wants_logprobs = None, self.params.has_extras
        chosen = self._chosen_again(scores)
        self._has_chosen |= chosen.size > 0
        self._num_remasked += chosen.size
        if self._most is not None:
            self._most -= chosen.size
        self._use_rule(make_rule(self.params, self.prompt_length))
        for guest in self._guests:
            guest.rescored(self.rule, chosen, self.num_steps + 1)
        return Commit(chosen, np.full(chosen.size, self.params.mask_id))

    def _chosen_again(self, scores: StripedScores) -> Array:
        """Return the positions to mask again, and limit the part to their block."""
        revision, budget = self._revision, self._revision.max_edits
        is_mask = self._original == self.params.mask_id
        is_changed = self._original != self._text
        if budget is not None:
            budget -= int(np.count_nonzero(is_changed & ~is_mask))
        chosen = choose(
            scores.logprobs,
            noise=revision.noise,
            most=self._most,
            threshold=revision.threshold,
            budget=budget,
            is_free=is_changed[scores.positions - self.prompt_length],
        )
        positions: Array = scores.positions[chosen]
        masked = self._find(self._part.start, is_mask=True)
        first = min([*positions[:1], *masked[:1]], default=None)
        if first is not None and first < self._part.stop:
            self._part = self._block_of(first)
        return positions[positions < self._part.stop]

    def _write(self, commit: Commit | BatchedCommit) -> None:
        super()._write(commit)
        masked = self._find(self._part.start, is_mask=True)
        if self._scores is not None or (masked.size and masked[0] < self._part.stop):
            return
        if self._part.stop < self.length and self._revision.changes_tokens:
            self._begin_part(self._part.stop)
        elif self._rounds_left and self._has_chosen and not masked.size:
            self._begin_round()
        else:
            self._rounds_left = 0

    def _num_settled(self) -> int:
        """Return the number of settled positions; tokens of the text settle in the last round."""
        if self._rounds_left:
            return self.prompt_length
        if self._scores is not None:
            return max(self._part.start, self.prompt_length)
        return min(super()._num_settled(), self._part.stop)

    def _use_rule(self, rule: DecodingRule) -> None:
        """Fill the masks by a rule, which also reports how many tokens became masks again."""
        self.rule = rule
        rule.report = {**rule.report, "num_remasked": self._num_remasked}
