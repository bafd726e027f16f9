#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How often answers with drafts are the plain ones, and how often plain ones among others are.

    benchmarks/same_answers.py [--family llada] [--prompts 200] [--states 8] [--context 128]
        [--gen-length 32] [--block-length 8] [--output-dir results/same_answers]
    benchmarks/same_answers.py --models llada-tiny dream-tiny

Drafts leave an answer as it is, but for how numbers are rounded: a forward of more rows may add
them in another order, and where two tokens are nearly equal in bf16, the other one wins. So does it
where other requests stand beside. Every prompt is answered three times at temperature 0, one token
a step, with kept keys and values (`cache: dual`; exact ones of block-causal families): alone;
beside as many requests as a forward has states; and with drafts, as many in every forward.
Released shape and random weights, or, with --models, trained checkpoints (names of tiny ones under
models/, which are trained if they are missing) and their own questions.

    answers   share that are the plain ones, token by token
    tokens    share of the tokens

Written: same_answers.json.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness, windows
from benchmarks.harness import Table, positive
from benchmarks.quality_speed import checkpoint, read_facts
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    Prompts = list[list[int]]

COLUMNS = {"model": "<18", "run": "<10", "answers": ">8.3f", "tokens": ">8.3f", "a": ">5.2f"}


@dataclass(frozen=True)
class Row:
    """One way to answer, beside the plain one.

    Attributes:
        answers, tokens: shares that are the plain ones.
        steps_per_forward: of all answers.
    """

    model: str
    run: str
    answers: float
    tokens: float
    steps_per_forward: float


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    table = Table(COLUMNS, "model run answers tokens steps_per_forward")
    for name in options.models or [options.family]:
        with engine(options, name) as (llm, shape, prompts):
            length = shape.block_length or options.block_length
            kept = windows.kept_parameters(shape, options.gen_length, length)
            plain, _ = answers(llm, prompts, kept, at_a_time=1)
            for run, count, drafts in (
                ("beside", options.states, 0),
                ("guesses", 1, options.states - 1),
            ):
                parameters = {**kept, "num_speculative_states": drafts}
                answers_found, pace = answers(llm, prompts, parameters, at_a_time=count)
                table.add(Row(Path(name).name, run, *shares(answers_found, plain), pace))
    harness.write("same_answers", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("same_answers", __doc__)
    parser.shape("llada", [family for family in harness.FAMILIES if family != "fast-dllm"])
    parser.option("--models", (), "trained checkpoints in the place of random weights")
    parser.option("--prompts", 200, "to answer; of a checkpoint at most as many as it has")
    parser.option("--states", 8, "of a forward; requests at once without guesses", type=positive)
    parser.option("--context", 128, "tokens of a prompt of a released shape", type=positive)
    parser.option("--gen-length", 32, "tokens of an answer", type=positive)
    parser.option("--block-length", 8, "where the model has none of its own", type=positive)
    return parser.parse_args(arguments)


@contextmanager
def engine(options: argparse.Namespace, name: str) -> Iterator[tuple[Any, Shape, Prompts]]:
    """Yield an engine that makes all drafts it is asked for, the model's shape, and prompts."""
    settings: dict[str, Any] = {"additional_config": {"dllm": {"weighs_guesses": False}}}
    settings |= {"max_num_seqs": options.states, "dtype": options.dtype}
    if not options.models:
        shape = Shape.of(harness.configuration_of(options))
        prompts = in_process.random_prompts(options.prompts, options.context, shape.vocab_size)
        length = options.context + options.gen_length
        with in_process.engine_of(options, max_model_len=length, **settings) as (llm, _):
            yield llm, shape, prompts
        return
    folder = checkpoint(name)
    settings["max_model_len"] = options.gen_length + 256
    with in_process.engine(folder, dummy_weights=False, **settings) as (llm, _):
        ask = partial(
            llm.get_tokenizer().apply_chat_template, add_generation_prompt=True, return_dict=False
        )
        questions = [question for question, _ in read_facts(folder, options.prompts)]
        prompts = [ask([{"role": "user", "content": question}]) for question in questions]
        yield llm, Shape.of_folder(folder), prompts


def answers(
    llm: Any, prompts: Prompts, parameters: dict[str, Any], *, at_a_time: int
) -> tuple[list[list[int]], float]:
    """Return the tokens of all answers, so many at a time, and the steps a forward."""
    outputs = []
    for start in range(0, len(prompts), at_a_time):
        outputs += in_process.run_requests(llm, prompts[start : start + at_a_time], parameters)
    reports = [harness.report_of(output) for output in outputs]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, harness.steps_per_forward(reports)


def shares(answers: list[list[int]], plain: list[list[int]]) -> tuple[float, float]:
    """Return the shares of answers, and of tokens, that are the plain ones."""
    equal = [
        a == b
        for one, other in zip(answers, plain, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    same = [one == other for one, other in zip(answers, plain, strict=True)]
    return sum(same) / len(same), sum(equal) / len(equal)


if __name__ == "__main__":
    sys.exit(main())
