# SPDX-License-Identifier: Apache-2.0
"""Chooses the step guests that a request needs; most requests need none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.engine.speculation import Speculation, can_speculate
from vllm.diffusion.engine.worker.draft_branches import DraftBranches, drafts_in_branches
from vllm.diffusion.engine.worker.expected_embeddings import ExpectedEmbeddings
from vllm.diffusion.engine.worker.first_forwards import FirstForwards, shares_first_forward
from vllm.diffusion.engine.worker.length_search import LengthSearch, searches_length
from vllm.diffusion.engine.worker.scoring_copies import ScoringCopies, scores_text

if TYPE_CHECKING:
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.engine.step_guest import StepGuest
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner


def guests_needed(new: NewCanvas, runner: DiffusionModelRunner) -> list[type[StepGuest]]:
    """Return the step guests that a request needs before it starts."""
    kinds: list[type[StepGuest]] = []
    if shares_first_forward(new.params):
        kinds.append(FirstForwards)
    if new.params.is_open:
        kinds.append(ExpectedEmbeddings)
    # Extra items need all rows on one rank, and the keys and values of drafts need pages on the
    # device.
    is_alone = runner.ranks.sequence.size == 1
    if is_alone and searches_length(new.params):
        kinds.append(LengthSearch)
    if is_alone and scores_text(new.params):
        kinds.append(ScoringCopies)
    if is_alone and not new.host_layers and can_speculate(new.params):
        kinds.append(Speculation)
    if is_alone and drafts_in_branches(new.params):
        kinds.append(DraftBranches)
    return kinds
