# SPDX-License-Identifier: Apache-2.0
"""Hidden states of the first forward of a prompt, shared by requests with the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion import ops
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.engine.scheduler.prompt_groups import MAX_SHARED_ROWS
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.sample_rows import SampleRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from vllm.diffusion.decoding import BatchedCommit, Candidates
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
    from vllm.diffusion.engine.worker.sample_rows import SamplePart
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams


class SharedRows(NamedTuple):
    """Sample rows of one request, with their hidden states.

    Attributes:
        part: the rows of the request alone.
        hidden: [r, D], hidden states of these rows after the last layer, in host memory.
    """

    part: SamplePart[Array]
    hidden: ops.HostCopy


class FirstForwards(StepGuest):
    """Hidden states of the sample rows of first forwards, kept while requests may need them."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        super().__init__(runner)
        self._canvases = runner.canvases
        self._known: dict[str, dict[int, SharedRows]] = {}  # by request, then by first position

    def started(self, canvas: Canvas, new: NewCanvas) -> None:
        if shares_first_forward(new.params):
            self._runner.forward.note_first = self.note

    def note(self, batch: StepBatch, part: SamplePart[Array], hidden: Tensor) -> None:
        """Keep the `hidden` states [r, D] of a part that other requests will need."""
        for number, piece_rows, unconditional in part.pieces:
            canvas = batch.items[number]
            if not is_shared(canvas) or batch.targets[number].eligible.size > MAX_SHARED_ROWS:
                continue
            num_rows = piece_rows.stop - piece_rows.start
            rows = slice(piece_rows.start, (unconditional or piece_rows).stop)
            second = None if unconditional is None else slice(num_rows, 2 * num_rows)
            alone = part._replace(
                rows=part.rows[rows],
                positions=part.positions[rows],
                layouts=(),
                pieces=[(0, slice(0, num_rows), second)],
            )
            shared = SharedRows(alone, ops.HostCopy(hidden[rows].clone()))
            self._known.setdefault(canvas.req_id, {})[int(alone.positions[0])] = shared

    def first_candidates(self, new: NewCanvas) -> Candidates | BatchedCommit | None:
        canvas = self._canvases[new.req_id]
        if new.prompt_of is None or not is_shared(canvas):
            return None
        if canvas.window.cache is not None:
            first = self._canvases.get(new.prompt_of)
            if first is None or not is_copied(first):
                return None
            self._runner.pages.copy(new.req_id, new.prompt_of)
        rows = SampleRows(self._runner.batch_of([canvas]))
        sampled = self.sampled(rows, new)
        if sampled is None:
            return None
        (candidates,) = rows.candidates_of(ops.HostCopy(sampled))
        return candidates

    def sampled(self, rows: SampleRows, new: NewCanvas) -> Tensor | None:
        """Sample a request's first forward from the hidden states of another request.

        Args:
            rows: sample rows of the forward, whose layers are not computed.
            new: the request; the hidden states are also kept under its name.

        Returns:
            the table of its samples; None if there are no hidden states.
        """
        shared_rows = self._known.get(new.prompt_of or "")
        if shared_rows is None:
            return None
        self._known[new.req_id] = shared_rows
        forward, samples = self._runner.forward, []
        for part, hidden in shared_rows.values():
            (positions,) = ops.to_device((part.positions,), forward.caches.device)
            sample_rows = hidden.wait().to(forward.caches.device, non_blocking=True)
            with forward.pool.temporaries(), forward.pool.scope("step"):
                samples.append(forward.sampled(rows, part, positions, sample_rows))
        return forward.broadcast_samples(rows.choose_jointly(Samples.joined(samples)))

    def held_back(self, req_ids: Iterable[str]) -> list[str]:
        """Return the requests whose keys and values can be copied with the next message."""
        return [req_id for req_id in req_ids if is_copied(self._canvases[req_id])]

    def invalidate(self) -> None:
        self._known.clear()

    def forget(self, req_id: str) -> None:
        self._known.pop(req_id, None)

    def removed(self, req_id: str) -> None:
        """Drop a finished request; other requests may still hold the hidden states it shared."""
        self._known.pop(req_id, None)


def is_shared(canvas: BatchItem) -> bool:
    """Whether the next forward is the first one and is equal for all requests with this prompt."""
    return canvas.num_steps == 0 and shares_first_forward(canvas.params)


def is_copied(canvas: Canvas) -> bool:
    """Whether other requests can copy the cache of a request: only its first forward has run."""
    shares = canvas.window.cache is not None and shares_first_forward(canvas.params)
    return shares and canvas.num_forwards == 1 and not canvas.window.is_in_flight


def shares_first_forward(params: DiffusionParams) -> bool:
    """Whether a request belongs to several answers whose first forwards are equal."""
    is_alike = params.num_answers > 1 and not params.is_open  # noise differs from answer to answer
    return is_alike and params.cache not in ("frozen", "exact")
