# SPDX-License-Identifier: Apache-2.0
"""From hidden states of masked rows to candidates: one token and one score per row.

Logits exist for one chunk of rows at a time. The order of operations is that of the LLaDA
reference loop: guidance, forbidden columns, noise, choice of the token, confidence from the
noise-free logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from vllm.diffusion import ops
from vllm.diffusion.sampling.noise import REMASKING, TOKEN, NoiseSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.diffusion.params import DiffusionParams

_CONFIDENCE_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class LogitsModel(Protocol):
    """The part of a model that sampling needs."""

    vocab_start: int  # first column of this rank

    def final_norm(self, x: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowGroup:
    """The sampled rows of one request.

    Attributes:
        params: the request's parameters, seed included.
        step: number of the request's forward, from 0.
        forbid_mask: the mask token must not be proposed.
        rows: [R] int64, rows of the hidden states that predict the masked positions.
        unconditional_rows: [R] int64, the same positions in the prompt-masked sequence, when
            guidance is on.
        positions: [R] int64, positions relative to the canvas.
    """

    params: DiffusionParams
    step: int
    forbid_mask: bool
    rows: torch.Tensor
    unconditional_rows: torch.Tensor | None
    positions: torch.Tensor

    @property
    def is_plain(self) -> bool:
        """Whether the rows need nothing but argmax and confidence."""
        p = self.params
        return (
            p.temperature == 0
            and p.cfg_scale == 0
            and p.remasking == "low_confidence"
            and not (p.logits_eos_inf or p.confidence_eos_eot_inf or self.forbid_mask)
        )


def sample(
    model: LogitsModel,
    hidden: torch.Tensor,
    groups: Sequence[RowGroup],
    rows_per_chunk: int,
    noise: NoiseSource,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of all groups, concatenated.

    Args:
        model: final norm and output head.
        hidden: [T, D] residual stream after the last layer, all sequences packed.
        groups: sampled rows per request.
        rows_per_chunk: rows whose logits may exist at a time.
        noise: source of random numbers.

    Returns:
        tokens [R] int64 and scores [R] float64, on the host.
    """
    tokens: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []
    for part in _chunks(_merge_plain(groups), rows_per_chunk):
        logits = model.compute_logits(model.final_norm(hidden[part.rows]))
        if part.unconditional_rows is not None:
            free = model.compute_logits(model.final_norm(hidden[part.unconditional_rows]))
            logits = free + (part.params.cfg_scale + 1) * (logits - free)
        token, score = choose(logits, part, model.vocab_start, noise)
        tokens.append(token.double())
        scores.append(score.double())
    if not tokens:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    # One copy to the host per step: token ids are exact in float64.
    both = torch.stack([torch.cat(tokens), torch.cat(scores)]).cpu()
    return both[0].long(), both[1]


def choose(
    logits: torch.Tensor, group: RowGroup, vocab_start: int, noise: NoiseSource
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [R] int64 and score [R] of every row of `logits` [R, columns of this rank].

    `logits` may be overwritten. Ties go to the lowest token id.
    """
    params = group.params
    columns = range(vocab_start, vocab_start + logits.shape[1])
    if params.logits_eos_inf:
        _forbid(logits, params.eos_id, columns)
    if group.forbid_mask:
        _forbid(logits, params.mask_id, columns)
    noisy = logits
    if params.temperature > 0:
        # argmax of exp(l) / (-log U)^t in the log domain; float64 as in the reference.
        u = noise.uniform(_seed(params), TOKEN, group.step, group.positions, columns)
        noisy = logits.double() - params.temperature * torch.log(-torch.log(u))
    dtype = _CONFIDENCE_DTYPES.get(params.confidence_dtype, logits.dtype)
    token, confidence = ops.most_likely(
        logits,
        noisy,
        vocab_start=vocab_start,
        excluded=_excluded_from_confidence(params),
        dtype=dtype,
    )
    if params.remasking == "random":
        one = range(1)
        u = noise.uniform(_seed(params), REMASKING, group.step, group.positions, one)
        return token, u[:, 0]
    return token, confidence


def _forbid(logits: torch.Tensor, token: int | None, columns: range) -> None:
    if token is not None and token in columns:
        logits[:, token - columns.start] = -torch.inf


def _excluded_from_confidence(params: DiffusionParams) -> tuple[int, ...]:
    """Columns whose probability is zero although they may be chosen.

    In the reference the noisy and the noise-free logits are one tensor at temperature 0, and its
    end-of-sequence column is masked in the noisy one: so both ids at temperature 0, else only
    end-of-turn.
    """
    if not params.confidence_eos_eot_inf:
        return ()
    ids = (params.eos_id, params.eot_id) if params.temperature == 0 else (params.eot_id,)
    return tuple(i for i in ids if i is not None)


def _seed(params: DiffusionParams) -> int:
    if params.seed is None:
        raise ValueError("seed: must be drawn before sampling, got None")
    return params.seed


def _merge_plain(groups: Sequence[RowGroup]) -> Iterator[RowGroup]:
    """Join neighbouring groups that need nothing request-specific, so they share one product."""
    run: list[RowGroup] = []
    for group in groups:
        if run and not _joinable(run[-1], group):
            yield _join(run)
            run = []
        run.append(group)
    if run:
        yield _join(run)


def _joinable(a: RowGroup, b: RowGroup) -> bool:
    same = a.params.confidence_dtype == b.params.confidence_dtype
    return a.is_plain and b.is_plain and same


def _join(run: list[RowGroup]) -> RowGroup:
    if len(run) == 1:
        return run[0]
    return RowGroup(
        params=run[0].params,
        step=run[0].step,
        forbid_mask=False,
        rows=torch.cat([g.rows for g in run]),
        unconditional_rows=None,
        positions=torch.cat([g.positions for g in run]),
    )


def _chunks(groups: Iterator[RowGroup], rows_per_chunk: int) -> Iterator[RowGroup]:
    for group in groups:
        free = group.unconditional_rows
        for start in range(0, group.rows.numel(), rows_per_chunk):
            part = slice(start, start + rows_per_chunk)
            yield RowGroup(
                params=group.params,
                step=group.step,
                forbid_mask=group.forbid_mask,
                rows=group.rows[part],
                unconditional_rows=None if free is None else free[part],
                positions=group.positions[part],
            )
