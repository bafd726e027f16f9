# SPDX-License-Identifier: Apache-2.0
"""The state of one request on a worker: its canvas, and how far decoding has come."""

from __future__ import annotations

import torch

from vllm.diffusion.decoding import Candidates, make_rule
from vllm.diffusion.engine.messages import NewCanvas, StepResult


class Canvas:
    """Prompt and canvas of a request as one row of tokens, on the host.

    Only `commit` writes tokens. A committed token never changes, so the canvas before its first
    masked position is final and can be reported.
    """

    def __init__(self, new: NewCanvas) -> None:
        self.params = new.params
        self.prompt_length = len(new.prompt_token_ids)
        mask = torch.full((self.params.gen_length,), self.params.mask_id, dtype=torch.int64)
        self.tokens = torch.cat([torch.tensor(new.prompt_token_ids, dtype=torch.int64), mask])
        self._known = self.tokens != self.params.mask_id  # guidance hides what was known at first
        self._prompt_holes = (~self._known[: self.prompt_length]).nonzero().flatten()
        self._rule = make_rule(self.params, self.prompt_length)
        self._num_reported = 0
        self.num_forwards = 0

    @property
    def length(self) -> int:
        return self.tokens.numel()

    @property
    def forbid_mask(self) -> bool:
        """Whether the mask token must not be proposed in the next forward."""
        return self._rule.forbid_mask

    def masked(self) -> torch.Tensor:
        """[T] bool."""
        return self.tokens == self.params.mask_id

    def unconditional_tokens(self) -> torch.Tensor:
        """[T] int64: the tokens with everything hidden that was known at the start."""
        return self.tokens.masked_fill(self._known, self.params.mask_id)

    def eligible(self) -> torch.Tensor:
        """Positions [R] int64 whose candidates the next forward must deliver, ascending."""
        masked = self.masked()
        end = self._rule.window(masked)
        return masked[:end].nonzero().flatten() if end is not None else masked.new_empty(0).long()

    def commit(self, candidates: Candidates) -> StepResult:
        """Let the rule choose, write the chosen tokens, and report what became final."""
        chosen = self._rule.select(candidates)
        self.tokens[candidates.positions[chosen]] = candidates.tokens[chosen]
        self.num_forwards += 1
        return self._report()

    def _report(self) -> StepResult:
        canvas = self.tokens[self.prompt_length :]
        masked = canvas == self.params.mask_id
        start = self._num_reported
        gaps = masked[start:].nonzero()
        end = start + int(gaps[0]) if gaps.numel() else canvas.numel()
        self._num_reported = end
        filled = self._prompt_holes[self.tokens[self._prompt_holes] != self.params.mask_id]
        return StepResult(
            new_token_ids=canvas[start:end].tolist(),
            num_forwards=self.num_forwards,
            num_committed=canvas.numel() - int(masked.sum()),
            infilled={int(p): int(self.tokens[p]) for p in filled},
        )
