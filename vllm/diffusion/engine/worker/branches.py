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

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from vllm.diffusion.core.pages import PAGE_SIZE, num_pages
from vllm.diffusion.core.random_streams import REMASKING
from vllm.diffusion.decoding.drafting import Drafter, State
from vllm.diffusion.engine.worker.agreement import OUT_OF_MEMORY
from vllm.diffusion.request.algorithms import algorithms_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence, PageAllocator
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.sampling import RowEdits

logger = init_logger(__name__)

_GONE = RuntimeError("its request is over")
MOST_LATER_DRAWS = 3  # each samples all rows once more
MOST_BLOCKS = 3  # of a window of exact keys: two are finished, but not kept yet
MOST_PLACES = 64  # of all requests
MOST_REQUESTS = 32  # of a step with guesses: drafting is work of the host


def takes_part(params: DiffusionParams) -> bool:
    """Whether a request's steps may have guesses beside them.

    The tokens of a guided answer are chosen together, by a search over the certain state. Delayed
    caches keep what every forward writes.
    """
    return params.guide is None and params.score is None and params.cache != "delayed"


class Place(NamedTuple):
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
        self.window = Place(None, canvas.window.kept_starts, canvas.window.num_sequences)
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
        canvas: the request.
        rows: sample rows of their step.
        samples: the table of its samples.
        number: index of the state in the step.
    """

    def __init__(self, canvas: Canvas, rows: SampleRows, samples: Array, number: int) -> None:
        self._canvas, self._rows, self._samples, self._number = canvas, rows, samples, number
        self._step = canvas.num_steps - 1  # of these candidates
        self._later_draws = rows.batch.canvases[number].later_draws
        is_random = canvas.params.remasking == "random"
        self.ranks_exactly = is_random and not canvas.rule.scoring.is_categorical
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
        if self.ranks_exactly and not is_noisy:
            scores = canvas.uniform(REMASKING, positions, step)
            if scores is not None:
                sign = -1 if canvas.rule.scoring.score == "negative_entropy" else 1
                found = found._replace(scores=sign * scores)
        return found._replace(draws=canvas.draws(positions, step))


def _later_draws(canvas: Canvas) -> int:
    """Return the number of later draws that guesses of a request are made by."""
    params = canvas.params
    if params.temperature == 0 or canvas.wants_logprobs:
        return 0
    return min(MOST_LATER_DRAWS, params.num_speculative_states)


def _may_keep(canvas: Canvas, window: Window) -> bool:
    """Whether guesses of a request's next forward may have places, or need none.

    None has a forward of all positions, nor one that computes more than the rule needs.
    """
    if canvas.window.cache is None:
        return True
    is_long = window.num_rows > MOST_BLOCKS * canvas.params.block_length
    is_exact = canvas.params.cache == "exact"
    return window.reads_kept and not (is_exact and is_long)


class Places:
    """Pages for guesses, of requests that keep keys and values.

    A forward writes the keys and values of its window, so the certain state and its guesses cannot
    have the same pages there. A place has pages of its own for the positions of one window. What
    these hold beside the window is a copy, made again for every other window: only forwards of
    other windows change it.

    Args:
        pages: the pages of all requests.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._held: dict[str, _Held] = {}  # by request

    def of(self, canvas: Canvas, first: int, stop: int, count: int) -> list[KeptSequence]:
        """Return at most `count` places for positions `first` to `stop` of a request.

        There are fewer where the pages for them are used up.
        """
        held = self._held.get(canvas.req_id)
        own_pages = first // PAGE_SIZE, num_pages(stop)
        if held is not None and held.own_pages != own_pages:
            self.release(canvas.req_id)
            held = None
        if held is None:
            held = self._held[canvas.req_id] = _Held(own_pages, (first, stop), [])
        num_held = len(held.places)
        names = [_place_name(canvas.req_id, number) for number in range(max(count, num_held))]
        if held.window != (first, stop):
            held.window = first, stop
            self._pages.copy_again(canvas.req_id, names[:num_held])
        if num_held < count:
            own = [range(start + first, start + stop) for start in canvas.window.kept_starts]
            room = MOST_PLACES - sum(len(held.places) for held in self._held.values())
            with suppress(*OUT_OF_MEMORY):
                more = names[num_held:][: max(room, 0)]
                held.places += self._pages.places(canvas.req_id, own, more)
        return held.places[:count]

    def leave(self, req_id: str, window: Window) -> None:
        """Take in the next forward of a request: what copies are of may change with it."""
        held = self._held.get(req_id)
        if held is not None and not held.window[0] <= window.first < window.stop <= held.window[1]:
            held.window = -1, -1

    def release(self, req_id: str) -> None:
        """Give back a request's places."""
        held = self._held.pop(req_id, None)
        for number in range(0 if held is None else len(held.places)):
            self._pages.release(_place_name(req_id, number))

    def release_all(self) -> None:
        """Give back all places."""
        for req_id in list(self._held):
            self.release(req_id)


@dataclass
class _Held:
    """Places of a request: for which of its pages, and for which positions."""

    own_pages: tuple[int, int]
    window: tuple[int, int]
    places: list[KeptSequence]


def _place_name(req_id: str, number: int) -> str:
    return f"{req_id}, guess {number}"


class Speculation:
    """Drafts guesses for the steps of some requests, and accepts those that come true.

    Args:
        canvases: all running requests.
        pages: pages of kept keys and values.
    """

    def __init__(self, canvases: Mapping[str, Canvas], pages: PageAllocator) -> None:
        self._canvases, self._places = canvases, Places(pages)
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
        crosses_blocks = params.is_block_causal  # whose windows end with the block
        drafter = Drafter(is_chain=is_chain, crosses_blocks=crosses_blocks)
        self._drafters[canvas.req_id] = drafter

    def forget(self, req_id: str) -> None:
        """Drop a request, if it takes part."""
        self._drafters.pop(req_id, None)
        self._sources.pop(req_id, None)
        self._places.release(req_id)

    def pause(self) -> bool:
        """Guess nothing in the next step, and give back all places.

        Returns:
            whether anything could have been guessed.
        """
        had, self._sources = bool(self._sources), {}
        self._places.release_all()
        return had

    # ---- before a step ----

    def with_branches(self, canvases: Sequence[Canvas], most_rows: int) -> list[Packed]:
        """Return the requests of a step, each with its guesses behind it.

        Args:
            canvases: the requests.
            most_rows: rows that the step may have.
        """
        packed, room = list[Packed](), most_rows - sum(canvas.next_rows for canvas in canvases)
        for canvas in canvases:
            packed.append(canvas)
            if canvas.req_id in self._drafters:
                work, window = canvas.next_forward()
                self._places.leave(canvas.req_id, window)
                canvas.later_draws = 0
                if len(canvases) <= MOST_REQUESTS:
                    canvas.later_draws = _later_draws(canvas)
                    branches = self._branches(canvas, work, window, room)
                    room -= sum(branch.num_rows for branch in branches)
                    packed += branches
        return packed

    def leave_places(self, req_id: str) -> None:
        """Give back the places of a request, which gets other pages."""
        self._places.release(req_id)

    def _branches(
        self, canvas: Canvas, work: ForwardTarget, window: Window, room: int
    ) -> list[Branch]:
        """Guess states behind the certain one, whose forwards have at most `room` rows."""
        most = min(canvas.params.num_speculative_states, room // canvas.next_rows)
        source = self._sources.get(canvas.req_id)
        if source is None or not work.eligible.size or most < 1 or not _may_keep(canvas, window):
            return []
        certain = State(0, canvas.tokens, canvas.rule, work)
        try:
            states = self._drafters[canvas.req_id].draft(certain, source, most)
        except Exception:
            if not self._failed:
                logger.exception("request %s: no states could be guessed", canvas.req_id)
            self._failed = True
            return []
        branches = list[Branch]()
        for state in states:
            is_alike = state.work.rows == work.rows
            own = window if is_alike else canvas.window.of(state.work.rows)
            if own is not None:
                branches.append(Branch(canvas, state, own))
                room -= branches[-1].num_rows
        while room < 0:
            room += branches.pop().num_rows
        if canvas.window.cache is None or not branches:
            return branches
        stop = max(branch.positions.stop for branch in branches)
        places = self._places.of(canvas, window.first, stop, len(branches))
        for branch, place in zip(branches, places, strict=False):
            branch.window = branch.window._replace(cache=place)
        return branches[: len(places)]

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
            self._sources[req_id] = LastCandidates(canvas, rows, samples, newest)


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
        work = canvas.begin()  # of which no window begins: what it would write lies elsewhere
        reached = (number for number, branch in branches.items() if branch.is_reached(work))
        number = next(reached, None)
        if number is None:
            break
        newest = number
        canvas.num_accepted += 1
        canvas.commit(found[newest])
    return newest
