# SPDX-License-Identifier: Apache-2.0
"""Creates the guests of a canvas; most requests have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.entropy_bound import EntropyBound
from vllm.diffusion.engine.worker.constrained import Constraint
from vllm.diffusion.engine.worker.open_canvas import (
    OpenConstraint,
    OpenProposals,
    OpenRecorder,
)
from vllm.diffusion.engine.worker.proposals import Proposals
from vllm.diffusion.engine.worker.recording import CompleteBlocks, Recorder
from vllm.diffusion.sampling import LogitEditor

if TYPE_CHECKING:
    from vllm.diffusion.decoding import DecodingRule
    from vllm.diffusion.engine.worker.canvas_guest import CanvasGuest
    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.params import DiffusionParams


def editor_of(params: DiffusionParams, tokens: Array, prompt_length: int) -> LogitEditor | None:
    """Create the editor of a request's logits, given its sequence [T] before decoding."""
    return None if params.edits is None else LogitEditor(params, tokens, prompt_length)


def guests_of(
    params: DiffusionParams, tokens: Array, prompt_length: int, rule: DecodingRule
) -> tuple[CanvasGuest, ...]:
    """Create the guests that a request asks for, in the order in which they take part.

    They may write the fixed beginning of an answer to `tokens` [T].
    """
    guests: list[CanvasGuest] = []
    if params.guide is not None:
        constraint = OpenConstraint if params.is_open else Constraint
        guests.append(constraint(params, tokens, prompt_length))
    if params.num_logprobs is not None and isinstance(rule, EntropyBound):
        guests.append(OpenProposals(params, prompt_length, rule))
    elif params.num_logprobs is not None:
        guests.append(Proposals(params, prompt_length))
    if params.complete_blocks:
        guests.append(CompleteBlocks(params, tokens, prompt_length, rule))
    # The recorder comes after all guests that change a commit.
    if params.return_trajectory:
        recorder = OpenRecorder if params.is_open else Recorder
        guests.append(recorder(params, tokens, prompt_length, rule))
    for guest in guests:
        guest.begin(tokens)
    return tuple(guests)
