# SPDX-License-Identifier: Apache-2.0
"""Lossless speculation: states that a request may reach, evaluated beside the one that is certain.

A round is one forward of a request and, beside it in the same step, of guesses of the states that
follow (`decoding/drafting.py`). A guess counts only if it is the state that the request reaches:
then its candidates are those that a forward of its own would give, and they are committed, too.

    round          certain      guesses                        steps
    forward        S3           S4?    S5?    S5'?
    commit         S3 -> S4     = S4   != S5  = S5             3: S4, S5 and S6 are reached
    next           S6           ...

The rule sees only what is committed, so a wrong guess costs its rows and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vllm.diffusion.decoding.drafting import Drafter, State
from vllm.diffusion.request.algorithms import algorithms_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.engine.worker.window import ForwardWindow, Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.sampling import RowEdits

logger = init_logger(__name__)

_GONE = RuntimeError("its request is over")
MOST_REQUESTS = 32  # of a step with guesses: drafting is work of the host


def takes_part(params: DiffusionParams) -> bool:
    """Whether a request's steps may have guesses beside them.

    The tokens of a guided answer are chosen together, by a search over the certain state. Delayed
    caches keep what every forward writes.
    """
    return params.guide is None and params.score is None and params.cache != "delayed"


class Branch:
    """A guessed state, which a step packs like a request of its own.

    Args:
        canvas: the request.
        state: the guess.
        window: positions that are computed: those of the certain state.
    """

    adjust_logits = None
    pick = None

    def __init__(self, canvas: Canvas, state: State, window: Window) -> None:
        self.canvas, self.state, self._window = canvas, state, window
        self.req_id, self.params = canvas.req_id, canvas.params
        self.prompt_length, self.wants_logprobs = canvas.prompt_length, canvas.wants_logprobs
        self.num_steps = canvas.num_steps + state.depth
        self.rule = state.rule

    @property
    def window(self) -> ForwardWindow:
        return self.canvas.window

    @property
    def sequences(self) -> tuple[Array, ...]:
        return self.canvas.sequences_of(self.state.tokens)

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        return self.state.work, self._window

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
        canvas, own = self.canvas, self.state.work
        return (
            self.num_steps == canvas.num_steps
            and self.rule.forbid_mask == canvas.rule.forbid_mask
            and work.fill is None
            and own.rows == work.rows
            and np.array_equal(own.eligible, work.eligible)
            and np.array_equal(self.state.tokens, canvas.tokens)
        )


# What a step packs.
Packed: TypeAlias = "Canvas | Branch"


class LastCandidates:
    """Candidates of the state that a request committed last, by which the next ones are guessed.

    Args:
        rows: sample rows of their step.
        samples: the table of its samples.
        number: index of the state in the step.
    """

    ranks_exactly = False

    def __init__(self, rows: SampleRows, samples: Array, number: int) -> None:
        self._rows, self._samples, self._number = rows, samples, number
        self._found: Candidates | None = None

    def at(self, depth: int) -> Candidates | None:
        if self._found is None:
            self._found = self._rows.candidates(self._samples, self._number)
        return self._found


class Speculation:
    """Drafts guesses for the steps of some requests, and accepts those that come true.

    Args:
        canvases: all running requests.
    """

    def __init__(self, canvases: Mapping[str, Canvas]) -> None:
        self._canvases = canvases
        self._drafters: dict[str, Drafter] = {}  # by request
        self._sources: dict[str, LastCandidates] = {}  # by request, from its first commit on
        self._failed = False

    def start(self, canvas: Canvas) -> None:
        """Take in a request, if it takes part."""
        params = canvas.params
        if not takes_part(params):
            return
        table = algorithms_of(is_block_causal=params.is_block_causal)
        is_chain = table[params.algorithm].speculates == "chain"
        self._drafters[canvas.req_id] = Drafter(is_chain=is_chain)

    def forget(self, req_id: str) -> None:
        """Drop a request, if it takes part."""
        self._drafters.pop(req_id, None)
        self._sources.pop(req_id, None)

    def forget_sources(self) -> bool:
        """Guess nothing in the next step of any request; return whether anything could be."""
        had, self._sources = bool(self._sources), {}
        return had

    # ---- before a step ----

    def with_branches(self, canvases: Sequence[Canvas], most_rows: int) -> list[Packed]:
        """Return the requests of a step, each with its guesses behind it.

        Args:
            canvases: the requests.
            most_rows: rows that the step may have.
        """
        if len(canvases) > MOST_REQUESTS:
            return list(canvases)
        packed, room = list[Packed](), most_rows - sum(canvas.next_rows for canvas in canvases)
        for canvas in canvases:
            branches = self._branches_of(canvas, room)
            room -= len(branches) * canvas.next_rows
            packed += [canvas, *branches]
        return packed

    def _branches_of(self, canvas: Canvas, room: int) -> list[Branch]:
        source = self._sources.get(canvas.req_id)
        if source is None or canvas.window.cache is not None:
            return []
        work, window = canvas.next_forward()
        most = min(canvas.params.num_speculative_states, room // canvas.next_rows)
        certain = State(0, canvas.tokens, canvas.rule, work)
        try:
            states = self._drafters[canvas.req_id].draft(certain, source, most)
        except Exception:
            if not self._failed:
                logger.exception("request %s: no states could be guessed", canvas.req_id)
            self._failed = True
            return []
        return [Branch(canvas, state, window) for state in states]

    # ---- after a step ----

    def accept(
        self,
        rows: SampleRows,
        samples: Array,
        found: Sequence[Candidates | BatchedCommit],
        outcomes: dict[str, Exception | None],
    ) -> None:
        """Commit the guesses that are the states which their requests have reached.

        Args:
            rows: sample rows of the step.
            samples: table of its samples, on the host.
            found: what was found for each state that it packed.
            outcomes: requests whose own candidates were committed, and why those fail that do; the
                failures of further commits are added.
        """
        own, guessed = dict[str, int](), dict[str, dict[int, Branch]]()
        for number, packed in enumerate(rows.batch.canvases):
            if isinstance(packed, Branch):
                guessed.setdefault(packed.req_id, {})[number] = packed
            elif packed.req_id in self._drafters and rows.batch.works[number].eligible.size:
                own[packed.req_id] = number
        for req_id, number in own.items():
            if outcomes.get(req_id, _GONE) is not None:
                continue
            canvas = self._canvases[req_id]
            try:
                newest = _accepted(canvas, guessed.get(req_id, {}), found)
            except Exception as error:
                logger.exception("decoding of request %s failed", req_id)
                outcomes[req_id] = error
                continue
            newest = number if newest is None else newest
            self._sources[req_id] = LastCandidates(rows, samples, newest)


def _accepted(
    canvas: Canvas, branches: dict[int, Branch], found: Sequence[Candidates | BatchedCommit]
) -> int | None:
    """Commit what was found for the guesses, by index, that a request reaches one by one.

    Returns:
        the index of the last one; None if it reaches none.
    """
    newest = None
    canvas.num_drafted += len(branches)
    while branches and not canvas.is_complete:
        work, _ = canvas.next_forward()
        reached = (number for number, branch in branches.items() if branch.is_reached(work))
        number = next(reached, None)
        if number is None:
            break
        newest = number
        canvas.num_accepted += 1
        canvas.commit(found[newest])
    return newest
