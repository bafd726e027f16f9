#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compute the time of LLaDA-8B's steps on cards on which nothing was measured.

    VLLM_DLLM_KERNELS=8.9 benchmarks/step_latency.py --families llada --lengths 32 256 \
        --requests 1 --no-reference --quantization int4 fp8
    benchmarks/other_cards.py results/step_latency/step_latency.json

From that run the program takes two shares for every kind of weights; for a kind that the run lacks,
it takes the shares of bf16. At 32 rows it is the share of the card's published bandwidth. At 256
rows it is the share of the rate that the card's tensor cores have with the instructions of the
portable kernels. The time of a step on another card is the longer of two times: that of its bytes
at the share of that card's bandwidth, and that of its operations at the share of its published
rate. So nothing was measured on the cards in the table.

Tokens per second are for requests with --prompt and --answer tokens that commit --tokens-a-forward
tokens per forward. Without a cache every forward has all rows. With `cache: dual` one forward per
block of 32 has all rows, and the others have the block.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import BenchmarkError, markdown
from benchmarks.shapes import Shape, Work, forward_work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FEW, MANY = 32, 256
BLOCK = 32
SPARE_GIB = 1.5  # GiB of a card that stay free in addition to the weights


class Card(NamedTuple):
    """Published figures: GiB, GB/s, dense 16-bit TFLOP/s with fp32 sums, and fp8 TFLOP/s."""

    memory: float
    bandwidth: float
    tflops: float
    fp8_tflops: float  # 0 if `mma.sync` has no fp8


# The rate of `mma.sync` on Hopper is about 0.62 of that of Hopper's own instructions
# (arXiv:2402.13499).
MEASURED = {"H100": Card(80, 3350, 0.62 * 989, 0), "H200": Card(141, 4800, 0.62 * 989, 0)}
OTHERS = {
    "RTX 3060 12 GB": Card(12, 360, 25.5, 0),
    "RTX 4090": Card(24, 1008, 165, 330),
    "RTX 5070": Card(12, 672, 61.7, 123),
    "RTX 5090": Card(32, 1792, 209, 419),
    "A100 80 GB": Card(80, 2039, 312, 0),
    "L40S": Card(48, 864, 362, 733),
    "B200": Card(180, 8000, 0.62 * 2250, 0),
}
STORED = {"llada": 2.0, "llada int4": 0.54, "llada fp8": 1.0}  # bytes per number of a layer
NAMES = {"llada": "bf16", "llada int4": "int4", "llada fp8": "fp8"}


class Kind(NamedTuple):
    """Kind of weights: the bytes that its steps read, and the shares that they reach."""

    name: str
    num_bytes: float
    of_bandwidth: float
    of_rate: float

    def seconds(self, card: Card, rows: int) -> float:
        """Return the seconds of a step of `rows` rows."""
        reading = self.num_bytes / (card.bandwidth * 1e9 * self.of_bandwidth)
        rate = card.fp8_tflops if self.name == "fp8" and card.fp8_tflops else card.tflops
        computing = work_of(rows).matmul_flops / (rate * 1e12 * self.of_rate)
        return max(reading, computing)

    def fits(self, card: Card) -> bool:
        """Whether a card holds the weights, including the embedding."""
        embedding = 2 * SHAPE.head_parameters
        return (self.num_bytes + embedding) / 2**30 + SPARE_GIB <= card.memory


SHAPE = Shape.of(harness.configuration("llada"))


def work_of(rows: int) -> Work:
    """Return the work of a forward of `rows` rows, in 16 bits."""
    return forward_work(SHAPE, rows, head_rows=BLOCK)


def kinds_of(content: dict[str, Any]) -> list[Kind]:
    """Return the kinds of weights that a run of step_latency.py measured, with their shares.

    Raises:
        BenchmarkError: The run lacks a number of rows, or the card has no published figures here.
    """
    gpu = str(content["run"].get("gpu"))
    card = next((card for name, card in MEASURED.items() if name in gpu), None)
    if card is None:
        raise BenchmarkError(f"given a run on {gpu}; wanted one of {', '.join(MEASURED)}")
    kinds = []
    for family in dict.fromkeys(row["family"] for row in content["rows"]):
        seconds = {
            row["length"]: row["device_ms"] / 1000
            for row in content["rows"]
            if row["family"] == family and row["num_requests"] == 1
        }
        if family not in STORED or not {FEW, MANY} <= seconds.keys():
            raise BenchmarkError(f"given {family}; wanted rows of LLaDA-8B with T {FEW} and {MANY}")
        num_bytes = bytes_of(family)
        of_bandwidth = num_bytes / (seconds[FEW] * card.bandwidth * 1e9)
        of_rate = work_of(MANY).matmul_flops / (seconds[MANY] * card.tflops * 1e12)
        kinds.append(Kind(NAMES[family], num_bytes, of_bandwidth, of_rate))
    return kinds


def kinds_without_a_run(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds that a run did not measure, with the shares of plain weights."""
    plain = next((kind for kind in kinds if kind.name == NAMES["llada"]), None)
    if plain is None:
        return []
    there = {kind.name for kind in kinds}
    return [
        plain._replace(name=name, num_bytes=bytes_of(family))
        for family, name in NAMES.items()
        if name not in there
    ]


def bytes_of(family: str) -> float:
    """Return the bytes of the weights that a step of a family reads."""
    layers = work_of(FEW).weight_bytes / 2 - SHAPE.head_parameters
    return layers * STORED[family] + 2 * SHAPE.head_parameters


class Request(NamedTuple):
    """The request of every client: tokens of prompt and answer, and those committed per forward."""

    prompt: int = 128
    answer: int = 128
    tokens: int = 1


def tokens_a_second(
    kind: Kind, card: Card, clients: int, request: Request, *, is_dual: bool
) -> float:
    """Return the tokens per second of all clients together, which share every step."""
    whole = kind.seconds(card, (request.prompt + request.answer) * clients)
    forwards = BLOCK / request.tokens  # forwards per block
    window = kind.seconds(card, BLOCK * clients) if is_dual else whole
    return clients * BLOCK / (whole + (forwards - 1) * window)


def table(kinds: Sequence[Kind], request: Request) -> Iterator[str]:
    """Yield a row for every card and kind of weights that it has memory and instructions for."""
    header = ["card", "weights", f"{FEW} rows, ms", f"{MANY} rows, ms"]
    header += [f"{name}, {count}" for name in ("no cache", "dual") for count in ("1 client", "8")]
    rows = []
    for name, card in OTHERS.items():
        for kind in kinds:
            if not kind.fits(card) or (kind.name == "fp8" and not card.fp8_tflops):
                continue
            steps = [1000 * kind.seconds(card, rows_) for rows_ in (FEW, MANY)]
            speeds = [
                tokens_a_second(kind, card, clients, request, is_dual=is_dual)
                for is_dual in (False, True)
                for clients in (1, 8)
            ]
            rows.append([name, kind.name, *steps, *speeds])
    yield from markdown(header, rows)


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = harness.Parser("", __doc__)
    parser.add_argument("file", type=Path, help="step_latency.json of a run as above")
    parser.option("--prompt", Request().prompt, "tokens of a request's prompt")
    parser.option("--answer", Request().answer, "tokens of a request's answer")
    parser.option("--tokens-a-forward", 1, "tokens committed per forward")
    options = parser.parse_args(arguments)
    kinds = kinds_of(json.loads(options.file.read_text(encoding="utf-8")))
    unmeasured = kinds_without_a_run(kinds)
    request = Request(options.prompt, options.answer, options.tokens_a_forward)
    for kind in [*kinds, *unmeasured]:
        shares = f"{kind.of_bandwidth:.2f} of the bandwidth, {kind.of_rate:.2f} of the rate"
        print(f"{kind.name}: {shares}{', as bf16: not measured' if kind in unmeasured else ''}")
    print()
    print("\n".join(table([*kinds, *unmeasured], request)))


if __name__ == "__main__":
    raise SystemExit(main())
