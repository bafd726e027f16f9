# SPDX-License-Identifier: Apache-2.0
"""The report of a request whose canvas began with a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.diffusion.editing.differences import edits_between

if TYPE_CHECKING:
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
    pairs = zip(text, answer, strict=False)
    return {
        "edits": [edit._asdict() for edit in edits_between(text, answer)],
        "num_edited": sum(token not in (params.mask_id, new) for token, new in pairs),
        "scoring": _scoring(params),
    }


def _scoring(params: DiffusionParams) -> str:
    """Return how the tokens of a text are scored: as they are read, or in copies that mask them."""
    if params.is_block_causal:
        return "direct"
    has_scores = params.revision is not None and params.revision.changes_tokens
    return "striped" if has_scores else "none"
