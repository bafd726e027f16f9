# SPDX-License-Identifier: Apache-2.0
"""The rows of one denoise step, packed without padding.

Whole sequences come first, one after the other; with guidance a request has two, its own and the
prompt-masked one. The windows of requests that keep keys and values follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion.decoding import Candidates, Work
from vllm.diffusion.sampling import RowGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.engine.canvas import Canvas
    from vllm.diffusion.memory import KeyValueCache
    from vllm.diffusion.sampling import NoiseSource


class Window(NamedTuple):
    """Rows of a request that keeps keys and values.

    Attributes:
        rows: rows of the batch.
        positions: the same as positions of the sequence.
        cache: keys and values of all its positions.
    """

    rows: slice
    positions: slice
    cache: KeyValueCache


@dataclass(frozen=True)
class StepBatch:
    """One step's input; it lives for that step.

    Attributes:
        token_ids: [T] int64 on the device.
        positions: [T] int64 on the device, from 0 in every sequence.
        boundaries: S + 1 row numbers; whole sequence s is rows boundaries[s] to boundaries[s + 1].
        windows: the rows after the whole sequences.
        canvases: the requests.
        works: per request, what the forward is for (positions, on the host).
        groups: per request, the rows to sample (on the device).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    boundaries: tuple[int, ...]
    windows: tuple[Window, ...]
    canvases: tuple[Canvas, ...]
    works: tuple[Work, ...]
    groups: tuple[RowGroup, ...]

    @property
    def num_rows(self) -> int:
        return self.token_ids.numel()

    @property
    def num_sampled(self) -> int:
        return sum(work.eligible.numel() for work in self.works)

    def candidates(self, sampled: torch.Tensor, noise: NoiseSource) -> list[Candidates]:
        """Cut what was sampled into one part per request.

        Args:
            sampled: [3, R] float64 on the host, as `sample` returns it.
            noise: source of the numbers that some rules want for each candidate.
        """
        parts = sampled.split([work.eligible.numel() for work in self.works], dim=1)
        found = []
        for canvas, work, (tokens, scores, greedy) in zip(
            self.canvases, self.works, parts, strict=True
        ):
            draws = canvas.draws(work.eligible, noise)
            found.append(Candidates(work.eligible, tokens.long(), scores, greedy.long(), draws))
        return found


def build_batch(canvases: Sequence[Canvas], logit_shift: int, device: torch.device) -> StepBatch:
    """Pack what `canvases` need computed in this step, and list the rows to sample.

    Args:
        canvases: the requests of the step.
        logit_shift: 1 where the token at a position is read from the row before it, else 0.
        device: where the model lives.
    """
    packing = _Packing()
    works = tuple(canvas.begin() for canvas in canvases)
    groups: list[RowGroup | None] = [None] * len(canvases)
    for cached in (False, True):
        for index, (canvas, work) in enumerate(zip(canvases, works, strict=True)):
            if (canvas.cache is not None) == cached:
                groups[index] = packing.add(canvas, work, logit_shift, device)
    return StepBatch(
        token_ids=torch.cat(packing.token_ids).to(device),
        positions=torch.cat(packing.positions).to(device),
        boundaries=tuple(packing.boundaries),
        windows=tuple(packing.windows),
        canvases=tuple(canvases),
        works=works,
        groups=tuple(group for group in groups if group is not None),
    )


class _Packing:
    """Rows as they are put one after the other."""

    def __init__(self) -> None:
        self.token_ids: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.boundaries = [0]
        self.windows: list[Window] = []
        self._num_rows = 0

    def add(self, canvas: Canvas, work: Work, logit_shift: int, device: torch.device) -> RowGroup:
        twin: int | None = None
        if canvas.cache is None:
            first = own = self._whole(canvas.tokens)
            if canvas.params.cfg_scale > 0:
                twin = self._whole(canvas.unconditional_tokens())
        else:
            # The window starts early enough for the row that predicts its first position.
            start = max(work.rows[0] - logit_shift, 0)
            own = self._num_rows
            first = own - start
            self._append(canvas.tokens[start : work.rows[1]], start)
            self.windows.append(
                Window(slice(own, self._num_rows), slice(start, work.rows[1]), canvas.cache)
            )
        predicting = (work.eligible - logit_shift).clamp(min=0).to(device)
        return RowGroup(
            params=canvas.params,
            scoring=canvas.rule.scoring,
            step=canvas.num_forwards,
            forbid_mask=canvas.rule.forbid_mask,
            rows=predicting + first,
            unconditional_rows=None if twin is None else predicting + twin,
            positions=work.eligible.to(device) - canvas.prompt_length,
            adjust=canvas.rule.adjust_logits if canvas.rule.adjusts_logits else None,
        )

    def _whole(self, tokens: torch.Tensor) -> int:
        start = self._num_rows
        self._append(tokens, 0)
        self.boundaries.append(self._num_rows)
        return start

    def _append(self, tokens: torch.Tensor, first_position: int) -> None:
        self.token_ids.append(tokens)
        self.positions.append(torch.arange(first_position, first_position + tokens.numel()))
        self._num_rows += tokens.numel()
