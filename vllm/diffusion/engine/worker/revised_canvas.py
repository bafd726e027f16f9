# SPDX-License-Identifier: Apache-2.0
"""Canvases that begin with a text, which the request revises.

Models that were trained to replace tokens need no more than a rule (`decoding/text_scan.py`).

All other revisions have rounds. A round scores the tokens of the text (`editing/choice.py`), masks
the unlikely ones again, and leaves the masks to the decoding rule. The forwards that score compute
copies of the canvas in which a part of its tokens is masked. They commit nothing. `ScoringCopies`
(`scoring_copies.py`) computes several copies in one step.

In block-causal families only the first block with an unlikely token or a mask is masked and filled.
Then the blocks after it are scored again, because their tokens depend on it.

With `slack`, masks are added behind the masked tokens, and the rest of the text moves
(`editing/slack.py`). End tokens that fill masks of the text are removed at the end of the round, so
no token of the answer is final before the last round has ended.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding import Commit, ForwardTarget, make_rule
from vllm.diffusion.decoding.text_scan import TextScan, end_of
from vllm.diffusion.editing.choice import StripedScores, choose
from vllm.diffusion.editing.slack import with_slack, without
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.request.visibility import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from vllm.diffusion.decoding import BatchedCommit, Candidates, DecodingRule, ScorePick
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.visibility import Visibility
    from vllm.diffusion.sampling import RowEdits

_NOTHING = Commit(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def make_canvas(new: NewCanvas, visibility: Visibility) -> Canvas:
    """Create the canvas of a request that starts."""
    kind = Canvas
    if new.params.revision is not None:
        kind = TextCanvas if new.params.scores_directly else RevisedCanvas
    return kind(new, visibility)


class TextCanvas(Canvas):
    """A canvas that begins with a text; for the arguments see `Canvas`.

    With guidance, and for penalties, the text counts as a part of the answer.
    """

    def __init__(self, new: NewCanvas, visibility: Visibility = FULL) -> None:
        # All that depends on the first masks is created before the text is written.
        super().__init__(new, visibility)
        if self.params.revision is None:
            raise ValueError("revision: wanted a text, got None")
        self._revision = self.params.revision
        self._text = self._canvas[: self.params.num_open]  # a view: the positions of the answer
        # A format's prefix is no part of the text.
        rest = self.params.pad_id if self.params.ends_with_text else self.params.mask_id
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

    def __init__(self, new: NewCanvas, visibility: Visibility = FULL) -> None:
        super().__init__(new, visibility)
        self._original = self._text.copy()
        self._original[: len(self._revision.token_ids)] = self._revision.token_ids
        self._is_pinned = self._revision.is_pinned(self._text.size)
        self._stop = len(self._revision.token_ids)  # end of the text among the answer's positions
        if self.params.ends_with_text:
            self._is_pinned[self._stop :] = True
        self._is_open = self._original == self.params.mask_id  # has been a mask of the text
        self._is_open[self._stop :] = False
        ends = (self.params.eos_id, self.params.eot_id, self.params.pad_id)
        self._end_ids = [token for token in ends if token is not None]
        self._num_more_forwards = 0  # forwards beyond the first one of each step
        self._num_removed = 0  # tokens of the given text that are removed
        self._rounds_left = self._revision.rounds
        self._known_texts = set[bytes]()
        self._num_remasked = len(self._revision.broken)
        self._use_rule(self._make_rule() if self._revision.slack else self.rule)
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
        has_ends = bool(self.params.stop_ids) and not self._revision.slack
        if self.params.is_block_causal and has_ends:
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
        self.commit(candidates)
        self._num_more_forwards -= 1

    @property
    def num_forwards(self) -> int:
        """Number of forwards so far; scoring is one step, which may take several forwards."""
        return super().num_forwards + self._num_more_forwards

    @property
    def sequences(self) -> tuple[Array, ...]:
        pending = self.pending_copies
        return self.masked_at(pending[0]) if pending else super().sequences

    def token_ids(self, positions: Array) -> Array | None:
        return self.named_tokens(positions) if self.pending_copies else super().token_ids(positions)

    def edits(self, positions: Array, tokens: Array | None = None) -> RowEdits | None:
        """Return the changes of logits; none for scores."""
        return None if self.pending_copies else super().edits(positions, tokens)

    def joints(self, target: ForwardTarget) -> list[Joint]:
        """Return the joint choices of the next forward; none for scores, which choose no token."""
        return [] if self.pending_copies else super().joints(target)

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
            return self._without_ends(super()._chosen(candidates))
        if candidates.logprobs is None:
            raise ValueError("logprobs: a scoring forward needs them, got None")
        scores.note(candidates.positions, candidates.logprobs[0])
        # No cache may keep the keys of the copy's masks.
        forward = self.window.end()
        if forward is not None and self.params.is_block_causal:
            self.window.computed(forward, self._num_settled())
        if scores.pending:
            # Scoring is one step, so that random numbers do not depend on the rows of a step.
            self.num_steps -= 1
            self._num_more_forwards += 1
            return _NOTHING
        self._scores, self.wants_logprobs = None, self.params.has_extras
        chosen = self._chosen_again(scores)
        self._has_chosen |= chosen.size > 0
        self._num_remasked += chosen.size
        if self._most is not None:
            self._most -= chosen.size
        self._use_rule(self._make_rule())
        for guest in self._guests:
            guest.rescored(self.rule, chosen, self.num_steps + 1)
        masked = Commit(chosen, np.full(chosen.size, self.params.mask_id))
        return self._with_slack(masked) if chosen.size else self._without_ends(masked)

    def _chosen_again(self, scores: StripedScores) -> Array:
        """Return the positions to mask again, and limit the part to their block."""
        revision, budget = self._revision, self._revision.max_edits
        is_mask = self._original == self.params.mask_id
        is_changed = self._original != self._text
        if budget is not None:
            budget -= int(np.count_nonzero(is_changed & ~is_mask)) + self._num_removed
            budget = max(budget, 0)
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

    # ---- length ----

    def _with_slack(self, masked: Commit) -> Commit:
        """Return a commit that masks tokens, and adds masks behind each run of them."""
        slack, at = self._revision.slack, masked.positions - self.prompt_length
        self._is_open[at] = True
        if not slack:
            return masked
        text = self._text.copy()
        text[at] = self.params.mask_id
        sources = with_slack(at, slack, self._stop, text.size)
        self._stop += int(np.count_nonzero(sources < 0))
        return self._moved(text, sources, self.params.mask_id)

    def _without_ends(self, commit: Commit) -> Commit:
        """Return a commit that also removes end tokens from the text if it ends the round."""
        if not self._revision.slack:
            return commit
        text, at = self._text.copy(), commit.positions - self.prompt_length
        is_of_text = at < text.size
        text[at[is_of_text]] = commit.tokens[is_of_text]
        later = self._is_pinned[max(self._part.stop - self.prompt_length, 0) :]
        has_more_parts = self._revision.changes_tokens and not later.all()
        if has_more_parts or (text == self.params.mask_id).any():
            return commit
        is_end = np.isin(text, self._end_ids)
        is_removed = is_end & self._is_open
        self._num_removed += int(
            np.count_nonzero(is_removed & (self._original != self.params.mask_id))
        )
        if not self.params.ends_with_text:
            self._stop = end_of(~is_end, self._stop)
        self._stop -= int(np.count_nonzero(is_removed[: self._stop]))
        assert self.params.pad_id is not None
        return self._moved(text, without(is_removed), self.params.pad_id)

    def _moved(self, text: Array, sources: Array, token: int) -> Commit:
        """Move the tokens of a text [N], and return the commit that writes them.

        Args:
            text: the text before the move.
            sources: [N] int64, the previous position of each position; -1 for `token`.
            token: the mask token, or the one behind the end of an answer.
        """
        is_new, is_mask = sources < 0, token == self.params.mask_id
        self._is_open = np.where(is_new, is_mask, self._is_open[sources])
        self._is_pinned = np.where(is_new, not is_mask, self._is_pinned[sources])
        self._original = np.where(is_new, token, self._original[sources])
        sequence = np.arange(self.prompt_length + self._canvas.size)
        sequence[self.prompt_length :][: sources.size] = np.where(
            is_new, -1, self.prompt_length + sources
        )
        for guest in self._guests:
            guest.grow(self.params, self.tokens[: sequence.size], sequence)
        text = np.where(is_new, token, text[sources])
        changed = (text != self._text).nonzero()[0]
        return Commit(self.prompt_length + changed, text[changed])

    @property
    def _is_over(self) -> bool:
        """Whether the last round has ended."""
        has_masks = bool((self._text == self.params.mask_id).any())
        return not self._rounds_left and self._scores is None and not has_masks

    def _make_rule(self) -> DecodingRule:
        """Create the rule that fills the masks; end tokens end no answer if they are removed."""
        params = self.params
        if self._revision.slack:
            params = replace(params, stop_ids=frozenset())
        return make_rule(params, self.prompt_length)

    # ---- progress ----

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
        if self._rounds_left or (self._revision.slack and not self._is_over):
            return self.prompt_length
        if self._scores is not None:
            return max(self._part.start, self.prompt_length)
        return min(super()._num_settled(), self._part.stop)

    def _use_rule(self, rule: DecodingRule) -> None:
        """Fill the masks by a rule, which also reports how many tokens became masks again."""
        self.rule = rule
        rule.report = {**rule.report, "num_remasked": self._num_remasked}
