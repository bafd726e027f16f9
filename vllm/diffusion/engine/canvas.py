# SPDX-License-Identifier: Apache-2.0
"""The state of one request on a worker: its canvas, and how far decoding has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.decoding import Commit, Work, make_rule, select
from vllm.diffusion.engine.messages import StepResult
from vllm.diffusion.engine.proposals import Proposals
from vllm.diffusion.engine.turns import Wish
from vllm.diffusion.visibility import FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.decoding import Candidates
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import NoiseSource
    from vllm.diffusion.visibility import Visibility


class Canvas:
    """Prompt and canvas of a request as one row of tokens, on the host.

    Only `begin` and `commit` write tokens. A token before the first masked position never
    changes, so the canvas up to there is final and can be reported.

    Attributes:
        req_id: the request.
        params: its parameters.
        tokens: [T] int64.
        positions: [T] int64, from 0; an array.
        rule: its decoding, at its present state.
        adjust_logits: what it makes of logits [R, V] of canvas positions [R], if anything.
        cache: keys and values that are kept between forwards, if any.
        visibility: who sees whom in it.
        num_forwards: forwards so far.
        is_complete: all of the answer is final.
    """

    def __init__(
        self, new: NewCanvas, cache: KeptSequence | None = None, visibility: Visibility = FULL
    ) -> None:
        self.req_id = new.req_id
        self.visibility = visibility.with_blocks_of(new.params.block_length)
        self.params = new.params
        self.cache = cache
        self.prompt_length = len(new.prompt_token_ids)
        mask = torch.full((self.params.gen_length,), self.params.mask_id, dtype=torch.int64)
        self.tokens = torch.cat([torch.tensor(new.prompt_token_ids, dtype=torch.int64), mask])
        self.positions = np.arange(self.tokens.numel())
        self._known = self.tokens != self.params.mask_id  # guidance hides what was known at first
        self._prompt_holes = (~self._known[: self.prompt_length]).nonzero().flatten()
        self.rule = make_rule(self.params, self.prompt_length)
        # The same memory as arrays, whose operations cost a fraction of a tensor's.
        self._tokens = self.tokens.numpy()
        self._canvas = self._tokens[self.prompt_length :]
        self._selector = new.selector
        self.adjust_logits = self._logits_hook()
        self._proposals: Proposals | None = None
        if self.params.num_logprobs is not None:
            self._proposals = Proposals(self.params, self.prompt_length)
        self._num_reported = 0
        self._work: Work | None = None  # begun and not committed
        self.num_forwards = 0
        self.is_complete = False

    @property
    def length(self) -> int:
        return self.tokens.numel()

    @property
    def wants_logprobs(self) -> bool:
        return self.params.num_logprobs is not None or self.rule.token_ids is not None

    def token_ids(self, positions: Array) -> Array | None:
        """Tokens [R, k] whose log probabilities are wanted at canvas positions [R]."""
        if self.rule.token_ids is None or self._work is None:
            return None
        eligible = self._work.eligible.numpy() - self.prompt_length
        return self.rule.token_ids[np.searchsorted(eligible, positions)]

    def _logits_hook(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        rule, selector = self.rule, self._selector
        if selector is None or not selector.reads_logits:
            return rule.adjust_logits if rule.adjusts_logits else None
        if not rule.adjusts_logits:
            return selector.adjust_logits
        return lambda logits, positions: selector.adjust_logits(
            rule.adjust_logits(logits, positions), positions
        )

    def unconditional_tokens(self) -> torch.Tensor:
        """[T] int64: the tokens with everything hidden that was known at the start."""
        return self.tokens.masked_fill(self._known, self.params.mask_id)

    @property
    def window(self) -> range:
        """Positions that the next forward computes."""
        work = self.begin()
        if self.cache is None:
            return range(self.length)
        # It starts early enough for the row that predicts its first position.
        return range(max(work.rows[0] - self.params.logit_shift, 0), work.rows[1])

    @property
    def next_rows(self) -> int:
        """Rows of the next forward; guidance runs the window twice.

        All rows where the rule fails: its error is met when it is the forward's turn.
        """
        try:
            num_rows = len(self.window)
        except Exception:
            num_rows = self.length
        return 2 * num_rows if self.params.cfg_scale > 0 and self.cache is None else num_rows

    @property
    def wish(self) -> Wish:
        """What the next forward is, for those who say when it is launched."""
        rows = self.next_rows
        return Wish(rows, keeps=self.cache is not None, is_window=rows < self.length)

    def begin(self) -> Work:
        """What the next forward is for; fills what the rule wants filled before it.

        The same again until it is committed: a forward that failed may be repeated.
        """
        if self._work is None:
            self._work = self._prepare()
        return self._work

    def _prepare(self) -> Work:
        work = self.rule.prepare(self.tokens)
        if work is None:
            nothing = torch.empty(0, dtype=torch.int64)
            return Work(nothing, (0, self.length))
        if work.fill is not None:
            start, token = work.fill
            self.tokens[start:] = token
            if self._proposals is not None:
                self._proposals.fill(start - self.prompt_length, token)
        return work

    def draws(self, positions: torch.Tensor, noise: NoiseSource) -> torch.Tensor | None:
        """A uniform number per position [R] of the next commit, where the rule wants them."""
        purpose = self.rule.draw_purpose
        if purpose is None or self.params.seed is None:
            return None
        on_canvas = positions - self.prompt_length
        seed, step = self.params.seed, self.num_forwards
        return noise.uniform(seed, purpose, step, on_canvas, range(1))[:, 0]

    def commit(self, candidates: Candidates) -> StepResult:
        """Let the rule choose, write the chosen tokens, and report what became final."""
        self._work = None
        commit = self._select(candidates)
        self._tokens[commit.positions.numpy()] = commit.tokens.numpy()
        if self._proposals is not None:
            self._proposals.note(candidates, commit)
        self.num_forwards += 1
        return self._report()

    def _select(self, candidates: Candidates) -> Commit:
        if self._selector is None:
            return self.rule.decide(candidates)
        return select(self._selector, self.rule, self.tokens, candidates)

    def _report(self) -> StepResult:
        canvas, start = self._canvas, self._num_reported
        masked = canvas == self.params.mask_id
        num_masked = int(np.count_nonzero(masked))
        end = start + int(masked[start:].argmax()) if num_masked else len(canvas)
        self._num_reported = end
        final = canvas[start:end].tolist()
        self.is_complete = self.params.answer_end(final, start) is not None
        logprobs = view = None
        if self._proposals is not None and self.params.logprobs is not None:
            logprobs = self._proposals.logprobs(start, end)
        if self._proposals is not None and self.params.stream_canvas:
            view = self._proposals.view(self.num_forwards, canvas)
        return StepResult(
            new_token_ids=final,
            num_forwards=self.num_forwards,
            num_committed=len(canvas) - num_masked,
            infilled=self._infilled() if self._prompt_holes.numel() else {},
            logprobs=logprobs,
            canvas=view,
            scores=self.rule.scores,
            # Last, because tokens may have to be filled before the next forward.
            next_rows=0 if self.is_complete else self.next_rows,
        )

    def _infilled(self) -> dict[int, int]:
        """The tokens that replaced mask tokens of the prompt so far, by position."""
        filled = self._prompt_holes[self.tokens[self._prompt_holes] != self.params.mask_id]
        return {int(p): int(self.tokens[p]) for p in filled}
