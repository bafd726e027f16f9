# SPDX-License-Identifier: Apache-2.0
"""Sampling: turns hidden states of sample rows into candidates, a token and a score per row.

Logits exist for one chunk of rows at a time. The order of operations is that of the LLaDA reference
loop: guidance, a request's edits, forbidden columns, filters of the draw, noise, choice of the
token, score from the noise-free logits. For Dream it is the order of `diffusion_generate`:
temperature, top-p, top-k, draw. One launch samples all rows of requests with the same `LaunchKey`
(`fused`); PyTorch samples all other rows (`plain`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.sampling.alone import read_jointly, sample_alone
from vllm.diffusion.sampling.edited_logits import edited
from vllm.diffusion.sampling.fused import LaunchKey, launch_key, sample_fused, sample_in_head
from vllm.diffusion.sampling.row_group import pieces_of
from vllm.diffusion.sampling.traced import candidate_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.sampling.row_group import LogitsModel, RowGroup


# Bytes per logit when PyTorch sorts, draws or takes logarithms in fp32.
BYTES_OF_COPIES = 24
BYTES_OF_EDITS = 4  # bytes per edited logit
COPIES_BYTES = 128 << 20  # bytes of the rows that are copied at a time


def sample(
    model: LogitsModel,
    hidden: torch.Tensor,
    groups: Sequence[RowGroup],
    buffers: Buffers | None = None,
) -> Samples[torch.Tensor]:
    """Sample rows and return their candidates, on the model's device.

    Args:
        model: final norm and output head.
        hidden: [r, D], hidden states after the last layer.
        groups: the requests of these rows, one after another.
        buffers: memory of normed rows and logits; None allocates.
    """
    normed = model.final_norm(hidden, buffers)
    if model.head_matrix is not None:
        whole = sample_in_head(normed, groups, model.head_matrix)
        if whole is not None:
            return Samples.of(whole)
    logits = model.compute_logits(normed, buffers)
    runs = _runs(groups, logits, _rows_at_a_time(model, BYTES_OF_EDITS))
    return Samples.joined([_sample_run(logits, run, key, model) for run, key in runs])


def _runs(
    groups: Sequence[RowGroup], logits: torch.Tensor, most_edited: int
) -> Iterator[tuple[list[RowGroup], LaunchKey | None]]:
    """Yield neighbouring groups that one launch serves, with its key.

    Guided groups, groups that are sampled alone and groups without a key form separate runs. Groups
    with edits share runs with each other, up to the number of rows that are copied at a time.
    """
    run: list[RowGroup] = []
    key: LaunchKey | None = None
    for group in groups:
        new = None if group.is_alone else launch_key(group, logits)
        if run:
            last = run[-1]
            is_guided = group.unconditional_rows is not None or last.unconditional_rows is not None
            is_other = new is None or new != key or (group.edits is None) != (last.edits is None)
            is_long = group.edits is not None and group.rows.stop - run[0].rows.start > most_edited
            if is_other or is_guided or is_long or last.rows.stop != group.rows.start:
                yield run, key
                run = []
        run.append(group)
        key = new
    if run:
        yield run, key


def _rows_at_a_time(model: LogitsModel, bytes_of_copies: int) -> int:
    """Return the number of rows that are copied at a time."""
    return max(COPIES_BYTES // (bytes_of_copies * model.vocab_size), 1)


def _sample_run(
    logits: torch.Tensor,
    run: list[RowGroup],
    key: LaunchKey | None,
    model: LogitsModel,
) -> Samples[torch.Tensor]:
    """Sample a run of groups whose rows are among the rows of `logits`; result as for `sample`."""
    lead = run[0]
    run_logits = logits[lead.rows.start : run[-1].rows.stop]
    if lead.unconditional_rows is not None:
        free = logits[lead.unconditional_rows]
        run_logits.sub_(free).mul_(lead.params.cfg_scale + 1).add_(free)
    if lead.edits is None:
        return _sample_rows(run_logits, run, key, model)
    parts = edited(run_logits, run, _rows_at_a_time(model, BYTES_OF_EDITS), model.vocab_start)
    return Samples.joined([_sample_rows(rows, part, key, model) for rows, part in parts])


def _sample_rows(
    logits: torch.Tensor,
    run: list[RowGroup],
    key: LaunchKey | None,
    model: LogitsModel,
) -> Samples[torch.Tensor]:
    """Sample a run of groups from its rows of logits, which may be overwritten.

    The table has three more rows for each extra draw of the group with the most extra draws.
    """
    lead = run[0]
    readers = [group for group in run if group.joints and group.adjust is None]
    if readers:
        read_jointly(ops.gather_columns(logits, model.vocab_size), readers, lead.rows.start)
    if not any(group.num_extra_draws for group in run):
        return _draw(logits, run, key, model)
    counts = range(max(group.num_extra_draws for group in run) + 1)
    draws = [_draw(logits, [group.at_step_offset(n) for group in run], key, model) for n in counts]
    return Samples(torch.cat([draw.table for draw in draws]))


def _draw(
    logits: torch.Tensor,
    run: list[RowGroup],
    key: LaunchKey | None,
    model: LogitsModel,
) -> Samples[torch.Tensor]:
    """Sample a run of groups from its rows of logits once."""
    lead = run[0]
    if key is not None:
        samples = sample_fused(logits, run, key, model.vocab_start, model.vocab_size)
        if not key.is_traced:
            return Samples.of(samples)
        traced = candidate_logprobs(logits, run, samples, model.vocab_start, model.vocab_size)
        return Samples.of(samples, [traced])
    if lead.is_adjusted_in_place:
        return sample_alone(logits, lead, model)
    # All other groups copy their logits, so they are sampled a few rows at a time.
    pieces = pieces_of(len(logits), _rows_at_a_time(model, BYTES_OF_COPIES))
    return Samples.joined([sample_alone(logits[rows], lead.piece(rows), model) for rows in pieces])
