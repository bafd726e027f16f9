# SPDX-License-Identifier: Apache-2.0
"""The revision of a text by LLaDA2.2's rule follows a plain model of it, and loses no token."""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.plain_stream import Plain
from vllm.diffusion.decoding import Candidates, levenshtein, make_rule
from vllm.diffusion.decoding.base import Array
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import LLADA22
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

V, MASK, EOS, DELETE, SPLIT = 24, 23, 22, 19, 18
NUM_CASES = 2_000
# Most forward passes of a block. The rule allows more, which would make the tests slow.
MOST_STEPS = 15
MODEL = ServedModel(
    family=LLADA22,
    ids=SpecialIds(mask=MASK, eos=EOS, eot=21, stop=frozenset({EOS}), edit=(DELETE, SPLIT)),
    max_model_len=96,
    vocab_size=V,
)


class Scores:
    """Random logits, which depend on the tokens of a position's block and before.

    Args:
        seed: determines the logits.
        block_length: positions of a block.
        keep: added to the logit of the token at a position; large values change few tokens.
        edit: added to the logits of the tokens that delete and insert.
        only_inserts: whether tokens are never replaced or deleted.
    """

    def __init__(
        self, seed: int, block_length: int, keep: float, edit: float, *, only_inserts: bool
    ) -> None:
        self.seed, self.block_length, self.keep, self.edit = seed, block_length, keep, edit
        self.only_inserts = only_inserts

    def block(self, tokens: Array, start: int) -> Array:
        """Return the logits [B, V] of the block at `start`."""
        stop = start + self.block_length
        generator = np.random.default_rng(zlib.crc32(tokens[:stop].tobytes(), self.seed))
        logits = generator.normal(scale=2, size=(self.block_length, V))
        logits[:, [DELETE, SPLIT]] += self.edit
        current = tokens[start:stop]
        if self.only_inserts:
            is_token = current != MASK
            logits[np.ix_(is_token, [t for t in range(V) if t != SPLIT])] = -1e9
            logits[:, DELETE] = -1e9
        logits[np.arange(self.block_length), current] += self.keep + 1e9 * self.only_inserts
        return logits


@dataclass
class Case:
    """A request and the logits of its model."""

    params: DiffusionParams
    prompt: list[int]
    scores: Scores

    def revised(self) -> Plain:
        return Plain(self.params, self.prompt, self.scores.block, MOST_STEPS).run()

    @property
    def length(self) -> int:
        unit = self.params.block_length
        return -(-(len(self.prompt) + self.params.gen_length) // unit) * unit


def drawn(number: int, *, only_inserts: bool = False) -> Case:
    rng = random.Random(number)
    block_length = rng.choice([1, 2, 4, 5, 8])
    prompt = [rng.randrange(18) for _ in range(rng.randint(1, 10))]
    text = [rng.randrange(18) for _ in range(rng.randint(1, 24))]
    for at in range(len(text)):
        if rng.random() < 0.05:
            text[at] = rng.choice([MASK, MASK, EOS])
    given: dict[str, Any] = {"block_length": block_length, "canvas_token_ids": text}
    given["steps_per_block"] = rng.choice([1, 2, 5, 32])
    given["threshold"] = rng.choice([0.0, 0.3, 0.7])
    given["editing_threshold"] = rng.choice([0.0, 0.2, 0.5])
    given["max_post_steps"] = rng.choice([0, 1, 2, 16])
    if rng.random() < 0.4:
        given["max_tokens"] = given["gen_length"] = len(text) + rng.choice([0, 1, 5, 20])
    first, last = rng.randint(0, len(text)), rng.randint(0, len(text))
    spans = [[0, first], [max(first, last), len(text)]]
    given["pinned"] = [span for span in spans if span[0] < span[1] and rng.random() < 0.4]
    params = decision.decide(fields.canonical(given), MODEL, prompt)
    keep, edit = rng.choice([0.0, 4.0, 8.0, 12.0]), rng.choice([0.0, 2.0, 4.0])
    return Case(params, prompt, Scores(number, block_length, keep, edit, only_inserts=only_inserts))


def forwards(case: Case, tokens: Array) -> Iterator[None]:
    """Run the rule on `tokens`, one forward pass at a time."""
    params, first = case.params, len(case.prompt)
    unit = params.block_length
    rule = make_rule(params, first)
    while (target := rule.prepare(tokens)) is not None:
        start, stop = target.rows
        assert start % unit == stop % unit == 0
        blocks = [case.scores.block(tokens, at) for at in range(start, stop, unit)]
        logits = torch.from_numpy(np.concatenate(blocks)[target.eligible - start])
        logits = rule.adjust_logits(logits, torch.from_numpy(target.eligible - first))
        score, token = logits.softmax(-1).max(-1)
        settled = rule.num_settled(tokens)
        commit = rule.decide(Candidates(target.eligible, token.numpy(), score.numpy()))
        assert settled <= commit.positions.min(initial=settled)
        tokens[commit.positions] = commit.tokens
        yield


def begun(case: Case) -> Array:
    """Return the sequence with which the engine begins."""
    params, first = case.params, len(case.prompt)
    assert params.revision is not None
    text = params.revision.token_ids
    rest = EOS if params.ends_with_text else MASK
    canvas = [*text, *[rest] * (params.max_tokens - len(text))]
    return np.array([*case.prompt, *canvas, *[EOS] * (case.length - first - len(canvas))])


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levenshtein, "MAX_FORWARDS", MOST_STEPS)


@pytest.mark.parametrize("part", range(5))
def test_random_texts(part: int) -> None:
    num_changed = 0
    for number in range(part, NUM_CASES, 5):
        case = drawn(number)
        tokens, wanted = begun(case), case.revised()
        num_forwards = sum(1 for _ in forwards(case, tokens))
        rest = [EOS] * (len(tokens) - len(wanted.settled))
        assert tokens.tolist() == [*wanted.settled, *rest], number
        assert num_forwards == wanted.num_forwards, number
        num_changed += bool(wanted.steps)
    assert NUM_CASES / 20 < num_changed < NUM_CASES / 5


def is_within(text: list[int], tokens: list[int]) -> bool:
    """Return whether `tokens` has all tokens of `text` in this order."""
    rest = iter(tokens)
    return all(token in rest for token in text)


def test_insertions_lose_no_token() -> None:
    for number in range(500):
        case = drawn(number, only_inserts=True)
        assert case.params.revision is not None
        text = list(case.params.revision.token_ids)
        kept = [t for t in text[: text.index(EOS) if EOS in text else None] if t != MASK]
        tokens = begun(case)
        for _ in forwards(case, tokens):
            assert is_within(kept, tokens[len(case.prompt) :].tolist()), number


def test_a_confident_model_takes_one_forward() -> None:
    for number in range(200):
        case = drawn(number)
        case.scores.keep = 1e3
        if MASK in begun(case):
            continue
        tokens = begun(case)
        before = tokens.copy()
        assert sum(1 for _ in forwards(case, tokens)) == 1
        assert tokens.tolist() == before.tolist()
