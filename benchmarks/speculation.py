#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps per second with drafts in addition to the certain state, and without drafts.

    benchmarks/speculation.py [--family llada] [--size 8b] [--quantization fp8] [--context 512]
        [--gen-length 256] [--block-length 32] [--states 2 4 8] [--forced 1]
        [--clients 1 2 4 8 16 32 64] [--chances 0 0.5 0.7 0.85 1] [--output-dir results/speculation]
    benchmarks/speculation.py --models llada-tiny sdar-tiny

The model has a released shape and random weights, and commits one token per step, with kept keys
and values (`cache: dual`; exact ones for block-causal families). How often drafts hold depends on
trained weights, so here it is a parameter. A run without drafts records the states of every
request. Drafts are then made from them that hold with a chance of 0 to 1. The engine itself decides
which drafts it accepts.

With random weights all tokens are nearly equal, and another number of rows rounds differently. A
request must have the same states whatever else is in its batch. So the engine samples as usual, but
its tokens and scores are then replaced by functions of the position.

First, forwards have --states states, with drafts that are right with the chances of --forced. Then
the engine decides how many drafts are worth their rows, up to eight states.

    steps/s   steps of all requests together, of one token each, from the first forward to the last
    gain      relative to the same number of clients without drafts
    between   for one client: steps per second without forwards of whole sequences, which start an
              answer and refresh its keys, and have no drafts
    gain      the same for `between`
    a         steps per forward
    held      share of the drafted states that were reached

With --models, it measures how often drafts hold on trained checkpoints (names of tiny ones under
models/, which are trained if they are missing): steps per forward with the engine's own drafts, up
to seven, at temperatures 0 and 1, for answers of 32 tokens with 1, 2 and 4 tokens per step, and
with a threshold of 0.9. For other checkpoints every answer reports this in
`diffusion.steps_per_forward`.

Written: speculation.json, speculation.png (reached.json with --models).
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import numpy as np

from benchmarks import harness, windows
from benchmarks.harness import Table, checkpoint, positive, read_facts
from benchmarks.shapes import Shape
from vllm.diffusion.engine.speculation.drafter import Drafter, DraftState
from vllm.diffusion.engine.worker.sample_rows import SampleRows
from vllm.diffusion.request.families import family_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

MAX_DRAFTS = 7
LENGTH, QUOTAS = 32, (1, 2, 4)  # tokens of answers of trained checkpoints; tokens per step
REACHED = {"model": "<16", "temperature": ">11", "1 a step": ">8.2f", "2 a step": ">8.2f"}
REACHED |= {"4 a step": ">8.2f", "threshold": ">9.2f"}
COLUMNS = {"clients": ">7", "states": ">6", "chance": ">6.2f", "steps/s": ">9.1f", "gain": ">5.2f"}
COLUMNS |= {"between": ">8.1f", "gain ": ">5.2f", "a": ">5.2f", "held": ">5.2f"}


@dataclass(frozen=True)
class Row:
    """Result of one run.

    Attributes:
        clients: requests at once.
        states: states of a forward; None: the number that is worth it; 1 without drafts.
        chance: chance that a draft holds if its parent does; None without drafts.
        steps_per_s: steps of all requests per second.
        gain: `steps_per_s` relative to that without drafts.
        between: steps per second between forwards of whole sequences; None for several clients.
        gain_between: `between` relative to that without drafts.
        steps_per_forward: steps of a request over its forwards.
        held: share of drafts that were reached; None without any.
    """

    clients: int
    states: int | None
    chance: float | None
    steps_per_s: float
    gain: float
    between: float | None
    gain_between: float | None
    steps_per_forward: float
    held: float | None


class Oracle:
    """Drafter whose drafts hold with a given chance, made from a run without drafts."""

    def __init__(self) -> None:
        self.chance = 1.0
        self._random = random.Random(0)
        self._paths: dict[bytes, list[DraftState]] = {}  # paths by prompt
        self._places: dict[bytes, int] = {}  # indices in the path by tokens

    @contextmanager
    def recording(self, runner: Any) -> Iterator[None]:
        """Record the states of all requests, which must run without drafts."""
        launch = runner.launch
        self._paths, self._places = {}, {}

        def recorded(req_ids: list[str]) -> Any:
            step = launch(req_ids)
            for canvas, target in zip(step.batch.items, step.batch.targets, strict=True):
                if target.eligible.size:
                    self._note(DraftState(0, canvas.tokens.copy(), canvas.rule.fork(), target))
            return step

        runner.launch = recorded
        try:
            yield
        finally:
            del runner.launch

    def _note(self, state: DraftState) -> None:
        path = self._paths.setdefault(_prompt_of(state), [])
        self._places[state.tokens.tobytes()] = len(path)
        path.append(state)

    @contextmanager
    def drafting(self, chance: float) -> Iterator[None]:
        """Make drafts hold with a given chance if the draft before them does."""
        self.chance, draft = chance, Drafter.draft
        Drafter.draft = lambda _, certain, __, most, ___: self._draft(certain, most)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Drafter.draft = draft  # type: ignore[method-assign]

    def _draft(self, certain: DraftState, most: int) -> list[DraftState]:
        here = self._places.get(certain.tokens.tobytes())
        if here is None:
            return []
        states, holds, parent = list[DraftState](), True, certain
        for depth, state in enumerate(self._paths[_prompt_of(certain)][here + 1 :][:most], 1):
            if not _is_alike(certain, state):
                break
            holds &= self._random.random() < self.chance
            parent = state._replace(depth=depth, parent=parent)
            if not holds:
                parent = parent._replace(tokens=_spoilt(state))
            states.append(parent)
        return states


def _prompt_of(state: DraftState) -> bytes:
    return bytes(state.tokens[: state.rule.prompt_length].tobytes())


def _is_alike(certain: DraftState, state: DraftState) -> bool:
    """Whether the forward of a later state can run together with that of the certain state."""
    ends_with_block = state.rule.params.is_block_causal
    follows = ends_with_block and state.target.rows[0] <= certain.target.rows[1]
    return state.target.rows == certain.target.rows or follows


def _spoilt(state: DraftState) -> Any:
    """Return the tokens of a state with one token of the answer changed."""
    tokens, start = state.tokens.copy(), state.rule.prompt_length
    filled = np.setdiff1d(np.arange(start, state.target.rows[1]), state.target.eligible)
    tokens[filled[-1]] ^= 1
    return tokens


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    if options.models:
        reached(options)
        return
    num_forced = 1 + len(options.states) * len(options.forced)
    num_rows = num_forced + len(options.clients) * (1 + len(options.chances))
    attributes = "clients states chance steps_per_s gain between gain_between"
    attributes += " steps_per_forward held"
    table = Table(COLUMNS, attributes, num_rows)
    with engine(options, weighs=False) as case:
        plain = case.measured(1, None, None, table)
        for states in options.states:
            for chance in options.forced:
                case.measured(1, states, chance, table, plain)
    with engine(options, weighs=True) as case:
        for clients in options.clients:
            plain = case.measured(clients, None, None, table)
            for chance in options.chances:
                case.measured(clients, MAX_DRAFTS + 1, chance, table, plain)
    harness.write("speculation", options, table.rows)
    governed = table.rows[num_forced:]
    harness.draw(options.output_dir / "speculation.png", lambda axis: paint(axis, governed))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("speculation", __doc__)
    parser.shape("llada", [family for family in harness.FAMILIES if family != "fast-dllm"])
    parser.option("--models", (), "trained checkpoints: measure how often drafts hold on these")
    parser.option("--questions", 24, "questions of a trained checkpoint", type=positive)
    parser.option("--quantization", None, "fp8, int4 or nf4")
    parser.option("--context", 512, "tokens of every prompt")
    parser.option("--gen-length", 256, "tokens of every answer")
    parser.option("--block-length", 32)
    parser.option("--states", [2, 4, 8], "states of every forward of one client", type=positive)
    parser.option("--forced", [1.0], "chances of these drafts to hold")
    parser.option("--clients", [1, 2, 4, 8, 16, 32, 64], "requests at once", type=positive)
    parser.option("--chances", [0.0, 0.5, 0.7, 0.85, 1.0], "chances of a draft to hold")
    parser.option("--rounds", 2, "measured rounds, after a warm-up", type=positive)
    options = parser.parse_args(arguments)
    if options.gen_length % options.block_length:
        parser.error("--gen-length: wanted whole blocks")
    if max(*options.states, MAX_DRAFTS + 1) * options.block_length > options.context:
        parser.error("--context: wanted more tokens than the states of a forward have rows")
    return options


@contextmanager
def engine(options: argparse.Namespace, *, weighs: bool) -> Iterator[Case]:
    """Yield the runs of an engine that decides on drafts itself, or makes all requested drafts."""
    settings: dict[str, Any] = {"additional_config": {"dllm": {"weighs_guesses": weighs}}}
    if options.quantization:
        settings["quantization"] = options.quantization
    length = options.context + options.gen_length + options.block_length
    with (
        in_process.engine_of(
            options, max_model_len=length, max_num_seqs=max(options.clients), **settings
        ) as (llm, runner),
        settled(),
    ):
        yield Case(options, llm, runner)


@contextmanager
def settled() -> Iterator[None]:
    """Make tokens and scores depend on positions only, with different scores in a block."""
    candidates_of = SampleRows.candidates_of

    def read(rows: SampleRows, table: Any) -> Any:
        table.wait()
        tokens, scores, greedy = table.host.numpy()[:3]
        at = np.concatenate([target.eligible for target in rows.batch.targets])
        tokens[:] = greedy[:] = 1 + at * 7919 % 29989
        scores[:] = 1 / (2 + at * 37 % 1009)
        return candidates_of(rows, table)

    SampleRows.candidates_of = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        SampleRows.candidates_of = candidates_of  # type: ignore[method-assign]


class Case:
    """Runs of one engine."""

    def __init__(self, options: argparse.Namespace, llm: Any, runner: Any) -> None:
        self._options, self._llm, self._runner = options, llm, runner
        self._shape, self._oracle = Shape.of(harness.configuration_of(options)), Oracle()
        self._recorded = 0  # number of clients whose states are recorded
        self._parameters = windows.kept_parameters(
            self._shape, options.gen_length, options.block_length
        )

    def measured(
        self,
        clients: int,
        states: int | None,
        chance: float | None,
        table: Table,
        plain: Row | None = None,
    ) -> Row:
        """Measure some clients with drafts that hold with `chance`; None: without drafts."""
        prompts = in_process.random_prompts(clients, self._options.context, self._shape.vocab_size)
        parameters = {
            **self._parameters,
            "num_speculative_states": 0 if states is None else states - 1,
        }
        if self._recorded != clients:
            with self._oracle.recording(self._runner):
                quiet = {**parameters, "num_speculative_states": 0}
                in_process.run_requests(self._llm, prompts, quiet)
            self._recorded = clients
        with self._oracle.drafting(chance or 0.0):
            rounds = [self._round(prompts, parameters) for _ in range(self._options.rounds + 1)]
        pace, between, reports = max(rounds[1:], key=lambda result: result[0])
        drafted = sum(report["states_drafted"] for report in reports)
        accepted = sum(report["states_accepted"] for report in reports)
        row = Row(
            clients,
            1 if states is None else states,
            chance,
            pace,
            1.0 if plain is None else pace / plain.steps_per_s,
            between,
            between / plain.between if between and plain and plain.between else None,
            harness.steps_per_forward(reports),
            accepted / drafted if drafted else None,
        )
        table.add(row)
        return row

    def _round(
        self, prompts: Sequence[Sequence[int]], parameters: dict[str, Any]
    ) -> tuple[float, float | None, list[dict[str, Any]]]:
        """Run the requests; return steps per second (all, between whole forwards), reports."""
        with in_process.StepLog().attached(self._runner) as log:
            outputs = in_process.run_requests(self._llm, prompts, parameters)
        steps = sorted(log.steps(), key=lambda step: step.started)
        reports = [harness.report_of(output) for output in outputs]
        num_steps = sum(report["num_steps"] for report in reports)
        pace = num_steps / in_process.seconds_of(steps)
        if len(prompts) > 1:
            return pace, None, reports
        whole = [step.num_rows > self._options.context for step in steps]
        pairs = zip(pairwise(steps), whole, strict=False)
        seconds = sum(b.started - a.started for (a, b), is_whole in pairs if not is_whole)
        return pace, (num_steps - sum(whole)) / seconds, reports


# --- trained checkpoints ---------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """Steps per forward of a checkpoint's answers."""

    model: str
    temperature: float
    quota_1: float
    quota_2: float
    quota_4: float
    threshold: float


def reached(options: argparse.Namespace) -> None:
    """Measure how often the engine's own drafts hold."""
    table = Table(REACHED, "model temperature quota_1 quota_2 quota_4 threshold")
    for name in options.models:
        folder = checkpoint(name)
        questions = [question for question, _ in read_facts(folder, options.questions)]
        settings = {"additional_config": {"dllm": {"weighs_guesses": False}}, "dtype": "float32"}
        with in_process.engine(
            folder, dummy_weights=False, max_model_len=LENGTH + 256, **settings
        ) as (llm, _):
            for temperature in (0.0, 1.0):
                rates = [
                    steps_per_forward(llm, questions, parameters, temperature)
                    for parameters in paces_of(folder)
                ]
                table.add(Reached(folder.name, temperature, *rates))
    harness.write("reached", options, table.rows)


def paces_of(folder: Path) -> list[dict[str, Any]]:
    """Return the parameters for 1, 2 and 4 tokens per step, and for a threshold."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = family_of(config["architectures"], config["model_type"], config)
    if family is None or not family.is_block_causal:
        paced: list[dict[str, Any]] = [{"steps": LENGTH // quota} for quota in QUOTAS]
        return [{"algorithm": "semi_ar", **p} for p in paced] + [{"algorithm": "threshold"}]
    block = config.get("block_size", LENGTH)
    paced = [{"steps_per_block": max(block // quota, 1)} for quota in QUOTAS]
    sure = {"algorithm": "low_confidence_dynamic", "threshold": 0.9}
    return [{"algorithm": "semi_ar", **p} for p in paced] + [sure]


def steps_per_forward(
    llm: Any, questions: Sequence[str], extra: dict[str, Any], temperature: float
) -> float:
    """Return the steps per forward over all answers, which run one after the other."""
    from vllm import SamplingParams

    parameters = {"gen_length": LENGTH, "num_speculative_states": MAX_DRAFTS, **extra}
    sampling = SamplingParams(temperature=temperature, seed=0, extra_args=parameters)
    reports = [
        harness.report_of(llm.chat([chat], sampling, use_tqdm=False)[0])
        for chat in ([{"role": "user", "content": question}] for question in questions)
    ]
    return harness.steps_per_forward(reports)


def paint(axis: Any, rows: Sequence[Row]) -> None:
    """Draw steps per second against clients, with a line for each chance."""
    for chance in dict.fromkeys(row.chance for row in rows):
        own = [row for row in rows if row.chance == chance]
        label = "no guesses" if chance is None else f"{chance:g}"
        style = "k--" if chance is None else "o-"
        axis.plot([r.clients for r in own], [r.steps_per_s for r in own], style, label=label)
    harness.binary(axis, "clients")
    axis.set_ylabel("tokens/s (one a step)")
    axis.legend(title="a guess holds with")


if __name__ == "__main__":
    sys.exit(main())
