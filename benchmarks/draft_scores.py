#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How well the scores of a draft find its wrong tokens, on the tiny trained models.

    benchmarks/draft_scores.py [--models llada-tiny] [--stripes 2 4 8 16]
        [--drafts 1000] [--threshold 0.1] [--output-dir results/draft_scores]

A draft is the right answer to a question that the model was taught, with 1 to 3 tokens replaced.
The score of a token is its probability. `direct` computes the draft as it is, so every position
reads its own token. `striped` with S stripes computes S copies; copy s masks every S-th position
from s on, and the probability of a token comes from the copy in which the token is masked. Missing
models are trained first.

Two kinds of wrong tokens are drawn: `random` tokens of other answers, and `likely` tokens, the ones
that the model finds most likely after the right token when the position is masked.

    auc           chance that a wrong token has a lower score than a right token of any draft; ties
                  count half
    found         share of wrong tokens below --threshold
    false alarms  share of right tokens below --threshold
    rows          rows of the forward pass relative to one copy

Written: draft_scores.json.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import harness  # isort: skip  (before torch)

import torch
from reference.models import load_reference, shift_right
from tiny_model.conversations import Conversation
from tiny_model.family import load_family
from tiny_model.settings import BLOCK_LENGTHS
from tiny_model.tokenizer import load_tokenizer, prompts_of

from benchmarks.harness import Table, checkpoint, positive, read_facts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

CANVAS = 32  # tokens; the part after an answer is filled with end tokens
MAX_WRONG = 3  # wrong tokens of a draft
KINDS = ("random", "likely")
COLUMNS = {"model": "<14", "wrong": "<7", "scoring": "<11", "auc": ">6.4f"}
COLUMNS |= {"found": ">6.3f", "false alarms": ">12.3f", "rows": ">4"}


@dataclass(frozen=True)
class Row:
    """Result of one way of scoring."""

    model: str
    wrong: str
    scoring: str
    auc: float
    found: float
    false_alarms: float
    num_rows: int


class Answer(NamedTuple):
    """Tokens [T] of a prompt and its right answer; the answer has positions [start, stop)."""

    ids: Tensor
    start: int
    stop: int


class Drafts(NamedTuple):
    """Drafts of one model.

    Attributes:
        ids: one sequence [T] per draft.
        spans: first and last + 1 position of each answer.
        wrong: positions of the wrong tokens of each draft.
    """

    ids: list[Tensor]
    spans: list[tuple[int, int]]
    wrong: list[list[int]]


class Model:
    """A tiny model, and the answers that it was taught."""

    def __init__(self, name: str) -> None:
        folder = checkpoint(name)
        self.name = name
        family = load_family(folder.name.removesuffix("-tiny"))
        tokenizer = load_tokenizer(folder)
        special = family.special_tokens
        self.mask_id, self._eos_id, self._eot_id = tokenizer.convert_tokens_to_ids(
            [special.mask, special.eos, special.eot]
        )
        self.num_tokens = len(tokenizer)  # ids behind them delete and insert, or have no meaning
        reference = load_reference(folder)
        block_length = BLOCK_LENGTHS.get(family.name)
        is_shifted = family.name == "dream"

        def logits(ids: Tensor) -> Tensor:
            raw: Tensor = reference.logits(ids, block_length)
            return shift_right(raw) if is_shifted else raw

        self._logits: Callable[[Tensor], Tensor] = logits
        facts = read_facts(folder, None)
        conversations = [
            Conversation(({"role": "user", "content": q},), answer) for q, answer in facts
        ]
        prompts = prompts_of(tokenizer, conversations)
        answers = tokenizer([answer for _, answer in facts], add_special_tokens=False)["input_ids"]
        self.answers = [self._answer(*pair) for pair in zip(prompts, answers, strict=True)]
        self.words = sorted({token for answer in answers for token in answer})

    def _answer(self, prompt: list[int], answer: list[int]) -> Answer:
        canvas = [*answer, self._eot_id]
        end = -(-len(canvas) // CANVAS) * CANVAS
        canvas += [self._eos_id] * (end - len(canvas))
        start = len(prompt)
        return Answer(torch.tensor([*prompt, *canvas]), start, start + len(answer))

    def probabilities(self, copies: Tensor) -> Tensor:
        """Return the distribution [B, T, V] of every position of sequences [B, T]."""
        return self._logits(copies).double().softmax(-1)


def draw(model: Model, kind: str, number: int, seed: int = 0) -> Drafts:
    """Draw drafts with wrong tokens of a kind."""
    rng = random.Random(seed)
    drafts = Drafts([], [], [])
    for _ in range(number):
        ids, start, stop = rng.choice(model.answers)
        draft = ids.clone()
        places = sorted(
            rng.sample(range(start, stop), min(rng.randint(1, MAX_WRONG), stop - start))
        )
        for place in places:
            draft[place] = wrong_token(model, ids, place, kind, rng)
        drafts.ids.append(draft)
        drafts.spans.append((start, stop))
        drafts.wrong.append(places)
    return drafts


def wrong_token(model: Model, ids: Tensor, place: int, kind: str, rng: random.Random) -> int:
    """Return a wrong token of a kind for position `place` of a right answer [T]."""
    if kind == "random":
        return rng.choice([token for token in model.words if token != ids[place]])
    masked = ids.clone()
    masked[place] = model.mask_id
    distribution = model.probabilities(masked[None])[0, place]
    distribution[ids[place]] = distribution[model.mask_id] = 0
    distribution[model.num_tokens :] = 0
    return int(distribution.argmax())


def scores_of(model: Model, ids: Tensor, span: tuple[int, int], stripes: int) -> Tensor:
    """Return the probability of every token of an answer; 0 stripes score directly."""
    places = torch.arange(*span)
    tokens = ids[places]
    copies = ids.repeat(max(stripes, 1), 1)
    which = torch.zeros_like(places)
    if stripes:
        which = torch.arange(len(places)) % stripes
        copies[which, places] = model.mask_id
    return model.probabilities(copies)[which, places, tokens]


def auc(wrong: Tensor, right: Tensor) -> float:
    """Return the chance that a score of `wrong` [W] is below one of `right` [R]; ties count half.

    Args:
        wrong, right: scores.
    """
    order = right.sort().values
    below = torch.searchsorted(order, wrong)
    not_above = torch.searchsorted(order, wrong, right=True)
    larger, ties = len(right) - not_above, not_above - below
    return float((larger + ties / 2).double().mean() / len(right))


def rows_of(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the results of every kind of wrong tokens and every way of scoring."""
    for kind in KINDS:
        drafts = draw(model, kind, options.drafts)
        for stripes in (0, *options.stripes):
            wrong: list[Tensor] = []
            right: list[Tensor] = []
            for ids, span, places in zip(*drafts, strict=True):
                scores = scores_of(model, ids, span, stripes)
                is_wrong = torch.isin(torch.arange(*span), torch.tensor(places))
                wrong.append(scores[is_wrong])
                right.append(scores[~is_wrong])
            low, high = torch.cat(wrong), torch.cat(right)
            yield Row(
                model.name,
                kind,
                f"striped {stripes}" if stripes else "direct",
                auc(low, high),
                float((low < options.threshold).double().mean()),
                float((high < options.threshold).double().mean()),
                max(stripes, 1),
            )


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.Parser("draft_scores", __doc__)
    parser.option("--models", ["llada-tiny"], "tiny models")
    parser.option("--stripes", [2, 4, 8, 16], "numbers of copies", type=positive)
    parser.option("--drafts", 1000, "drafts of each kind", type=positive)
    parser.option("--threshold", 0.1, "probability below which a token counts as wrong")
    options = parser.parse_args(arguments)
    names = "model wrong scoring auc found false_alarms num_rows"
    table = Table(COLUMNS, names)
    for name in options.models:
        for row in rows_of(Model(name), options):
            table.add(row)
    record: dict[str, Any] = {"canvas": CANVAS}
    harness.write("draft_scores", options, table.rows, **record)


if __name__ == "__main__":
    sys.exit(main())
