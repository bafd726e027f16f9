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
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.decoding.drafting import MAX_DRAFTED_COMMITS, Drafter, State
from vllm.diffusion.engine.worker.branches import Branch
from vllm.diffusion.engine.worker.governor import HoldingRates, Offer, StepTimes, worthwhile
from vllm.diffusion.engine.worker.last_candidates import LastCandidates, has_random_scores
from vllm.diffusion.engine.worker.places import Places
from vllm.diffusion.engine.worker.step_graphs import ROW_BUCKETS
from vllm.diffusion.memory import StepShape
from vllm.diffusion.request.algorithms import algorithms_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget
    from vllm.diffusion.decoding.drafting import Chance
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.branches import Packed
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.governor import Kind
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.engine.worker.step_graphs import GraphRunner
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.memory import PageAllocator, Plan, Planner
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams

logger = init_logger(__name__)

MAX_BLOCKS = 3  # of a window of exact keys: two are finished, but not kept yet
MAX_EXTRA_DRAWS = 3  # each samples all rows once more
MAX_REQUESTS = 32  # of a step with guesses: drafting is work of the host
_GONE = RuntimeError("its request is over")
# Where no guess is worth it: steps after which that is looked at again, of few requests and of
# more, and in how many of them.
FEW_REQUESTS, FEW_RESTS, RESTS, LOOKS = 4, 12, 32, 2
NOISY_INTERVAL = 4  # steps in which a request that draws tokens, but has no guesses, is watched


def takes_part(params: DiffusionParams) -> bool:
    """Whether a request's steps may have guesses beside them.

    The tokens of a guided answer are chosen together, by a search over the certain state. Delayed
    caches keep what every forward writes.
    """
    return params.guide is None and params.score is None and params.cache != "delayed"


class _Guessing(NamedTuple):
    """How the states of a request are guessed, and of which kind its guesses are."""

    drafter: Drafter
    kind: Kind
    chance: Chance


class _Watched(NamedTuple):
    """A step without guesses, by which is learned whether they would have held."""

    canvas: Canvas
    certain: State
    source: LastCandidates
    num_steps: int


class Speculation:
    """Drafts guesses for the steps of some requests, and accepts those that come true.

    Args:
        canvases: all running requests.
        pages: pages of kept keys and values.
        times: times of steps, of windows or not; None where as many states are guessed as requests
            ask for.
        grows: whether the store of pages may grow for guesses.
    """

    def __init__(
        self,
        canvases: Mapping[str, Canvas],
        pages: PageAllocator,
        times: Callable[[bool], StepTimes] | None = None,
        *,
        grows: bool = True,
    ) -> None:
        self._canvases, self._places = canvases, Places(pages, grows=grows)
        self._times = None if times is None else cache(times)
        self._rates = HoldingRates()
        self._guessing: dict[str, _Guessing] = {}  # by request
        self._sources: dict[str, LastCandidates] = {}  # by request, from its first commit on
        self._watched: list[_Watched] = []
        self._num_rounds = self._rests_until = 0
        self._failed = False

    def start(self, canvas: Canvas) -> None:
        """Take in a request, if it takes part."""
        params = canvas.params
        if not takes_part(params):
            return
        table = algorithms_of(is_block_causal=params.is_block_causal)
        is_chain = table[params.algorithm].speculates == "chain"
        drafter = Drafter(
            is_chain=is_chain or has_random_scores(canvas),
            crosses_blocks=params.is_block_causal,  # whose windows end with the block
        )
        quota = params.gen_length / (params.steps or params.gen_length)
        if params.steps_per_block is not None:
            quota = params.block_length / params.steps_per_block
        kind = params.algorithm, quota, params.cache, params.temperature > 0
        chance = partial(self._rates.chance, kind)
        self._guessing[canvas.req_id] = _Guessing(drafter, kind, chance)

    def forget(self, req_id: str) -> None:
        """Drop a request, if it takes part."""
        self._guessing.pop(req_id, None)
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

    def reset(self) -> None:
        """Forget what other weights have said, and how often guesses by them have held."""
        self.pause()
        self._watched.clear()
        self._rates.forget()

    def leave_places(self, req_id: str) -> None:
        """Give back the places of a request, which gets other pages."""
        self._places.release(req_id)

    # ---- before a step ----

    def with_branches(self, canvases: Sequence[Canvas], most_rows: int) -> list[Packed]:
        """Return the requests of a step, each with its guesses behind it.

        Args:
            canvases: the requests.
            most_rows: rows that the step may have.
        """
        self._num_rounds += 1
        if not self._guessing or self._is_resting(len(canvases)):
            self._stand_by(canvases)
            return list(canvases)
        rows = sum(canvas.next_rows for canvas in canvases)
        begun = {c.req_id: c.next_forward() for c in canvases if c.req_id in self._guessing}
        asking = [c for c in canvases if c.req_id in begun and _may_guess(c, *begun[c.req_id])]
        numbers = self._numbers(asking, canvases, rows)
        packed: list[Packed] = []
        room = most_rows - rows
        for index, canvas in enumerate(canvases):
            packed.append(canvas)
            if canvas.req_id not in begun:
                continue
            work, window = begun[canvas.req_id]
            self._places.leave(canvas.req_id, window)
            number = numbers.get(canvas.req_id, 0)
            canvas.later_draws = _later_draws(canvas, number)
            branches = list[Branch]()
            if number:
                branches = self._branches(canvas, work, window, number, room)
                room -= sum(branch.num_rows for branch in branches)
                packed += branches
            if not branches and index == self._num_rounds % len(canvases):
                self._watch(canvas, work)
        return packed

    def _is_resting(self, num_requests: int) -> bool:
        """Whether nothing is guessed for so many requests, nor looked at whether it would pay."""
        return num_requests > MAX_REQUESTS or self._num_rounds < self._rests_until

    def _stand_by(self, canvases: Sequence[Canvas]) -> None:
        """Hold nothing for guesses: there are none for some steps."""
        self._places.release_all()
        self._sources.clear()
        for canvas in canvases:
            canvas.later_draws = 0

    def _numbers(
        self, asking: Sequence[Canvas], canvases: Sequence[Canvas], rows: int
    ) -> dict[str, int]:
        """Return how many guesses the requests that may have some should have at most."""
        asked = {canvas.req_id: canvas.params.num_speculative_states for canvas in asking}
        if self._times is None or not asking:
            return asked
        times = self._times(all(canvas.window.cache is not None for canvas in canvases))
        known: dict[tuple[Kind, int], list[float]] = {}  # most often requests are alike
        offers = []
        for canvas in asking:
            (drafter, kind, chance), most = self._guessing[canvas.req_id], asked[canvas.req_id]
            chances = known.get((kind, most))
            if chances is None:
                chances = known[kind, most] = drafter.chances(most, chance)
            offers.append(Offer(chances, canvas.next_rows))
        counts = worthwhile(offers, len(canvases), rows, times)
        if not any(counts) and self._num_rounds >= self._rests_until + LOOKS:
            are_few = len(canvases) <= FEW_REQUESTS
            self._rests_until = self._num_rounds + (FEW_RESTS if are_few else RESTS)
        return {canvas.req_id: count for canvas, count in zip(asking, counts, strict=True)}

    def _branches(
        self, canvas: Canvas, work: ForwardTarget, window: Window, most: int, room: int
    ) -> list[Branch]:
        """Guess at most `most` states behind the certain one, whose forwards fit into `room`."""
        source = self._sources.get(canvas.req_id)
        if source is None:
            return []
        branches = list[Branch]()
        for state in self._drafted(
            canvas, State(0, canvas.tokens, canvas.rule, work), source, most
        ):
            is_alike = state.work.rows == work.rows
            own = window if is_alike else canvas.window.of(state.work.rows)
            if own is not None:
                branches.append(Branch(canvas, state, own))
                room -= branches[-1].num_rows
        while room < 0 and branches:
            room += branches.pop().num_rows
        if canvas.window.cache is None or not branches:
            return branches
        stop = max(branch.positions.stop for branch in branches)
        places = self._places.of(canvas, window.first, stop, len(branches))
        for branch, place in zip(branches, places, strict=False):
            branch.window = branch.window._replace(cache=place)
        return branches[: len(places)]

    def _drafted(
        self, canvas: Canvas, certain: State, source: LastCandidates, most: int
    ) -> list[State]:
        """Guess states; none where a rule fails on what it is shown."""
        drafter, _, chance = self._guessing[canvas.req_id]
        try:
            return drafter.draft(certain, source, most, chance)
        except Exception:
            if not self._failed:
                logger.exception("request %s: no states could be guessed", canvas.req_id)
            self._failed = True
            return []

    # ---- what is learned without a forward ----

    def _watch(self, canvas: Canvas, work: ForwardTarget) -> None:
        """Note the state of a request whose step has no guesses."""
        source = self._sources.get(canvas.req_id)
        if self._times is not None and source is not None and source.at(1) is not None:
            certain = State(0, canvas.tokens.copy(), canvas.rule.fork(), work)
            self._watched.append(_Watched(canvas, certain, source, canvas.num_steps))

    def take_note(self) -> None:
        """Learn by steps that were watched whether guesses would have held.

        Called after the next launch, so the device does not wait for it.
        """
        watched, self._watched = self._watched, []
        for step in watched:
            canvas = step.canvas
            if self._canvases.get(canvas.req_id) is not canvas or canvas.is_complete:
                continue
            if canvas.num_steps == step.num_steps:
                self._watched.append(step)  # it is under way
            elif canvas.num_steps == step.num_steps + 1:
                self._learn_by(step)

    def _learn_by(self, step: _Watched) -> None:
        """Learn by a step that has committed what guesses would have been about."""
        canvas, kind = step.canvas, self._guessing[step.canvas.req_id].kind
        try:
            work = canvas.begin()
        except Exception:  # the next step, which it is for, will tell
            return
        for state in self._drafted(canvas, step.certain, step.source, MAX_DRAFTED_COMMITS):
            if state.depth == 1:
                holds = state.is_of(canvas.tokens, canvas.rule, work)
                self._rates.learn(kind, state.committed, 1, holds=holds)

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
        if len(rows.batch.canvases) == len(outcomes) and self._is_resting(len(outcomes)):
            return
        own, guessed = dict[str, int](), dict[str, dict[int, Branch]]()
        for number, packed in enumerate(rows.batch.canvases):
            if isinstance(packed, Branch):
                guessed.setdefault(packed.req_id, {})[number] = packed
            elif packed.req_id in self._guessing and rows.batch.works[number].eligible.size:
                own[packed.req_id] = number
        for req_id, number in own.items():
            if outcomes.get(req_id, _GONE) is not None:
                continue
            canvas = self._canvases[req_id]
            branches = guessed.get(req_id, {})
            try:
                reached = _accepted(canvas, branches, found)
            except Exception as error:
                logger.exception("decoding of request %s failed", req_id)
                outcomes[req_id] = error
                continue
            newest = reached[-1] if reached else number
            self._sources[req_id] = LastCandidates(canvas, rows, samples, newest)
            self._learn(self._guessing[req_id].kind, branches, reached)

    def _learn(self, kind: Kind, branches: Mapping[int, Branch], reached: Sequence[int]) -> None:
        """Learn by guesses whose parents were reached, of which `reached` were, too."""
        states = [branches[number].state for number in reached]
        for number, branch in branches.items():
            _, _, _, _, parent, count = state = branch.state
            follows = parent is None or parent.depth == 0 or any(s is parent for s in states)
            if follows and state.depth <= len(states) + 1:
                self._rates.learn(kind, count, state.depth, holds=number in reached)


def times_of(
    graphs: GraphRunner | None, planner: Planner, *, weighs: bool
) -> Callable[[bool], StepTimes] | None:
    """Return the times of steps, of windows or not; None where guesses are not to be weighed.

    Args:
        graphs: the graphs, timed at start, if there are any.
        planner: predicts times without graphs.
        weighs: weigh guesses.
    """
    if not weighs:
        return None
    if graphs is not None:
        return graphs.times.__getitem__

    def predicted(are_windows: bool) -> StepTimes:
        found = {}
        for n in ROW_BUCKETS:
            with suppress(ActivationBudgetError):  # a step that does not fit is never worth it
                shape = StepShape(n, n, n, num_sequences=2, keeps=are_windows)
                found[n] = planner.plan(shape).predicted_seconds
        return StepTimes.of(found)

    return predicted


def serves_guesses(batch: StepBatch, plan: Plan, graphs: GraphRunner | None) -> bool:
    """Whether guesses cost a step nothing but their rows: it is whole, and one graph's."""
    has_graph = graphs is None or graphs.serves(batch)
    return has_graph and plan.is_whole(batch.num_rows)


def _accepted(
    canvas: Canvas, branches: dict[int, Branch], found: Sequence[Candidates | BatchedCommit]
) -> list[int]:
    """Commit what was found for the guesses, by index, that a request reaches one by one.

    Returns:
        the indices of these, in order.
    """
    accepted = list[int]()
    canvas.num_drafted += len(branches)
    while branches and not canvas.is_complete:
        work = canvas.begin()  # of which no window begins: what it would write lies elsewhere
        reached = (number for number, branch in branches.items() if branch.is_reached(work))
        number = next(reached, None)
        if number is None:
            break
        accepted.append(number)
        canvas.num_accepted += 1
        canvas.commit(found[number])
    return accepted


def _later_draws(canvas: Canvas, number: int) -> int:
    """Return the number of later draws that `number` guesses of a request are made by.

    Without guesses there is one, now and then, by which is learned whether they would hold.
    """
    if canvas.params.temperature == 0 or canvas.wants_logprobs:
        return 0
    return min(MAX_EXTRA_DRAWS, number) or int(canvas.num_steps % NOISY_INTERVAL == 0)


def _may_guess(canvas: Canvas, work: ForwardTarget, window: Window) -> bool:
    """Whether a request's next forward may have guesses beside it: they have places, or need none.

    None has a forward of all positions that refreshes keys, nor one that computes more than the
    rule needs.
    """
    if not work.eligible.size or canvas.window.cache is None:
        return work.eligible.size > 0
    if canvas.params.cache == "exact":
        return window.num_rows <= MAX_BLOCKS * canvas.params.block_length
    return window.reads_kept
