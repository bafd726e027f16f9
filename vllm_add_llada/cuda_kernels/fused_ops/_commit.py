# SPDX-License-Identifier: Apache-2.0
"""Choice and commit of a step's candidates: checks, then the kernel or the reference."""

import torch
from torch import Tensor

from . import reference
from ._support import check_vector, has_kernel, integers_of, launch, native
from .reference import Committed, Proposals, Selection


def commit(
    canvas: Tensor,
    ranges: Tensor,
    proposals: Proposals,
    selection: Selection,
    mask_id: int,
    out: Committed | None = None,
) -> Committed:
    """Choose among the candidates of S requests, write the chosen tokens, and count what is left.

    For a loop that keeps its canvases on the GPU: one launch ends the step of every request, and
    the host copies two numbers a request to know which of them go on.

    A request with a quota commits that many of its candidates (all, if there are fewer): the most
    certain, ties by ascending index. One with a threshold commits every candidate whose score is
    at least (``AT_LEAST_THRESHOLD``) or above it (``ABOVE_THRESHOLD``), and in any case the most
    certain one. In the order infinite scores count as the largest finite ones, and NaN below all.

    Args:
        canvas: [N] int64, the canvases of all requests; written.
        ranges: [S, 2] int32, first and last + 1 position of each request in ``canvas``.
        proposals: The candidates. ``rows`` must lie in 0..N-1, a position named once at most.
        selection: What each request commits.
        mask_id: Token of a masked position. Committing it leaves the position masked.
        out: Where the result is stored. Allocated when not given.

    Returns:
        ``out``: which candidates were chosen, and what is left of each request's range.

    Raises:
        ValueError: A shape, dtype or device is not as above.
    """
    name, device = "commit", canvas.device
    num_requests, num_candidates = len(ranges), len(proposals.tokens)
    per_request, per_candidate = (num_requests,), (num_candidates,)
    check_vector(name, "canvas", canvas, (torch.int64,), (-1,), device)
    check_vector(name, "ranges", ranges, (torch.int32,), (-1, 2), device)
    for argument, dtypes in (
        ("tokens", (torch.int64,)),
        ("scores", (torch.float64,)),
        ("rows", (torch.int32, torch.int64)),
    ):
        check_vector(name, argument, getattr(proposals, argument), dtypes, per_candidate, device)
    check_vector(name, "ends", proposals.ends, (torch.int32,), (num_requests + 1,), device)
    check_vector(name, "quota", selection.quota, (torch.int32,), per_request, device)
    check_vector(name, "threshold", selection.threshold, (torch.float64,), per_request, device)
    if out is None:
        out = Committed(
            torch.empty(num_candidates, dtype=torch.bool, device=device),
            torch.empty(num_requests, dtype=torch.int32, device=device),
            torch.empty(num_requests, dtype=torch.int32, device=device),
        )
    else:
        check_vector(name, "chosen", out.chosen, (torch.bool,), per_candidate, device)
        check_vector(name, "num_masked", out.num_masked, (torch.int32,), per_request, device)
        check_vector(name, "prefix", out.prefix, (torch.int32,), per_request, device)
    if not has_kernel(canvas):
        return reference.commit(canvas, ranges, proposals, selection, mask_id, out)
    assert native is not None
    launch(
        native.commit,
        canvas,
        tokens=proposals.tokens.data_ptr(),
        scores=proposals.scores.data_ptr(),
        rows=integers_of(proposals.rows),
        ends=proposals.ends.data_ptr(),
        canvas=canvas.data_ptr(),
        ranges=ranges.data_ptr(),
        quota=selection.quota.data_ptr(),
        threshold=selection.threshold.data_ptr(),
        mask_id=mask_id,
        chosen=out.chosen.data_ptr(),
        num_masked=out.num_masked.data_ptr(),
        prefix=out.prefix.data_ptr(),
        num_candidates=num_candidates,
        num_positions=len(canvas),
        num_requests=num_requests,
    )
    return out
