# SPDX-License-Identifier: Apache-2.0
"""Sampling of many requests' rows by one launch.

Requests differ in temperature, seed, step and special tokens; these become parameters of each row.
All rows of a launch have the same `LaunchKey`: the settings that a launch cannot mix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import CATEGORICAL, REMASKING, TOKEN
from vllm.diffusion.request.params import signed_seed
from vllm.diffusion.sampling.filtering import kind_of, numbers_of, with_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.sampling.row_group import RowGroup

_OF_ROWS = ("temperature", "seed", "step", "forbidden", "excluded")
_SCORES: dict[str, ops.Score] = {
    "confidence": "confidence",
    "negative_entropy": "entropy",
    "margin": "margin",
}


class LaunchKey(NamedTuple):
    """Settings that all rows of a launch share.

    Attributes:
        score: name of the score, as in `ops.candidates`.
        epsilon: number added to probabilities in the logarithm of the entropy.
        purpose: purpose of the noise, for its random stream.
        is_tempered: whether scores are computed at the temperature.
        has_greedy: whether the argmax of the noise-free logits is needed.
        dtype: dtype of the scores.
        filters: kind of the filters, without their numbers; None for none.
        is_traced: whether trajectories need the log probabilities of the candidates.
    """

    score: ops.Score
    epsilon: float
    purpose: int
    is_tempered: bool
    has_greedy: bool
    dtype: torch.dtype
    filters: ops.Filters | None
    is_traced: bool


def launch_key(group: RowGroup, logits: torch.Tensor) -> LaunchKey | None:
    """Return the key of a group's launch; None if the group needs more than a launch provides.

    A launch does not provide float64, scores that each operation rounds to a narrow dtype, or
    forbidden tokens that count in the probability of other tokens. Dream's draw on CPU stays in
    PyTorch, because its reference rounds there so that tokens with equal fp32 probabilities
    compete.
    """
    scoring, filters = group.scoring, group.filters
    dtype = group.confidence_dtype(logits)
    is_categorical = scoring.is_categorical
    if dtype == torch.float64 or group.counted:
        return None
    if is_categorical and not logits.is_cuda:
        return None
    # PyTorch's softmax also rounds the probability once, at the end.
    is_rounded_once = logits.is_cuda and scoring.score == "confidence" and not is_categorical
    if dtype != torch.float32 and not is_rounded_once:
        return None
    score = _SCORES[scoring.score]
    return LaunchKey(
        score=score,
        epsilon=scoring.epsilon if score == "entropy" else 1.0,
        purpose=CATEGORICAL if is_categorical else TOKEN,
        is_tempered=is_categorical,
        has_greedy=scoring.greedy,
        dtype=dtype,
        filters=None if filters is None else kind_of(filters),
        is_traced=group.params.return_trajectory,
    )


def sample_fused(
    logits: torch.Tensor,
    groups: Sequence[RowGroup],
    key: LaunchKey,
    first_column: int,
    vocab_size: int,
) -> ops.Sampled:
    """Return token, score (larger is more certain) and greedy token of the rows of `groups`.

    Args:
        logits: [R, C], rows of the groups one after another; columns of this rank.
        groups: requests whose key is `key`.
        key: the settings that they share.
        first_column: token id of the first column.
        vocab_size: number of columns of all ranks.
    """
    rows, is_random = _parameters(groups, key, logits.device)
    sampled = ops.candidates(
        logits, rows, key.score, first_column=first_column, vocab_size=vocab_size
    )
    return _scored(sampled, rows, is_random, key)


def sample_in_head(
    normed: torch.Tensor, groups: Sequence[RowGroup], matrix: torch.Tensor
) -> ops.Sampled | None:
    """Sample groups that all take their most likely tokens, without storing logits.

    Args:
        normed: [R, D], the groups' rows one after another.
        groups: the requests.
        matrix: [V, D], the output matrix.

    Returns:
        None if some group needs more of its logits, or if storing them is faster.
    """
    if not groups or not ops.samples_in_head(normed, matrix):
        return None
    key = launch_key(groups[0], normed)
    if key is None or key.score != "confidence" or key.filters is not None:
        return None
    end = 0
    for group in groups:
        is_plain = group.unconditional_rows is None and not group.has_extras
        is_plain &= not group.joints and group.edits is None
        follows, end = group.rows.start == end, group.rows.stop
        is_noisy = group.params.temperature > 0
        if not is_plain or not follows or is_noisy or launch_key(group, normed) != key:
            return None
    rows, is_random = _parameters(groups, key, normed.device)
    if len(rows.columns) > ops.MAX_HEAD_COLUMNS:
        return None
    return _scored(ops.most_likely_in_head(normed, matrix, rows), rows, is_random, key)


def _scored(
    sampled: ops.Sampled, rows: ops.Rows, is_random: bool | torch.Tensor, key: LaunchKey
) -> ops.Sampled:
    """Convert scores to the key's dtype and sign (larger is more certain); some become random."""
    sign = -1 if key.score == "entropy" else 1
    scores = (sign * sampled.score).to(key.dtype)
    if is_random is not False and rows.positions is not None:
        # If entropies are compared, the random number replaces the entropy.
        u = sign * ops.philox_uniform(rows.seed, REMASKING, rows.step, rows.positions, range(1))
        scores = u[:, 0] if is_random is True else torch.where(is_random, u[:, 0], scores.double())
    return ops.Sampled(sampled.token, scores, sampled.greedy if key.has_greedy else sampled.token)


def _parameters(
    groups: Sequence[RowGroup], key: LaunchKey, device: torch.device
) -> tuple[ops.Rows, bool | torch.Tensor]:
    """Return the rows' parameters, and whether scores are random; makes at most one copy."""
    forbidden, excluded = [g.forbidden for g in groups], [g.excluded for g in groups]
    columns = tuple(sorted({token for tokens in (*forbidden, *excluded) for token in tokens}))
    is_random = [g.params.remasking == "random" and not key.is_tempered for g in groups]
    is_noisy = [g.params.temperature > 0 for g in groups]
    needs_seed = [a or b for a, b in zip(is_random, is_noisy, strict=True)]
    parameters = spread(
        {
            "temperature": ([g.params.temperature for g in groups], np.float64),
            "seed": (
                [signed_seed(g.seed) if n else 0 for g, n in zip(groups, needs_seed, strict=True)],
                np.int64,
            ),
            "step": (
                [g.step if n else 0 for g, n in zip(groups, needs_seed, strict=True)],
                np.int64,
            ),
            "forbidden": ([bits_of(tokens, columns) for tokens in forbidden], np.int32),
            "excluded": ([bits_of(tokens, columns) for tokens in excluded], np.int32),
            "is_random": (is_random, np.bool_),
            **({} if key.filters is None else numbers_of(g.filters for g in groups)),
        },
        [g.positions.numel() for g in groups],
        device,
    )
    choice: bool | torch.Tensor = parameters.pop("is_random")
    filters = None if key.filters is None else with_numbers(key.filters, parameters)
    positions = None
    if any(needs_seed):
        positions = torch.cat([g.positions for g in groups])
    return (
        ops.Rows(
            **{name: parameters[name] for name in _OF_ROWS},
            positions=positions,
            purpose=key.purpose,
            is_tempered=key.is_tempered,
            epsilon=key.epsilon,
            columns=columns,
            filters=filters,
        ),
        choice,
    )


def spread(
    values: dict[str, tuple[list[Any], type[np.generic]]], counts: list[int], device: torch.device
) -> dict[str, Any]:
    """Spread values of requests over their rows: one number if all are equal, else [R]."""
    arrays: dict[str, Any] = {}
    on_host = {}
    for name, (numbers, dtype) in values.items():
        if all(number == numbers[0] for number in numbers):
            arrays[name] = numbers[0]
        else:
            on_host[name] = np.array(numbers, dtype=dtype).repeat(counts)
    if on_host:
        arrays |= zip(on_host, ops.to_device(tuple(on_host.values()), device), strict=True)
    return arrays


def bits_of(tokens: tuple[int, ...], columns: tuple[int, ...]) -> int:
    """Return a bit mask of the columns of `tokens`."""
    return sum(1 << columns.index(token) for token in set(tokens))
