# SPDX-License-Identifier: Apache-2.0
"""The decoding loops of block-causal families, one sequence at a time, written plainly.

Sources: the public `generate` of LLaDA2.0 and LLaDA2.1, the evaluation code of SDAR and its
JetEngine, `generate` of Fast-dLLM v2. Every forward pass computes the sequence from its start to
the end of the active block, without a cache. There is one function per family:

- `llada2`: all candidates above the threshold if they are at least the quota, or else the best.
- `llada21`: the same with at least `num_to_transfer`, and committed tokens may be replaced.
- `sdar`: four rules by name, and confidences before top-k and top-p.
- `fast_dllm_v2`: parts of a block, which begins with a token that the previous row predicts.

All return the answer up to and including its first stop token. Deviations from the sources: any
`gen_length` is allowed, ties go to the lowest position, a stop token only counts after the prompt,
and no forward pass stores keys and values. A loop without end, in which the model proposes the mask
token and no rule forbids it, raises `NoEnd`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LogitsOf = Callable[[Sequence[int]], Tensor]  # tokens of positions 0..T-1 -> logits [T, V]
Uniform = Callable[[int, int], Tensor]  # forward pass from 0, canvas position -> [V] in (0, 1)


class NoEnd(Exception):
    """The loop would never end, or gives up with masked positions."""


@dataclass
class Decoded:
    """The answer, the number of forward passes, and the canvas after each of them."""

    answer: list[int]
    forwards: int
    history: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Draw:
    """Draws a token: temperature, then top-k, then top-p. Temperature 0 takes the most likely."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    scores_all: bool = False  # whether the confidence is that before top-k and top-p
    uniform: Uniform | None = None
    never: tuple[int, ...] = ()  # tokens that are not drawn, but keep their probability

    def __call__(self, logits: Tensor, forward: int, position: int) -> tuple[int, float, Tensor]:
        """Return token, confidence and distribution of one row of logits [V]."""
        if self.temperature == 0:
            p = torch.softmax(logits, dim=-1)
            token = int(self._allowed(p).argmax())
            return token, float(p[token]), p
        scaled = logits / self.temperature
        everything = torch.softmax(scaled, dim=-1)
        if self.top_k is not None:
            least = scaled.sort(descending=True).values[min(self.top_k, len(scaled)) - 1]
            scaled = torch.where(scaled < least, -torch.inf, scaled)
        if self.top_p is not None:
            ordered, columns = scaled.sort(descending=True, stable=True)
            before = torch.softmax(ordered, dim=-1).cumsum(dim=-1).roll(1)
            before[0] = 0
            scaled = scaled.clone()
            scaled[columns[before > self.top_p]] = -torch.inf
        kept = torch.softmax(scaled, dim=-1)
        token = int(self._allowed(kept).argmax())
        if self.uniform is not None:
            noise = -torch.log(-torch.log(self.uniform(forward, position)))
            token = int((self._allowed(kept).double().log() + noise).argmax())
        scored = everything if self.scores_all else kept
        return token, float(scored[token]), scored

    def _allowed(self, p: Tensor) -> Tensor:
        """Return probabilities [V] with those of `never` set to 0."""
        if not self.never:
            return p
        allowed = p.clone()
        allowed[list(self.never)] = 0
        return allowed


class _Row:
    """Prompt and masks up to the end of a block, and the number of forward passes so far."""

    def __init__(
        self,
        logits_of: LogitsOf,
        prompt: Sequence[int],
        gen_length: int,
        block_length: int,
        mask_id: int,
        stop_ids: Collection[int],
        draw: Draw,
    ) -> None:
        self.logits_of, self.draw = logits_of, draw
        self.mask_id, self.stop_ids = mask_id, frozenset(stop_ids)
        self.first, self.end = len(prompt), len(prompt) + gen_length
        self.block_length = block_length
        total = -(-self.end // block_length) * block_length
        self.tokens = [*prompt, *[mask_id] * (total - self.first)]
        self.forwards = 0
        self.history: list[list[int]] = []

    @property
    def block_starts(self) -> range:
        start = self.first // self.block_length * self.block_length
        return range(start, len(self.tokens), self.block_length)

    def masked(self, start: int, end: int) -> list[int]:
        return [p for p in range(start, end) if self.tokens[p] == self.mask_id]

    def forward(self, end: int) -> Tensor:
        """Compute the logits [end, V] of all positions before `end`."""
        logits = self.logits_of(self.tokens[:end])
        self.forwards += 1
        return logits

    def proposals(
        self, logits: Tensor, positions: Sequence[int], shift: int = 0
    ) -> dict[int, tuple[int, float, Tensor]]:
        """Return token, confidence and distribution by position, from the last forward pass."""
        return {
            p: self.draw(logits[max(p - shift, 0)], self.forwards - 1, p - self.first)
            for p in positions
        }

    def write(self, tokens: dict[int, int]) -> None:
        for position, token in tokens.items():
            self.tokens[position] = token
        self.history.append(self.tokens[self.first : self.end])

    def has_stop(self, end: int) -> bool:
        return any(token in self.stop_ids for token in self.tokens[self.first : end])

    def result(self) -> Decoded:
        answer = self.tokens[self.first : self.end]
        stops = [i for i, token in enumerate(answer) if token in self.stop_ids]
        answer = answer[: stops[0] + 1] if stops else answer
        if self.mask_id in answer:
            raise NoEnd
        return Decoded(answer, self.forwards, self.history)


def quotas(block_length: int, steps: int) -> list[int]:
    """Return the number of commits of every step of a block; they sum up to its length."""
    return [block_length // steps + (i < block_length % steps) for i in range(steps)]


def most_confident(confidence: dict[int, float], count: int) -> list[int]:
    return sorted(confidence, key=lambda p: (-confidence[p], p))[:count]


def by_threshold_or_quota(
    confidence: dict[int, float], threshold: float, quota: int
) -> Collection[int]:
    high = [p for p, c in confidence.items() if c > threshold]
    return high if len(high) >= quota else most_confident(confidence, quota)


def llada2(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 32,
    steps: int = 32,
    threshold: float = 0.95,
    stop_ids: Collection[int] = (),
    draw: Draw = Draw(),
) -> Decoded:
    """Run LLaDA2.0; `steps` are the steps of a block, at most `gen_length`."""
    row = _Row(logits_of, prompt, gen_length, block_length, mask_id, stop_ids, draw)
    schedule = quotas(block_length, min(steps, gen_length))
    for start in row.block_starts:
        end = start + block_length
        for quota in schedule:
            masked = row.masked(start, end)
            if not masked:
                break
            proposals = row.proposals(row.forward(end), masked)
            confidence = {p: c for p, (_, c, _) in proposals.items()}
            chosen = by_threshold_or_quota(confidence, threshold, quota)
            row.write({p: proposals[p][0] for p in chosen})
        if row.has_stop(end):
            break
    return row.result()


def llada21(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 32,
    threshold: float = 0.95,
    editing_threshold: float = 0.9,
    max_post_steps: int = 16,
    num_to_transfer: int = 1,
    penalty_lambda: float = 0.0,
    stop_ids: Collection[int] = (),
    draw: Draw = Draw(),
    most_forwards: int = 10_000,
) -> Decoded:
    """Run LLaDA2.1, with SGLang's penalty on the token that precedes a position of the block."""
    row = _Row(logits_of, prompt, gen_length, block_length, mask_id, stop_ids, draw)
    for start in row.block_starts:
        end, post = start + block_length, 0
        while True:
            masked = row.masked(start, end)
            if not masked:
                post += 1
                if post > max_post_steps:
                    break
            if row.forwards == most_forwards:
                raise NoEnd
            logits = row.forward(end).clone()
            for p in range(start + 1, end):
                logits[p, row.tokens[p - 1]] -= penalty_lambda
            editable = [p for p in range(max(start, row.first), end) if p not in masked]
            proposals = row.proposals(logits, [*masked, *editable])
            chosen = by_threshold_or_quota(
                {p: proposals[p][1] for p in masked}, threshold, num_to_transfer
            )
            edited = [
                p
                for p in editable
                if proposals[p][0] != row.tokens[p] and proposals[p][1] > editing_threshold
            ]
            row.write({p: proposals[p][0] for p in [*chosen, *edited]})
            if not masked and not edited:
                break
        if row.has_stop(end):
            break
    return row.result()


def sdar(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    remasking: str,
    block_length: int = 4,
    steps: int = 4,
    threshold: float = 0.85,
    stop_ids: Collection[int] = (),
    draw: Draw = Draw(scores_all=True),
) -> Decoded:
    """Run SDAR; `remasking` is dynamic, static, sequential, or entropy_bounded by the threshold."""
    row = _Row(logits_of, prompt, gen_length, block_length, mask_id, stop_ids, draw)
    for start in row.block_starts:
        end = start + block_length
        schedule = iter(quotas(block_length, steps))
        while masked := row.masked(start, end):
            proposals = row.proposals(row.forward(end), masked)
            confidence = {p: c for p, (_, c, _) in proposals.items()}
            chosen: Collection[int]
            if remasking == "entropy_bounded":
                chosen = within_entropy({p: d for p, (_, _, d) in proposals.items()}, threshold)
            else:
                quota = next(schedule, None)
                if quota is None:
                    raise NoEnd
                chosen = {
                    "dynamic": by_threshold_or_quota(confidence, threshold, quota),
                    "static": most_confident(confidence, quota),
                    "sequential": masked[:quota],
                }[remasking]
            row.write({p: proposals[p][0] for p in chosen})
            if all(row.tokens[p] == mask_id for p in masked) and remasking == "entropy_bounded":
                raise NoEnd
        if row.has_stop(end):
            break
    return row.result()


def stable_diffcoder(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 4,
    steps: int | None = None,
    threshold: float | None = None,
    stop_ids: Collection[int] = (),
    draw: Draw = Draw(),
) -> Decoded:
    """Run Stable-DiffCoder: commit the best and all above the threshold, or a share of masks."""

    def logits(tokens: Sequence[int]) -> Tensor:
        return logits_of(tokens).double()

    row = _Row(logits, prompt, gen_length, block_length, mask_id, stop_ids, draw)
    for start in row.block_starts:
        end = start + block_length
        schedule = iter(quotas(len(row.masked(start, end)), steps or block_length))
        while masked := row.masked(start, end):
            proposals = row.proposals(row.forward(end), masked)
            confidence = {p: c for p, (_, c, _) in proposals.items()}
            if threshold is None:
                chosen = set(most_confident(confidence, next(schedule)))
            else:
                chosen = {p for p, c in confidence.items() if c >= threshold}
                chosen |= set(most_confident(confidence, 1))
            row.write({p: proposals[p][0] for p in chosen})
            if all(row.tokens[p] == mask_id for p in masked):
                raise NoEnd
        if row.has_stop(end):
            break
    return row.result()


def without(logits_of: LogitsOf, tokens: Collection[int]) -> LogitsOf:
    """Return the same logits, but with tokens that are never proposed."""

    def logits(ids: Sequence[int]) -> Tensor:
        masked = logits_of(ids).clone()
        masked[:, list(tokens)] = -torch.inf
        return masked

    return logits


def _ranked(logits: Tensor, own: range) -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the tokens of each position, likeliest first, and the probability of the likeliest."""
    p_of = torch.softmax(logits, dim=-1)
    ranked = {p: logits[p].sort(descending=True, stable=True).indices.tolist() for p in own}
    return ranked, {p: float(p_of[p, ranked[p][0]]) for p in own}


def _leave_loop(
    written: dict[int, int],
    tokens: Sequence[int],
    conf: dict[int, float],
    ranked: dict[int, list[int]],
    seen: list[list[int]],
) -> None:
    """Change the least certain changed token until the block differs from all earlier ones."""
    for _ in range(5):
        changed = [p for p in written if written[p] != tokens[p]]
        if not changed or list(written.values()) not in seen:
            return
        weak = min(changed, key=lambda p: (conf[p], p))
        written[weak] = next(x for x in ranked[weak] if x != written[weak])


def _scanned(
    written: dict[int, int],
    tokens: Sequence[int],
    marks: dict[int, bool],
    edit_ids: tuple[int, int],
    mask_id: int,
) -> list[tuple[int, bool]]:
    """Delete and insert as the `written` tokens of a block say; return tokens with their marks."""
    delete, split = edit_ids
    scanned: list[tuple[int, bool]] = []
    for p, token in written.items():
        if token == split:
            scanned += [(mask_id, False), (tokens[p], marks[p])]
        elif token != delete:
            scanned.append((token, marks[p]))
    return [*scanned, *[(mask_id, False)] * len(written)][: len(written)]


def llada22(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    edit_ids: tuple[int, int],
    block_length: int = 32,
    steps: int = 32,
    threshold: float = 0.5,
    editing_threshold: float = 0.0,
    max_post_steps: int = 16,
    stop_ids: Collection[int] = (),
    draw: Draw = Draw(),
) -> Decoded:
    """Run LLaDA2.2 at temperature 0 without proposals of the mask, and leave loops as FluxServe."""
    allowed = without(logits_of, [mask_id])
    row = _Row(allowed, prompt, gen_length, block_length, mask_id, stop_ids, draw)
    for start in row.block_starts:
        end = start + block_length
        own = range(max(start, row.first), end)
        marks = {p: row.tokens[p] == mask_id for p in own}
        schedule, seen, post, t = quotas(sum(marks.values()), steps), [], 0, 0
        while t < 1000:
            masks = [p for p in own if row.tokens[p] == mask_id]
            original = [p for p in masks if marks[p]]
            post = 0 if original else post + 1
            if not masks and post > max_post_steps:
                break
            logits = row.forward(end)
            ranked, conf = _ranked(logits, own)
            fills: Collection[int] = masks
            if t < steps:
                need = schedule[t] + len(masks) - len(original)
                fills = by_threshold_or_quota({p: conf[p] for p in masks}, threshold, need)
            others = [p for p in own if p not in masks and ranked[p][0] != row.tokens[p]]
            edits = [p for p in others if conf[p] > editing_threshold]
            is_last = post >= max_post_steps
            if max_post_steps == 0:
                is_last = bool(original) and set(original) <= set(fills)
            is_last = is_last or t == 999
            fills = masks if is_last else fills
            not_proposed = edit_ids if is_last else ()
            written = {p: row.tokens[p] for p in own}
            written |= {
                p: next(x for x in ranked[p] if x not in not_proposed) for p in [*fills, *edits]
            }
            if not is_last:
                _leave_loop(written, row.tokens, conf, ranked, seen)
            seen.append(list(written.values()))
            scanned = _scanned(written, row.tokens, marks, edit_ids, mask_id)
            is_stable = [token for token, _ in scanned] == row.tokens[own.start : end]
            marks = {p: mark for p, (_, mark) in zip(own, scanned, strict=True)}
            row.write({p: token for p, (token, _) in zip(own, scanned, strict=True)})
            t += 1
            if is_stable and mask_id not in row.tokens[own.start : end]:
                break
        if row.has_stop(end):
            break
    return row.result()


def within_entropy(distributions: dict[int, Tensor], bound: float) -> list[int]:
    """Return the lowest entropies whose running sum is below the bound, but at least one."""
    entropy = {p: float(-(d * torch.log(d + 1e-12)).sum()) for p, d in distributions.items()}
    order = sorted(entropy, key=lambda p: (entropy[p], p))
    sums = torch.tensor([entropy[p] for p in order]).cumsum(dim=0)
    return order[: max(1, int((sums < bound).sum()))]


def fast_dllm_v2(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    gen_length: int,
    mask_id: int,
    block_length: int = 32,
    sub_block_length: int = 8,
    threshold: float = 1.0,
    stop_ids: Collection[int] = (),
    draw: Draw = Draw(),
) -> Decoded:
    """Run Fast-dLLM v2, in which the row before a position predicts it."""
    row = _Row(logits_of, prompt, gen_length, block_length, mask_id, stop_ids, draw)
    for start in row.block_starts:
        end = start + block_length
        if row.has_stop(start):
            break
        if start >= row.first:  # the finished blocks predict its first token
            logits = row.forward(start)
            row.write({start: int(logits[-1].argmax())})
            if row.tokens[start] in row.stop_ids:
                break
        for part in range(start, end, sub_block_length):
            while masked := row.masked(part, part + sub_block_length):
                if _stops_before(row, row.masked(start, end)[0]):
                    return row.result()
                proposals = row.proposals(row.forward(end), masked, shift=1)
                confidence = {p: c for p, (_, c, _) in proposals.items()}
                chosen = {p for p, c in confidence.items() if c > threshold}
                chosen |= set(most_confident(confidence, 1))
                row.write({p: proposals[p][0] for p in chosen})
                if all(row.tokens[p] == mask_id for p in masked):
                    raise NoEnd
    return row.result()


def _stops_before(row: _Row, masked: int) -> bool:
    """Return whether a stop token has no masked position before it."""
    return row.has_stop(masked)


def run(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    *,
    algorithm: str,
    gen_length: int,
    block_length: int,
    mask_id: int,
    stop_ids: Collection[int] = (),
    steps_per_block: int | None = None,
    scores_after_filters: bool = False,
    counts_masks: bool = False,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    uniform: Uniform | None = None,
    **parameters: float,
) -> Decoded:
    """Run the loop of a request's parameters, which have their own names.

    `steps_per_block` applies to algorithms with a number of steps; the default is one step per
    position. `parameters` are parameters that only some algorithms have.
    """
    options = {
        **parameters,
        "gen_length": gen_length,
        "block_length": block_length,
        "mask_id": mask_id,
        "stop_ids": stop_ids,
        "draw": Draw(temperature, top_k, top_p, not scores_after_filters, uniform),
    }
    loops: dict[str, tuple[Callable[..., Decoded], dict[str, str]]] = {
        "low_confidence_dynamic": (llada2, {}),
        "semi_ar": (sdar, {"remasking": "static"}),
        "sequential": (sdar, {"remasking": "sequential"}),
        "entropy_bounded": (sdar, {"remasking": "entropy_bounded"}),
        "joint_threshold": (llada21, {}),
        "hierarchy_block": (fast_dllm_v2, {}),
    }
    if counts_masks:
        loops |= {name: (stable_diffcoder, {}) for name in ("low_confidence_dynamic", "semi_ar")}
    loop, own = loops[algorithm]
    if algorithm in ("low_confidence_dynamic", "semi_ar", "sequential"):
        own = {**own, "steps": steps_per_block or block_length}  # type: ignore[dict-item]
    return loop(logits_of, prompt, **options, **own)
