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
rows compute what they would compute without drafts. Random numbers depend on the position alone. A
draft is right if it is the token that its verifying row draws, so the answer is that of one token
per forward pass with the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.base import Array, Candidates, Commit, DraftCounts, ForwardTarget
from vllm.diffusion.decoding.self_speculation import SelfSpeculation

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams


class Introspective(SelfSpeculation):
    """Commits the drafts before the first wrong one and the token after them, and drafts again.

    The first forward pass computes the prompt and predicts the first token. Without drafts, which
    is the case after it and after a wrong draft, a pass has the latest token and masks only.
    """

    draft_counts: DraftCounts

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        assert params.stride is not None
        self._stride = params.stride
        self._drafts: Array = np.empty(0, dtype=np.int64)  # drafts after the latest token
        self.draft_counts = DraftCounts()

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        if not self._drafts.size:
            self._pass_known(tokens)
        start = self._next
        if start >= self._end:
            return None
        stop = start + (1 if start == self.prompt_length else self._drafts.size + self._stride)
        first = 0 if start == self.prompt_length else start - 1
        return ForwardTarget(np.arange(start, stop), (first, stop - 1), is_causal=True)

    def decide(self, candidates: Candidates) -> Commit:
        self.forbade_mask = True
        drafts, tokens = self._drafts, candidates.tokens
        differ = (drafts != tokens[: drafts.size]).nonzero()[0]
        count = int(differ[0]) + 1 if differ.size else drafts.size + 1
        tried, held, cold = self.draft_counts
        is_cold = not drafts.size and self._next > self.prompt_length
        self.draft_counts = DraftCounts(tried + drafts.size, held + count - 1, cold + is_cold)
        if differ.size:  # the drafts after a wrong one become masks again
            tokens = np.where(np.arange(drafts.size) < count, tokens[: drafts.size], self._mask)
        self._drafts = tokens[:0] if differ.size else tokens[count:].copy()
        self._next += count
        self.num_unconfirmed = min(self._drafts.size, max(self._end - self._next, 0))
        return Commit(candidates.positions[: tokens.size], tokens)
