# SPDX-License-Identifier: Apache-2.0
"""Rules that choose for many requests at once choose as for each request alone."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.diffusion.decoding import (
    BatchedChoice,
    BatchedCommit,
    Candidates,
    Commit,
    ForwardTarget,
    make_rule,
)
from vllm.diffusion.decoding.base import Array
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import SDAR
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

MASK, STOP = 9, 8
SCORES = (math.nan, -math.inf, 0.0, 0.25, 0.5, 0.5, 0.75, 1.0)  # equal scores are common
MODEL = ServedModel(
    family=SDAR,
    ids=SpecialIds(mask=MASK, eos=STOP, eot=None, stop=frozenset({STOP})),
    max_model_len=64,
    vocab_size=10,
)


class Request:
    """A sequence under a rule of a block-causal family."""

    def __init__(
        self, algorithm: str, block: int, prompt: int, length: int, steps: int, ignore_eos: bool
    ) -> None:
        parameters = {"algorithm": algorithm, "block_length": block, "gen_length": length}
        parameters |= {"ignore_eos": ignore_eos}
        if algorithm != "entropy_bounded":
            parameters["steps_per_block"] = min(steps, block)
        if algorithm == "low_confidence_dynamic":
            parameters["threshold"] = 0.5
        ids = [1] * prompt
        self.rule = make_rule(decision.decide(fields.canonical(parameters), MODEL, ids), prompt)
        whole = -(-(prompt + length) // block) * block
        self.tokens = np.array([*ids, *[MASK] * (whole - prompt)])
        self.target = self.rule.prepare(self.tokens)
        self.num_settled = self.rule.num_settled(self.tokens)

    def write(self, commit: Commit | BatchedCommit) -> None:
        self.tokens[commit.positions] = commit.tokens

    def see(self, tokens: Array, scores: Array) -> None:
        """Commit the choice of the rule for this request alone."""
        assert self.target is not None
        self.write(self.rule.decide(Candidates(self.target.eligible, tokens, scores)))
        self.num_settled = self.rule.num_settled(self.tokens)
        self.target = self.rule.prepare(self.tokens)

    def take(self, choice: BatchedCommit) -> None:
        """Commit a choice that was made together with other requests."""
        self.write(choice)
        target = self.rule.next_target(self.tokens, choice.left, choice.has_changes)
        self.num_settled = self.rule.num_settled(self.tokens) if target is None else target.rows[0]
        self.target = self.rule.prepare(self.tokens) if target is None else target

    def state(self) -> tuple[object, ...]:
        target = self.target and (self.target.eligible.tolist(), self.target.rows)
        return self.tokens.tolist(), self.rule.forbid_mask, self.num_settled, target


ALGORITHMS = ("low_confidence_dynamic", "semi_ar", "sequential", "entropy_bounded")
REQUESTS = st.tuples(
    st.sampled_from(ALGORITHMS),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 8),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=5), data=st.data())
def test_together_is_one_by_one(
    requests: Sequence[tuple[str, int, int, int, int, bool]], data: st.DataObject
) -> None:
    pairs = [(Request(*one), Request(*one)) for one in requests]
    while pairs := [pair for pair in pairs if pair[0].target is not None]:
        targets = [together.target for _, together in pairs if together.target is not None]
        tokens, scores = drawn(data, pairs, targets)
        picks = [together.rule.pick for _, together in pairs]
        choices = BatchedChoice(picks, targets, MASK).decide(tokens, scores)
        ends = np.cumsum([0, *[target.eligible.size for target in targets]]).tolist()
        for (alone, together), choice, (start, end) in zip(
            pairs, choices, pairwise(ends), strict=True
        ):
            alone.see(tokens[start:end], scores[start:end])
            if choice is None:
                together.see(tokens[start:end], scores[start:end])
            else:
                together.take(choice)
            assert alone.state() == together.state()


def drawn(
    data: st.DataObject, pairs: Sequence[tuple[Request, Request]], targets: Sequence[ForwardTarget]
) -> tuple[Array, Array]:
    """Return random tokens and scores of all candidates, with masks where they are allowed."""
    tokens: list[int] = []
    for (alone, _), target in zip(pairs, targets, strict=True):
        most = STOP if alone.rule.forbid_mask else MASK
        count = target.eligible.size
        tokens += data.draw(st.lists(st.integers(5, most), min_size=count, max_size=count))
    scores = st.lists(st.sampled_from(SCORES), min_size=len(tokens), max_size=len(tokens))
    return np.array(tokens), np.array(data.draw(scores))
