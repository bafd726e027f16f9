#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How often answers with drafts, or next to other requests, equal the plain answers.

    benchmarks/same_answers.py [--family llada] [--prompts 200] [--states 8] [--context 128]
        [--gen-length 32] [--block-length 8] [--output-dir results/same_answers]
    benchmarks/same_answers.py --batch-invariant [--tensor-parallel-size N]
    benchmarks/same_answers.py --models llada-tiny dream-tiny

Drafts do not change an answer, except through rounding: a forward with more rows may add numbers in
another order, and if two tokens are nearly equal in bf16, the other one wins. The same happens if
other requests are in the batch. With --batch-invariant neither happens. Every prompt is answered
three times at temperature 0, with one token per step and kept keys and values (`cache: dual`; exact
ones for block-causal families): alone; together with other requests, so that a batch has --states
requests; and with drafts, so that a forward has --states states.

The model has a released shape and random weights or, with --models, is a trained checkpoint (names
of tiny ones under models/, which are trained if they are missing) with its own questions.

    answers   share that equal the plain answers, token by token
    tokens    share of equal tokens

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
from benchmarks.harness import Table, checkpoint, positive, read_facts
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    Prompts = list[list[int]]

COLUMNS = {"model": "<18", "run": "<10", "answers": ">8.3f", "tokens": ">8.3f", "a": ">5.2f"}


@dataclass(frozen=True)
class Row:
    """One way to answer, compared with the plain one.

    Attributes:
        answers, tokens: shares that equal the plain ones.
        steps_per_forward: over all answers.
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
    parser.option("--batch-invariant", False, "with the same bits beside other requests")
    parser.option("--tensor-parallel-size", 1, "ranks that divide the weights", type=positive)
    parser.option("--models", (), "trained checkpoints instead of random weights")
    parser.option("--prompts", 200, "prompts to answer; at most the number of a checkpoint")
    parser.option(
        "--states", 8, "states of a forward; requests at once without drafts", type=positive
    )
    parser.option("--context", 128, "tokens of a prompt of a released shape", type=positive)
    parser.option("--gen-length", 32, "tokens of an answer", type=positive)
    parser.option("--block-length", 8, "block length, if the model has none", type=positive)
    return parser.parse_args(arguments)


@contextmanager
def engine(options: argparse.Namespace, name: str) -> Iterator[tuple[Any, Shape, Prompts]]:
    """Yield an engine that makes all requested drafts, the model's shape, and prompts."""
    mode = {"weighs_guesses": False, "batch_invariant": options.batch_invariant}
    settings: dict[str, Any] = {"additional_config": {"dllm": mode}}
    settings |= {"max_num_seqs": options.states, "dtype": options.dtype}
    settings["tensor_parallel_size"] = options.tensor_parallel_size
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
    """Return the tokens of all answers, `at_a_time` at once, and the steps per forward."""
    outputs = []
    for start in range(0, len(prompts), at_a_time):
        outputs += in_process.run_requests(llm, prompts[start : start + at_a_time], parameters)
    reports = [harness.report_of(output) for output in outputs]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, harness.steps_per_forward(reports)


def shares(answers: list[list[int]], plain: list[list[int]]) -> tuple[float, float]:
    """Return the shares of answers, and of tokens, that equal the plain ones."""
    equal = [
        a == b
        for one, other in zip(answers, plain, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    same = [one == other for one, other in zip(answers, plain, strict=True)]
    return sum(same) / len(same), sum(equal) / len(equal)


if __name__ == "__main__":
    sys.exit(main())
