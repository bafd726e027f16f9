# SPDX-License-Identifier: Apache-2.0
"""Sampling: from hidden states of sample rows to candidates, a token and a score per row.

Logits exist for one chunk of rows at a time. The order of operations is that of the LLaDA reference
loop: guidance, a request's edits, forbidden columns, filters of the draw, noise, choice of the
token, score from the noise-free logits; and for Dream's that of `diffusion_generate`: temperature,
top-p, top-k, draw. Rows of requests with one `LaunchKey` are sampled by one launch (`fused`),
others in PyTorch (`plain`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.samples import Logprobs, Samples
from vllm.diffusion.guided.joint import read_all
from vllm.diffusion.sampling.edited_logits import edited
from vllm.diffusion.sampling.fused import LaunchKey, launch_key, sample_fused, sample_in_head
from vllm.diffusion.sampling.plain import sample_plain
from vllm.diffusion.sampling.row_group import pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm.diffusion.sampling.row_group import LogitsModel, RowGroup


BYTES_OF_COPIES = 24  # of a logit, where PyTorch sorts, draws or takes logarithms in fp32
BYTES_OF_EDITS = 4  # of a logit that is edited
COPIES_BYTES = 128 << 20  # of the rows that are copied at a time


def sample(
    model: LogitsModel,
    parts: Iterable[tuple[torch.Tensor, Sequence[RowGroup]]],
) -> Samples[torch.Tensor]:
    """Sample all groups and return their candidates, concatenated.

    Args:
        model: final norm and output head.
        parts: hidden states [r, D] after the last layer and the groups whose rows they are, one
            after another. The logits of one part exist at a time, if they are stored at all.

    Returns:
        The candidates of all rows, on the model's device.
    """
    found = []
    for hidden, groups in parts:
        normed = model.final_norm(hidden)
        if model.head_matrix is not None:
            whole = sample_in_head(normed, groups, model.head_matrix)
            if whole is not None:
                found.append(Samples.of(whole))
                continue
        logits = model.compute_logits(normed)
        for run, key in _runs(groups, logits, _rows_at_a_time(model, BYTES_OF_EDITS)):
            found.append(_sample_run(logits, run, key, model))
    return Samples.joined(found)


def sample_group(logits: torch.Tensor, group: RowGroup, model: LogitsModel) -> ops.Sampled:
    """Return token, score (larger is more certain) and greedy token of every row of one group.

    The greedy token is the argmax of the noise-free logits where the scoring wants it, else the
    token. Ties go to the lowest token id.

    Args:
        logits: [R, columns of this rank]; may be overwritten.
        group: the request whose rows they are; guidance has been applied.
        model: the model whose columns they are.
    """
    first_column = model.vocab_start
    if group.adjust is not None:  # works on whole rows, so ranks exchange their columns
        logits, first_column = ops.gather_columns(logits, model.vocab_size), 0
        logits = group.adjust(logits, group.positions)
        _read_jointly(logits, [group], group.rows.start)
    key = launch_key(group, logits)
    if key is not None:
        return sample_fused(logits, [group], key, first_column, model.vocab_size)
    return sample_plain(logits, group, first_column, model.vocab_size)


def _runs(
    groups: Sequence[RowGroup], logits: torch.Tensor, most_edited: int
) -> Iterator[tuple[list[RowGroup], LaunchKey | None]]:
    """Yield neighbouring groups that one launch serves, with its key.

    Guided groups, those with extras and those without a key form runs of their own. Groups
    with edits share runs with each other, of the rows that are copied at a time.
    """
    run: list[RowGroup] = []
    key: LaunchKey | None = None
    for group in groups:
        own = None if group.has_extras else launch_key(group, logits)
        if run:
            last = run[-1]
            is_guided = group.unconditional_rows is not None or last.unconditional_rows is not None
            is_other = own is None or own != key or (group.edits is None) != (last.edits is None)
            is_long = group.edits is not None and group.rows.stop - run[0].rows.start > most_edited
            if is_other or is_guided or is_long or last.rows.stop != group.rows.start:
                yield run, key
                run = []
        run.append(group)
        key = own
    if run:
        yield run, key


def _rows_at_a_time(model: LogitsModel, bytes_of_copies: int) -> int:
    """Return the number of rows of which copies are made at a time."""
    return max(COPIES_BYTES // (bytes_of_copies * model.vocab_size), 1)


def _sample_run(
    logits: torch.Tensor,
    run: list[RowGroup],
    key: LaunchKey | None,
    model: LogitsModel,
) -> Samples[torch.Tensor]:
    """Sample a run of groups whose rows are among those of `logits`; result as of `sample`."""
    lead = run[0]
    own = logits[lead.rows.start : run[-1].rows.stop]
    if lead.unconditional_rows is not None:
        free = logits[lead.unconditional_rows]
        own.sub_(free).mul_(lead.params.cfg_scale + 1).add_(free)
    if lead.edits is None:
        return _sample_rows(own, run, key, model)
    parts = edited(own, run, _rows_at_a_time(model, BYTES_OF_EDITS), model.vocab_start)
    return Samples.joined([_sample_rows(rows, part, key, model) for rows, part in parts])


def _sample_rows(
    own: torch.Tensor,
    run: list[RowGroup],
    key: LaunchKey | None,
    model: LogitsModel,
) -> Samples[torch.Tensor]:
    """Sample the rows `own` of a run of groups, whose logits may be overwritten."""
    lead = run[0]
    readers = [group for group in run if group.joints and group.adjust is None]
    if readers:
        _read_jointly(ops.gather_columns(own, model.vocab_size), readers, lead.rows.start)
    if key is not None:
        return Samples.of(sample_fused(own, run, key, model.vocab_start, model.vocab_size))
    # The others make copies of their logits: of a few rows at a time.
    pieces = pieces_of(len(own), _rows_at_a_time(model, BYTES_OF_COPIES))
    return Samples.joined([_sample_alone(own[rows], lead.piece(rows), model) for rows in pieces])


def _read_jointly(logits: torch.Tensor, groups: Sequence[RowGroup], first: int) -> None:
    """Show whole rows of logits to the joint choices of requests.

    Args:
        logits: [R, V].
        groups: requests whose rows they are; rows of others may stand between them.
        first: index of the first of these rows in the hidden states.
    """
    found = []
    for group in groups:
        start = group.rows.start - first
        for joint, rows in group.joints:
            at = slice(start + rows.start, start + rows.stop)
            found.append((joint, at, group.positions[rows]))
    if found:
        read_all(logits, found)


def _sample_alone(
    logits: torch.Tensor, group: RowGroup, model: LogitsModel
) -> Samples[torch.Tensor]:
    """Sample a group without a key; arguments as for `sample_group`, result as of `sample`."""
    if not group.has_extras:
        return Samples.of(sample_plain(logits, group, model.vocab_start, model.vocab_size))
    # Log probabilities before the choice, which may overwrite the logits.
    if group.token_ids is not None:
        (token_ids,) = ops.to_device([group.token_ids], logits.device)
        top = None
        if group.num_top:  # ranks exchange their columns for the best of all tokens
            whole = ops.gather_columns(logits, model.vocab_size)
            top = whole.topk(group.num_top, dim=-1).indices
            token_ids = torch.cat([token_ids, top], dim=1)
        scores = ops.token_logprobs(
            logits, token_ids, first_column=model.vocab_start, vocab_size=model.vocab_size
        )
        extras = [scores.T] if top is None else [scores.T, top.T]
        return Samples.of(sample_group(logits, group, model), extras)
    if group.params.num_logprobs is None:
        return Samples.of(sample_group(logits, group, model))
    # Ranks exchange their columns for ranks among all tokens.
    whole = ops.gather_columns(logits, model.vocab_size)
    distribution = _distribution_of(whole, group.forbidden)
    found = sample_group(logits, group, model)
    named = None
    if group.params.logprob_token_ids:
        ids = np.array(group.params.logprob_token_ids, dtype=np.int64)
        (named,) = ops.to_device([ids], logits.device)
    num_top = group.params.num_logprobs
    logprobs = Logprobs.of(distribution, found.token, found.greedy, num_top, named)
    return Samples.of(found, [logprobs.packed()])


def _distribution_of(logits: torch.Tensor, forbidden: tuple[int, ...]) -> torch.Tensor:
    """Return log probabilities [R, V] fp32 of whole rows of logits, without `forbidden` columns."""
    kept = logits.to(torch.float32, copy=True)
    for token in forbidden:  # a list as an index would make the host wait for the device
        kept[:, token] = -torch.inf
    return torch.log_softmax(kept, dim=-1)
