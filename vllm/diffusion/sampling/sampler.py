# SPDX-License-Identifier: Apache-2.0
"""From hidden states of masked rows to candidates: a token and a score per row.

Logits exist for one chunk of rows at a time. The order of operations is that of the LLaDA
reference loop: guidance, forbidden columns, noise, choice of the token, score from the noise-free
logits; and for Dream's that of `diffusion_generate`: temperature, top-p, top-k, draw. Rows of
requests that want alike are sampled by one launch (`joint`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm.diffusion import ops
from vllm.diffusion.sampling.categorical import draw_categorical
from vllm.diffusion.sampling.joint import Kind, choose_jointly, confidence_dtype, kind_of
from vllm.diffusion.sampling.logprobs import Logprobs, distribution_of
from vllm.diffusion.scoring import REMASKING, TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm.diffusion.params import DiffusionParams
    from vllm.diffusion.sampling.noise import NoiseSource
    from vllm.diffusion.scoring import Scoring


BYTES_OF_COPIES = 24  # of a logit, where PyTorch sorts, draws or takes logarithms in fp32
COPIES_BYTES = 128 << 20  # of the rows that are copied at a time


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
    def has_extras(self) -> bool:
        """Whether more is wanted of the logits than candidates."""
        return self.adjust is not None or self.params.num_logprobs is not None

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Token ids that must not be proposed."""
        eos = self.params.eos_id if self.params.logits_eos_inf else None
        mask = self.params.mask_id if self.forbid_mask else None
        return tuple(token for token in (eos, mask) if token is not None)

    @property
    def excluded(self) -> tuple[int, ...]:
        """Token ids whose probability is zero although they may be chosen.

        In the reference the noisy and the noise-free logits are one tensor at temperature 0, and
        its end-of-sequence column is masked in the noisy one: so both ids at temperature 0, else
        only end-of-turn.
        """
        if not self.params.confidence_eos_eot_inf:
            return ()
        eos = self.params.eos_id if self.params.temperature == 0 else None
        return tuple(token for token in (eos, self.params.eot_id) if token is not None)

    @property
    def seed(self) -> int:
        if self.params.seed is None:
            raise ValueError("seed: must be drawn before sampling, got None")
        return self.params.seed


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

    def packed(self) -> torch.Tensor:
        """[3, R] float64; token ids are exact in it."""
        return torch.stack([x.double() for x in self])


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
        [3, R] float64 on the model's device: token, score, greedy token of every row. Where a group
        wants log probabilities there are more rows, those of `Logprobs.packed` (zero for other
        groups). One tensor, so that one copy brings it to the host: token ids are exact in float64.
    """
    found = []
    for hidden, groups in parts:
        logits = model.compute_logits(model.final_norm(hidden))
        for run in _runs(groups, logits, noise):
            found.append(_choose(logits, run, model, noise))
    return joined(found)


def joined(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `sample` returned for several parts, as it returns it for all of them."""
    if not found:
        return torch.empty(3, 0, dtype=torch.float64)
    if len(found) == 1:
        return found[0]
    height = max(part.shape[0] for part in found)
    return torch.cat([_padded(part, height) for part in found], dim=1)


def choose(logits: torch.Tensor, group: RowGroup, model: LogitsModel, noise: NoiseSource) -> Choice:
    """Token and score of every row of `logits` [R, columns of this rank], which may be overwritten.

    Ties go to the lowest token id.
    """
    kind = kind_of(group, logits, noise)
    first = model.vocab_start
    if group.adjust is not None or (kind is None and group.scoring.draw == "categorical"):
        # These work on whole rows, so ranks exchange their columns.
        logits, first = ops.gather_columns(logits, model.vocab_size), 0
    if group.adjust is not None:
        logits = group.adjust(logits, group.positions)
        kind = kind_of(group, logits, noise)
    if kind is not None:
        return Choice(*choose_jointly(logits, [group], kind, first, model.vocab_size))
    return _choose_alone(logits, group, first, model.vocab_size, noise)


def _choose(
    logits: torch.Tensor, run: list[RowGroup], model: LogitsModel, noise: NoiseSource
) -> torch.Tensor:
    """What `sample` returns for a run of groups, whose rows are among those of `logits`."""
    lead = run[0]
    own = logits[lead.rows.start : run[-1].rows.stop]
    if lead.unconditional_rows is not None:
        free = logits[lead.unconditional_rows]
        own.sub_(free).mul_(lead.params.cfg_scale + 1).add_(free)
    kind = None if lead.has_extras else kind_of(lead, own, noise)
    if kind is not None:
        return Choice(*choose_jointly(own, run, kind, model.vocab_start, model.vocab_size)).packed()
    # The others, each in a run of its own, make copies of their logits: of a few rows at a time.
    most = max(COPIES_BYTES // (BYTES_OF_COPIES * model.vocab_size), 1)
    parts = [slice(start, start + most) for start in range(0, max(len(own), 1), most)]
    return torch.cat([_choose_part(own, lead, part, model, noise) for part in parts], dim=1)


def _choose_part(
    logits: torch.Tensor, group: RowGroup, rows: slice, model: LogitsModel, noise: NoiseSource
) -> torch.Tensor:
    """What `sample` returns for some rows of a group, given all of its logits."""
    logits, group = logits[rows], replace(group, positions=group.positions[rows])
    if group.params.num_logprobs is None:
        return choose(logits, group, model, noise).packed()
    # Before the choice, which may overwrite the logits; ranks exchange their columns for it.
    whole = ops.gather_columns(logits, model.vocab_size)
    distribution = distribution_of(whole, group.forbidden)
    found = choose(logits, group, model, noise)
    logprobs = Logprobs.of(distribution, found.tokens, found.greedy, group.params.num_logprobs)
    return torch.cat([found.packed(), logprobs.packed()])


def _padded(rows: torch.Tensor, height: int) -> torch.Tensor:
    missing = height - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _choose_alone(
    logits: torch.Tensor, group: RowGroup, first: int, vocab_size: int, noise: NoiseSource
) -> Choice:
    """The rows of one request in PyTorch's arithmetic, at any precision and from any noise."""
    params, scoring = group.params, group.scoring
    columns = range(first, first + logits.shape[1])
    for token in group.forbidden:
        if token in columns:
            logits[:, token - first] = -torch.inf
    dtype = confidence_dtype(group, logits)
    if scoring.draw == "categorical":
        tokens, scores = draw_categorical(logits.to(dtype), group, noise)
        return Choice(tokens, scores, tokens)
    whole_rows = logits.shape[1] == vocab_size
    noisy = logits
    if params.temperature > 0:
        # argmax of exp(l) / (-log U)^t in the log domain; float64 as in the reference.
        u = noise.uniform(group.seed, TOKEN, group.step, group.positions, columns)
        noisy = logits.double() - params.temperature * torch.log(-torch.log(u))
    excluded = group.excluded
    tokens, scores = ops.most_likely(
        logits, noisy, first_column=first, whole_rows=whole_rows, excluded=excluded, dtype=dtype
    )
    greedy = tokens
    if scoring.greedy and params.temperature > 0:
        greedy, _ = ops.most_likely(
            logits, logits, first_column=first, whole_rows=whole_rows, excluded=(), dtype=dtype
        )
    if params.remasking == "random":
        u = noise.uniform(group.seed, REMASKING, group.step, group.positions, range(1))
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


def _runs(
    groups: Sequence[RowGroup], logits: torch.Tensor, noise: NoiseSource
) -> Iterator[list[RowGroup]]:
    """Neighbouring groups that one launch serves; guided ones and those with extras alone."""
    run: list[RowGroup] = []
    kind: Kind | None = None
    for group in groups:
        is_lone = group.unconditional_rows is not None or group.has_extras
        own = None if is_lone else kind_of(group, logits, noise)
        if run and (own is None or own != kind or run[-1].rows.stop != group.rows.start):
            yield run
            run = []
        run.append(group)
        kind = own
    if run:
        yield run
