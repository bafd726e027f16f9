#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Effects of quantised weights: answers, likeliest tokens, and the order of committing.

    benchmarks/quantisation_quality.py [--models llada-tiny dream-tiny] [--limit N]
        [--quantization fp8 int4 nf4] [--attention model fp8] [--gen-length 32] [--block-length 8]
    benchmarks/quantisation_quality.py --models /path/to/LLaDA-8B-Instruct --facts gsm8k.jsonl

Questions of facts.jsonl (of the checkpoint, or --facts; lines with question and answer) are decoded
block by block, at temperature 0, with the logits of the served model and no other part of the
engine. --attention fp8 measures each kind of weights with fp8 attention, whatever the length;
block-causal models have no fp8 attention. --prompt-tokens N puts turns of other questions with
their answers before each question, up to N tokens.

    right           answers that are exactly the fact's
    top-1           share of masked positions with the same likeliest token as with the plain
                    weights, on the canvases of the decoding with plain weights
    KL              mean over the same positions, in nats, of KL(plain || other)
    order           Spearman's rank correlation of the steps in which positions are committed, one
                    per step, with the steps of the plain weights; mean over the answers
    equal steps     share of positions that are committed in the same step as with plain weights
    tokens/forward  if all positions of at least --threshold are committed at once

A quantisation may keep the likeliest token of a position and still change which position has the
highest confidence. This changes the order, which a decoding rule follows, so the order is measured
separately.

Written: quantisation_quality.json, .md and .svg.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import torch

from benchmarks import harness
from benchmarks.harness import WORDINGS, Table, checkpoint, positive, read_facts, worded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from torch import Tensor

COLUMNS = {"model": "<16", "weights": "<8", "attention": "<9"}
COLUMNS |= {"layers, MiB": ">11.2f", "right": ">12"}
COLUMNS |= {"top-1": ">6.4f", "KL": ">8.5f", "order": ">6.3f", "equal steps": ">11.3f"}
COLUMNS |= {"tokens/forward": ">14.2f"}
ATTRIBUTES = (
    "model quantization attention weight_mib right_of top_1 kl order equal_steps tokens_per_forward"
)
PLAIN = "plain"


@dataclass
class Trace:
    """Decoding of one answer, step by step.

    Attributes:
        tokens: tokens of the canvas.
        steps: step in which each of its positions was committed.
        num_forwards: number of all steps.
        states: ids, masked positions of the block, and their log probabilities, before each step.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    num_forwards: int = 0
    states: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Result for one kind of weights and of attention on one model, over all questions."""

    model: str
    quantization: str
    attention: str
    weight_bytes: int
    questions: int
    right: int
    top_1: float
    kl: float
    order: float
    equal_steps: float
    tokens_per_forward: float

    @property
    def weight_mib(self) -> float:
        return self.weight_bytes / 2**20

    @property
    def right_of(self) -> str:
        return f"{self.right} of {self.questions}"


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    num_kinds = (1 + len(options.quantization)) * len(options.attention)
    table = Table(COLUMNS, ATTRIBUTES, len(options.models) * num_kinds)
    for name in options.models:
        folder = checkpoint(name) if options.facts is None else Path(name)
        measure_model(folder, options, table)
    harness.write("quantisation_quality", options, table.rows)
    file = options.output_dir / "quantisation_quality.md"
    cells = [[cell.strip() for cell in table.cells(row)] for row in table.rows]
    file.write_text("\n".join(harness.markdown(list(COLUMNS), cells)) + "\n", "utf-8")
    harness.draw(file.with_suffix(".svg"), partial(paint, table.rows))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("quantisation", __doc__)
    parser.option("--models", ["llada-tiny"], "names under models/, or checkpoint directories")
    parser.option("--quantization", ["fp8", "int4", "nf4"], "kinds of weights")
    parser.option("--attention", ["model"], "dtypes of attention", choices=("model", "fp8"))
    parser.option("--facts", None, "JSONL of questions and answers", type=Path)
    parser.option("--wording", "taught", "wording of the questions", choices=WORDINGS)
    parser.option("--limit", None, "questions per model (default: all)", type=positive)
    parser.option("--prompt-tokens", 0, "longest prompt, filled with turns of other questions")
    parser.option("--gen-length", 32, "canvas length in tokens", type=positive)
    parser.option("--block-length", 8, "tokens of one block", type=positive)
    parser.option("--threshold", 0.9, "threshold for tokens/forward")
    parser.option("--dtype", "bfloat16", "precision of the model")
    return parser.parse_args(arguments)


# --- decoding --------------------------------------------------------------------------------


class Decoder:
    """Served model, decoded without the engine.

    Args:
        llm: the engine.
        runner: its model runner.
        options: lengths of canvas and blocks.
    """

    def __init__(self, llm: Any, runner: Any, options: argparse.Namespace) -> None:
        from vllm.diffusion.config import served_model

        self.model, self.device = runner.model, runner.device
        self.tokenizer = llm.get_tokenizer()
        self.facts = served_model(llm.llm_engine.vllm_config)
        self.has_fp8_attention = False
        self.gen_length, self.block_length = options.gen_length, options.block_length
        if self.model.family.is_block_causal:
            self.block_length = self.model.config.block_length

    @torch.inference_mode()
    def log_probabilities(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Compute [P, V] fp32 log probabilities at these positions, without the mask token."""
        positions_of_all = torch.arange(len(ids), device=ids.device)
        hidden = self.model(ids, positions_of_all, fp8_attention=self.has_fp8_attention)
        rows = (positions - self.model.family.logit_shift).clamp(min=0)
        logits = self.model.compute_logits(hidden[rows]).float()
        logits[:, self.facts.ids.mask] = -torch.inf
        return logits.log_softmax(dim=-1)

    def decode(self, prompt: Sequence[int], threshold: float | None, keeps: bool = False) -> Trace:
        """Decode one answer: one position per step, or all positions that reach the threshold."""
        start, mask = len(prompt), self.facts.ids.mask
        end = start + self.gen_length
        if self.model.family.is_block_causal:
            end = -(-end // self.block_length) * self.block_length
        ids = torch.tensor([*prompt, *[mask] * (end - start)], device=self.device)
        trace, steps = Trace(), torch.zeros(end, dtype=torch.long)
        for first, last in self._blocks(start, end):
            while True:
                masked = (ids[first:last] == mask).nonzero().flatten() + first
                if not len(masked):
                    break
                log_probs = self.log_probabilities(ids, masked)
                if keeps:
                    trace.states.append((ids.clone(), masked, log_probs))
                best, tokens = log_probs.max(dim=-1)
                is_sure = best == best.max() if threshold is None else best.exp() >= threshold
                is_sure[best.argmax()] = True
                chosen = is_sure.nonzero().flatten()
                chosen = chosen[:1] if threshold is None else chosen
                ids[masked[chosen]] = tokens[chosen]
                steps[masked[chosen].cpu()] = trace.num_forwards
                trace.num_forwards += 1
        trace.tokens, trace.steps = ids[start:].tolist(), steps[start:].tolist()
        return trace

    def _blocks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of each block of the canvas.

        Block-causal models count blocks from the first position of the prompt.
        """
        offset = 0 if self.model.family.is_block_causal else start
        first = start
        while first < end:
            last = offset + ((first - offset) // self.block_length + 1) * self.block_length
            yield first, min(last, end)
            first = last

    def prompt(self, question: str, before: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Tokenise a question, after turns of other questions, through the chat template."""
        turns = [
            {"role": role, "content": text}
            for turn in before
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        turns.append({"role": "user", "content": question})
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompts(self, facts: Sequence[tuple[str, str]], num_tokens: int) -> list[list[int]]:
        """Tokenise questions, each after the other questions that fit into `num_tokens` tokens."""
        prompts = []
        for number, (question, _) in enumerate(facts):
            others, first = [*facts[number + 1 :], *facts[:number]], self.prompt(question)
            before: list[tuple[str, str]] = []
            while len(prompt := self.prompt(question, before)) <= num_tokens and others:
                first, before = prompt, [*before, others[len(before) % len(others)]]
            prompts.append(first)
        return prompts

    def text(self, tokens: Sequence[int]) -> str:
        """Decode an answer up to its first stop token."""
        stop = next((i for i, token in enumerate(tokens) if token in self.facts.ids.stop), None)
        decoded: str = self.tokenizer.decode(tokens[:stop], skip_special_tokens=True)
        return decoded.strip()


# --- measuring -------------------------------------------------------------------------------


def measure_model(folder: Path, options: argparse.Namespace, table: Table) -> None:
    """Measure a row for each kind of weights and of attention, the plain weights first."""
    facts = worded(facts_of(folder, options), options.wording)
    plain: list[Trace] = []
    for quantization in (None, *options.quantization):
        settings = {"dtype": options.dtype, "quantization": quantization, "enforce_eager": True}
        with in_process.engine(folder, dummy_weights=False, **settings) as (llm, runner):
            decoder = Decoder(llm, runner, options)
            prompts = decoder.prompts(facts, options.prompt_tokens)
            if not plain:
                plain = [decoder.decode(prompt, None, keeps=True) for prompt in prompts]
            for attention in options.attention:
                decoder.has_fp8_attention = attention == "fp8"
                if decoder.has_fp8_attention and runner.model.family.is_block_causal:
                    continue
                measured = measure_kind(decoder, plain, prompts, [a for _, a in facts], options)
                kind = folder.name, quantization or PLAIN, attention
                table.add(Row(*kind, weight_bytes=weight_bytes(runner.model), **measured))


def measure_kind(
    decoder: Decoder,
    plain: Sequence[Trace],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure one kind of weights and attention against plain; return fields of a `Row`."""
    traces = [decoder.decode(prompt, None) for prompt in prompts]
    fast = [decoder.decode(prompt, options.threshold) for prompt in prompts]
    texts = [decoder.text(trace.tokens) for trace in traces]
    top_1, kl = compared(decoder, plain)
    pairs = zip(plain, traces, strict=True)
    return {
        "questions": len(prompts),
        "right": sum(text == answer for text, answer in zip(texts, answers, strict=True)),
        "top_1": top_1,
        "kl": kl,
        "order": statistics.mean(rank_correlation(a.steps, b.steps) for a, b in pairs),
        "equal_steps": equal_share(plain, traces),
        "tokens_per_forward": sum(len(trace.tokens) for trace in fast)
        / sum(trace.num_forwards for trace in fast),
    }


def facts_of(folder: Path, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Read questions and answers of the checkpoint or of --facts."""
    if options.facts is None:
        return read_facts(folder, options.limit)
    lines = options.facts.read_text(encoding="utf-8").splitlines()[: options.limit]
    return [(fact["question"], fact["answer"]) for fact in map(json.loads, lines)]


def compared(decoder: Decoder, plain: Sequence[Trace]) -> tuple[float, float]:
    """Compute top-1 agreement and mean KL on the canvases of the decoding with plain weights."""
    same = positions = 0
    divergence = 0.0
    for trace in plain:
        for ids, masked, wanted in trace.states:
            log_probs = decoder.log_probabilities(ids, masked)
            same += int((log_probs.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())
            terms = wanted.exp() * (wanted - log_probs)
            divergence += float(torch.where(wanted.isfinite(), terms, 0.0).sum())
            positions += len(masked)
    return same / positions, divergence / positions


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the layers: matrices, scales, norms."""
    layers: Any = model
    tensors = {*layers.model.layers.parameters(), *layers.model.layers.buffers()}
    return sum(tensor.nbytes for tensor in tensors)


def rank_correlation(first: Sequence[int], second: Sequence[int]) -> float:
    """Compute Spearman's rank correlation of two orders of the same positions, without ties."""
    count = len(first)
    if count < 2:
        return 1.0
    distance = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
    return 1 - 6 * distance / (count * (count**2 - 1))


def equal_share(first: Sequence[Trace], second: Sequence[Trace]) -> float:
    """Compute the share of positions that have the same step in both."""
    pairs = [
        pair
        for one, other in zip(first, second, strict=True)
        for pair in zip(one.steps, other.steps, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def paint(rows: Sequence[Row], axis: Any) -> None:
    """Draw order against likeliest tokens, with one point per row."""
    for row in rows:
        if row.quantization != PLAIN or row.attention != "model":
            axis.scatter(row.top_1, row.order)
            name = f"{row.model} {row.quantization}"
            name += " fp8 attention" if row.attention != "model" else ""
            axis.annotate(name, (row.top_1, row.order), fontsize=7)
    axis.set_xlabel("likeliest token as with plain weights")
    axis.set_ylabel("rank correlation of the commit order")


if __name__ == "__main__":
    sys.exit(main())
