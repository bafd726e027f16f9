# SPDX-License-Identifier: Apache-2.0
"""The decoding loops of LLaDA, one sequence at a time, written plainly.

Sources: `semi_ar` is the generate loop of the public LLaDA repository (arXiv:2502.09992);
`threshold` is the no-cache loop of Fast-dLLM (arXiv:2505.22618), which accepts every candidate
above a confidence threshold, or runs the same quotas without idle steps.

A row is the prompt (P tokens) followed by the canvas (N mask ids); V is the number of logit
columns. Deviation from both sources: the lowest position wins a tie, which the sources leave to
their sorting routine. Random numbers come from callbacks, so that tests can supply any stream.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from reference.models import shift_right

MINUS_INF = float("-inf")


class LogitModel(Protocol):
    """A model with logits(ids int64 [B, T]) -> [B, T, V], as the head computes them.

    With an attribute logit_shift of 1, logits at position i predict the token at i + 1, and the
    loops read the logits of the previous position. Without the attribute there is no shift.
    """

    def logits(self, ids: Tensor) -> Tensor: ...


class SpecialIds(NamedTuple):
    mask: int
    eos: int
    eot: int | None = None


# (step, canvas positions, columns) -> float64 [positions, columns], each in [0, 1)
UniformLogits = Callable[[int, Sequence[int], Sequence[int]], Tensor]
# (step, canvas positions) -> [positions], each in [0, 1)
UniformScores = Callable[[int, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Options:
    """Options that both loops have in common.

    The callbacks receive the number of earlier forward passes as `step`, and canvas positions (0 is
    the first generated token; a mask inside the prompt has a negative one). They are only called
    for eligible positions.

    confidence_dtype: "logits" (the model's), "float32" or "float64".

    guard_mask_token: off in the published loops. If a forward pass would change nothing because
    every accepted token is the mask itself, the best position is accepted with its best other token
    instead. Tokens are then chosen again without the mask column, scores are the probabilities of
    these tokens (the softmax still includes the mask column), and the highest score wins.
    """

    ids: SpecialIds
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    confidence_dtype: str = "float32"
    uniform_logits: UniformLogits | None = None
    uniform_scores: UniformScores | None = None
    guard_mask_token: bool = False


@dataclass(frozen=True)
class Candidates:
    """One proposal for every eligible position (row positions, ascending)."""

    positions: list[int]
    tokens: list[int]
    plain_tokens: list[int]  # chosen without noise
    scores: list[float]
    token_gaps: list[float]  # best minus second best, in (noised) logits
    logit_scale: float  # largest finite |logit|

    def are_masks(self, chosen: Sequence[int], mask: int) -> bool:
        """Return whether all chosen ones propose the mask token; False if none is chosen."""
        return bool(chosen) and all(self.tokens[i] == mask for i in chosen)


class Margin(NamedTuple):
    """The distance of a score from another decision."""

    kind: str  # "order" or "threshold"
    candidate: int  # index of the candidate
    gap: float
    scale: float  # magnitude of the compared scores


class Selection(NamedTuple):
    """Indices of the accepted candidates in order of acceptance, and the close decisions."""

    accepted: list[int]
    margins: list[Margin]
    plain: Collection[int] = ()  # candidates that commit the token chosen without noise


@dataclass(frozen=True)
class Score:
    """The score that ranks the candidates; the highest one is accepted first.

    confidence: probability of the token. entropy: sum p log(p + epsilon), the negative entropy.
    With random remasking, both are replaced by a random number: U, or -U for the entropy.
    """

    kind: str
    epsilon: float = 0.0


CONFIDENCE = Score("confidence")
Select = Callable[[Candidates], Selection]


class NearTie(NamedTuple):
    """A decision that a small difference of rounding could reverse."""

    step: int
    kind: str  # "token", "order" or "threshold"
    positions: list[int]
    gap: float


@dataclass(frozen=True)
class Step:
    """One forward pass. Positions are row positions."""

    index: int
    block: int
    row: tuple[int, ...]  # before the commit
    candidates: Candidates
    accepted: list[int]  # positions in order of acceptance, tokens may be the mask
    exact_scores: bool  # scores are injected random numbers, not computed confidences
    demotes: bool  # confidence_eos_eot_inf: tokens of rejected positions matter as well
    margins: list[Margin]

    @property
    def committed(self) -> dict[int, int]:
        token_of = dict(zip(self.candidates.positions, self.candidates.tokens, strict=True))
        return {position: token_of[position] for position in self.accepted}


class Decoded(NamedTuple):
    ids: list[int]  # the N ids of the canvas, with mask ids where decoding left them or stopped
    num_forwards: int  # a guided forward pass (two sequences) counts once
    trace: list[Step]


def num_transfer_tokens(num_masked: int, num_steps: int) -> list[int]:
    """Return the number of masks per step of a block: equal shares, one more in the first steps."""
    share, rest = divmod(num_masked, num_steps)
    return [share + 1 if step < rest else share for step in range(num_steps)]


def order_margin(scores: Sequence[float], last: int, first: int) -> Margin:
    """Return the margin of accepting `last` and rejecting `first`, whose score is not higher."""
    return Margin("order", last, scores[last] - scores[first], _scale(scores[last]))


def threshold_margins(
    scores: Sequence[float], limit: float, indices: Iterable[int] | None = None
) -> list[Margin]:
    """Return the margins of candidates (by default of all) that were compared with a limit."""
    indices = range(len(scores)) if indices is None else indices
    return [Margin("threshold", i, abs(scores[i] - limit), _scale(limit)) for i in indices]


def add_noise(logits: Tensor, temperature: float, uniform: Tensor | None) -> Tensor:
    """Add Gumbel-max noise exp(L) / (-log U)^temperature in float64; 0 leaves logits unchanged."""
    if temperature == 0:
        return logits
    if uniform is None:
        raise ValueError(f"uniform_logits: needed at temperature {temperature}, got None")
    noised: Tensor = logits.double().exp() / (-uniform.double().log()) ** temperature
    return noised


def aligned(model: LogitModel, raw: Tensor) -> Tensor:
    """Return logits [..., T, V] whose row i predicts token i; if shifted, row 0 is its own."""
    return shift_right(raw) if getattr(model, "logit_shift", 0) else raw


def guided_logits(model: LogitModel, row: Tensor, known: Tensor, options: Options) -> Tensor:
    """Return logits [T, V] of a row [T]; cfg_scale guides them by the row whose prompt is masked.

    known [T] marks the positions that were not masked before decoding began.
    """
    if options.cfg_scale == 0:
        return aligned(model, model.logits(row[None]))[0]
    unprompted = torch.where(known, options.ids.mask, row)
    conditional, unconditional = aligned(model, model.logits(torch.stack([row, unprompted])))
    guided: Tensor = unconditional + (options.cfg_scale + 1) * (conditional - unconditional)
    return guided


def select_quota(scores: Sequence[float], quota: int) -> list[int]:
    """Return the indices of the `quota` highest scores, best first; ties go to the lowest index."""
    return best_first(scores)[:quota]


def select_threshold(scores: Sequence[float], threshold: float) -> list[int]:
    """Return the best index and all others whose score is at least the threshold."""
    order = best_first(scores)
    return order[:1] + [i for i in order[1:] if scores[i] >= threshold]


def by_quota(quota: int) -> Select:
    """Return `select_quota` as a rule of a loop."""

    def select(candidates: Candidates) -> Selection:
        scores, order = candidates.scores, best_first(candidates.scores)
        margins = []
        if 0 < quota < len(order):
            last, first = order[quota - 1], order[quota]
            # Two scores of exactly 0 are demoted tokens, without rounding: the lowest position
            # wins.
            if scores[last] != 0 or scores[first] != 0:
                margins.append(order_margin(scores, last, first))
        return Selection(select_quota(scores, quota), margins)

    return select


def by_threshold(threshold: float) -> Select:
    """Return `select_threshold` as a rule of a loop."""

    def select(candidates: Candidates) -> Selection:
        scores, order = candidates.scores, best_first(candidates.scores)
        margins = threshold_margins(scores, threshold)
        if len(order) > 1 and scores[order[0]] < threshold:
            margins.append(order_margin(scores, order[0], order[1]))
        return Selection(select_threshold(scores, threshold), margins)

    return select


def semi_ar(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    skip_idle_steps: bool = False,
    early_stop_ids: Collection[int] = (),
    **options: Any,
) -> Decoded:
    """Run LLaDA's semi-autoregressive loop: fixed quotas, always steps / blocks forwards per block.

    skip_idle_steps omits forward passes with a quota of 0, which commit nothing. early_stop_ids
    ends decoding after a block without masks that contains one of them; later canvas positions stay
    masked. For other keywords see Options. Raises ValueError if the lengths do not divide.
    """
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    num_blocks, block_steps = split_steps(gen_length, block_length, steps)
    for block in range(num_blocks):
        start, end = loop.block_range(block, block_length)
        for quota in num_transfer_tokens(loop.num_masked(start, end), block_steps):
            if quota == 0 and skip_idle_steps:
                continue
            loop.forward(block, end, by_quota(quota))
        if loop.may_stop(end, early_stop_ids):
            break
    return loop.result()


def threshold(
    model: LogitModel,
    prompt_ids: Iterable[int],
    *,
    gen_length: int,
    block_length: int,
    threshold: float = 0.9,
    early_stop_ids: Collection[int] = (),
    **options: Any,
) -> Decoded:
    """Run Fast-dLLM's loop without cache: forward passes until the block has no masks.

    Every eligible candidate whose score reaches the threshold is accepted, and the best one always.
    Raises ValueError if the lengths do not divide, and RuntimeError if masks remain forever because
    the model predicts the mask (the published loop spins or fails there).
    """
    loop = Loop(model, prompt_ids, gen_length, Options(**options))
    num_blocks, _ = split_steps(gen_length, block_length, None)
    forward_limit = 4 * len(loop.row)
    for block in range(num_blocks):
        start, end = loop.block_range(block, block_length)
        while loop.num_masked(start, end) > 0:
            if len(loop.trace) >= forward_limit:
                raise RuntimeError(f"block {block}: masks remain, the model predicts the mask")
            loop.forward(block, end, by_threshold(threshold))
        if loop.may_stop(end, early_stop_ids):
            break
    return loop.result()


def best_first(scores: Sequence[float]) -> list[int]:
    """Return the indices by descending score; ties by ascending index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def truncate(
    ids: Sequence[int], stop_ids: Collection[int], mask_id: int | None = None
) -> tuple[list[int], str]:
    """Return the answer within a canvas, the ids before the first stop id, and the finish reason.

    The reason is "stop", or "length" without a stop id. Raises ValueError if a mask id precedes the
    first stop id, because that answer is not complete.
    """
    answer, reason = list(ids), "length"
    for i, token in enumerate(ids):
        if token in stop_ids:
            answer, reason = list(ids[:i]), "stop"
            break
    if mask_id in answer:
        raise ValueError(f"ids: mask id {mask_id} at {answer.index(mask_id)}, before any stop id")
    return answer, reason


def near_ties(trace: Iterable[Step], tolerance: float = 1e-4) -> list[NearTie]:
    """Return the decisions of a run whose margin is within a relative tolerance.

    token: best and second best logit of an accepted position (relative to the largest logit);
    order: last accepted and first rejected score; threshold: a score and the threshold.
    """
    ties = []
    for step in trace:
        ties += _near_token_ties(step, tolerance)
        if not step.exact_scores:
            ties += _near_score_ties(step, tolerance)
    return ties


class Loop:
    """The row that is decoded, and its history."""

    def __init__(
        self, model: LogitModel, prompt_ids: Iterable[int], gen_length: int, options: Options
    ) -> None:
        self.model = model
        self.options = options
        prompt = list(prompt_ids)
        self.prompt_len = len(prompt)
        self.row = torch.tensor(prompt + [options.ids.mask] * gen_length)
        self.known = self.row != options.ids.mask
        self.trace: list[Step] = []

    def block_range(self, block: int, block_length: int) -> tuple[int, int]:
        start = self.prompt_len + block * block_length
        return start, start + block_length

    def masked(self, start: int, end: int) -> list[int]:
        """Return the row positions in [start, end) that hold a mask."""
        row = self.row.tolist()
        return [p for p in range(start, end) if row[p] == self.options.ids.mask]

    def num_masked(self, start: int, end: int) -> int:
        return len(self.masked(start, end))

    def check_change(self) -> None:
        """Raise RuntimeError if the last forward pass changed nothing and no later one would.

        That happens if the model predicts the mask at all accepted positions. With random numbers
        the next forward pass may differ, so that a loop only ends after many forward passes.
        """
        before = self.trace[-1].row
        random = self.options.temperature > 0 or self.options.remasking == "random"
        changed = before != tuple(self.row.tolist())
        if not (changed or random) or len(self.trace) > 4 * len(self.row):
            block = self.trace[-1].block
            raise RuntimeError(f"block {block}: masks remain, the model predicts the mask")

    def may_stop(self, end: int, stop_ids: Collection[int]) -> bool:
        """Return whether all positions before `end` are decided, with a stop id in the canvas."""
        decided = self.row[self.prompt_len : end].tolist()
        return self.num_masked(0, end) == 0 and any(token in stop_ids for token in decided)

    def result(self) -> Decoded:
        return Decoded(self.row[self.prompt_len :].tolist(), len(self.trace), self.trace)

    def forward(self, block: int, end: int, select: Select) -> None:
        """Run one forward pass, which commits among all masks before `end`."""
        eligible = self.masked(0, end)
        logits = guided_logits(self.model, self.row, self.known, self.options)
        self.decide(block, logits, eligible, select)

    def decide(
        self,
        block: int,
        logits: Tensor,
        eligible: list[int],
        select: Select,
        *,
        score: Score = CONFIDENCE,
    ) -> Step:
        """Commit some of the eligible row positions, given the logits [T, V] of a forward pass."""
        row_before = tuple(self.row.tolist())
        candidates = self.propose(logits, eligible, score)
        chosen, margins, plain = select(candidates)
        for i in plain:
            candidates.tokens[i] = candidates.plain_tokens[i]
        if self.options.guard_mask_token and candidates.are_masks(chosen, self.options.ids.mask):
            candidates = self.propose(logits, eligible, score, exclude_mask=True)
            chosen, margins, _ = by_quota(1)(candidates)

        for i in chosen:
            self.row[candidates.positions[i]] = candidates.tokens[i]
        step = Step(
            index=len(self.trace),
            block=block,
            row=row_before,
            candidates=candidates,
            accepted=[candidates.positions[i] for i in chosen],
            exact_scores=self.options.remasking == "random",
            demotes=self.options.confidence_eos_eot_inf,
            margins=margins,
        )
        self.trace.append(step)
        return step

    def propose(
        self, logits: Tensor, eligible: list[int], score: Score, exclude_mask: bool = False
    ) -> Candidates:
        """Return token and score of each eligible row position from the logits [T, V]."""
        options, step = self.options, len(self.trace)
        canvas_positions = [p - self.prompt_len for p in eligible]
        if not eligible:
            return Candidates([], [], [], [], [], 0.0)
        logits = logits[eligible].clone()
        if options.logits_eos_inf:
            logits[:, options.ids.eos] = MINUS_INF

        uniform = None
        if options.temperature > 0 and options.uniform_logits is not None:
            columns = range(logits.shape[1])
            uniform = options.uniform_logits(step, canvas_positions, columns)
        noised = add_noise(logits, options.temperature, uniform)
        choice = noised
        if exclude_mask:
            choice = noised.clone()
            choice[:, options.ids.mask] = MINUS_INF
        tokens = choice.argmax(dim=1)
        plain_tokens = logits.argmax(dim=1).tolist()
        # The log domain is entered before the next lines write into the same storage.
        top_two = choice.double().topk(2, dim=1).values
        if options.temperature > 0:
            top_two = top_two.log()
        finite = logits[logits.isfinite()]

        if options.confidence_eos_eot_inf:
            # As published: at temperature 0 `noised` IS `logits`, so both columns disappear from
            # the softmax. With noise it is another tensor, and only EoT disappears.
            noised[:, options.ids.eos] = MINUS_INF
            logits[:, options.ids.eot] = MINUS_INF
        return Candidates(
            positions=eligible,
            tokens=tokens.tolist(),
            plain_tokens=plain_tokens,
            scores=self._scores(logits, tokens, canvas_positions, score),
            token_gaps=(top_two[:, 0] - top_two[:, 1]).tolist(),
            logit_scale=float(finite.abs().max()) if finite.numel() else 0.0,
        )

    def _scores(
        self, logits: Tensor, tokens: Tensor, canvas_positions: list[int], score: Score
    ) -> list[float]:
        """Return the noise-free score of each token, or the injected random number."""
        options = self.options
        sign = -1 if score.kind == "entropy" else 1
        if options.remasking == "random":
            if options.uniform_scores is None:
                raise ValueError("uniform_scores: needed for remasking random, got None")
            return [
                sign * number
                for number in options.uniform_scores(len(self.trace), canvas_positions).tolist()
            ]
        dtypes = {"logits": logits.dtype, "float32": torch.float32, "float64": torch.float64}
        p = torch.softmax(logits.to(dtypes[options.confidence_dtype]), dim=1)
        if score.kind == "entropy":
            scores = (p * (p + score.epsilon).log()).sum(dim=1)
        else:
            scores = p.gather(1, tokens[:, None])[:, 0]
        values: list[float] = scores.tolist()
        return values


def _scale(value: float) -> float:
    """Return the scale of a gap; near 0, the rounding of logits does not decrease any further."""
    return max(abs(value), 0.05)


def split_steps(gen_length: int, block_length: int, steps: int | None) -> tuple[int, int]:
    """Return the number of blocks and of steps per block; the default is one step per token."""
    if block_length < 1 or gen_length < 1 or gen_length % block_length != 0:
        raise ValueError(
            f"block_length: wanted a divisor of gen_length {gen_length}, got {block_length}"
        )
    num_blocks = gen_length // block_length
    if steps is None:
        steps = gen_length
    if steps < 1 or steps % num_blocks != 0:
        raise ValueError(f"steps: wanted a multiple of {num_blocks} blocks, got {steps}")
    return num_blocks, steps // num_blocks


def _near_token_ties(step: Step, tolerance: float) -> list[NearTie]:
    limit = tolerance * max(1.0, step.candidates.logit_scale)
    gaps = dict(zip(step.candidates.positions, step.candidates.token_gaps, strict=True))
    return [
        NearTie(step.index, "token", [position], gap)
        for position, gap in gaps.items()
        if gap <= limit and (step.demotes or position in step.accepted)
    ]


def _near_score_ties(step: Step, tolerance: float) -> list[NearTie]:
    return [
        NearTie(step.index, margin.kind, [step.candidates.positions[margin.candidate]], margin.gap)
        for margin in step.margins
        if margin.gap <= tolerance * margin.scale
    ]
