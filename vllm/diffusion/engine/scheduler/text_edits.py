# SPDX-License-Identifier: Apache-2.0
"""The report of a request whose canvas began with a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.editing.differences import edits_between, moving_edits
from vllm.diffusion.request.algorithms import algorithms_of

if TYPE_CHECKING:
    from vllm.diffusion.editing.differences import Edit
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.diffusion.request.params import DiffusionParams


def edits_of(item: RequestState) -> dict[str, Any]:
    """Return how the answer differs from the text, and how the text's tokens were scored."""
    params, revision = item.params, item.params.revision
    assert revision is not None
    answer = list(item.request.output_token_ids)
    if answer and answer[-1] in params.stop_ids:
        answer.pop()
    text = revision.token_ids[: revision.num_before_end(params.stop_ids)]
    algorithm = algorithms_of(is_block_causal=params.is_block_causal)[params.algorithm]
    if algorithm.edits_length or revision.slack:
        edits = moving_edits(text, answer)
        num_edited = sum(_num_moved(edit, params.mask_id) for edit in edits)
    else:
        edits = edits_between(text, answer)
        pairs = zip(text, answer, strict=False)
        num_edited = sum(token not in (params.mask_id, new) for token, new in pairs)
    return {
        "edits": [edit._asdict() for edit in edits],
        "num_edited": num_edited,
        "scoring": _scoring(params),
    }


def _num_moved(edit: Edit, mask_id: int) -> int:
    """Return the number of tokens that an edit replaces, deletes or inserts."""
    num_masks = edit.old_ids.count(mask_id)
    return max(len(edit.old_ids), len(edit.new_ids)) - num_masks


def _scoring(params: DiffusionParams) -> str:
    """Return how the tokens of a text are scored: as they are read, or in copies that mask them."""
    if params.scores_directly:
        return "direct"
    has_scores = params.revision is not None and params.revision.changes_tokens
    return "striped" if has_scores else "none"
