# SPDX-License-Identifier: Apache-2.0
"""From hidden states of masked rows to candidates: a token and a score per row.

Logits exist for one chunk of rows at a time. The order of operations is that of the LLaDA
reference loop: guidance, forbidden columns, noise, choice of the token, score from the noise-free
logits; and for Dream's that of `diffusion_generate`: temperature, top-p, top-k, draw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm.diffusion import ops
from vllm.diffusion.sampling.categorical import draw_categorical
from vllm.diffusion.scoring import REMASKING, TOKEN, Scoring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm.diffusion.params import DiffusionParams
    from vllm.diffusion.sampling.noise import NoiseSource

_CONFIDENCE_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class LogitsModel(Protocol):
    """The part of a model that sampling needs."""

    vocab_start: int  # first column of this rank
    vocab_size: int  # columns of all ranks

    def final_norm(self, x: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowGroup:
    """The sampled rows of one request.

    Attributes:
        params: the request's parameters, seed included.
        scoring: what its decoding rule wants to know.
        step: number of the request's forward, from 0.
        forbid_mask: the mask token must not be proposed.
        rows: R consecutive rows of the hidden states, which predict the masked positions.
        unconditional_rows: the same positions in the prompt-masked sequence, when guidance is on.
        positions: [R] int64, positions relative to the canvas.
        adjust: replaces logits [R, V] of canvas positions [R] by what the rule makes of them.
    """

    params: DiffusionParams
    scoring: Scoring
    step: int
    forbid_mask: bool
    rows: slice
    unconditional_rows: slice | None
    positions: torch.Tensor
    adjust: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the rows need nothing but argmax and its probability."""
        p = self.params
        return (
            p.temperature == 0
            and p.cfg_scale == 0
            and p.remasking == "low_confidence"
            and self.scoring == Scoring()
            and self.adjust is None
            and not (p.logits_eos_inf or p.confidence_eos_eot_inf or self.forbid_mask)
        )


class Choice(NamedTuple):
    """What sampling found for each row of some logits.

    Attributes:
        tokens: [R] int64.
        scores: [R], larger is more certain.
        greedy: [R] int64, argmax of the noise-free logits (`tokens` where it was not wanted).
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    greedy: torch.Tensor


def sample(
    model: LogitsModel,
    parts: Iterable[tuple[torch.Tensor, Sequence[RowGroup]]],
    noise: NoiseSource,
) -> torch.Tensor:
    """Candidates of all groups, concatenated.

    Args:
        model: final norm and output head.
        parts: hidden states [r, D] after the last layer and the groups whose rows they are. The
            logits of one part exist at a time.
        noise: source of random numbers.

    Returns:
        [3, R] float64 on the host: token, score, greedy token of every row.
    """
    found = []
    for hidden, groups in parts:
        logits = model.compute_logits(model.final_norm(hidden))
        for group in _merge_plain(groups):
            own = logits[group.rows]
            if group.unconditional_rows is not None:
                free = logits[group.unconditional_rows]
                own = free + (group.params.cfg_scale + 1) * (own - free)
            found.append(torch.stack([c.double() for c in choose(own, group, model, noise)]))
    if not found:
        return torch.empty(3, 0, dtype=torch.float64)
    # One copy to the host per step: token ids are exact in float64.
    return torch.cat(found, dim=1).cpu()


def choose(logits: torch.Tensor, group: RowGroup, model: LogitsModel, noise: NoiseSource) -> Choice:
    """Token and score of every row of `logits` [R, columns of this rank], which may be overwritten.

    Ties go to the lowest token id.
    """
    params, scoring, first = group.params, group.scoring, model.vocab_start
    if group.adjust is not None or scoring.draw == "categorical":
        # These work on whole rows, so ranks exchange their columns.
        logits, first = ops.gather_columns(logits, model.vocab_size), 0
    columns = range(first, first + logits.shape[1])
    if group.adjust is not None:
        logits = group.adjust(logits, group.positions)
    if params.logits_eos_inf:
        _forbid(logits, params.eos_id, columns)
    if group.forbid_mask:
        _forbid(logits, params.mask_id, columns)
    dtype = _CONFIDENCE_DTYPES.get(params.confidence_dtype, logits.dtype)
    if scoring.draw == "categorical":
        tokens, scores = draw_categorical(logits.to(dtype), group, noise)
        return Choice(tokens, scores, tokens)
    whole_rows = logits.shape[1] == model.vocab_size
    noisy = logits
    if params.temperature > 0:
        # argmax of exp(l) / (-log U)^t in the log domain; float64 as in the reference.
        u = noise.uniform(_seed(params), TOKEN, group.step, group.positions, columns)
        noisy = logits.double() - params.temperature * torch.log(-torch.log(u))
    excluded = _excluded_from_confidence(params)
    tokens, scores = ops.most_likely(
        logits, noisy, first_column=first, whole_rows=whole_rows, excluded=excluded, dtype=dtype
    )
    greedy = tokens
    if scoring.greedy and params.temperature > 0:
        greedy, _ = ops.most_likely(
            logits, logits, first_column=first, whole_rows=whole_rows, excluded=(), dtype=dtype
        )
    if params.remasking == "random":
        u = noise.uniform(_seed(params), REMASKING, group.step, group.positions, range(1))
        # Where entropies are compared, the number stands for the entropy.
        scores = -u[:, 0] if scoring.score == "negative_entropy" else u[:, 0]
    elif scoring.score == "negative_entropy":
        scores = ops.negative_entropy(
            logits,
            epsilon=scoring.epsilon,
            first_column=first,
            whole_rows=whole_rows,
            excluded=excluded,
            dtype=dtype,
        )
    return Choice(tokens, scores, greedy)


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
    adjacent = a.rows.stop == b.rows.start
    same = a.params.confidence_dtype == b.params.confidence_dtype
    return adjacent and same and a.is_plain and b.is_plain


def _join(run: list[RowGroup]) -> RowGroup:
    if len(run) == 1:
        return run[0]
    return replace(
        run[0],
        rows=slice(run[0].rows.start, run[-1].rows.stop),
        positions=torch.cat([g.positions for g in run]),
    )
