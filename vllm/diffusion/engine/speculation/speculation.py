# SPDX-License-Identifier: Apache-2.0
"""Lossless speculation: a step also evaluates drafts, which are predicted next states.

A step evaluates one forward of a request, and drafts of the states that follow (`drafter.py`). A
draft is accepted only if it is exactly the state that the request reaches. Then its candidates
equal the candidates of a forward of that state, so they are committed, too.

Example: a request is in state S3, and the step has the drafts S4, S5 and S5'. The commit of S3
gives S4. Draft S4 matches, and its commit gives S5. Draft S5 matches, and its commit gives S6. S5'
is rejected. So one forward made three commits, and the next forward computes S6.

The rule receives only committed tokens, so a rejected draft costs the time of its rows, but changes
no answer.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.config import settings_of
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.engine.speculation.budget import (
    AcceptanceRates,
    DraftOffer,
    choose_num_drafts,
)
from vllm.diffusion.engine.speculation.candidates import CachedCandidates, has_random_scores
from vllm.diffusion.engine.speculation.draft_pages import DraftPages
from vllm.diffusion.engine.speculation.drafter import Drafter, DraftState
from vllm.diffusion.engine.speculation.drafts import Draft
from vllm.diffusion.engine.speculation.end_drafter import EndDrafter
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.step_times import ROW_BUCKETS, StepTimes
from vllm.diffusion.memory import StepShape
from vllm.diffusion.request.algorithms import algorithms_of
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates, ForwardTarget
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.speculation.budget import Kind
    from vllm.diffusion.engine.speculation.drafter import AcceptanceChance
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes
    from vllm.diffusion.engine.worker.step_graphs import GraphRunner
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.memory import Plan, Planner
    from vllm.diffusion.request.params import DiffusionParams

logger = init_logger(__name__)

# Blocks of a window with an exact cache: the current block, and up to two finished blocks that are
# not cached yet.
MAX_BLOCKS = 3
MAX_EXTRA_DRAWS = 3  # each extra draw samples all rows once more
MAX_REQUESTS = 32  # requests of a step with drafts; for more, drafting takes the host too long
# If drafts save no time, steps have no drafts for a while (fewer steps for batches of at most
# SMALL_BATCH requests). Then one request has a draft for some steps, to measure its acceptance.
SMALL_BATCH, BACKOFF_STEPS_SMALL, BACKOFF_STEPS, TRIAL_STEPS = 4, 12, 32, 3


def can_speculate(params: DiffusionParams) -> bool:
    """Whether a request asks for drafts and its steps may have them.

    Three kinds of requests have no drafts. With structured output, the tokens of a step are chosen
    jointly, by a search over the current state. A delayed cache keeps the keys and values of the
    last forward that computed a block, which would be in draft pages if this forward was a draft. A
    revision scores its text in steps that already have further rows.
    """
    may_have_drafts = params.guide is None and params.score is None and params.cache != "delayed"
    may_have_drafts &= params.revision is None
    return params.num_speculative_states > 0 and may_have_drafts


class _RequestDrafting(NamedTuple):
    """The drafter of a request, the kind of its drafts and their acceptance rates."""

    drafter: Drafter | EndDrafter
    kind: Kind
    acceptance_chance: AcceptanceChance


class Speculation(StepGuest):
    """Adds drafts to the steps of some requests, and accepts the drafts that they reach."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        super().__init__(runner)
        self._canvases, self._graphs = runner.canvases, runner.graphs
        # Growing the store would require new captures of the graphs, and another rank might lack
        # the memory.
        can_grow = runner.graphs is None and runner.agreement is None
        self._pages = DraftPages(runner.pages, can_grow=can_grow)
        # The times of steps in which all requests have a cache (True), or of other steps (False).
        # None if every request gets the number of drafts that it asks for.
        self._times: Callable[[bool], StepTimes] | None = None
        weighs = settings_of(runner.vllm_config).weighs_guesses
        if weighs or (weighs is None and runner.device.type == "cuda"):
            self._times = cache(partial(_step_times, runner.graphs, runner.planner))
        self._rates = AcceptanceRates()
        self._drafting: dict[str, _RequestDrafting] = {}  # by request
        # By request, after its first commit.
        self._latest_candidates: dict[str, CachedCandidates] = {}
        self._num_steps = self._backoff_until = 0  # steps of the runner
        self._failed = False

    def started(self, canvas: Canvas, new: NewCanvas) -> None:
        """Start drafting for a request that is eligible (see `can_speculate`)."""
        params = canvas.params
        if new.host_layers or not can_speculate(params):
            return
        table = algorithms_of(is_block_causal=params.is_block_causal)
        speculates = table[params.algorithm].speculates
        drafter: Drafter | EndDrafter = EndDrafter()
        if speculates != "end":
            drafter = Drafter(
                is_chain=speculates == "chain" or has_random_scores(canvas),
                # The windows of block-causal families end with the block.
                crosses_blocks=params.is_block_causal,
            )
        quota = params.gen_length / (params.steps or params.gen_length)
        if params.steps_per_block is not None:
            quota = params.block_length / params.steps_per_block
        kind = params.algorithm, quota, params.cache, params.temperature > 0
        acceptance_chance = partial(self._rates.chance, kind)
        self._drafting[canvas.req_id] = _RequestDrafting(drafter, kind, acceptance_chance)

    def removed(self, req_id: str) -> None:
        self._drafting.pop(req_id, None)
        self.forget(req_id)

    def forget(self, req_id: str) -> None:
        """Drop a request's candidates and drafts."""
        self._latest_candidates.pop(req_id, None)
        self._pages.release(req_id)

    def release_memory(self, *, even_work: bool) -> bool:
        """Skip drafts in the next step, and release all draft pages.

        Returns:
            whether the next step could have had drafts.
        """
        if even_work:
            return False
        had_drafts, self._latest_candidates = bool(self._latest_candidates), {}
        self._pages.release_all()
        return had_drafts

    def invalidate(self) -> None:
        """Forget candidates and acceptance rates of earlier weights."""
        self.release_memory(even_work=False)
        self._rates.clear()

    def pages_changed(self, req_id: str, *, are_replaced: bool) -> None:
        """Release the draft pages of a request whose own pages have changed."""
        self._pages.release(req_id)

    # ---- before a step ----

    def extra_items(self, canvases: Sequence[Canvas], row_budget: int) -> Sequence[BatchItem]:
        """Return the drafts of the requests of a step."""
        self._num_steps += 1
        if not self._drafting or self._is_backing_off(len(canvases)):
            self._release_drafts(canvases)
            return ()
        rows = sum(canvas.count_next_rows() for canvas in canvases)
        forwards = {c.req_id: c.next_forward() for c in canvases if c.req_id in self._drafting}
        eligible = [
            c
            for c in canvases
            if c.req_id in forwards
            and _may_draft(c, *forwards[c.req_id])
            and self._drafting[c.req_id].drafter.can_draft(c)
        ]
        num_drafts = self._num_drafts(eligible, canvases, rows)
        items: list[Draft] = []
        room = row_budget - rows
        for canvas in canvases:
            if canvas.req_id not in forwards:
                continue
            target, window = forwards[canvas.req_id]
            self._pages.invalidate_copies(canvas.req_id, window)
            max_drafts = num_drafts.get(canvas.req_id, 0)
            if self._drafting[canvas.req_id].drafter.has_extra_draws:
                canvas.num_extra_draws = _num_extra_draws(canvas, max_drafts)
            if max_drafts:
                drafts = self._drafts(canvas, target, window, max_drafts, room)
                room -= sum(draft.num_rows for draft in drafts)
                items += drafts
        return items

    def _is_backing_off(self, num_requests: int) -> bool:
        """Whether a step of `num_requests` requests has no drafts."""
        return num_requests > MAX_REQUESTS or self._num_steps < self._backoff_until

    def _release_drafts(self, canvases: Sequence[Canvas]) -> None:
        """Release draft pages and cached candidates during back-off."""
        self._pages.release_all()
        self._latest_candidates.clear()
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
            drafter, kind, acceptance_chance = self._drafting[canvas.req_id]
            limit = limits[canvas.req_id]
            chances = cached_chances.get((kind, limit))
            if chances is None:
                chances = drafter.chances(limit, acceptance_chance)
                cached_chances[kind, limit] = chances
            offers.append(DraftOffer(chances, drafter.rows_factor * canvas.count_next_rows()))
        counts = choose_num_drafts(offers, len(canvases), rows, times)
        if not any(counts):
            if self._num_steps < self._backoff_until + TRIAL_STEPS:
                return {eligible[self._backoff_until % len(eligible)].req_id: 1}
            is_small = len(canvases) <= SMALL_BATCH
            self._backoff_until = self._num_steps + (
                BACKOFF_STEPS_SMALL if is_small else BACKOFF_STEPS
            )
        return {canvas.req_id: count for canvas, count in zip(eligible, counts, strict=True)}

    def _drafts(
        self, canvas: Canvas, target: ForwardTarget, window: Window, max_drafts: int, room: int
    ) -> list[Draft]:
        """Draft at most `max_drafts` states after the current one that fit into `room` rows."""
        candidates = self._latest_candidates.get(canvas.req_id)
        if candidates is None:
            return []
        drafts = list[Draft]()
        current = DraftState(0, canvas.tokens, canvas.rule, target)
        for state in self._draft_states(canvas, current, candidates, max_drafts):
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
        self, canvas: Canvas, current: DraftState, candidates: CachedCandidates, max_drafts: int
    ) -> list[DraftState]:
        """Draft states; return none if a rule fails on drafted tokens."""
        drafter, _, acceptance_chance = self._drafting[canvas.req_id]
        try:
            return drafter.draft(current, candidates, max_drafts, acceptance_chance)
        except Exception:
            if not self._failed:
                logger.exception("request %s: no states could be drafted", canvas.req_id)
            self._failed = True
            return []

    # ---- after a step ----

    def accepts(self, batch: StepBatch, plan: Plan) -> bool:
        """Whether the step still runs in one chunk and, if graphs are used, in one graph."""
        has_graph = self._graphs is None or self._graphs.serves(batch)
        return has_graph and super().accepts(batch, plan)

    def collected(
        self, step: Step, candidates: Sequence[Candidates | BatchedCommit], outcomes: Outcomes
    ) -> None:
        """Commit the drafts that their requests have reached."""
        rows, samples = step.rows, step.samples.host.numpy()
        if not self._drafting:
            return
        # This step has no drafts, and the next step makes none from its candidates.
        if len(rows.batch.items) == len(outcomes) and self._is_backing_off(len(outcomes)):
            return
        item_indices, drafts_by_request = dict[str, int](), dict[str, dict[int, Draft]]()
        for item_index, item in enumerate(rows.batch.items):
            if isinstance(item, Draft):
                drafts_by_request.setdefault(item.req_id, {})[item_index] = item
            elif item.req_id in self._drafting and rows.batch.targets[item_index].eligible.size:
                item_indices[item.req_id] = item_index
        for req_id, item_index in item_indices.items():
            # The request was removed since the launch, or its own commit failed.
            if req_id not in outcomes or outcomes[req_id] is not None:
                continue
            canvas = self._canvases[req_id]
            drafts = drafts_by_request.get(req_id, {})
            try:
                reached = _accept(canvas, drafts, candidates)
            except Exception as error:
                logger.exception("decoding of request %s failed", req_id)
                outcomes[req_id] = error
                continue
            latest = reached[-1] if reached else item_index
            self._latest_candidates[req_id] = CachedCandidates(canvas, rows, samples, latest)
            self._learn(self._drafting[req_id].kind, drafts, reached)

    def _learn(self, kind: Kind, drafts: Mapping[int, Draft], reached: Sequence[int]) -> None:
        """Learn from the drafts whose parents were reached; `reached` lists the accepted drafts."""
        states = [drafts[item_index].state for item_index in reached]
        for item_index, draft in drafts.items():
            state, parent = draft.state, draft.state.parent
            follows = parent is None or parent.depth == 0 or any(s is parent for s in states)
            if follows and state.depth <= len(states) + 1:
                is_accepted = item_index in reached
                self._rates.learn(kind, state.committed, state.depth, is_accepted=is_accepted)


def _step_times(graphs: GraphRunner | None, planner: Planner, has_caches: bool) -> StepTimes:
    """Return the times of steps: measured at start with graphs, else predicted by the planner."""
    if graphs is not None:
        return graphs.times[has_caches]
    seconds = {}
    for n in ROW_BUCKETS:
        # A step that does not fit has no time, so it gets no drafts.
        with suppress(ActivationBudgetError):
            shape = StepShape(n, n, n, num_sequences=2, keeps=has_caches)
            seconds[n] = planner.plan(shape).predicted_seconds
    return StepTimes.of(seconds)


def _accept(
    canvas: Canvas, drafts: dict[int, Draft], candidates: Sequence[Candidates | BatchedCommit]
) -> list[int]:
    """Commit the candidates of each draft that the request reaches, one after another.

    Returns:
        the item indices of the accepted drafts, in order.
    """
    accepted = list[int]()
    canvas.num_drafts += len(drafts)
    while drafts and canvas.has_next:
        target = canvas.begin()
        reached = (index for index, draft in drafts.items() if draft.is_reached(target))
        item_index = next(reached, None)
        if item_index is None:
            break
        accepted.append(item_index)
        canvas.num_accepted_drafts += 1
        # The request's window has ended already, so this commit does not cache keys: the draft's
        # keys are in draft pages.
        canvas.commit(candidates[item_index])
    return accepted


def _num_extra_draws(canvas: Canvas, num_drafts: int) -> int:
    """Return the number of extra draws that `num_drafts` drafts of a request need."""
    if canvas.params.temperature == 0 or canvas.wants_logprobs:
        return 0
    return min(MAX_EXTRA_DRAWS, num_drafts)


def _may_draft(canvas: Canvas, target: ForwardTarget, window: Window) -> bool:
    """Whether the next forward of a request may have drafts.

    True without a cache; with an exact cache, if the window has at most `MAX_BLOCKS` blocks;
    otherwise if the forward reads cached keys that it does not compute. A forward that samples
    nothing has no drafts.
    """
    if not target.eligible.size or canvas.window.cache is None:
        return target.eligible.size > 0
    if canvas.params.cache == "exact":
        return window.num_rows <= MAX_BLOCKS * canvas.params.block_length
    return window.reads_kept
