# SPDX-License-Identifier: Apache-2.0
"""Constrained answers: keeps a request's answer in a formal language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.diffusion.decoding import Commit
from vllm.diffusion.engine.worker.canvas_guest import CanvasGuest
from vllm.diffusion.guided.joint import Joint
from vllm.diffusion.guided.language import language_from
from vllm.diffusion.guided.open_window import FREE, OPEN, OpenWindow, can_be_completed

if TYPE_CHECKING:
    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.decoding import Candidates, DecodingRule, ForwardTarget
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams


@dataclass
class _Stretch:
    """Positions that hold one string of the language: the canvas, or a gap of the prompt.

    Attributes:
        rows: positions of the sequence.
        limit: maximum number of these positions that the string may take.
        state: automaton state after the first `num_passed` positions, which change only if a text
            is scored again.
    """

    rows: range
    limit: int
    state: int = 0
    num_passed: int = 0

    def within(self, positions: Array) -> Array:
        """Return, as bool, whether each of `positions` belongs to the stretch."""
        return (positions >= self.rows.start) & (positions < self.rows.stop)


def gaps(tokens: Array, mask_id: int) -> list[range]:
    """Return the runs of adjacent mask tokens."""
    masked = (tokens == mask_id).nonzero()[0]
    runs = np.split(masked, (np.diff(masked) > 1).nonzero()[0] + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs if run.size]


class Constraint(CanvasGuest):
    """Constraint that takes all candidates of a stretch from one string of the language.

    Any subset of the candidates that a rule commits can still be completed to a string. Only a rule
    that replaces committed tokens may mix two strings. If the mixture cannot be completed, the
    constraint commits all candidates of the later string.

    Args:
        params: parameters of the request, with a guide.
        tokens: sequence of the request before decoding.
        prompt_length: number of tokens before the canvas.
    """

    def __init__(self, params: DiffusionParams, tokens: Array, prompt_length: int) -> None:
        if params.guide is None:
            raise ValueError("guide: wanted one, got None")
        self._params, self._prompt_length = params, prompt_length
        self._language = language_from(params.guide.language)
        holes = gaps(tokens[:prompt_length], params.mask_id)
        answer = range(prompt_length, prompt_length + params.num_open)
        canvas = _Stretch(answer, params.longest_answer)
        self._stretches = [*(_Stretch(hole, len(hole)) for hole in holes), canvas]

    def begin(self, tokens: Array) -> None:
        """Write the fixed prefix of every answer, up to the token after which room runs out.

        A text on the canvas stays as it is.
        """
        prefix = self._params.guide.prefix if self._params.guide is not None else ()
        for stretch in self._stretches:
            state = 0
            for index, token in enumerate(prefix[: len(stretch.rows)]):
                state = self._language.advance(state, token)
                has_text = tokens[stretch.rows.start + index] != self._params.mask_id
                if has_text or self._language.room[state] > stretch.limit - index - 1:
                    break
                tokens[stretch.rows.start + index] = token

    def grow(self, params: DiffusionParams, tokens: Array, sources: Array) -> None:
        self._params, canvas = params, self._stretches[-1]
        canvas.rows = range(canvas.rows.start, canvas.rows.start + params.num_open)

    def rescored(self, rule: DecodingRule, positions: Array, step: int) -> None:
        for stretch in self._stretches:
            stretch.state = stretch.num_passed = 0

    def report(self, tokens: Array, final: range, *, is_complete: bool) -> dict[str, Any]:
        """Report whether the answer is a whole string that no text could continue."""
        return {"is_closed": is_complete and self._is_closed(tokens)}

    def _is_closed(self, tokens: Array) -> bool:
        answer = self._stretches[-1]
        state = answer.state
        for token in tokens[answer.rows.start :][answer.num_passed : answer.limit].tolist():
            state = self._language.advance(state, token)
        return self._language.is_closed(state)

    def joints(
        self, tokens: Array, target: ForwardTarget, scoring: CandidateScoring, step: int
    ) -> list[Joint]:
        """Return the joint choices of a forward, in the order of positions."""
        joints = []
        for stretch in self._stretches:
            eligible = target.eligible[stretch.within(target.eligible)]
            if eligible.size:
                window = self._window(stretch, tokens, eligible)
                joints.append(self._joint(window, scoring, step))
        return joints

    def _joint(self, window: OpenWindow, scoring: CandidateScoring, step: int) -> Joint:
        params = self._params
        is_scored = scoring.score == "confidence" and (
            scoring.is_categorical or params.remasking != "random"
        )
        excluded: tuple[int | None, ...] = ()
        if params.confidence_eos_eot_inf:
            excluded = (params.eos_id, params.eot_id)
        return Joint(
            language=self._language,
            window=window,
            temperature=params.temperature,
            seed=params.seed or 0,
            step=step,
            is_tempered=scoring.is_categorical,
            sets_scores=is_scored,
            excluded=tuple(token for token in excluded if token is not None),
            num_logprobs=params.num_logprobs,
        )

    def commit(self, tokens: Array, candidates: Candidates, commit: Commit) -> Commit:
        is_filled = tokens[candidates.positions] != self._params.mask_id
        if not is_filled.any():
            return commit
        mixed = tokens.copy()
        mixed[commit.positions] = commit.tokens
        is_committed = np.isin(candidates.positions, commit.positions)
        is_mended = False
        for stretch in self._stretches:
            within = stretch.within(candidates.positions)
            if not (within & is_filled).any():
                continue
            window = self._window(stretch, mixed, candidates.positions[within], are_open=False)
            if not can_be_completed(self._language, window):
                is_committed |= within & is_filled
                is_mended = True
        if not is_mended:
            return commit
        return Commit(candidates.positions[is_committed], candidates.tokens[is_committed])

    def _window(
        self, stretch: _Stretch, tokens: Array, eligible: Array, *, are_open: bool = True
    ) -> OpenWindow:
        """Make the window of a stretch.

        It reaches from the first position that may change to the last position that is, or may be,
        filled.
        """
        start = stretch.rows.start
        tokens_within, eligible = tokens[start : stretch.rows.stop], eligible - start
        filled = tokens_within != self._params.mask_id
        holes = (~filled).nonzero()[0]
        first = int(min(eligible[0], holes[0] if holes.size else eligible[0]))
        end = int(max(eligible[-1], filled.nonzero()[0][-1] if filled.any() else 0)) + 1
        self._pass(stretch, tokens_within, first)
        tokens_within = tokens_within[first:end]
        kinds = np.full(end - first, FREE, dtype=np.int32)
        kinds[filled[first:end]] = self._language.class_of_token[tokens_within[filled[first:end]]]
        if are_open:
            kinds[eligible - first] = OPEN
        on_canvas = start - self._prompt_length + first
        return OpenWindow(on_canvas, stretch.state, kinds, stretch.limit - end)

    def _pass(self, stretch: _Stretch, tokens_within: Array, first: int) -> None:
        """Advance the state to position `first`; no step changes an earlier position."""
        for token in tokens_within[stretch.num_passed : first].tolist():
            stretch.state = self._language.advance(stretch.state, token)
        stretch.num_passed = max(stretch.num_passed, first)
