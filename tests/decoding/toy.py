# SPDX-License-Identifier: Apache-2.0
"""A model without layers, and the engine's part of decoding with it, without batch or cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.diffusion.decoding import Candidates, ForwardTarget, make_rule
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.sampling import RowGroup, sample_group


class Toy:
    """A model whose fp32 logits [T, V] depend on the tokens of a position's block and before.

    Args:
        seed: determines the weights.
        vocab_size: V.
        block_length: None if every position attends to every other one.
        scale: larger values make the model more certain.
        bias: added to the logits of single tokens.
        decimals: number of decimals to which logits are rounded, so that ties are common.
    """

    vocab_start = 0

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        block_length: int | None,
        scale: float = 3.0,
        bias: dict[int, float] | None = None,
        decimals: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self._block_length = vocab_size, block_length
        self._scale, self._decimals = scale, decimals
        self._tokens = torch.randn(64, vocab_size, 16, generator=generator)
        self._places = torch.randn(4096, 16, generator=generator)
        self._head = torch.randn(16, vocab_size, generator=generator)
        self._bias = torch.zeros(vocab_size)
        for token, value in (bias or {}).items():
            self._bias[token] = value

    def __call__(self, tokens: Sequence[int] | Tensor, num_causal: int | None = None) -> Tensor:
        """Return logits. With `num_causal`, that number of first positions is causal."""
        ids = torch.as_tensor(tokens)
        length = len(ids)
        seen = self._tokens[torch.arange(length) % 64, ids].cumsum(dim=0)
        block = length if self._block_length is None else self._block_length
        last = ((torch.arange(length) // block + 1) * block - 1).clamp(max=length - 1)
        if num_causal is not None:
            last = torch.arange(length).where(torch.arange(length) < num_causal, length - 1)
        hidden = torch.tanh(seen[last] / (last + 1)[:, None] ** 0.5 + self._places[:length])
        logits = hidden @ self._head * (self._scale / 4) + self._bias
        return logits if self._decimals is None else logits.round(decimals=self._decimals)


class Decoding:
    """One request under its rule, with the state that the engine would keep.

    Attributes:
        tokens: [T] int64, prompt and canvas, up to the end of a block.
        targets: the target of each forward pass.
        history: the canvas after each forward pass.
        settled: number of settled tokens after each forward pass, including the prompt.
    """

    def __init__(self, toy: Toy, params: DiffusionParams, prompt: Sequence[int]) -> None:
        self.toy, self.params = toy, params
        self.first, self.end = len(prompt), len(prompt) + params.gen_length
        total = self.end
        if params.is_block_causal:
            total = -(-self.end // params.block_length) * params.block_length
        if params.has_causal_context:
            total = self.end + params.block_length - 1
        masks = [params.mask_id] * (total - self.first)
        self.tokens = np.array([*prompt, *masks])
        self.rule = make_rule(params, self.first)
        self.targets: list[ForwardTarget] = []
        self.history: list[list[int]] = []
        self.num_settled: list[int] = [self.rule.num_settled(self.tokens)]
        self._final: list[int] = []

    def run(self, limit: int = 20_000) -> list[int]:
        """Run forward passes until the answer is complete, and return the answer."""
        while (answer := self._take_settled()) is None:
            assert len(self.targets) < limit, "the rule does not come to an end"
            before = self.tokens.copy()
            target = self.rule.prepare(self.tokens)
            assert np.array_equal(self.tokens, before), "a rule does not write tokens"
            assert target is not None, "nothing left to do, and no answer"
            self._forward(target)
        return answer

    def _take_settled(self) -> list[int] | None:
        """Return the answer if the settled tokens, which must not change, complete it."""
        settled = min(self.rule.num_settled(self.tokens), self.end)
        assert settled >= self.num_settled[-1] or not self.targets
        assert self.rule.num_settled(self.tokens) == max(
            settled, self.rule.num_settled(self.tokens)
        )
        self.num_settled.append(settled)
        given = self.tokens[self.first : max(settled, self.first)].tolist()
        assert given[: len(self._final)] == self._final, "a settled token changed"
        assert self.params.mask_id not in given
        new, num_before = given[len(self._final) :], len(self._final)
        self._final = given
        kept = self.params.answer_end(new, num_before)
        return None if kept is None else given[: num_before + kept]

    def _forward(self, target: ForwardTarget) -> None:
        number, shift = len(self.targets), max(self.params.logit_shift, int(target.is_causal))
        self.targets.append(target)
        if target.fill is not None:
            self.tokens[target.fill[0] : target.fill_end] = target.fill[1]
        positions = target.eligible
        assert positions.tolist() == sorted(set(positions.tolist()))
        assert 0 <= target.rows[0] < target.rows[1] <= len(self.tokens)
        end = target.rows[1] if self.params.is_block_causal else len(self.tokens)
        rows = np.maximum(positions - shift, 0)
        assert rows.max(initial=0) < end, "candidates are read from rows of the window"
        num_causal = None
        if self.params.has_causal_context:
            num_causal = end if target.is_causal else target.rows[0]
        logits = self.toy(self.tokens[:end], num_causal)[rows]
        group = RowGroup(
            params=self.params if self.params.seed is not None else self.params.with_seed(0),
            scoring=self.rule.scoring,
            step=number,
            forbid_mask=self.rule.forbid_mask,
            rows=slice(0, len(rows)),
            unconditional_rows=None,
            positions=torch.from_numpy(positions - self.first),
            adjust=self.rule.adjust_logits if self.rule.adjusts_logits else None,
        )
        model: Any = self.toy
        actual = sample_group(logits, group, model)
        sampled = (x.numpy() for x in (actual.token, actual.score.double(), actual.greedy))
        candidates = Candidates(positions, *sampled)
        commit = self.rule.decide(candidates)
        assert np.isin(commit.positions, positions).all()
        self.tokens[commit.positions] = commit.tokens
        self.history.append(self.tokens[self.first : self.end].tolist())
