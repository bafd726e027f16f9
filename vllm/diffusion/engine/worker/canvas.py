# SPDX-License-Identifier: Apache-2.0
"""State of one request on a worker: its canvas, and the progress of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.pages import in_whole_pages
from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget, make_rule, select
from vllm.diffusion.engine.messages import StepResult
from vllm.diffusion.engine.scheduler.turns import NextForward
from vllm.diffusion.engine.worker.constrained import Guided
from vllm.diffusion.engine.worker.proposals import Proposals
from vllm.diffusion.engine.worker.window import ALL_ROWS, windows_of
from vllm.diffusion.request.visibility import FULL, Forward, num_positions

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.decoding import Commit, ScorePick
    from vllm.diffusion.engine.messages import CanvasView, NewCanvas
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.visibility import Visibility

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class Window(NamedTuple):
    """Positions that a forward computes of a sequence, and the keys that these read.

    Attributes:
        forward: the forward as `visibility` describes it.
        first, stop: positions that are computed, half-open.
        num_keys, block_length: keys that are read, see `Visibility.seen_by`.
        reads_kept: some of these keys are not computed by the forward.
    """

    forward: Forward
    first: int
    stop: int
    num_keys: int
    block_length: int
    reads_kept: bool

    @classmethod
    def of(cls, forward: Forward, visibility: Visibility) -> Window:
        positions, num_keys = forward.window, forward.num_keys
        seen, block_length = visibility.seen_by(positions, num_keys)
        first, stop = positions.start, positions.stop
        return cls(forward, first, stop, seen, block_length, num_keys > stop - first)

    @property
    def num_rows(self) -> int:
        return self.stop - self.first


class Canvas:
    """Prompt and canvas of a request as one row of tokens, on the host.

    Only `begin` and `commit` write tokens. What the rule has settled never changes, so the canvas
    up to there is final and can be reported. A block-causal family's last block is never cut: its
    row may be longer than prompt and canvas.

    Attributes:
        req_id: the request.
        params: its parameters.
        num_sequences: sequences that are computed: 1, or 2 with guidance, whose second one masks
            what was known.
        kept_starts: per sequence, index of its position 0 among the kept positions.
        tokens: [T] int64, in whole blocks.
        length: T.
        rule: its decoding rule, with its state.
        wants_logprobs: log probabilities are wanted of proposed tokens, or of tokens to be scored.
        adjust_logits: function of logits [R, V] and their canvas positions [R] that returns changed
            logits; None if there is none.
        cache: keys and values kept between forwards, if any; where the scheduler hands out pages,
            only those it has handed out.
        room: rows that its next forward may have.
        visibility: which positions attend to which.
        num_forwards: forwards so far.
        is_complete: all of the answer is final.
    """

    def __init__(
        self, new: NewCanvas, cache: KeptSequence | None = None, visibility: Visibility = FULL
    ) -> None:
        self.req_id = new.req_id
        self.visibility = visibility.with_blocks_of(new.params.block_length)
        self.params = new.params
        self.num_sequences = 2 if new.params.cfg_scale > 0 else 1
        self.cache = cache
        self.room = ALL_ROWS
        self.prompt_length = len(new.prompt_token_ids)
        self.tokens = self._masked_row(new.prompt_token_ids, self.params)
        self.length = self.tokens.size
        self.kept_starts = (0,) if self.num_sequences == 1 else (0, self.unconditional_start)
        self._known = self.tokens != self.params.mask_id  # guidance hides what was known at first
        self._prompt_holes = (~self._known[: self.prompt_length]).nonzero()[0]
        if self.params.score is not None:  # the target of a likelihood stays where it is known
            self._known[self.params.score.context_length :] = False
        self.rule = make_rule(self.params, self.prompt_length)
        self.wants_logprobs = (
            self.params.num_logprobs is not None or self.rule.token_ids is not None
        )
        self._canvas = self.tokens[self.prompt_length :][: self.params.gen_length]
        self._guided = None if self.params.guide is None else self._begin_guided()
        self._selector = new.selector or self._guided
        self.adjust_logits = self._logits_hook()
        self._proposals: Proposals | None = None
        if self.params.num_logprobs is not None:
            self._proposals = Proposals(self.params, self.prompt_length)
            self._proposals.begin(self._canvas)
        self._num_final = 0  # canvas positions from 0
        self._next_news = 0  # with fewer positions settled a commit makes nothing final
        self._newest: list[int] = []  # tokens that the newest commit made final
        self._seen: tuple[int, CanvasView | None] | None = None  # see `_look`
        length = self.length if cache is None else cache.length
        self._windows = windows_of(self.params, self.visibility, self.prompt_length, length)
        self._work: ForwardTarget | None = None  # begun and not committed
        self._forward: Forward | None = None  # under way, and its keys and values have a place
        self._rows = (0, 0)  # of the newest work; most often the same as before, and so are these:
        self._uncut: Window | None = None  # the next one if nothing cuts it
        self._most_rows = ALL_ROWS  # that it may have
        self._wish: NextForward | None = None  # what that is
        self._is_for_rule = True  # the forward under way
        self._is_over = False  # the rule has nothing left to fill
        self.num_forwards = 0
        self.is_complete = False

    def _masked_row(self, prompt: list[int], params: DiffusionParams) -> Array:
        """Build the row of prompt and canvas; a suffix stands right behind the longest answer."""
        length = num_positions(self.visibility, len(prompt), params.gen_length)
        row = np.full(length, params.mask_id, dtype=np.int64)
        row[: len(prompt)] = prompt
        if params.suffix_ids and params.eos_id is not None:
            start = len(prompt) + params.max_tokens
            row[start:] = params.eos_id
            row[start : start + len(params.suffix_ids)] = params.suffix_ids
        return row

    def token_ids(self, positions: Array) -> Array | None:
        """Tokens [R, k] whose log probabilities are wanted at canvas positions [R]."""
        if self.rule.token_ids is None or self._work is None:
            return None
        eligible = self._work.eligible - self.prompt_length
        return self.rule.token_ids[np.searchsorted(eligible, positions)]

    def _begin_guided(self) -> Guided:
        """Write the tokens that every answer begins with, and return the guide."""
        guided = Guided(self.params, self.tokens, self.prompt_length)
        guided.begin(self.tokens)
        return guided

    def joints(self, work: ForwardTarget) -> list[Joint]:
        """Joint choices of the next forward; empty where candidates do not depend on each other."""
        if self._guided is None:
            return []
        return self._guided.joints(self.tokens, work, self.rule.scoring, self.num_forwards)

    def _logits_hook(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        rule, selector = self.rule, self._selector
        if selector is None or not selector.reads_logits:
            return rule.adjust_logits if rule.adjusts_logits else None
        if not rule.adjusts_logits:
            return selector.adjust_logits
        return lambda logits, positions: selector.adjust_logits(
            rule.adjust_logits(logits, positions), positions
        )

    @property
    def unconditional_start(self) -> int:
        """Index of the unconditional sequence's position 0 among the kept positions."""
        return in_whole_pages(self.length)

    @property
    def num_kept_positions(self) -> int:
        """Number of places for kept positions, with the gap between two sequences."""
        return self.length + (self.unconditional_start if self.num_sequences > 1 else 0)

    @property
    def frozen_positions(self) -> tuple[range, ...]:
        """Kept positions that no forward writes once the prompt is frozen."""
        frozen = max(self.prompt_length - self.params.logit_shift, 0)
        return tuple(range(start, start + frozen) for start in self.kept_starts)

    def read_prompt(self, cache: KeptSequence) -> None:
        """Use the prompt's keys and values that another request's first forward computed."""
        self.cache = cache
        self._windows.computed(Forward(range(self.length)), self.length)

    @property
    def sequences(self) -> tuple[Array, ...]:
        """Tokens [T] of each sequence; the unconditional one masks all that was known at first."""
        if self.num_sequences == 1:
            return (self.tokens,)
        return self.tokens, np.where(self._known, self.params.mask_id, self.tokens)

    @property
    def num_kept(self) -> int:
        """Number of positions, from 0, whose keys and values are kept."""
        return self._windows.kept

    @property
    def unit(self) -> int | None:
        """Granularity, in rows, at which a forward can be cut; None if it cannot be cut."""
        return self._windows.unit

    @property
    def next_rows(self) -> int:
        """Rows of the next forward if nothing cuts it; guidance runs the window twice.

        All rows if the rule fails: its error is reported when the forward is launched.
        """
        try:
            return self._next_window(self.begin()).num_rows * self.num_sequences
        except Exception:
            self._uncut = self._wish = None
            return self.length * self.num_sequences

    def _next_window(self, work: ForwardTarget) -> Window:
        """Return what the next forward, whose target is `work`, computes if nothing cuts it."""
        if self._uncut is None:
            self._uncut = Window.of(self._windows.next(work.rows), self.visibility)
            self._most_rows = self._rows_with_pages
        return self._uncut

    @property
    def has_made_one_forward(self) -> bool:
        """Whether the first forward is over and no other one is under way."""
        return self.num_forwards == 1 and self._forward is None

    @property
    def wish(self) -> NextForward:
        """Sizes of the next forward, by which the loop decides when it is launched."""
        if self._wish is None or self._work is None:
            rows = self.next_rows  # which looks whether it is still the same
            self._wish = self._wish or self._next_wish(rows)
        return self._wish

    def _next_wish(self, rows: int) -> NextForward:
        unit = self.unit
        if unit is not None:  # of the rows, those that have pages for their keys and values
            return NextForward(min(rows, self._most_rows // unit * unit), keeps=True, unit=unit)
        is_window = rows < self.length * self.num_sequences
        return NextForward(rows, keeps=self.cache is not None, is_window=is_window)

    @property
    def _rows_with_pages(self) -> int:
        if self.unit is None:
            return ALL_ROWS
        return 0 if self.cache is None else self.cache.length - self.num_kept

    def assign(self, cache: KeptSequence | None, num_kept: int | None) -> None:
        """Use other pages from now on.

        Args:
            cache: the pages; None if there are none.
            num_kept: positions from 0 whose keys and values the pages hold; None if they extend
                those that the request had.
        """
        self.cache = cache
        self._uncut = self._wish = None
        self._next_news = 0
        if num_kept is not None:
            self._windows.kept = num_kept
            self._forward = None  # what is under way writes to pages of the past

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        """Begin the next forward: return its target, and what it computes.

        Where the window is cut before the rule's rows, the target is empty and the rule takes no
        part.
        """
        work = self.begin()
        window, room = self._next_window(work), min(self.room, self._most_rows)
        if window.stop - window.first > room:
            window = Window.of(self._windows.next(work.rows, room), self.visibility)
        self._forward = window.forward
        self._is_for_rule = window.stop >= work.rows[1]
        return (work if self._is_for_rule else ForwardTarget(_NO_POSITIONS, work.rows)), window

    def begin(self) -> ForwardTarget:
        """Return the target of the next forward, after the fill that the rule wants before it.

        Repeated calls return an equal target until it is committed: a failed forward may be
        repeated.
        """
        return self._is_for(self._prepare()) if self._work is None else self._work

    def _is_for(self, work: ForwardTarget) -> ForwardTarget:
        """Set the target of the next forward."""
        self._work = work
        if work.rows != self._rows:
            self._rows, self._uncut, self._wish = work.rows, None, None
        return work

    def _prepare(self) -> ForwardTarget:
        work = self.rule.prepare(self.tokens)
        if work is None:
            self._is_over = True
            return ForwardTarget(_NO_POSITIONS, (0, self.length))
        if work.fill is not None:
            self._look()
            start, token = work.fill
            self.tokens[start:] = token
            if self._proposals is not None:
                self._proposals.fill(start - self.prompt_length, token)
        return work

    def draws(self, positions: Array) -> Array | None:
        """Uniform random numbers [R] for the next commit's positions; None if the rule has none."""
        purpose = self.rule.draw_purpose
        if purpose is None or self.params.seed is None:
            return None
        on_canvas = torch.from_numpy(positions - self.prompt_length)
        seed, step = self.params.seed, self.num_forwards
        drawn: Array = ops.philox_uniform(seed, purpose, step, on_canvas, range(1))[:, 0].numpy()
        return drawn

    @property
    def pick(self) -> ScorePick | None:
        """The rule's choice for a batched decision; None where others take part in it."""
        is_plain = self._is_for_rule and self._selector is None and self._proposals is None
        return self.rule.pick if is_plain and not self._is_over else None

    def commit(self, found: Candidates | BatchedCommit) -> None:
        """Let the rule choose, write the chosen tokens, and collect those that became final.

        The device may be waiting for the next forward, so all else is left to `report`.
        """
        work, written = None, _NO_POSITIONS
        if isinstance(found, BatchedCommit):
            written = self._write(found)
            work = self.rule.go_on(self.tokens, found.left, found.changes)
            if work is not None:
                self._is_for(work)
        elif self._is_for_rule:
            written = self._write(self._chosen(found))
        num_settled = self.rule.settled(self.tokens) if work is None else work.rows[0]
        forward, self._forward, self._is_for_rule = self._forward, None, True
        self._seen, self._newest = None, []
        if num_settled < self._next_news:
            return  # most often no block was finished
        if forward is not None and num_settled >= self._windows.least_committed:
            num_unchanged = min(written.tolist(), default=self.length)
            num_final = min(num_settled, num_unchanged, self._first_hole)
            self._windows.computed(forward, num_final)
            self._uncut = self._wish = None
        start, end = self._num_final, min(num_settled - self.prompt_length, self._canvas.size)
        if end > start or not self._canvas.size:
            # The answer does not end before its prompt is whole, unless the rule leaves it so.
            if self._is_over or self._first_hole == self.length:
                self._num_final = max(start, end)
            self._newest = self._canvas[start : self._num_final].tolist()
            self.is_complete = self.params.answer_end(self._newest, start) is not None
        if self._canvas.size:
            following = self.prompt_length + self._num_final + 1
            self._next_news = min(self._windows.least_committed, following)

    @property
    def _first_hole(self) -> int:
        """First position of the prompt that is still masked; `length` if none is."""
        if not self._prompt_holes.size:
            return self.length
        masked = self._prompt_holes[self.tokens[self._prompt_holes] == self.params.mask_id]
        return int(masked[0]) if masked.size else self.length

    def _chosen(self, candidates: Candidates) -> Commit:
        """Return the commit that the rule, or the selector around it, chooses among candidates."""
        if self._selector is None:
            commit = self.rule.decide(candidates)
        else:
            commit = select(self._selector, self.rule, self.tokens, candidates)
        if self._proposals is not None:
            was_masked = self.tokens[candidates.positions] == self.params.mask_id
            self._proposals.note(candidates, commit, was_masked)
        return commit

    def _write(self, commit: Commit | BatchedCommit) -> Array:
        """Write tokens and return their positions [K]."""
        self._work = None
        self.tokens[commit.positions] = commit.tokens
        self.num_forwards += 1
        return commit.positions

    @property
    def num_committed(self) -> int:
        """Number of committed canvas positions after the newest commit, without a given suffix."""
        return self._look()[0]

    def _look(self) -> tuple[int, CanvasView | None]:
        """Return the number of committed positions, and the canvas if the request asks to see it.

        Must run before tokens are filled for what follows, so that both are as of the newest
        commit.
        """
        if self._seen is None:
            num_masked = int(np.count_nonzero(self._canvas == self.params.mask_id))
            view = None
            if self._proposals is not None and self.params.stream_canvas:
                view = self._proposals.view(self.num_forwards, self._canvas)
            num_given = self.params.gen_length - self.params.num_open
            self._seen = self._canvas.size - num_masked - num_given, view
        return self._seen

    def report(self) -> StepResult:
        """Return what clients see of the newest commit."""
        logprobs, (num_committed, view) = None, self._look()
        if self._proposals is not None and self.params.logprobs is not None:
            start = self._num_final - len(self._newest)
            logprobs = self._proposals.logprobs(start, self._num_final)
        return StepResult(
            new_token_ids=self._newest,
            num_forwards=self.num_forwards,
            num_committed=num_committed,
            next_rows=0 if self.is_complete else self.next_rows,
            infilled=self._infilled() if self._prompt_holes.size else {},
            logprobs=logprobs,
            canvas=view,
            scores=self.rule.scores,
            num_kept=self.num_kept,
            is_closed=self.is_complete
            and self._guided is not None
            and self._guided.is_closed(self.tokens),
        )

    def _infilled(self) -> dict[int, int]:
        """Tokens that have replaced mask tokens of the prompt, by position."""
        filled = self._prompt_holes[self.tokens[self._prompt_holes] != self.params.mask_id]
        return {int(p): int(self.tokens[p]) for p in filled}
