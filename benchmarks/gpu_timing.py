# SPDX-License-Identifier: Apache-2.0
"""Times of work on a CUDA device, and the ceilings of that device, measured in the same run.

    from benchmarks.gpu_timing import compare, copy_bandwidth, rotating, run_record

    inputs = rotating(lambda: torch.randn(4096, 4096, device="cuda"))  # together exceed the cache
    times = compare({
        "ours": [partial(op, x) for x in inputs],
        "torch": [partial(torch_op, x) for x in inputs],
    })                                                      # {"ours": Timing, "torch": Timing}
    print(times["ours"].median_us, num_bytes / times["ours"].seconds / copy_bandwidth())

All times are measured with CUDA events. Variants that are compared run in turns, so that a change
of the clock rate affects all of them. Inputs are random, because with zeros a card needs less power
and is faster.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Parser, Table
from benchmarks.run_record import first_line, software_record

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

T = TypeVar("T")
MIN_ATTENTION_LENGTH = 2048
SUSTAINED_S = 0.3  # seconds of work after which a card has reached its power limit


@dataclass(frozen=True)
class Timing:
    """Time of one call over several measurements."""

    median_ms: float
    min_ms: float
    num_measured: int

    @property
    def median_us(self) -> float:
        """Median in microseconds."""
        return 1000 * self.median_ms

    @property
    def seconds(self) -> float:
        """Median in seconds."""
        return self.median_ms / 1000

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Timing:
        """Compute median and minimum of `times_ms`.

        Raises:
            ValueError: `times_ms` is empty.
        """
        if not times_ms:
            raise ValueError("times_ms: wanted at least one time, got none")
        return cls(statistics.median(times_ms), min(times_ms), len(times_ms))


# --- timing ----------------------------------------------------------------------------------


def time_call(call: Callable[[], object], *, repeats: int = 20, warm_up_s: float = 0.05) -> Timing:
    """Measure the device time of one call, including the gaps between its kernels.

    The call may launch any number of kernels, each time from the host, as a user's program would
    when the device waits for the host. It is repeated for `warm_up_s` seconds before.
    """
    warm_up([call], warm_up_s)
    return Timing.of([event_ms(call) for _ in range(repeats)])


def time_graph(
    calls: Sequence[Callable[[], object]], *, repeats: int = 20, warm_up_s: float = 0.05
) -> Timing:
    """Measure the device time of one call, by replays of one CUDA graph of all `calls` in turn.

    This excludes the host from the measurement. Pass calls on different inputs (see `rotating`),
    because a small input would stay in the cache.
    """
    replay = graph_of(calls)
    warm_up([replay], warm_up_s)
    return Timing.of([event_ms(replay) / len(calls) for _ in range(repeats)])


def compare(
    variants: Mapping[str, Sequence[Callable[[], object]]],
    *,
    repeats: int = 20,
    warm_up_s: float = 0.05,
    use_graphs: bool = True,
) -> dict[str, Timing]:
    """Measure the time of one call of every variant; the variants take turns.

    Args:
        variants: calls of each variant, usually one for each of several inputs.
        use_graphs: whether all calls of a variant become one CUDA graph, as in `time_graph`. A
            variant that cannot be captured requires False; then the gaps between its launches
            count.
    """
    run = {
        name: graph_of(calls) if use_graphs else partial(_call_all, calls)
        for name, calls in variants.items()
    }
    warm_up(list(run.values()), warm_up_s)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, calls in variants.items():
            times[name].append(event_ms(run[name]) / len(calls))
    return {name: Timing.of(measured) for name, measured in times.items()}


def event_ms(call: Callable[[], object]) -> float:
    """Measure the milliseconds between two CUDA events around `call` on the current stream.

    Without a CUDA device the host's clock is used.
    """
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def warm_up(calls: Sequence[Callable[[], object]], seconds: float) -> None:
    """Run every call at least twice, then in turns until `seconds` have passed."""
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < until:
        for call in calls:
            call()
        torch.cuda.synchronize()
        rounds += 1


def graph_of(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Capture a CUDA graph of `calls` in order; return a function that replays it.

    The calls run once on a side stream before. The graph, its memory and the data of `calls` live
    as long as the result.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _call_all(calls)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _call_all(calls)
    return partial(_replay, graph, calls)


def _replay(graph: torch.cuda.CUDAGraph, _inputs: Sequence[Callable[[], object]]) -> None:
    graph.replay()


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def rotating(make: Callable[[], T], num_bytes: int | None = None, most: int = 64) -> list[T]:
    """Make inputs that together are twice the device's cache, so that each is read from memory.

    Args:
        num_bytes: bytes that one call reads and writes of its input; by default the bytes of the
            tensors that `make` returns (a tensor, or a sequence or mapping of tensors).
        most: upper bound on the number of inputs.
    """
    first = make()
    size = num_bytes or sum(tensor.nbytes for tensor in _tensors(first))
    count = min(most, 1 + 2 * l2_bytes() // max(1, size))
    return [first, *(make() for _ in range(count - 1))]


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def l2_bytes() -> int:
    """Return the size of the device's last-level cache."""
    size: int = torch.cuda.get_device_properties().L2_cache_size
    return size


# --- ceilings --------------------------------------------------------------------------------
# Ceilings come from the fastest measurement: a hot card lowers its clock, and a ceiling must not
# follow.


@cache
def copy_bandwidth(num_bytes: int = 2**31) -> float:
    """Measure bytes per second, read plus written, of one large device-to-device copy."""
    source = torch.randint(2**62, (num_bytes // 8,), device="cuda")
    target = torch.empty_like(source)
    timing = time_call(partial(target.copy_, source))
    return 2000 * source.nbytes / timing.min_ms


@cache
def matmul_rate(size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure FLOP per second of repeated products of `size` x `size` random matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    timing = time_call(partial(torch.mm, a, b), warm_up_s=SUSTAINED_S)
    return float(2000 * size**3 / timing.median_ms)


@cache
def attention_rate(
    num_tokens: int,
    num_heads: int = 32,
    head_dim: int = 128,
    backend: SDPBackend = SDPBackend.CUDNN_ATTENTION,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Measure FLOP per second of bidirectional attention over a sequence by `backend`."""
    q, k, v = (
        torch.randn(1, num_heads, num_tokens, head_dim, device="cuda", dtype=dtype)
        for _ in range(3)
    )
    flops = attention_flops(num_tokens, num_tokens, num_heads, head_dim)
    calls = [partial(scaled_dot_product_attention, q, k, v)] * (1 if num_tokens > 8192 else 8)
    with sdpa_kernel(backend):
        timing = time_graph(calls, warm_up_s=SUSTAINED_S)
    return 1000 * flops / timing.median_ms


def rates(
    length: int, num_heads: int, head_dim: int, noted: dict[str, Any]
) -> tuple[float, float, float]:
    """Measure bandwidth, and the rates of products and of attention; add them to `noted`.

    Attention is measured over `length` rows, but at least over 2,048: with fewer rows the launch
    decides its time, not the card.
    """
    length = max(length, MIN_ATTENTION_LENGTH)
    measured = copy_bandwidth(), matmul_rate(), attention_rate(length, num_heads, head_dim)
    noted["copy_tb_per_s"], noted["matmul_tflop_per_s"] = measured[0] / 1e12, measured[1] / 1e12
    attention = noted.setdefault("attention_tflop_per_s", {})
    attention[f"{length} x {num_heads} heads"] = measured[2] / 1e12
    return measured


def attention_flops(num_queries: int, num_keys: int, num_heads: int, head_dim: int) -> float:
    """Return the FLOP of both products of attention without a mask."""
    return 4.0 * num_queries * num_keys * num_heads * head_dim


# --- the record of a run ---------------------------------------------------------------------


def run_record() -> dict[str, Any]:
    """Record the conditions of a run: machine, device, software, commit, command line."""
    record = software_record()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties()
        record["gpu"] = device.name
        record["gpu_memory_gib"] = round(device.total_memory / 2**30, 1)
        record["cuda"] = torch.version.cuda
        record["driver"] = first_line(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return record


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write `{"run": run_record(), **content}` as JSON; create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"run": run_record(), **content}, indent=2) + "\n", "utf-8")


# --- benchmarks of kernels -------------------------------------------------------------------


class KernelParser(Parser):
    """Parser of the options of a benchmark of kernels, which needs a GPU.

    Args:
        about: docstring of the benchmark.
        rows: default numbers of rows; empty: no such option.
    """

    def __init__(self, about: str | None, rows: Sequence[int] = ()) -> None:
        super().__init__("", about)
        if rows:
            self.option("--rows", rows, "numbers of rows")
        self.option("--json", None, "file for the record of the run", type=Path)

    def parse(
        self, arguments: Sequence[str] | None = None, *, is_built: bool = True
    ) -> argparse.Namespace:
        """Parse the options; exit without a GPU or if the measured module is not built."""
        options = self.parse_args(arguments)
        if not torch.cuda.is_available():
            self.error("needs a CUDA device")
        if not is_built:
            self.error("needs the compiled module (scripts/test.sh builds it)")
        return options


def report(
    path: Path | None, title: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]
) -> None:
    """Print rows as they arrive, after the bandwidth of a copy; write them if there is a path."""
    print(f"copy: {copy_bandwidth() / 1e12:.2f} TB/s")
    table = Table(columns)
    for row in rows:
        table.add(row)
    if path is not None:
        content = {"columns": list(columns), "rows": table.rows}
        write_record(path, {"title": title, "copy_bandwidth": copy_bandwidth(), **content})


def random_rows(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Draw from N(0, scale^2) on the GPU."""
    return torch.randn(*shape, dtype=dtype, device="cuda").mul_(scale)
