# SPDX-License-Identifier: Apache-2.0
"""A sequence under a decoding rule, with proposals made by hand."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.diffusion.decoding import Candidates, ForwardTarget, make_rule
from vllm.diffusion.decoding.base import Array
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import DREAM, LLADA
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

MASK, EOS, EOT = 15, 14, 13
MODEL = ServedModel(
    family=LLADA,
    ids=SpecialIds(mask=MASK, eos=EOS, eot=EOT, stop=frozenset({EOS, EOT})),
    max_model_len=4096,
    vocab_size=16,
)
SHIFTED = dataclasses.replace(MODEL, family=DREAM)


def decided(model: ServedModel = MODEL, **parameters: Any) -> DiffusionParams:
    return decision.decide(fields.canonical(parameters), model, [1])


def candidates(
    positions: list[int],
    scores: list[float],
    tokens: list[int] | None = None,
    **more: Array,
) -> Candidates:
    return Candidates(
        np.array(positions, dtype=np.int64),
        np.array(tokens or [1] * len(positions), dtype=np.int64),
        np.array(scores, dtype=np.float64),
        **more,
    )


class Row:
    """A sequence under a rule, with the tokens that the engine would store."""

    def __init__(self, parameters: DiffusionParams, prompt: list[int]) -> None:
        self.rule = make_rule(parameters, len(prompt))
        self.tokens = np.array([*prompt, *[MASK] * parameters.gen_length])
        self.targets: list[ForwardTarget] = []
        self.committed: list[list[int]] = []
        self.chance = random.Random(1)

    @property
    def ends(self) -> list[int]:
        """The end of each forward pass: its last eligible position + 1."""
        return [int(target.eligible[-1]) + 1 for target in self.targets]

    def eligible(self) -> list[int] | None:
        """Return positions of the next forward pass after its fill, or None at the end."""
        before = self.tokens.copy()
        target = self.rule.prepare(self.tokens)
        assert np.array_equal(self.tokens, before), "a rule does not write tokens"
        if target is None:
            return None
        self.targets.append(target)
        actual: list[int] = target.eligible.tolist()
        assert actual == sorted(set(actual))
        assert all(before[position] == MASK for position in actual)
        first, end = target.rows
        assert 0 <= first < end <= len(self.tokens)
        assert all(first <= position < end for position in actual)
        if target.fill is not None:
            start, token = target.fill
            self.tokens[start:] = token
        return actual

    def commit(self, actual: Candidates) -> None:
        chosen = self.rule.select(actual)
        assert chosen.dtype == np.int64
        assert len(set(chosen.tolist())) == chosen.size
        self.tokens[actual.positions[chosen]] = self.rule.replacement(actual)[chosen]
        self.committed.append(sorted(actual.positions[chosen].tolist()))

    def see(self, positions: list[int], scores: list[float], tokens: list[int] | None) -> None:
        """Run one forward pass with these proposals."""
        greedy = np.array(tokens or [1] * len(positions), dtype=np.int64)
        draws = [self.chance.random() for _ in positions]
        actual = candidates(positions, scores, tokens, greedy=greedy, draws=np.array(draws))
        if self.rule.adjusts_logits:
            on_canvas = torch.from_numpy(actual.positions - self.rule.prompt_length)
            logits = torch.eye(16)[actual.tokens]
            assert self.rule.adjust_logits(logits, on_canvas).shape == logits.shape
        self.commit(actual)

    def run(self, propose: Callable[[int, bool], tuple[int, float]], limit: int = 10_000) -> int:
        """Return the number of forward passes until all is filled.

        `propose(position, forbid_mask)` is the model.
        """
        for count in itertools.count():
            positions = self.eligible()
            if positions is None:
                return count
            assert count < limit, "the rule does not come to an end"
            proposals = [propose(position, self.rule.forbid_mask) for position in positions]
            self.see(positions, [s for _, s in proposals], [t for t, _ in proposals])
        raise AssertionError


class Case(NamedTuple):
    """Scores at ascending positions (by default from 1), and the indices of accepted ones."""

    scores: list[float]
    wanted: set[int]
    parameters: dict[str, Any] = {}  # noqa: RUF012  # never changed
    at: list[int] | None = None

    @property
    def positions(self) -> list[int]:
        return self.at or list(range(1, len(self.scores) + 1))


def of_ours(rule: str, case: Case) -> set[int]:
    """Return the accepted indices of one forward pass of our rule, in a sequence of one block."""
    positions = case.positions
    length = max(positions)
    row = Row(
        decided(gen_length=length, block_length=length, algorithm=rule, **case.parameters), [1]
    )
    row.tokens[[p for p in range(1, length + 1) if p not in positions]] = 2
    assert row.eligible() == positions
    row.see(positions, case.scores, None)
    return {positions.index(position) for position in row.committed[-1]}
