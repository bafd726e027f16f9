# SPDX-License-Identifier: Apache-2.0
"""Canvases that begin with a text, which the request revises.

In block-causal families the rule (`decoding/text_scan.py`) finds the tokens to replace.

In families with full attention a revision has rounds. A round scores the tokens of the text
(`editing/choice.py`), masks the unlikely ones again, and leaves the masks to the decoding rule. The
forwards that score compute copies of the canvas in which a part of its tokens is masked. They
commit nothing. `ScoringCopies` (`scoring_copies.py`) computes several copies in one step.
"""

from __future__ import annotations

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

    from vllm.diffusion.decoding import BatchedCommit, Candidates, DecodingRule
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
        kind = TextCanvas if new.params.is_block_causal else RevisedCanvas
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
        for guest in self._guests:
            guest.begin(self.tokens)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        """Begin the next forward; a scan for blocks to repair ends where its window is cut."""
        target, window = super().next_forward()
        if not self._reaches_target and isinstance(self.rule, TextScan):
            shorter = self.rule.cut_scan(window.stop)
            if shorter is not None:
                self._target = target = shorter
                self._reaches_target = True
        return target, window


class RevisedCanvas(TextCanvas):
    """A canvas whose text is scored, masked and filled in rounds."""

    def __init__(
        self, new: NewCanvas, cache: KeptSequence | None = None, visibility: Visibility = FULL
    ) -> None:
        super().__init__(new, cache, visibility)
        self._original = self._text.copy()
        self._is_pinned = self._revision.is_pinned(self._text.size)
        self._rounds_left = self._revision.rounds
        self._known_texts = set[bytes]()
        self._text[list(self._revision.broken)] = self.params.mask_id
        self._num_remasked = len(self._revision.broken)
        self._use_rule(self.rule)
        self._scores: StripedScores | None = None
        self._has_scored = False  # whether the latest forward scored a text that will change
        self._begin_round()

    def _begin_round(self) -> None:
        """Begin to score the text, unless it was scored before or none of it may change."""
        self._rounds_left -= 1
        is_known = self._text.tobytes() in self._known_texts
        self._known_texts.add(self._text.tobytes())
        is_candidate = ~self._is_pinned & (self._text != self.params.mask_id)
        positions = self.prompt_length + is_candidate.nonzero()[0]
        if is_known or not positions.size or not self._revision.changes_tokens:
            self._rounds_left = 0
            return
        self._scores = StripedScores(positions)
        self.wants_logprobs = True
        self.window.invalidate()  # copies read no cached keys

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

    def _prepare(self) -> ForwardTarget:
        pending = self.pending_copies
        return ForwardTarget(pending[0], (0, self.length)) if pending else super()._prepare()

    def _chosen(self, candidates: Candidates) -> Commit:
        """Return the commit of a forward; after the last copy, the tokens to mask again."""
        scores, self._has_scored = self._scores, self._scores is not None
        if scores is None:
            return super()._chosen(candidates)
        if candidates.logprobs is None:
            raise ValueError("logprobs: a scoring forward needs them, got None")
        scores.note(candidates.positions, candidates.logprobs[0])
        if scores.pending:
            return _NOTHING
        self._scores, self.wants_logprobs = None, self.params.has_extras
        chosen = self._chosen_again(scores)
        if not chosen.size:
            self._rounds_left, self._has_scored = 0, False
        self._num_remasked += chosen.size
        self._use_rule(make_rule(self.params, self.prompt_length))
        return Commit(chosen, np.full(chosen.size, self.params.mask_id))

    def _chosen_again(self, scores: StripedScores) -> Array:
        """Return the positions to mask again."""
        revision, budget = self._revision, self._revision.max_edits
        is_mask = self._original == self.params.mask_id
        is_changed = self._original != self._text
        if budget is not None:
            budget -= int(np.count_nonzero(is_changed & ~is_mask))
        chosen = choose(
            scores.logprobs,
            noise=revision.noise,
            threshold=revision.threshold,
            budget=budget,
            is_free=is_changed[scores.positions - self.prompt_length],
        )
        positions: Array = scores.positions[chosen]
        return positions

    def _write(self, commit: Commit | BatchedCommit) -> None:
        super()._write(commit)
        is_filled = not (self._text == self.params.mask_id).any()
        if self._scores is None and self._rounds_left and is_filled:
            self._begin_round()

    def _num_settled(self) -> int:
        """Return the number of settled positions.

        A forward that scores settles nothing, so that no cache keeps the keys of its masks. Tokens
        of the canvas settle in the last round.
        """
        if self._scores is not None or self._has_scored:
            return 0
        return self.prompt_length if self._rounds_left else super()._num_settled()

    def _use_rule(self, rule: DecodingRule) -> None:
        """Fill the masks by a rule, which also reports how many tokens became masks again."""
        self.rule = rule
        rule.report = {**rule.report, "num_remasked": self._num_remasked}
