# SPDX-License-Identifier: Apache-2.0
"""The sequences of one denoise step, packed row-wise without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.diffusion.decoding import Candidates
from vllm.diffusion.sampling import RowGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.engine.canvas import Canvas


@dataclass(frozen=True)
class StepBatch:
    """One step's input; it lives for that step.

    Attributes:
        token_ids: [T] int64 on the device, all sequences one after the other. With guidance a
            request has two: its own and the prompt-masked one.
        positions: [T] int64 on the device, from 0 in every sequence.
        boundaries: S + 1 row numbers; sequence s is rows boundaries[s] to boundaries[s + 1].
        canvases: the requests.
        eligible: per request, the positions [R] (host) whose candidates are wanted.
        groups: per request, the same as rows of the packed batch (device).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    boundaries: tuple[int, ...]
    canvases: tuple[Canvas, ...]
    eligible: tuple[torch.Tensor, ...]
    groups: tuple[RowGroup, ...]

    @property
    def num_rows(self) -> int:
        return self.boundaries[-1]

    def candidates(self, tokens: torch.Tensor, scores: torch.Tensor) -> list[Candidates]:
        """Cut the sampled tokens [R] and scores [R] of all groups into one part per request."""
        sizes = [p.numel() for p in self.eligible]
        parts = zip(self.eligible, tokens.split(sizes), scores.split(sizes), strict=True)
        return [Candidates(*part) for part in parts]


def build_batch(canvases: Sequence[Canvas], device: torch.device) -> StepBatch:
    """Pack the current tokens of `canvases` and list the rows that must be sampled."""
    sequences: list[torch.Tensor] = []
    starts: list[tuple[int, int | None]] = []
    boundaries = [0]

    def append(tokens: torch.Tensor) -> int:
        sequences.append(tokens)
        boundaries.append(boundaries[-1] + tokens.numel())
        return boundaries[-2]

    for canvas in canvases:
        own = append(canvas.tokens)
        guided = canvas.params.cfg_scale > 0
        starts.append((own, append(canvas.unconditional_tokens()) if guided else None))

    eligible = tuple(canvas.eligible() for canvas in canvases)
    groups = tuple(
        _row_group(canvas, positions, own, twin, device)
        for canvas, positions, (own, twin) in zip(canvases, eligible, starts, strict=True)
    )
    return StepBatch(
        token_ids=torch.cat(sequences).to(device),
        positions=torch.cat([torch.arange(s.numel()) for s in sequences]).to(device),
        boundaries=tuple(boundaries),
        canvases=tuple(canvases),
        eligible=eligible,
        groups=groups,
    )


def _row_group(
    canvas: Canvas, positions: torch.Tensor, own: int, twin: int | None, device: torch.device
) -> RowGroup:
    on_device = positions.to(device)
    return RowGroup(
        params=canvas.params,
        step=canvas.num_forwards,
        forbid_mask=canvas.forbid_mask,
        rows=on_device + own,
        unconditional_rows=None if twin is None else on_device + twin,
        positions=on_device - canvas.prompt_length,
    )
