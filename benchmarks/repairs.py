#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many errors of a text a revision repairs, on the tiny trained models.

    benchmarks/repairs.py [--models llada-tiny] [--errors random likely] [--drafts 1000]
        [--parameters '{}'] [--output-dir results/repairs]
    benchmarks/repairs.py --models llada21-tiny --errors random likely line
    benchmarks/repairs.py --models llada22-tiny --errors random likely missing added

A draft is the right answer to a question that the model was taught, with 1 to 3 errors of one kind.
It is sent as `canvas_token_ids` behind its question, with the request fields in --parameters. The
kinds of errors are

    random   a token is replaced by a token of another answer
    likely   a token is replaced by the one that the model finds most likely after the right token
    missing  a token is deleted; never the last one, because the text ends with it
    added    a token of another answer is inserted
    line     10 tokens in a row are replaced in the model's own canvas of 512 tokens, which are an
             answer and end tokens; at most 20 drafts

A name of a model is a folder, or the name of one under models/; missing models are trained first.
The last part of a folder's name is the family and `-tiny`.

    repaired  share of the errors that the revision repairs
    changed   share of the tokens that were right and that the revision changes
    right     share of the drafts that become the right answer
    passes    forward passes of a request, on average
    share     passes divided by the passes that generate the text; only for lines

Written: repairs.json.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import draft_scores, harness
from benchmarks.draft_scores import MAX_WRONG, Model
from benchmarks.harness import Table, checkpoint, positive
from vllm import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

REPLACED = draft_scores.KINDS
MISSING, ADDED, LINE = "missing", "added", "line"
CANVAS, LINE_LENGTH, MAX_LINES = 512, 10, 20
MAX_MODEL_LEN = 2 * CANVAS
COLUMNS = {"model": "<14", "errors": "<8", "repaired": ">8.3f", "changed": ">8.4f"}
COLUMNS |= {"right": ">6.3f", "passes": ">6.2f", "share": ">6.3f"}


@dataclass(frozen=True)
class Row:
    """Result of one kind of errors."""

    model: str
    errors: str
    repaired: float
    changed: float
    right: float
    passes: float
    share: float | None = None


class Draft(NamedTuple):
    """A right answer with errors of one kind.

    Attributes:
        prompt: token ids of the question.
        text: token ids of the draft.
        answer: token ids of the right answer.
        places: positions of the answer whose tokens are wrong or missing in the draft, or before
            which a token is added.
    """

    prompt: list[int]
    text: list[int]
    answer: list[int]
    places: list[int]


class Repair(NamedTuple):
    """What a revision has done with a draft."""

    num_repaired: int
    num_changed: int  # tokens that were right


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    table = Table(COLUMNS, "model errors repaired changed right passes share")
    for name in options.models:
        model, folder = Model(name), checkpoint(name)
        settings = {"max_model_len": MAX_MODEL_LEN, "dtype": "float32"}
        with in_process.engine(folder, dummy_weights=False, **settings) as (llm, _):
            for kind in options.errors:
                if kind == LINE:
                    number = min(options.drafts, MAX_LINES)
                    table.add(measured_lines(llm, folder.name, model, number, options.parameters))
                    continue
                drafts = draw(model, kind, options.drafts)
                table.add(measured(llm, folder.name, kind, drafts, options.parameters))
    harness.write("repairs", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("repairs", __doc__)
    parser.option("--models", ["llada-tiny"], "tiny models")
    parser.option("--errors", list(REPLACED), "kinds", choices=[*REPLACED, MISSING, ADDED, LINE])
    parser.option("--drafts", 1000, "drafts of each kind", type=positive)
    parser.option("--parameters", None, "fields of the requests, as JSON", type=json.loads)
    options = parser.parse_args(arguments)
    options.parameters = options.parameters or {}
    return options


def draw(model: Model, kind: str, number: int, seed: int = 0) -> list[Draft]:
    """Draw drafts with errors of a kind."""
    rng = random.Random(seed)
    # An answer without its last token has a token that may be missing.
    answers = [a for a in model.answers if a.stop - a.start > 1 or kind in REPLACED]
    return [_drawn(model, kind, rng.choice(answers), rng) for _ in range(number)]


def _drawn(model: Model, kind: str, right: draft_scores.Answer, rng: random.Random) -> Draft:
    ids, start, stop = right
    answer = ids[start:stop].tolist()
    length = len(answer) - (kind == MISSING)
    places = sorted(rng.sample(range(length), min(rng.randint(1, MAX_WRONG), length)))
    text = [[token] for token in answer]
    for place in places:
        if kind in REPLACED:
            text[place] = [draft_scores.wrong_token(model, ids, start + place, kind, rng)]
        elif kind == MISSING:
            text[place] = []
        else:
            others = [token for token in model.words if token != answer[place]]
            text[place].insert(0, rng.choice(others))
    return Draft(ids[:start].tolist(), [t for part in text for t in part], answer, places)


def measured(
    llm: Any, name: str, kind: str, drafts: Sequence[Draft], parameters: dict[str, Any]
) -> Row:
    """Revise drafts, and return the result."""
    fields = [{"canvas_token_ids": draft.text, **parameters} for draft in drafts]
    outputs = _answers(llm, [draft.prompt for draft in drafts], fields, is_whole=kind == LINE)
    reports = [harness.report_of(output) for output in outputs]
    revised = [_without_end(output.outputs[0]) for output in outputs]
    repairs = [repair_of(draft, kind, ids) for draft, ids in zip(drafts, revised, strict=True)]
    num_errors = sum(len(draft.places) for draft in drafts)
    num_right = sum(len(draft.answer) for draft in drafts) - (kind != ADDED) * num_errors
    return Row(
        name,
        kind,
        sum(repair.num_repaired for repair in repairs) / num_errors,
        sum(repair.num_changed for repair in repairs) / num_right,
        statistics.mean(d.answer == ids for d, ids in zip(drafts, revised, strict=True)),
        statistics.mean(report["num_forwards"] for report in reports),
    )


def measured_lines(
    llm: Any, name: str, model: Model, number: int, parameters: dict[str, Any]
) -> Row:
    """Revise long texts with a wrong line, and compare the passes with generating the text."""
    rng = random.Random(0)
    prompts = [ids[:start].tolist() for ids, start, _ in rng.sample(model.answers, number)]
    # A threshold may have a value that only suits a revision.
    outputs = _answers(llm, prompts, [{"gen_length": CANVAS}] * number, is_whole=True)
    drafts = list[Draft]()
    for prompt, output in zip(prompts, outputs, strict=True):
        answer, start = list(output.outputs[0].token_ids), rng.randrange(CANVAS - LINE_LENGTH)
        places = range(start, start + LINE_LENGTH)
        text = [rng.choice(model.words) if p in places else t for p, t in enumerate(answer)]
        drafts.append(Draft(prompt, text, answer, [p for p in places if text[p] != answer[p]]))
    row = measured(llm, name, LINE, drafts, parameters)
    generated = statistics.mean(harness.report_of(output)["num_forwards"] for output in outputs)
    return replace(row, share=row.passes / generated)


def _answers(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    fields: Sequence[dict[str, Any]],
    *,
    is_whole: bool,
) -> list[Any]:
    """Return the outputs of requests; whole canvases have no end."""
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=CANVAS if is_whole else None,
            ignore_eos=is_whole,
            detokenize=False,
            extra_args=one,
        )
        for one in fields
    ]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs: list[Any] = llm.generate(inputs, sampling, use_tqdm=False)
    return outputs


def _without_end(answer: Any) -> list[int]:
    """Return the tokens of an answer without the token that ends it."""
    ids = list(answer.token_ids)
    return ids[:-1] if answer.finish_reason == "stop" else ids


def repair_of(draft: Draft, kind: str, revised: Sequence[int]) -> Repair:
    """Compare a revised draft with the right answer.

    The tokens of both are aligned. A wrong or missing token is repaired if the right token is
    there. An added token is repaired if nothing is between its neighbours.
    """
    matcher = SequenceMatcher(None, draft.answer, revised, autojunk=False)
    blocks = matcher.get_matching_blocks()
    matched = {block.a + at: block.b + at for block in blocks for at in range(block.size)}
    matched[-1] = -1
    if kind == ADDED:
        repaired = [matched.get(p) == matched.get(p - 1, len(revised)) + 1 for p in draft.places]
        were_right = range(len(draft.answer))
    else:
        repaired = [place in matched for place in draft.places]
        were_right = sorted(set(range(len(draft.answer))).difference(draft.places))
    return Repair(sum(repaired), sum(place not in matched for place in were_right))


if __name__ == "__main__":
    sys.exit(main())
