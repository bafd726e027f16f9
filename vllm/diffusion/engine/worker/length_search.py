# SPDX-License-Identifier: Apache-2.0
"""Evaluates several lengths of a canvas in one step, for requests that choose their length.

The rule (`decoding/daedal.py`) lengthens a canvas of masks until the model is certain that the
answer ends on it. These forwards do not depend on each other's results, so a step evaluates several
of them as separate sequences. The first length that passes is the one that the rule would find with
one length per step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vllm.diffusion.decoding.daedal import Daedal
from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.diffusion.decoding import BatchedCommit, Candidates
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.worker.runner import Outcomes
    from vllm.diffusion.engine.worker.step_memory import Step
    from vllm.diffusion.request.params import DiffusionParams

# Lengths of a request's first step. Each later step evaluates twice as many as all steps before.
FIRST_LENGTHS = 4


def searches_length(params: DiffusionParams) -> bool:
    """Whether a request begins with the search for the length of its canvas."""
    return params.canvas == "daedal" and params.score is None


class LengthSearch(StepGuest):
    """Adds longer canvases of a request to its step; the last one that is reached replaces it."""

    def extra_items(self, canvases: Sequence[Canvas], row_budget: int) -> Sequence[BatchItem]:
        searching = [canvas for canvas in canvases if _is_searching(canvas)]
        if not searching:
            return ()
        room = row_budget - sum(canvas.count_next_rows() for canvas in canvases)
        items = list[Canvas]()
        for canvas in searching:
            for longer in self._longer(canvas):
                room -= longer.count_next_rows()
                if room < 0:
                    return items
                items.append(longer)
        return items

    def _longer(self, canvas: Canvas) -> Iterator[Canvas]:
        """Yield canvases of masks with the next lengths, as the request would reach them."""
        params, prompt = canvas.params, canvas.tokens[: canvas.prompt_length].tolist()
        num_lengths = max(FIRST_LENGTHS, 2 * canvas.num_steps)
        for number in range(1, num_lengths):
            length = params.gen_length + number * params.expansion
            if length - params.expansion >= params.max_tokens:
                return
            own = dataclasses.replace(params, gen_length=min(length, params.max_tokens))
            new = NewCanvas(canvas.req_id, prompt, own)
            longer = Canvas(new, self._runner.model.family.visibility)
            longer.num_steps = canvas.num_steps + number
            longer.use_weights(self._runner.weight_generation)
            yield longer

    def collected(
        self, step: Step, candidates: Sequence[Candidates | BatchedCommit], outcomes: Outcomes
    ) -> None:
        """Replace a canvas by a longer one that it reaches, one after another."""
        canvases = self._runner.canvases
        for item, result in zip(step.batch.items, candidates, strict=True):
            req_id = item.req_id
            if not isinstance(item, Canvas) or outcomes.get(req_id, True) is not None:
                continue
            canvas = canvases[req_id]
            canvas.num_drafts += item is not canvas
            if not _is_searching(canvas) or canvas.new_lengths[-1:] != (item.params.gen_length,):
                continue
            outcomes[req_id] = item.failure_of(item.commit, result)
            if outcomes[req_id] is not None:
                continue
            item.new_lengths = canvas.new_lengths + item.new_lengths
            item.num_drafts = canvas.num_drafts
            item.num_accepted_drafts = canvas.num_accepted_drafts + 1
            canvases[req_id] = item


def _is_searching(canvas: Canvas) -> bool:
    return isinstance(canvas.rule, Daedal) and not canvas.rule.has_length
