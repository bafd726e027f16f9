# SPDX-License-Identifier: Apache-2.0
"""Drafts after every row that verifies a draft (`draft_branches: all` of `introspective`).

The masks of a forward pass draft the tokens after all drafts. They are of no use after a wrong
draft, so a pass without drafts would follow. A *branch* drafts the tokens after one of the drafts,
as if the next one were wrong. A step packs its masks like a request of their own, with pages of
their own. The keys of the rows before them (in parentheses) are the request's: each layer stores
them in the pages of the branch, too.

```
positions    t        t+1   t+2   t+3   t+4 t+5 t+6
request      latest   d1    d2    d3    M   M   M
branch 0     (latest) M     M     M               used if d1 is wrong
branch 1     (latest) (d1)  M     M     M         used if d2 is wrong
branch 2     (latest) (d1)  (d2)  M     M   M     used if d3 is wrong
```

Rows that verify do not depend on branches, so tokens are the same as without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding import Candidates
from vllm.diffusion.decoding.introspective import Introspective
from vllm.diffusion.engine.batch_item import ExtraItem
from vllm.diffusion.engine.speculation.draft_pages import DraftPages
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.decoding import BatchedCommit, ForwardTarget
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner, Outcomes
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.memory import KeptSequence, Plan
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.sampling import RowEdits

MAX_ROWS = 128  # rows of a step with branches; more rows would take more time than they save


def drafts_in_branches(params: DiffusionParams) -> bool:
    """Whether a request asks for branches, and its forward passes may have them."""
    is_plain = params.guide is None and params.score is None
    return params.draft_branches == "all" and params.cache == "exact" and is_plain


class Branch(ExtraItem):
    """The drafts of a request after a number of its current drafts.

    Args:
        canvas: the request.
        number: number of its current drafts before the branch's own.
        target: the masks of the branch.
        positions: the positions of the masks.
        cache: pages of the branch.
    """

    def __init__(
        self,
        canvas: Canvas,
        number: int,
        target: ForwardTarget,
        positions: Window,
        cache: KeptSequence,
    ) -> None:
        super().__init__(canvas, canvas.rule, target, positions)
        self.number = number
        self.window = self.window._replace(cache=cache, context=canvas)
        self._tokens = canvas.tokens.copy()
        self._tokens[target.tail_start :] = canvas.params.mask_id

    @property
    def sequences(self) -> tuple[Array, ...]:
        return (self._tokens,)

    def edits(self, positions: Array) -> RowEdits | None:
        return self.canvas.edits(positions, self._tokens)


class DraftBranches(StepGuest):
    """Adds branches to steps of few rows, and gives requests the drafts of the one they need."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        super().__init__(runner)
        can_grow = runner.graphs is None and runner.agreement is None
        self._pages = DraftPages(runner.pages, can_grow=can_grow)

    def removed(self, req_id: str) -> None:
        self._pages.release(req_id)

    def forget(self, req_id: str) -> None:
        self._pages.release(req_id)

    def invalidate(self) -> None:
        self._pages.release_all()

    def pages_changed(self, req_id: str, *, are_replaced: bool) -> None:
        self._pages.release(req_id)

    def extra_items(self, canvases: Sequence[Canvas], row_budget: int) -> Sequence[BatchItem]:
        """Return the branches of all requests of a step, or none if they have too many rows."""
        if self._runner.caches.host_layers:  # copies stay in the buffers of the device
            return ()
        num_rows = sum(canvas.count_next_rows() for canvas in canvases)
        branching = [c for c in canvases if drafts_in_branches(c.params)]
        branches = [(canvas, *one) for canvas in branching for one in _branches_of(canvas)]
        num_rows += sum(window.num_rows for *_, window in branches)
        if num_rows > min(MAX_ROWS, row_budget):
            return ()
        items = list[Branch]()
        for canvas in branching:
            own = [one for one in branches if one[0] is canvas]
            if not own:
                continue
            first = own[0][2].rows[0]
            stop = max(window.stop for *_, window in own)
            caches = self._pages.of(canvas, first, stop, len(own))
            items += [Branch(*one, cache) for one, cache in zip(own, caches, strict=False)]
        return items

    def accepts(self, batch: StepBatch, plan: Plan) -> bool:
        graphs = self._runner.graphs
        is_whole = super().accepts(batch, plan) and not plan.layout.is_streamed
        return is_whole and (graphs is None or graphs.serves(batch))

    def collected(
        self, step: Step, candidates: Sequence[Candidates | BatchedCommit], outcomes: Outcomes
    ) -> None:
        for item, drafts in zip(step.rows.batch.items, candidates, strict=True):
            if not isinstance(item, Branch) or outcomes.get(item.req_id, True) is not None:
                continue
            canvas = self._runner.canvases[item.req_id]
            rule = canvas.rule
            assert isinstance(rule, Introspective) and isinstance(drafts, Candidates)
            if canvas.has_next and rule.num_right == item.number:
                canvas.tokens[drafts.positions] = rule.resume(drafts.tokens)


def _branches_of(canvas: Canvas) -> list[tuple[int, ForwardTarget, Window]]:
    """Return the branches of a request's next forward: number, target and positions of each."""
    target, window = canvas.next_forward()
    assert isinstance(canvas.rule, Introspective)
    branches: list[tuple[int, ForwardTarget, Window]] = []
    for number, own in enumerate(canvas.rule.branches(target)):
        positions = canvas.window.of(own.rows)
        if positions is not None and positions.first == window.first == own.rows[0]:
            assert own.tail_start is not None
            masks = range(own.tail_start, positions.stop)  # they read the keys before them
            forward = positions.forward._replace(window=masks, kept=masks.start)
            branches.append((number, own, Window.of(forward, canvas.window.visibility)))
    return branches
