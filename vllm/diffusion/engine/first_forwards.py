# SPDX-License-Identifier: Apache-2.0
"""First forwards that several answers share: computed once, sampled by each with its own seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion import ops
from vllm.diffusion.engine.siblings import MOST_SAMPLE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vllm.diffusion.engine.batch import SamplePart, StepBatch
    from vllm.diffusion.engine.canvas import Canvas


class Known(NamedTuple):
    """Sample rows of one request.

    Attributes:
        part: they alone.
        hidden: [r, D], their hidden states after the last layer, in host memory.
    """

    part: SamplePart
    hidden: ops.HostCopy


class FirstForwards:
    """Hidden states of the sample rows of first forwards, while somebody may ask for them."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, Known]] = {}  # by request, and by its first position

    def note(self, batch: StepBatch, part: SamplePart, hidden: Tensor) -> None:
        """Keep what siblings of the requests of a part will want of its `hidden` states [r, D]."""
        for number, own, unconditional in part.pieces:
            canvas = batch.canvases[number]
            if not is_shared(canvas) or batch.works[number].eligible.size > MOST_SAMPLE_ROWS:
                continue
            num_rows = own.stop - own.start
            rows = slice(own.start, (unconditional or own).stop)
            second = None if unconditional is None else slice(num_rows, 2 * num_rows)
            alone = part._replace(
                rows=part.rows[rows],
                positions=part.positions[rows],
                span_groups=(),
                pieces=((0, slice(0, num_rows), second),),
            )
            known = Known(alone, ops.HostCopy(hidden[rows].clone()))
            self._known.setdefault(canvas.req_id, {})[int(alone.positions[0])] = known

    def share(self, req_id: str, of: str) -> Iterator[Known]:
        """What is known of the first forward of another request; from now on it is this one's."""
        known = self._known.get(of)
        if known is not None:
            self._known[req_id] = known
        return iter([] if known is None else known.values())

    def forget(self, req_id: str) -> None:
        """A request has gone; others may hold what it shared."""
        self._known.pop(req_id, None)


def is_shared(canvas: Canvas) -> bool:
    """Whether the forward that a request stands before is that of its siblings, too."""
    return canvas.num_forwards == 0 and _has_siblings(canvas)


def is_copied(canvas: Canvas) -> bool:
    """Whether siblings may now copy what a request keeps: it is as its first forward left it."""
    return canvas.cache is not None and canvas.has_made_one_forward and _has_siblings(canvas)


def _has_siblings(canvas: Canvas) -> bool:
    params = canvas.params
    return params.num_answers > 1 and params.cache not in ("frozen", "exact")
