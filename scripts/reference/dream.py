# SPDX-License-Identifier: Apache-2.0
"""Dream's diffusion_generate (arXiv:2508.15487), one sequence at a time.

The schedule commits a share of the masks at every step, over the whole canvas: there are no blocks,
and always `steps` forward passes. Logits are read from the previous position (see decode.aligned).

Deviations from the published code: ties go to the lowest position, and random numbers come from
callbacks. Step and positions have the meaning of decode.Options.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference.decode import (
    Candidates,
    Decoded,
    LogitModel,
    Margin,
    SpecialIds,
    Step,
    UniformLogits,
    UniformScores,
    aligned,
    best_first,
    order_margin,
    threshold_margins,
)

FILTERED_GAP = 1e30  # between a token and a token that was filtered out
SUM_SCALE = 0.01  # sums of probabilities are more exact than scores


@dataclass(frozen=True)
class DreamOptions:
    """All options except the lengths.

    uniform_tokens draws tokens at a temperature: argmax(log p - log(-log U)).
    uniform_commits decides alg origin: committed iff U is below the step's share.
    uniform_choices draws positions with alg_temp: the largest log w - log(-log U), which is drawing
    without replacement in proportion to w.
    guard_mask_token: off in the published loop. If a step would change nothing because every
    accepted token is the mask, the best position (for alg origin, the lowest one) is accepted with
    its best other token instead.
    """

    ids: SpecialIds
    alg: str = "entropy"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3
    uniform_tokens: UniformLogits | None = None
    uniform_commits: UniformScores | None = None
    uniform_choices: UniformScores | None = None
    guard_mask_token: bool = False


def times(steps: int, eps: float) -> Tensor:
    """Return the schedule [steps + 1] from 1 to eps, in fp32."""
    return torch.linspace(1, eps, steps + 1, dtype=torch.float32)


def commit_share(schedule: Tensor, step: int) -> Tensor:
    """Return the share of the masks that a step commits, in fp32; the last step commits all."""
    if step == len(schedule) - 2:
        return torch.tensor(1.0)
    return 1 - schedule[step + 1] / schedule[step]


def num_commits(num_masked: int, schedule: Tensor, step: int) -> int:
    """Return the number of masks that a step commits: the share of the rest, fp32, rounded down."""
    return int(torch.tensor(float(num_masked)) * commit_share(schedule, step))


def filter_logits(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """Return logits [R, V] with the tokens outside top_p and top_k at the lowest finite value.

    top_p keeps the most likely tokens up to and including the first that makes their sum exceed
    top_p. top_k keeps every token that is not below the k-th, including ties.
    """
    lowest = torch.finfo(logits.dtype).min
    if top_p is not None and top_p < 1:
        order = logits.sort(dim=1, descending=True, stable=True).indices
        sums = torch.softmax(logits.gather(1, order), dim=1).cumsum(dim=1)
        removed = torch.zeros_like(order, dtype=torch.bool)
        removed[:, 1:] = (sums > top_p)[:, :-1]
        logits = logits.masked_fill(removed.scatter(1, order, removed), lowest)
    if top_k is not None:
        kth = logits.sort(dim=1, descending=True).values[:, min(top_k, logits.shape[1]) - 1]
        logits = logits.masked_fill(logits < kth[:, None], lowest)
    return logits


def diffusion_generate(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    steps: int,
    skip_idle_steps: bool = False,
    **options: Any,
) -> Decoded:
    """Run Dream's loop. Confidences are computed in the dtype of the logits.

    skip_idle_steps omits forward passes that commit nothing by the schedule (not for alg origin);
    random numbers then count the forward passes that are made. For other keywords see DreamOptions.
    """
    loop = _Loop(model, list(prompt_ids), gen_length, DreamOptions(**options))
    schedule = times(steps, loop.options.eps)
    for step in range(steps):
        if skip_idle_steps and loop.is_idle(schedule, step):
            continue
        loop.forward(schedule, step)
    return Decoded(loop.row[loop.prompt_len :].tolist(), len(loop.trace), loop.trace)


class _Loop:
    """The row that is decoded, and its history."""

    def __init__(
        self, model: LogitModel, prompt: list[int], gen_length: int, options: DreamOptions
    ) -> None:
        self.model = model
        self.options = options
        self.prompt_len = len(prompt)
        self.row = torch.tensor(prompt + [options.ids.mask] * gen_length)
        self.trace: list[Step] = []

    def masked(self) -> list[int]:
        return [p for p, token in enumerate(self.row.tolist()) if token == self.options.ids.mask]

    def is_idle(self, schedule: Tensor, step: int) -> bool:
        num_masked = len(self.masked())
        if self.options.alg == "origin":
            return num_masked == 0
        return num_commits(num_masked, schedule, step) == 0

    def forward(self, schedule: Tensor, step: int) -> None:
        row_before = tuple(self.row.tolist())
        eligible = self.masked()
        logits = aligned(self.model, self.model.logits(self.row[None]))[0][eligible]
        candidates = self._sample(logits, eligible)
        chosen, margins = self._choose(candidates, schedule, step)
        margins += self._top_p_margins(logits)
        if self.options.guard_mask_token and candidates.are_masks(chosen, self.options.ids.mask):
            candidates = self._sample(logits, eligible, exclude_mask=True)
            chosen, margins = self._best(candidates, 1)
            if self.options.alg == "origin":
                chosen, margins = [0], []
        for i in chosen:
            self.row[eligible[i]] = candidates.tokens[i]
        self.trace.append(
            Step(
                index=len(self.trace),
                block=0,
                row=row_before,
                candidates=candidates,
                accepted=[eligible[i] for i in chosen],
                exact_scores=False,
                demotes=False,
                margins=margins,
            )
        )

    def _sample(
        self, logits: Tensor, eligible: list[int], exclude_mask: bool = False
    ) -> Candidates:
        """Return token and confidence of each masked position from its logits [R, V]."""
        options = self.options
        if not eligible:
            return Candidates([], [], [], [], [], 0.0)
        if options.temperature > 0:
            logits = logits / options.temperature
        filtered = filter_logits(logits, options.top_p, options.top_k)
        p = torch.softmax(filtered, dim=1)
        # At temperature 0 the tokens are compared as probabilities, as published, because two
        # logits may round to the same one. Gaps are given in logits.
        choice, gaps = p, filtered.double()
        if options.temperature > 0:
            if options.uniform_tokens is None:
                raise ValueError("uniform_tokens: needed at a temperature above 0, got None")
            positions = self._canvas(eligible)
            uniform = options.uniform_tokens(len(self.trace), positions, range(p.shape[1]))
            choice = gaps = p.double().log() - (-uniform.double().log()).log()
        if exclude_mask:
            choice, gaps = choice.clone(), gaps.clone()
            choice[:, options.ids.mask] = gaps[:, options.ids.mask] = float("-inf")
        tokens = choice.argmax(dim=1)
        top_two = gaps.topk(2, dim=1).values
        scores = p.gather(1, tokens[:, None])[:, 0]
        if options.alg == "topk_margin":
            best = p.sort(dim=1, descending=True).values
            scores = best[:, 0] - best[:, 1]
        elif options.alg == "entropy":
            scores = (p * (p + 1e-10).log()).sum(dim=1)
        return Candidates(
            positions=eligible,
            tokens=tokens.tolist(),
            plain_tokens=p.argmax(dim=1).tolist(),
            scores=scores.tolist(),
            token_gaps=(top_two[:, 0] - top_two[:, 1]).tolist(),
            logit_scale=float(logits.abs().max()),
        )

    def _top_p_margins(self, logits: Tensor) -> list[Margin]:
        """Return the margins between a sum of probabilities and top_p, at any position."""
        top_p = self.options.top_p
        if top_p is None or top_p >= 1:
            return []
        p = torch.softmax(logits / (self.options.temperature or 1.0), dim=1)
        sums = p.sort(dim=1, descending=True).values.cumsum(dim=1)
        gaps = (sums - top_p).abs().min(dim=1).values.tolist()
        return [Margin("threshold", i, gap, SUM_SCALE) for i, gap in enumerate(gaps)]

    def _choose(
        self, candidates: Candidates, schedule: Tensor, step: int
    ) -> tuple[list[int], list[Margin]]:
        options = self.options
        num_masked = len(candidates.positions)
        if options.alg == "origin":
            return self._choose_by_chance(candidates, float(commit_share(schedule, step)))
        count = num_commits(num_masked, schedule, step)
        if not options.alg_temp:
            return self._best(candidates, count)
        if count == 0:
            return [], []
        if options.uniform_choices is None:
            raise ValueError("uniform_choices: needed with alg_temp, got None")
        uniform = options.uniform_choices(len(self.trace), self._canvas(candidates.positions))
        scores = torch.tensor(candidates.scores, dtype=torch.float64) / options.alg_temp
        keys = torch.log_softmax(scores, dim=0) - (-uniform.double().log()).log()
        return self._best(replace(candidates, scores=keys.tolist()), count)

    def _choose_by_chance(
        self, candidates: Candidates, share: float
    ) -> tuple[list[int], list[Margin]]:
        if self.options.uniform_commits is None:
            raise ValueError("uniform_commits: needed for alg origin, got None")
        positions = candidates.positions
        uniform = self.options.uniform_commits(len(self.trace), self._canvas(positions)).tolist()
        chosen = [i for i in range(len(positions)) if uniform[i] < share]
        return chosen, [m for m in threshold_margins(uniform, share) if share < 1]

    def _best(self, candidates: Candidates, count: int) -> tuple[list[int], list[Margin]]:
        order = best_first(candidates.scores)
        margins = []
        if 0 < count < len(order):
            last, first = order[count - 1], order[count]
            # If top_p or top_k left one token, scores are exactly equal, and no rounding decides.
            if min(candidates.token_gaps[last], candidates.token_gaps[first]) < FILTERED_GAP:
                margins.append(order_margin(candidates.scores, last, first))
        return order[:count], margins

    def _canvas(self, positions: Iterable[int]) -> list[int]:
        return [p - self.prompt_len for p in positions]
