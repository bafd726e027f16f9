# SPDX-License-Identifier: Apache-2.0
"""Guessed states, packed into a step like requests, and the candidates that they follow from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from vllm.diffusion.core.random_streams import REMASKING

if TYPE_CHECKING:
    from vllm.diffusion.decoding import Candidates, ForwardTarget
    from vllm.diffusion.decoding.drafting import State
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import RowEdits


class BranchWindow(NamedTuple):
    """Where a guess keeps the keys and values that it computes, as `ForwardWindow` says it.

    Attributes:
        cache: the request's pages, but own ones where positions of the window lie; None where the
            request keeps nothing.
        kept_starts, num_sequences: those of the request.
    """

    cache: KeptSequence | None
    kept_starts: tuple[int, ...]
    num_sequences: int


class Branch:
    """A guessed state, which a step packs like a request of its own.

    Args:
        canvas: the request.
        state: the guess.
        positions: positions that are computed.
    """

    adjust_logits = None
    pick = None

    def __init__(self, canvas: Canvas, state: State, positions: Window) -> None:
        self.canvas, self.state, self.positions = canvas, state, positions
        self.window = BranchWindow(None, canvas.window.kept_starts, canvas.window.num_sequences)
        self.req_id, self.params = canvas.req_id, canvas.params
        self.prompt_length, self.wants_logprobs = canvas.prompt_length, canvas.wants_logprobs
        self.num_steps = canvas.num_steps + state.depth
        self.rule, self.later_draws = state.rule, canvas.later_draws

    @property
    def num_rows(self) -> int:
        """Rows of its forward."""
        return self.positions.num_rows * self.window.num_sequences

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.sequences_of(self.state.tokens)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        return self.state.work, self.positions

    def token_ids(self, positions: Array) -> None:
        """Return no tokens to be scored: likelihoods are not guessed."""

    def joints(self, work: ForwardTarget) -> list[Joint]:
        return []

    def edits(self, positions: Array) -> RowEdits | None:
        return self.canvas.edits(positions, self.state.tokens)

    def draws(self, positions: Array) -> Array | None:
        return self.canvas.draws(positions, self.num_steps)

    def is_reached(self, work: ForwardTarget) -> bool:
        """Whether this is the request's state, whose next forward is for `work`."""
        canvas = self.canvas
        is_due = self.num_steps == canvas.num_steps
        return is_due and self.state.is_of(canvas.tokens, canvas.rule, work)


# What a step packs.
Packed: TypeAlias = "Canvas | Branch"


def has_random_scores(canvas: Canvas) -> bool:
    """Whether random numbers, known before a step, stand for the scores of a request."""
    return canvas.params.remasking == "random" and not canvas.rule.scoring.is_categorical


class LastCandidates:
    """Candidates of the state that a request committed last, by which the next ones are guessed.

    Args:
        canvas: the request.
        rows: sample rows of their step.
        samples: the table of its samples.
        number: index of the state in the step.
    """

    def __init__(self, canvas: Canvas, rows: SampleRows, samples: Array, number: int) -> None:
        self._canvas, self._rows, self._samples, self._number = canvas, rows, samples, number
        self._step = canvas.num_steps - 1  # of these candidates
        self._later_draws = rows.batch.canvases[number].later_draws
        self._is_random = has_random_scores(canvas)
        self._known: dict[int, Candidates | None] = {}

    def at(self, depth: int) -> Candidates | None:
        """Return the candidates with the random numbers of a later step; see `Source`."""
        if depth not in self._known:
            self._known[depth] = self._drawn_at(depth)
        return self._known[depth]

    def _drawn_at(self, depth: int) -> Candidates | None:
        canvas, is_noisy = self._canvas, self._canvas.params.temperature > 0
        if is_noisy and depth > self._later_draws:
            return None
        found = self._rows.candidates(self._samples, self._number, depth if is_noisy else 0)
        positions, step = found.positions, self._step + depth
        if self._is_random and not is_noisy:
            scores = canvas.uniform(REMASKING, positions, step)
            if scores is not None:
                sign = -1 if canvas.rule.scoring.score == "negative_entropy" else 1
                found = found._replace(scores=sign * scores)
        return found._replace(draws=canvas.draws(positions, step))
