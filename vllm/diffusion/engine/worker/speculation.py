# SPDX-License-Identifier: Apache-2.0
"""Lossless speculation: a step also evaluates drafts, that is, predicted next states.

A round evaluates one forward of a request and, in the same step, drafts of the states that follow
(`decoding/drafting.py`). A draft is accepted only if it is exactly the state that the request
reaches. Its candidates then equal the candidates of a forward of that state, so they are committed,
too.

    round          certain      drafts                        steps
    forward        S3           S4?    S5?    S5'?
    commit         S3 -> S4     = S4   != S5  = S5             3: S4, S5 and S6 are reached
    next           S6           ...

The rule receives only committed tokens, so a rejected draft costs its rows and changes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.decoding.drafting import MAX_DRAFTED_COMMITS, Drafter, DraftState
from vllm.diffusion.engine.worker.cached_candidates import CachedCandidates, has_random_scores
from vllm.diffusion.engine.worker.draft_budget import (
    AcceptanceRates,
    DraftOffer,
    StepTimes,
    choose_num_drafts,
)
from vllm.diffusion.engine.worker.draft_pages import DraftPages
from vllm.diffusion.engine.worker.drafts import Draft
from vllm.diffusion.engine.worker.step_graphs import ROW_BUCKETS
from vllm.diffusion.memory import StepShape
from vllm.diffusion.request.algorithms import algorithms_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget
    from vllm.diffusion.decoding.drafting import Chance
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.draft_budget import Kind
    from vllm.diffusion.engine.worker.drafts import BatchItem
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.engine.worker.step_graphs import GraphRunner
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.memory import PageAllocator, Plan, Planner
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams

logger = init_logger(__name__)

MAX_BLOCKS = 3  # blocks of a window with exact keys: two may be finished, but not cached yet
MAX_EXTRA_DRAWS = 3  # each extra draw samples all rows once more
MAX_REQUESTS = 32  # requests of a step with drafts; the host drafts, so more would cost too much
_FINISHED = RuntimeError("its request is over")
# Back-off when drafting does not pay: steps to wait before probing again, for batches of up to
# SMALL_BATCH requests and for larger ones, and steps to probe.
SMALL_BATCH, BACKOFF_STEPS_SMALL, BACKOFF_STEPS, PROBE_STEPS = 4, 12, 32, 2
NOISY_INTERVAL = 4  # steps between probes of a request that samples tokens and has no drafts


def can_speculate(params: DiffusionParams) -> bool:
    """Whether a request's steps may have drafts.

    A search over the certain state chooses the tokens of a guided answer together. Delayed caches
    keep the keys and values of every forward.
    """
    return params.guide is None and params.score is None and params.cache != "delayed"


class _RequestDrafting(NamedTuple):
    """The drafter of a request, the kind of its drafts and their acceptance rates."""

    drafter: Drafter
    kind: Kind
    chance: Chance


class _Probe(NamedTuple):
    """A step without drafts, used to learn whether drafts would have been accepted."""

    canvas: Canvas
    certain: DraftState
    source: CachedCandidates
    num_steps: int


class Speculation:
    """Adds drafts to the steps of some requests, and accepts the drafts that they reach.

    Args:
        canvases: all running requests.
        pages: pages of cached keys and values.
        times: function that returns the times of steps with or without windows; None drafts as many
            states as requests ask for.
        can_grow: whether the page store may grow for drafts.
    """

    def __init__(
        self,
        canvases: Mapping[str, Canvas],
        pages: PageAllocator,
        times: Callable[[bool], StepTimes] | None = None,
        *,
        can_grow: bool = True,
    ) -> None:
        self._canvases, self._pages = canvases, DraftPages(pages, can_grow=can_grow)
        self._times = None if times is None else cache(times)
        self._rates = AcceptanceRates()
        self._drafting: dict[str, _RequestDrafting] = {}  # by request
        self._sources: dict[str, CachedCandidates] = {}  # by request, after its first commit
        self._probes: list[_Probe] = []
        self._num_rounds = self._backoff_until = 0
        self._failed = False

    def start(self, canvas: Canvas) -> None:
        """Start drafting for a request that is eligible (see `can_speculate`)."""
        params = canvas.params
        if not can_speculate(params):
            return
        table = algorithms_of(is_block_causal=params.is_block_causal)
        is_chain = table[params.algorithm].speculates == "chain"
        drafter = Drafter(
            is_chain=is_chain or has_random_scores(canvas),
            # The windows of block-causal families end with the block.
            crosses_blocks=params.is_block_causal,
        )
        quota = params.gen_length / (params.steps or params.gen_length)
        if params.steps_per_block is not None:
            quota = params.block_length / params.steps_per_block
        kind = params.algorithm, quota, params.cache, params.temperature > 0
        chance = partial(self._rates.chance, kind)
        self._drafting[canvas.req_id] = _RequestDrafting(drafter, kind, chance)

    def remove(self, req_id: str) -> None:
        """Drop a request, if it has drafts."""
        self._drafting.pop(req_id, None)
        self._sources.pop(req_id, None)
        self._pages.release(req_id)

    def pause(self) -> bool:
        """Skip drafts in the next step, and release all draft pages.

        Returns:
            whether the step could have had drafts.
        """
        had_drafts, self._sources = bool(self._sources), {}
        self._pages.release_all()
        return had_drafts

    def reset(self) -> None:
        """Forget candidates and acceptance rates of earlier weights."""
        self.pause()
        self._probes.clear()
        self._rates.clear()

    def release_draft_pages(self, req_id: str) -> None:
        """Release the draft pages of a request whose own pages have changed."""
        self._pages.release(req_id)

    # ---- before a step ----

    def with_drafts(self, canvases: Sequence[Canvas], most_rows: int) -> list[BatchItem]:
        """Return the requests of a step, each followed by its drafts.

        Args:
            canvases: the requests.
            most_rows: maximum number of rows of the step.
        """
        self._num_rounds += 1
        if not self._drafting or self._is_backing_off(len(canvases)):
            self._release_drafts(canvases)
            return list(canvases)
        rows = sum(canvas.next_rows for canvas in canvases)
        forwards = {c.req_id: c.next_forward() for c in canvases if c.req_id in self._drafting}
        eligible = [
            c for c in canvases if c.req_id in forwards and _may_draft(c, *forwards[c.req_id])
        ]
        numbers = self._num_drafts(eligible, canvases, rows)
        packed: list[BatchItem] = []
        room = most_rows - rows
        for index, canvas in enumerate(canvases):
            packed.append(canvas)
            if canvas.req_id not in forwards:
                continue
            target, window = forwards[canvas.req_id]
            self._pages.invalidate_copies(canvas.req_id, window)
            number = numbers.get(canvas.req_id, 0)
            canvas.num_extra_draws = _num_extra_draws(canvas, number)
            drafts = list[Draft]()
            if number:
                drafts = self._drafts(canvas, target, window, number, room)
                room -= sum(draft.num_rows for draft in drafts)
                packed += drafts
            if not drafts and index == self._num_rounds % len(canvases):
                self._probe(canvas, target)
        return packed

    def _is_backing_off(self, num_requests: int) -> bool:
        """Whether a step of `num_requests` requests skips both drafts and probes."""
        return num_requests > MAX_REQUESTS or self._num_rounds < self._backoff_until

    def _release_drafts(self, canvases: Sequence[Canvas]) -> None:
        """Release draft pages and cached candidates during back-off."""
        self._pages.release_all()
        self._sources.clear()
        for canvas in canvases:
            canvas.num_extra_draws = 0

    def _num_drafts(
        self, eligible: Sequence[Canvas], canvases: Sequence[Canvas], rows: int
    ) -> dict[str, int]:
        """Return the maximum number of drafts of each eligible request."""
        limits = {canvas.req_id: canvas.params.num_speculative_states for canvas in eligible}
        if self._times is None or not eligible:
            return limits
        times = self._times(all(canvas.window.cache is not None for canvas in canvases))
        # Cached, because requests often have equal chances.
        cached_chances: dict[tuple[Kind, int], list[float]] = {}
        offers = []
        for canvas in eligible:
            (drafter, kind, chance), limit = self._drafting[canvas.req_id], limits[canvas.req_id]
            chances = cached_chances.get((kind, limit))
            if chances is None:
                chances = cached_chances[kind, limit] = drafter.chances(limit, chance)
            offers.append(DraftOffer(chances, canvas.next_rows))
        counts = choose_num_drafts(offers, len(canvases), rows, times)
        if not any(counts) and self._num_rounds >= self._backoff_until + PROBE_STEPS:
            is_small = len(canvases) <= SMALL_BATCH
            self._backoff_until = self._num_rounds + (
                BACKOFF_STEPS_SMALL if is_small else BACKOFF_STEPS
            )
        return {canvas.req_id: count for canvas, count in zip(eligible, counts, strict=True)}

    def _drafts(
        self, canvas: Canvas, target: ForwardTarget, window: Window, max_drafts: int, room: int
    ) -> list[Draft]:
        """Draft at most `max_drafts` states after the certain one that fit into `room` rows."""
        source = self._sources.get(canvas.req_id)
        if source is None:
            return []
        drafts = list[Draft]()
        for state in self._draft_states(
            canvas, DraftState(0, canvas.tokens, canvas.rule, target), source, max_drafts
        ):
            is_alike = state.target.rows == target.rows
            positions = window if is_alike else canvas.window.of(state.target.rows)
            if positions is not None:
                drafts.append(Draft(canvas, state, positions))
                room -= drafts[-1].num_rows
        while room < 0 and drafts:
            room += drafts.pop().num_rows
        if canvas.window.cache is None or not drafts:
            return drafts
        stop = max(draft.positions.stop for draft in drafts)
        caches = self._pages.of(canvas, window.first, stop, len(drafts))
        for draft, draft_cache in zip(drafts, caches, strict=False):
            draft.window = draft.window._replace(cache=draft_cache)
        return drafts[: len(caches)]

    def _draft_states(
        self, canvas: Canvas, certain: DraftState, source: CachedCandidates, max_drafts: int
    ) -> list[DraftState]:
        """Draft states; return none if a rule fails on drafted tokens."""
        drafter, _, chance = self._drafting[canvas.req_id]
        try:
            return drafter.draft(certain, source, max_drafts, chance)
        except Exception:
            if not self._failed:
                logger.exception("request %s: no states could be drafted", canvas.req_id)
            self._failed = True
            return []

    # ---- acceptance rates without drafts ----

    def _probe(self, canvas: Canvas, target: ForwardTarget) -> None:
        """Record the state of a request whose step has no drafts."""
        source = self._sources.get(canvas.req_id)
        if self._times is not None and source is not None and source.at(1) is not None:
            certain = DraftState(0, canvas.tokens.copy(), canvas.rule.fork(), target)
            self._probes.append(_Probe(canvas, certain, source, canvas.num_steps))

    def learn_from_probes(self) -> None:
        """Learn from probed steps whether drafts would have been accepted.

        Called after the next launch, so that the device does not wait for it.
        """
        probes, self._probes = self._probes, []
        for step in probes:
            canvas = step.canvas
            if self._canvases.get(canvas.req_id) is not canvas or canvas.is_complete:
                continue
            if canvas.num_steps == step.num_steps:
                self._probes.append(step)  # still in flight
            elif canvas.num_steps == step.num_steps + 1:
                self._learn_from(step)

    def _learn_from(self, step: _Probe) -> None:
        """Learn from a step whose commit is known."""
        canvas, kind = step.canvas, self._drafting[step.canvas.req_id].kind
        try:
            target = canvas.begin()
        # The next step reports this error.
        except Exception:
            return
        for state in self._draft_states(canvas, step.certain, step.source, MAX_DRAFTED_COMMITS):
            if state.depth == 1:
                is_accepted = state.is_of(canvas.tokens, canvas.rule, target)
                self._rates.learn(kind, state.committed, 1, is_accepted=is_accepted)

    # ---- after a step ----

    def accept(
        self,
        rows: SampleRows,
        samples: Array,
        candidates: Sequence[Candidates | BatchedCommit],
        outcomes: dict[str, Exception | None],
    ) -> None:
        """Commit the drafts that their requests have reached.

        Args:
            rows: sample rows of the step.
            samples: table of its samples, on the host.
            candidates: candidates or commit of each item of the batch.
            outcomes: requests whose own candidates were committed, each with its error or None;
                errors of further commits are added.
        """
        if len(rows.batch.canvases) == len(outcomes) and self._is_backing_off(len(outcomes)):
            return
        numbers, drafts_by_request = dict[str, int](), dict[str, dict[int, Draft]]()
        for number, packed in enumerate(rows.batch.canvases):
            if isinstance(packed, Draft):
                drafts_by_request.setdefault(packed.req_id, {})[number] = packed
            elif packed.req_id in self._drafting and rows.batch.targets[number].eligible.size:
                numbers[packed.req_id] = number
        for req_id, number in numbers.items():
            if outcomes.get(req_id, _FINISHED) is not None:
                continue
            canvas = self._canvases[req_id]
            drafts = drafts_by_request.get(req_id, {})
            try:
                reached = _accept(canvas, drafts, candidates)
            except Exception as error:
                logger.exception("decoding of request %s failed", req_id)
                outcomes[req_id] = error
                continue
            latest = reached[-1] if reached else number
            self._sources[req_id] = CachedCandidates(canvas, rows, samples, latest)
            self._learn(self._drafting[req_id].kind, drafts, reached)

    def _learn(self, kind: Kind, drafts: Mapping[int, Draft], reached: Sequence[int]) -> None:
        """Learn from the drafts whose parents were reached; `reached` lists the accepted drafts."""
        states = [drafts[number].state for number in reached]
        for number, draft in drafts.items():
            _, _, _, _, parent, count = state = draft.state
            follows = parent is None or parent.depth == 0 or any(s is parent for s in states)
            if follows and state.depth <= len(states) + 1:
                self._rates.learn(kind, count, state.depth, is_accepted=number in reached)


def step_times_of(
    graphs: GraphRunner | None, planner: Planner, *, weighs: bool
) -> Callable[[bool], StepTimes] | None:
    """Return the function that gives step times, with or without windows; None without weighing.

    Args:
        graphs: the graphs, which are timed at start; None without graphs.
        planner: predicts the times if there are no graphs.
        weighs: whether the costs of drafts are weighed.
    """
    if not weighs:
        return None
    if graphs is not None:
        return graphs.times.__getitem__

    def predicted(are_windows: bool) -> StepTimes:
        seconds = {}
        for n in ROW_BUCKETS:
            # A step that does not fit never pays.
            with suppress(ActivationBudgetError):
                shape = StepShape(n, n, n, num_sequences=2, keeps=are_windows)
                seconds[n] = planner.plan(shape).predicted_seconds
        return StepTimes.of(seconds)

    return predicted


def serves_drafts(batch: StepBatch, plan: Plan, graphs: GraphRunner | None) -> bool:
    """Whether drafts cost a step only their rows: it has no chunks, and one graph serves it."""
    has_graph = graphs is None or graphs.serves(batch)
    return has_graph and plan.is_whole(batch.num_rows)


def _accept(
    canvas: Canvas, drafts: dict[int, Draft], candidates: Sequence[Candidates | BatchedCommit]
) -> list[int]:
    """Commit the candidates of each draft that the request reaches, one after another.

    Returns:
        the indices of the accepted drafts, in order.
    """
    accepted = list[int]()
    canvas.num_drafts += len(drafts)
    while drafts and not canvas.is_complete:
        # A draft never advances the window: its keys go to draft pages.
        target = canvas.begin()
        reached = (number for number, draft in drafts.items() if draft.is_reached(target))
        number = next(reached, None)
        if number is None:
            break
        accepted.append(number)
        canvas.num_accepted += 1
        canvas.commit(candidates[number])
    return accepted


def _num_extra_draws(canvas: Canvas, number: int) -> int:
    """Return the number of extra draws that `number` drafts of a request need.

    Without drafts there is one extra draw in some steps, to learn whether drafts would be accepted.
    """
    if canvas.params.temperature == 0 or canvas.wants_logprobs:
        return 0
    return min(MAX_EXTRA_DRAWS, number) or int(canvas.num_steps % NOISY_INTERVAL == 0)


def _may_draft(canvas: Canvas, target: ForwardTarget, window: Window) -> bool:
    """Whether the next forward of a request may have drafts: they have pages, or need none.

    A forward of all positions that refreshes keys has no drafts, nor has a forward that computes
    more rows than the rule needs.
    """
    if not target.eligible.size or canvas.window.cache is None:
        return target.eligible.size > 0
    if canvas.params.cache == "exact":
        return window.num_rows <= MAX_BLOCKS * canvas.params.block_length
    return window.reads_kept
