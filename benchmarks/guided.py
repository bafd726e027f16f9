#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of a JSON schema: its compilation, one step in isolation, and an engine's steps.

    benchmarks/guided.py                      everything; without a GPU only the compilation
    benchmarks/guided.py --num-layers 2       fewer layers of LLaDA-8B in the engine

The vocabulary is made up: 126,464 tokens of syllables, numbers, spaces, punctuation and pieces of
UTF-8, many of which cross the boundaries of JSON's parts. Engines have random weights and run with
and without the schema, in turns.

Written: guided.json.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import numpy as np
import torch

from benchmarks import harness
from benchmarks.harness import Table, positive
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.guided.automaton import build
from vllm.diffusion.guided.joint import Joint, choose_all, gather, read_all
from vllm.diffusion.guided.json_schema import from_schema
from vllm.diffusion.guided.language import Ends, Language, over_tokens
from vllm.diffusion.guided.open_window import OPEN, OpenWindow
from vllm.diffusion.guided.vocabulary import Vocabulary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

STEPS = {"requests": ">8", "rows": ">5", "temperature": ">11g"}
STEPS |= {"device us": ">10.1f", "host us": ">10.1f"}
ENGINE = {"requests": ">8", "temperature": ">11g", "free ms": ">8.2f", "schema ms": ">9.2f"}
NUM_TOKENS = 126_464
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "string", "format": "date"},
    {"enum": ["red", "green", "blue"]},
)


def schema(num_fields: int) -> dict[str, Any]:
    """Build the schema of an object with `num_fields` required fields of seven kinds."""
    members = {f"field_{i}": KINDS[i % len(KINDS)] for i in range(num_fields)}
    return {"type": "object", "properties": members, "required": list(members)}


def vocabulary(num_tokens: int) -> Vocabulary:
    """Make up tokens, which are the same in every call; the last 64 are special."""
    draw = random.Random(0)
    tokens = {bytes([byte]) for byte in range(256)}
    tokens |= {str(number).encode() for number in range(1000)}
    for length in range(1, 64):
        tokens |= {b" " * length, b"\n" + b" " * length, b"\t" * min(length, 20)}
    marks = list(".,;:!?\"'()[]{}<>/\\|@#$%^&*-_=+`~")
    for first in marks:
        for second in [*marks, " ", "\n"]:
            tokens |= {(first + second).encode(), (" " + first + second).encode()}
            tokens |= {(first + second + m).encode() for m in marks if draw.random() < 0.1}
    for word in ("name", "field", "type", "date", "true", "false", "red", "green", "blue"):
        for before in ("", " ", '"', ' "', '{"', '["', ', "', "_"):
            tokens |= {(before + word + behind).encode() for behind in ("", '"', '":', '",', "_")}
    onsets = ["", *"bcdfgnmprstlwvkh", "st", "tr"]
    syllables = [a + b + c for a in onsets for b in "aeiouy" for c in ("", *"nrstlm", "ng", "ck")]
    while len(tokens) < num_tokens - 28_000:
        word = "".join(draw.choices(syllables, k=draw.choice([1, 2, 2, 3, 3, 4])))
        word = draw.choice([word, word, word.capitalize(), word.upper()])
        behind = draw.choice([""] * 12 + ["(", ".", "_", '"', "'s", ":", "=", "\n"])
        tokens.add((draw.choice(["", " ", " "]) + word + behind).encode())
    scripts = [(0x4E00, 0x9FFF), (0x430, 0x450), (0xAC00, 0xD7A3)]
    while len(tokens) < num_tokens - 64:
        text = "".join(chr(draw.randrange(*draw.choice(scripts))) for _ in range(3))
        tokens.add(text.encode()[: draw.choice([2, 3, 6, 9])])
    ordered = sorted(tokens)
    draw.shuffle(ordered)
    return Vocabulary([*ordered, *(None for _ in range(num_tokens - len(ordered)))], num_tokens)


def compile_times(known: Vocabulary) -> tuple[Language, dict[str, float]]:
    """Measure the milliseconds on one core for 20 fields; a server builds the trie only once."""
    times = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        times[name] = 1000 * (time.process_time() - started)
        return result

    timed("trie of the vocabulary", lambda: known.levels)
    automaton = timed("automaton", lambda: build(from_schema(schema(20))))
    ends = Ends(NUM_TOKENS - 1, (NUM_TOKENS - 2,))
    language = timed("over tokens", lambda: over_tokens(automaton, known, ends))
    packed = timed("packed", language.packed)
    timed("unpacked", lambda: Language.unpacked(packed))
    return language, times


def step_us(
    language: Language, num_requests: int, num_rows: int, temperature: float, repeats: int = 20
) -> tuple[float, float]:
    """Measure the microseconds of the device and of the host for one step's joint choices."""
    rows = torch.randn(num_requests * num_rows, NUM_TOKENS, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(num_rows, device="cuda")
    ends = [num_rows * (i + 1) for i in range(num_requests)]
    device, host = [], []
    for _ in range(repeats):
        sampled = torch.zeros(3, len(rows), dtype=torch.float64, device="cuda")
        kinds = np.full(num_rows, OPEN, dtype=np.int32)
        window = OpenWindow(0, 0, kinds, 200)
        joints = [
            Joint(language, window, temperature, seed, 0, is_tempered=False, sets_scores=True)
            for seed in range(num_requests)
        ]
        gather(joints, ends)
        parts = [
            (j, slice(end - num_rows, end), positions) for j, end in zip(joints, ends, strict=True)
        ]
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        first.record()
        read_all(rows, parts)
        choose_all(Samples(sampled), joints)
        last.record()
        host.append(1e6 * (time.perf_counter() - started))
        torch.cuda.synchronize()
        device.append(1000 * first.elapsed_time(last))
    return statistics.median(device[3:]), statistics.median(host[3:])


def engine_steps(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the milliseconds per step of an engine, without a schema and with it."""
    config = harness.configuration_of(options)
    known = vocabulary(config["embedding_size"])
    medians: dict[str, dict[str, float]] = {}
    table = Table(ENGINE)
    with (
        mock.patch("vllm.diffusion.config.vocabulary_of", lambda *_: known),
        in_process.engine_of(options, max_model_len=1024, max_num_seqs=32) as (llm, _),
    ):
        for requests, temperature in itertools.product(options.requests, (0.0, 1.0)):
            times: dict[str, float] = {}
            for _ in range(2):  # The first iteration compiles kernels and captures graphs.
                structured = {"structured_outputs": {"json": schema(5)}}
                for name, more in (("free", {}), ("schema", structured)):
                    parameters = {**more, "temperature": temperature}
                    times[name] = _step_ms(llm, config["embedding_size"], requests, parameters)
            medians[f"{requests} requests at {temperature:g}"] = times
            table.add([requests, temperature, *times.values()])
    return medians


def _step_ms(llm: Any, vocab_size: int, requests: int, more: dict[str, Any]) -> float:
    prompts = in_process.random_prompts(requests, 128, vocab_size)
    parameters = {"gen_length": 128, "block_length": 64, "steps": 16, **more}
    outputs = in_process.run_requests(llm, prompts, parameters)
    reports = [output.kv_transfer_params["dllm"] for output in outputs]
    return statistics.median(r["denoise_ms"] / r["num_forwards"] for r in reports)


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = harness.Parser("guided", __doc__)
    parser.shape("llada", ("llada",))
    parser.option("--requests", [1, 32], "requests at once in the engine", type=positive)
    options = parser.parse_args(arguments)
    language, times = compile_times(vocabulary(NUM_TOKENS))
    results: dict[str, Any] = {"compile_ms": times, "states": language.num_states}
    results |= {"classes": language.num_classes, "sets": language.num_sets}
    for name, time_ms in times.items():
        print(f"{name:>24}: {time_ms:.1f} ms")
    print(f"{results['states']} states, {results['classes']} classes, {results['sets']} sets")
    if torch.cuda.is_available():
        table = Table(STEPS)
        for (requests, rows), temperature in itertools.product(((1, 64), (32, 32)), (0.0, 1.0)):
            device, host = step_us(language, requests, rows, temperature)
            name = f"{requests} requests of {rows} rows, temperature {temperature:g}"
            results[name] = {"device_us": device, "host_us": host}
            table.add([requests, rows, temperature, device, host])
        results["engine_ms"] = engine_steps(options)
    harness.write("guided", options, **results)


if __name__ == "__main__":
    sys.exit(main())
