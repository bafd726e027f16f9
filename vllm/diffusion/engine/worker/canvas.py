# SPDX-License-Identifier: Apache-2.0
"""State of one request on a worker: its canvas and its decoding progress.

A token is first a candidate, then committed, settled and final:

- Candidate: a token and a score that a forward predicts for an eligible position.
- Committed: the decoding rule has chosen the candidate, and the canvas has written it. Some rules
  later replace committed tokens or mask them again.
- Settled: the rule never changes the token again. Settled positions start at 0 and have no gaps.
- Final: settled, and can be sent to the client. A settled token is not final while the prompt has
  masks to fill, or if a guest forbids that the answer ends with this token.

A guest (`canvas_guest.py`) is an optional capability of the request, such as structured output,
that takes part in its commits.

A step of the runner is one forward pass for several requests. A step of a request (`num_steps`) is
one commit. With drafts a step of the runner may make several commits.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget, make_rule
from vllm.diffusion.engine.messages import StepResult
from vllm.diffusion.engine.worker.canvas_guests import editor_of, guests_of
from vllm.diffusion.engine.worker.window import ForwardWindow
from vllm.diffusion.request.visibility import FULL, num_positions
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.decoding import Commit, ScorePick
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.scheduler.turns import NextForward
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.visibility import Visibility
    from vllm.diffusion.sampling import RowEdits

logger = init_logger(__name__)

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class Canvas:
    """Prompt and canvas of a request as one sequence of tokens on the host, with decoding state.

    `commit` writes the chosen tokens. `begin`, and `report` after the end of the answer, write the
    tokens that the rule fills in without a forward. The sequences of block-causal families are
    rounded up to whole blocks, so T may exceed prompt + canvas.

    Attributes:
        tokens: [T] int64, prompt and canvas.
        length: T.
        rule: decoding rule of the request, with its state.
        window: the positions of the next forward, and the cached keys and values.
        wants_logprobs: whether the request needs log probabilities, of proposed tokens or of tokens
            to be scored.
        num_steps: denoising steps so far, including accepted drafts; also the counter of the random
            stream.
        num_accepted_drafts: steps that were accepted drafts, without a forward of their own.
        num_drafts: drafts that were evaluated.
        num_extra_draws: as in `RowGroup`.
        is_complete: whether the whole answer is final.
        new_lengths: lengths to which the canvas must grow before the answer can continue, in order;
            empty if it keeps its length.
    """

    def __init__(self, new: NewCanvas, visibility: Visibility = FULL) -> None:
        self.req_id, self.params = new.req_id, new.params
        self.prompt_length = len(new.prompt_token_ids)
        offset = self.params.block_offset(self.prompt_length)
        visibility = self._visibility = visibility.with_blocks_of(self.params.block_length, offset)
        self.length = num_positions(visibility, self.prompt_length, self.params.gen_length)
        self.tokens = self._masked_sequence(new.prompt_token_ids, self.params)
        self.window = ForwardWindow(self.params, visibility, self.prompt_length, self.length)
        # Positions that are masked in the unconditional sequence (classifier-free guidance).
        self._known = self.tokens != self.params.mask_id
        self._prompt_holes = (~self._known[: self.prompt_length]).nonzero()[0]
        # In a likelihood request the tokens to be scored do not count as known.
        if self.params.score is not None:
            self._known[self.params.score.context_length :] = False
        self.rule = make_rule(self.params, self.prompt_length)
        self.wants_logprobs = self.params.has_extras or self.rule.token_ids is not None
        self._canvas = self.tokens[self.prompt_length :][: self.params.gen_length]
        self._editor = editor_of(self.params, self.tokens, self.prompt_length)
        self._guests = guests_of(self.params, self.tokens, self.prompt_length, self.rule)
        self._guests_only_watch = all(guest.only_watches for guest in self._guests)
        self._num_final = 0  # canvas positions from 0
        # A commit with fewer settled positions than this makes no token final and no key cacheable,
        # so `commit` returns early.
        self._settled_threshold = 0
        self._unreported: list[int] = []  # tokens that became final since the latest report
        self.facts: dict[str, Any] = {}  # fields that the engine adds to the report
        self._num_committed: int | None = None  # see `count_committed`
        # Target of a forward that has begun and is not committed.
        self._target: ForwardTarget | None = None
        # False if the window of the current forward ends before `target.rows` does.
        self._reaches_target = True
        self._rule_has_ended = False  # whether the rule has no masks left to fill
        self.num_steps = self.num_accepted_drafts = self.num_drafts = self.num_extra_draws = 0
        self.is_complete = False
        self.new_lengths: tuple[int, ...] = ()

    def _masked_sequence(self, prompt: list[int], params: DiffusionParams) -> Array:
        """Build prompt and masked canvas; a suffix comes right after the longest answer."""
        tokens = np.full(self.length, params.mask_id, dtype=np.int64)
        tokens[: len(prompt)] = prompt
        if params.has_fixed_end and params.pad_id is not None:
            start = len(prompt) + params.max_tokens
            tokens[start:] = params.pad_id
            tokens[start : start + len(params.suffix_ids)] = params.suffix_ids
        return tokens

    def grow(self, params: DiffusionParams) -> None:
        """Lengthen the canvas by masks; `params` are the request's parameters with the new length.

        The next forward computes the whole sequence, and the request needs new pages.
        """
        sources = self.rule.grow(params)
        is_new = sources < 0
        self.params, self.length = params, len(sources)
        self.tokens = np.where(is_new, params.mask_id, self.tokens[sources])
        self._known = ~is_new & self._known[sources]
        self._canvas = self.tokens[self.prompt_length :]
        self.window = ForwardWindow(params, self._visibility, self.prompt_length, self.length)
        if self._editor is not None:
            self._editor.grow(self.length)
        for guest in self._guests:
            guest.grow(params, self.tokens, sources)
        self._settled_threshold, self._num_committed, self._target = 0, None, None
        self.new_lengths, self._rule_has_ended = (), False

    def token_ids(self, positions: Array) -> Array | None:
        """Return the tokens [R, k] whose log probabilities are needed at canvas positions [R]."""
        if self.rule.token_ids is None or self._target is None:
            return None
        eligible = self._target.eligible - self.prompt_length
        return self.rule.token_ids[np.searchsorted(eligible, positions)]

    def joints(self, target: ForwardTarget) -> list[Joint]:
        """Return the joint choices of the next forward; empty if candidates are independent."""
        return [
            joint
            for guest in self._guests
            for joint in guest.joints(self.tokens, target, self.rule.scoring, self.num_steps)
        ]

    def edits(self, positions: Array, tokens: Array | None = None) -> RowEdits | None:
        """Return the requested changes of logits at canvas positions [R]; None if there are none.

        `tokens` [T] is the sequence that the changes depend on, by default the request's own.
        """
        if self._editor is None:
            return None
        sequence = self.tokens if tokens is None else tokens
        is_causal = self._target is not None and self._target.is_causal
        on_sequence = positions + self.prompt_length
        return self._editor.of(self.rule.decided(sequence), on_sequence, is_causal=is_causal)

    @property
    def adjust_logits(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """The rule's change of logits [R, V] at canvas positions [R], or None."""
        return self.rule.adjust_logits if self.rule.adjusts_logits else None

    @property
    def sequences(self) -> tuple[Array, ...]:
        """The tokens [T] of each sequence."""
        return self.sequences_of(self.tokens)

    def sequences_of(self, tokens: Array) -> tuple[Array, ...]:
        """Return the sequences [T] to compute; the unconditional one masks known tokens."""
        if self.window.num_sequences == 1:
            return (tokens,)
        return tokens, np.where(self._known, self.params.mask_id, tokens)

    def count_next_rows(self) -> int:
        """Begin the next forward, and return its number of rows if its window is not cut.

        If the rule fails, return the number of rows of all positions; the launch reports the error.
        """
        try:
            self.begin()
            return self.window.next_rows()
        except Exception:
            self.window.reset()
            return self.length * self.window.num_sequences

    def measure_next_forward(self) -> NextForward:
        """Begin the next forward, and return its sizes; the loop decides by them when to launch."""
        if self._target is None or self.window.size is None:
            return self.window.next_size(self.count_next_rows())
        return self.window.size

    @property
    def num_forwards(self) -> int:
        """Number of forwards so far; one forward may serve several steps."""
        return self.num_steps - self.num_accepted_drafts

    @property
    def has_next(self) -> bool:
        """Whether the request has a next forward on its present canvas."""
        return not (self.is_complete or self.new_lengths)

    @property
    def keeps_approximately(self) -> bool:
        """Whether the request caches keys and values of all positions, in pages of the worker."""
        return self.params.cache not in ("none", "exact")

    def assign(self, cache: KeptSequence | None, num_kept: int | None) -> None:
        """Replace the pages of the request; arguments as in `ForwardWindow.assign`."""
        self.window.assign(cache, num_kept)
        self._settled_threshold = 0

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        """Begin the next forward: return its target and its window.

        The window is cut if the step has too few rows for it, or the request has too few pages. A
        window may end before the rule's rows end, because it is cut or because earlier positions
        are computed first. Then the target is empty, and the rule skips this forward.
        """
        target = self.begin()
        window = self.window.begin()
        self._reaches_target = window.stop >= target.rows[1]
        if not self._reaches_target:
            target = ForwardTarget(_NO_POSITIONS, target.rows)
        return target, window

    def begin(self) -> ForwardTarget:
        """Return the target of the next forward, and fill the tokens that the rule sets before it.

        Repeated calls return an equal target until it is committed, because a failed forward may be
        repeated.
        """
        return self._set_target(self._prepare()) if self._target is None else self._target

    def _set_target(self, target: ForwardTarget) -> ForwardTarget:
        """Set the target of the next forward."""
        self._target = target
        self.window.set_range(target.rows, is_causal=target.is_causal)
        return target

    def _prepare(self) -> ForwardTarget:
        target = self.rule.prepare(self.tokens)
        if target is None:
            self._rule_has_ended = True
            return ForwardTarget(_NO_POSITIONS, (0, self.length))
        if target.fill is not None:
            self.count_committed()
            start, token = target.fill
            self.tokens[start : target.fill_end] = token
            for guest in self._guests:
                guest.fill(start, token, target.fill_end)
        return target

    def draws(self, positions: Array, step: int | None = None) -> Array | None:
        """Return uniform random numbers [R] for the positions of a commit.

        `step` is by default the next step. Returns None if the rule uses no random numbers.
        """
        purpose = self.rule.draw_purpose
        return None if purpose is None else self.uniform(purpose, positions, step)

    def uniform(self, purpose: int, positions: Array, step: int | None = None) -> Array | None:
        """Return uniform random numbers [R] of a step for one purpose; None without a seed."""
        if self.params.seed is None:
            return None
        on_canvas = torch.from_numpy(positions - self.prompt_length)
        step = self.num_steps if step is None else step
        numbers = ops.philox_uniform(self.params.seed, purpose, step, on_canvas, range(1))
        uniforms: Array = numbers[:, 0].numpy()
        return uniforms

    @property
    def pick(self) -> ScorePick | None:
        """How the rule chooses in a batched decision; None if a guest takes part in the choice."""
        is_plain = self._reaches_target and self._guests_only_watch and not self._rule_has_ended
        return self.rule.pick if is_plain else None

    def failure_of(self, call: Callable[..., object], *arguments: object) -> Exception | None:
        """Call a method that runs the rule; log and return its error, which ends this request."""
        try:
            call(*arguments)
        except Exception as error:
            logger.exception("decoding of request %s failed", self.req_id)
            return error.with_traceback(None)  # the frames of its traceback hold tensors
        return None

    def commit(self, candidates: Candidates | BatchedCommit) -> None:
        """Choose and write tokens, and collect the tokens that became final.

        The device may be waiting for the next forward, so `report` does all other work.
        """
        target, written = None, _NO_POSITIONS
        if isinstance(candidates, BatchedCommit):
            for guest in self._guests:
                guest.watch(candidates, is_mask_forbidden=self.rule.forbid_mask)
            written = candidates.positions
            self._write(candidates)
            target = self.rule.next_target(self.tokens, candidates.left, candidates.has_changes)
            if target is not None:
                self._set_target(target)
        elif self._reaches_target:
            commit = self._chosen(candidates)
            written = commit.positions[self.tokens[commit.positions] != commit.tokens]
            self._write(commit)
            self.new_lengths = self.rule.new_lengths
        num_settled = self._num_settled() if target is None else target.rows[0]
        forward, self._reaches_target = self.window.end(), True
        self._num_committed = None
        if num_settled < self._settled_threshold:
            return  # in most steps no block is finished
        if forward is not None and num_settled >= self.window.least_committed:
            num_unchanged = min(written.tolist(), default=self.length)
            num_final = min(num_settled, num_unchanged, self._first_hole)
            self.window.computed(forward, num_final)
        start, end = self._num_final, min(num_settled - self.prompt_length, self._canvas.size)
        if end > start or self.rule.scores is not None:
            # The answer must not end before all masks of its prompt are filled, unless the rule has
            # ended.
            if self._rule_has_ended or self._first_hole == self.length:
                self._num_final = max(start, end)
            final = self._canvas[start : self._num_final].tolist()
            self._end_answer(final, start)
            self._unreported += final
        if self._canvas.size:
            following = self.prompt_length + self._num_final + 1
            self._settled_threshold = min(self.window.least_committed, following)

    def _num_settled(self) -> int:
        """Return the number of positions, from 0, whose tokens never change again."""
        return self.rule.num_settled(self.tokens)

    def _end_answer(self, final: list[int], start: int) -> None:
        """Set `is_complete` if the new final tokens `final` end the answer.

        `start` is the canvas position of the first one. If a guest does not allow the end yet, the
        last token is removed from `final`. A full canvas grows if it can and the answer continues.
        """
        if self.params.can_grow and self._num_final == self._canvas.size:
            self.new_lengths = (self.params.next_length,)
        end = self.params.answer_end(final, start, continues=bool(self.new_lengths))
        if end is not None and self._guests and not self._rule_has_ended:
            stop = start + end
            if not all(guest.may_end(self.tokens, stop) for guest in self._guests):
                self._num_final, end, self.new_lengths = stop - 1, None, ()
                del final[self._num_final - start :]
        self.is_complete = end is not None
        if self.is_complete:
            self.new_lengths = ()

    def use_weights(self, generation: int) -> None:
        """Set the weight generation that computes the next forward."""
        for guest in self._guests:
            guest.use_weights(generation)

    def invalidate(self) -> None:
        """Make the next forward compute all positions; committed tokens stay."""
        self.window.invalidate()
        self._settled_threshold = 0
        if not self.keeps_approximately or not self.has_next:
            return
        if self.facts:  # without the invalidation it would have read the cached keys
            self.facts["refreshed_early"] = True
        if self.params.cache == "frozen":
            return
        # If the rule fails here, the launch of the forward reports its error.
        with suppress(Exception):
            self._set_target(self.begin()._replace(rows=(0, self.length)))

    @property
    def _first_hole(self) -> int:
        """First masked position of the prompt; `length` if there is none."""
        if not self._prompt_holes.size:
            return self.length
        masked = self._prompt_holes[self.tokens[self._prompt_holes] == self.params.mask_id]
        return int(masked[0]) if masked.size else self.length

    def _chosen(self, candidates: Candidates) -> Commit:
        """Return the commit: the rule's choice, changed by the guests."""
        commit = self.rule.decide(candidates)
        for guest in self._guests:
            commit = guest.commit(self.tokens, candidates, commit)
        return commit

    def _write(self, commit: Commit | BatchedCommit) -> None:
        self._target = None
        self.tokens[commit.positions] = commit.tokens
        self.num_steps += 1

    def count_committed(self) -> int:
        """Return the number of committed canvas positions after the latest commit.

        The first call after a commit also passes the canvas to the guests, so it must run before
        the rule fills tokens for the next forward.
        """
        if self._num_committed is None:
            num_masked = int(np.count_nonzero(self._canvas == self.params.mask_id))
            # Tokens that do not count: a given suffix, and tokens that the rule may mask again.
            num_uncounted = (
                self.params.gen_length - self.params.num_open + self.rule.num_unconfirmed
            )
            self._num_committed = self._canvas.size - num_masked - num_uncounted
            for guest in self._guests:
                guest.look(self.tokens, self.num_steps)
        return self._num_committed

    def report(self) -> StepResult:
        """Return the results of all commits since the latest report."""
        num_committed, more = self.count_committed(), dict[str, Any]()
        if self.is_complete and self.params.early_stop:
            # Fills the positions after the end of the answer.
            self._prepare()
        new_tokens, self._unreported = self._unreported, []
        final = range(self._num_final - len(new_tokens), self._num_final)
        for guest in self._guests:
            more |= guest.report(self.tokens, final, is_complete=self.is_complete)
        return StepResult(
            new_token_ids=new_tokens,
            num_steps=self.num_steps,
            num_forwards=self.num_forwards,
            num_drafts=self.num_drafts,
            report={**self.rule.report, **self.facts},
            num_committed=num_committed,
            next_rows=self.count_next_rows() if self.has_next else 0,
            new_lengths=self.new_lengths,
            infilled=self._infilled() if self._prompt_holes.size else {},
            scores=self.rule.scores,
            num_kept=self.window.num_kept,
            **more,
        )

    def _infilled(self) -> dict[int, int]:
        """Return the tokens that have replaced mask tokens of the prompt, by position."""
        filled = self._prompt_holes[self.tokens[self._prompt_holes] != self.params.mask_id]
        return {int(p): int(self.tokens[p]) for p in filled}
