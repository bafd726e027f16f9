# SPDX-License-Identifier: Apache-2.0
"""Expected embeddings that a canvas passes from one denoising step to the next, on the device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vllm.diffusion.decoding.entropy_bound import EntropyBound
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.step_times import ROW_BUCKETS
from vllm.diffusion.models.gemma_model import GemmaModel

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner


class ExpectedEmbeddings(StepGuest):
    """Computes expected embeddings from the logits of a step, and conditions the next step on them.

    A step may be repeated after a failure. So its input is kept until the next step begins.
    """

    def __init__(self, runner: DiffusionModelRunner) -> None:
        super().__init__(runner)
        # [L, D] by request, and by the step that they condition.
        self._states: dict[str, dict[int, Tensor]] = {}

    def started(self, canvas: Canvas, new: NewCanvas) -> None:
        if isinstance(canvas.rule, EntropyBound):
            canvas.rule.note_logits = partial(self.note, canvas)

    def removed(self, req_id: str) -> None:
        self._states.pop(req_id, None)

    def launching(self, batch: StepBatch) -> None:
        soft = self._model.soft_rows(batch.num_rows, ROW_BUCKETS[-1])
        for item, target, (*_, block) in zip(
            batch.items, batch.targets, batch.packing.of_requests, strict=True
        ):
            rule = item.rule
            # A draft begins a canvas, and has a rule of its own.
            if item is not self._runner.canvases.get(item.req_id):
                assert isinstance(rule, EntropyBound)
                rule.note_logits = partial(self.note, item)
                soft[block.q_start : block.q_end].zero_()
            elif target.eligible.size:
                rows, state = soft[block.q_start : block.q_end], self._state(item)
                if state is None:
                    rows.zero_()
                else:
                    rows.copy_(state)

    @property
    def _model(self) -> GemmaModel:
        assert isinstance(self._runner.model, GemmaModel)
        return self._runner.model

    def _state(self, item: BatchItem) -> Tensor | None:
        """Return the embeddings [L, D] for a request's next step; None in a canvas's first step."""
        states = self._states.setdefault(item.req_id, {})
        for step in [step for step in states if step != item.num_steps]:
            del states[step]
        if item.num_steps == item.rule.first_step:
            return None
        return states[item.num_steps]

    def note(self, canvas: BatchItem, logits: Tensor, positions: Tensor) -> None:
        """Compute the expected embeddings of logits [R, V] at canvas positions [R]."""
        soft = self._model.expected_embeddings(logits)
        states, step = self._states[canvas.req_id], canvas.num_steps + 1
        if step not in states:
            states[step] = soft.new_empty(canvas.params.block_length, soft.shape[1])
        rule = canvas.rule
        assert isinstance(rule, EntropyBound)
        states[step][positions - (rule.start - rule.prompt_length)] = soft
