# SPDX-License-Identifier: Apache-2.0
"""A request whose answer must be in a language: where it stands, and what it may still commit."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding import Commit, Selector
from vllm.diffusion.guided.joint import Joint
from vllm.diffusion.guided.language import Language
from vllm.diffusion.guided.window import FREE, OPEN, Window, can_be_completed

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.decoding import Candidates, Work
    from vllm.diffusion.ops import Array
    from vllm.diffusion.params import DiffusionParams
    from vllm.diffusion.scoring import Scoring

_MOST_LANGUAGES = 128  # that a process keeps


@lru_cache(maxsize=_MOST_LANGUAGES)
def _language(packed: bytes) -> Language:
    return Language.unpacked(packed)


class Guided(Selector):
    """Candidates of such a request come from one string of the language.

    What a rule commits of it stays completable, whichever part it is. Only a rule that replaces
    committed tokens may mix two strings: where that is not completable, it takes over all of the
    newer one.

    Args:
        params: of the request, with a guide.
        prompt_length: tokens before the canvas.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        if params.guide is None:
            raise ValueError("guide: wanted one, got None")
        self._params, self._prompt_length = params, prompt_length
        self._language = _language(params.guide.language)
        self._limit = min(params.max_tokens, params.gen_length)
        self._state, self._num_passed = 0, 0  # the state behind so many tokens of the canvas

    def prefix(self, num_positions: int) -> tuple[int, ...]:
        """Tokens of the beginning of every answer, as far as there is room for what follows."""
        found, state = 0, 0
        prefix = self._params.guide.prefix if self._params.guide is not None else ()
        for token in prefix[:num_positions]:
            state = self._language.advance(state, token)
            if self._language.room[state] > self._limit - found - 1:
                break
            found += 1
        return prefix[:found]

    def joint(self, tokens: Array, work: Work, scoring: Scoring, step: int) -> Joint | None:
        """What a forward chooses together; None where none of it is of the canvas."""
        eligible = work.eligible[work.eligible >= self._prompt_length] - self._prompt_length
        if not eligible.size:
            return None
        params = self._params
        is_scored = scoring.score == "confidence" and (
            scoring.is_categorical or params.remasking != "random"
        )
        excluded: tuple[int | None, ...] = ()
        if params.confidence_eos_eot_inf:
            excluded = (params.eos_id, params.eot_id)
        return Joint(
            language=self._language,
            window=self._window(tokens, eligible),
            temperature=params.temperature,
            seed=params.seed or 0,
            step=step,
            is_tempered=scoring.is_categorical,
            sets_scores=is_scored,
            excluded=tuple(token for token in excluded if token is not None),
            num_logprobs=params.num_logprobs,
            num_holes=work.eligible.size - eligible.size,
        )

    def select(
        self,
        tokens: Array,
        candidates: Candidates,
        choose: Callable[[Candidates], Commit],
    ) -> Commit:
        commit = choose(candidates)
        of_canvas = candidates.positions >= self._prompt_length
        positions, proposed = candidates.positions[of_canvas], candidates.tokens[of_canvas]
        standing = tokens[positions] != self._params.mask_id
        if not standing.any():
            return commit
        mixed = tokens.copy()
        mixed[commit.positions] = commit.tokens
        eligible = positions - self._prompt_length
        window = self._window(mixed, eligible, are_open=False)
        if can_be_completed(self._language, window):
            return commit
        taken = standing | np.isin(positions, commit.positions)
        return Commit(positions[taken], proposed[taken])

    def _window(self, tokens: Array, eligible: Array, *, are_open: bool = True) -> Window:
        """From the first position that may change to the last one that is filled or may be."""
        canvas = tokens[self._prompt_length :]
        filled = canvas != self._params.mask_id
        holes = (~filled).nonzero()[0]
        first = int(min(eligible[0], holes[0] if holes.size else eligible[0]))
        end = int(max(eligible[-1], filled.nonzero()[0][-1] if filled.any() else 0)) + 1
        self._pass(canvas, first)
        own = canvas[first:end]
        kinds = np.full(end - first, FREE, dtype=np.int32)
        kinds[filled[first:end]] = self._language.class_of_token[own[filled[first:end]]]
        if are_open:
            kinds[eligible - first] = OPEN
        return Window(first, self._state, kinds, self._limit - end)

    def _pass(self, canvas: Array, first: int) -> None:
        """Go on to the state before position `first`, up to which nothing changes any more."""
        for token in canvas[self._num_passed : first].tolist():
            self._state = self._language.advance(self._state, token)
        self._num_passed = max(self._num_passed, first)
