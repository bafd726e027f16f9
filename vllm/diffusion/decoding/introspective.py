# SPDX-License-Identifier: Apache-2.0
"""Introspective strided decoding (I-DLM, 2026), for families whose forward passes are all causal.

A forward pass verifies drafts and makes the next ones:

```
positions    t        t+1 ... t+N-1       t+N ... t+2N-2
rows         latest   drafts              masks
predict      t+1      t+2 ... t+N         t+N+1 ... t+2N-1
             verify the drafts, and the   the next drafts, if
             token after them             all drafts are right
```

N is the stride. Rows of masks come after all other rows and are not seen by them, so the verifying
rows compute what they would compute without drafts.

`coupled`: random numbers depend on the position alone. A draft is right if it is the token that its
verifying row draws, so the answer is that of one token per forward pass with the same seed.

`ratio` (speculative sampling; Leviathan et al. 2023, arXiv:2211.17192): a draft is drawn from the
distribution q of its row. It is right with probability min(1, p / q), where p is that of its
verifying row; a wrong one is replaced by a token drawn from max(0, p - q). Tokens then have the
distribution of one token per forward pass, and more drafts are right at high temperatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import CATEGORICAL, COMMIT
from vllm.diffusion.decoding.base import Array, Candidates, Commit, ForwardTarget
from vllm.diffusion.decoding.filters import filtered
from vllm.diffusion.decoding.self_speculation import SelfSpeculation

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams


class Introspective(SelfSpeculation):
    """Commits the drafts before the first wrong one and the token after them, and drafts again.

    The first forward pass computes the prompt and predicts the first token. Without drafts, which
    is the case after it and after a wrong draft, a pass has the latest token and masks only.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        assert params.stride is not None
        self._stride = params.stride
        self._drafts: Array = np.empty(0, dtype=np.int64)  # drafts after the latest token
        counts = dict.fromkeys(("drafts_tried", "drafts_held", "cold_forwards"), 0)
        self.report = {**self.report, **counts}
        # At temperature 0 both kinds of acceptance are the same.
        self.adjusts_logits = params.keeps_distributions
        self._num_forwards = 0
        # Drafts before the first wrong one in the latest forward; None if all were right.
        self.num_right: int | None = None
        # Distributions [V] of the drafts, and of the drafts that this forward makes, by position.
        self._distributions: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        if not self._drafts.size:
            self._pass_known(tokens)
        start = self._next
        if start >= self._end:
            return None
        if start > self.prompt_length:
            predicted = self._predicted(tokens, self._stride - 1)
            if predicted.size:
                return self._with_predicted(predicted)
        stop = start + (1 if start == self.prompt_length else self._drafts.size + self._stride)
        first = 0 if start == self.prompt_length else start - 1
        rows, tail_start = (first, stop - 1), start + self._drafts.size
        return ForwardTarget(np.arange(start, stop), rows, is_causal=True, tail_start=tail_start)

    def _with_predicted(self, predicted: Array) -> ForwardTarget:
        """Return the target of a forward whose drafts are predicted, with masks after them."""
        start, tail_start = self._next, self._next + predicted.size
        stop = tail_start + self._stride
        # They replace the drafts of the previous forward, which may be more.
        more = max(self._drafts.size - predicted.size, 0)
        written = np.pad(self.resume(predicted), (0, more), constant_values=self.params.mask_id)
        return ForwardTarget(
            np.arange(start, stop),
            (start - 1, stop - 1),
            fill=(start, written),
            fill_end=start + written.size,
            is_causal=True,
            tail_start=tail_start,
        )

    def branches(self, target: ForwardTarget) -> list[ForwardTarget]:
        """Return the targets of rows that draft after the first 0, 1, ... drafts of a forward.

        `target` is that of the forward. Its own masks draft after all drafts.
        """
        if not target.eligible.size:
            return []
        first, targets = self._next, list[ForwardTarget]()
        for place in range(first, first + self._drafts.size):
            stop = place + self._stride
            rows = first - 1, stop - 1
            eligible = np.arange(place + 1, stop)
            targets.append(ForwardTarget(eligible, rows, is_causal=True, tail_start=place))
        return targets

    def resume(self, drafts: Array) -> Array:
        """Set the drafts after the latest token, and return them."""
        self._drafts = drafts
        self.num_unconfirmed = min(drafts.size, max(self._end - self._next, 0))
        return drafts

    def decide(self, candidates: Candidates) -> Commit:
        self.forbade_mask = True
        drafts, tokens = self._drafts, candidates.tokens
        differ = (drafts != tokens[: drafts.size]).nonzero()[0]
        count = int(differ[0]) + 1 if differ.size else drafts.size + 1
        self.num_right = count - 1 if differ.size else None
        is_cold = not drafts.size and self._next > self.prompt_length
        self._count_predicted(drafts.size, count - 1)
        new = {"drafts_tried": drafts.size, "drafts_held": count - 1, "cold_forwards": is_cold}
        self.report = {name: number + new.get(name, 0) for name, number in self.report.items()}
        if differ.size:  # the drafts after a wrong one become masks again
            tokens = np.where(np.arange(drafts.size) < count, tokens[: drafts.size], self._mask)
        self._drafts = tokens[:0] if differ.size else tokens[count:].copy()
        kept = range(self._next + count, self._next + count + self._drafts.size)
        self._distributions = {p: q for p, q in self._made.items() if p in kept}
        self._made, self._num_forwards = {}, self._num_forwards + 1
        self._next += count
        self.resume(self._drafts)
        return Commit(candidates.positions[: tokens.size], tokens)

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw the tokens of `ratio`; return logits that leave only these tokens."""
        places = [self.prompt_length + p for p in positions.tolist()]
        p = self._distribution(logits)
        accepted = self._uniform(COMMIT, positions, 1)[:, 0]
        for row, place in enumerate(places):
            if place > self._next + self._drafts.size:
                self._made[place] = p[row].clone()
            elif place in self._distributions:
                q, draft = self._distributions[place], int(self._drafts[place - self._next])
                rest = (p[row] - q).clamp(min=0)
                is_right = accepted[row] * q[draft] < p[row, draft]
                only = torch.zeros_like(rest)
                only[draft] = 1
                p[row] = torch.where(is_right, only, rest)
        # One row at a time, because these numbers have 8 bytes.
        drawn = [self._drawn(row, positions[i : i + 1]) for i, row in enumerate(p)]
        return logits.fill_(-torch.inf).scatter_(1, torch.stack(drawn)[:, None], 0.0)

    def _drawn(self, p: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Draw the token of a position [1] from weights [V] fp32."""
        noise = -torch.log(-torch.log(self._uniform(CATEGORICAL, position, len(p))[0]))
        return (p.double().log() + noise).argmax()

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [R, V] fp32 with which tokens are drawn."""
        params = self.params
        scaled = logits.float() / params.temperature
        for token in (*params.never_ids, params.mask_id):
            scaled[:, token] = -torch.inf
        return torch.softmax(filtered(scaled, params), dim=-1)

    def _uniform(self, purpose: int, positions: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Return uniform numbers [R, columns] of this forward."""
        seed, columns = self.params.seed, range(num_columns)
        assert seed is not None  # the engine draws one
        return ops.philox_uniform(seed, purpose, self._num_forwards, positions, columns)
