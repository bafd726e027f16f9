#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print results of benchmarks as tables for the pages in docs/measurements.

    benchmarks/performance_tables.py results/step_latency/step_latency.json ...

It reads the JSON files of step_latency.py, compare_hf.py, speculation.py, llada/run_benchmark.py
and its twins, and of benchmarks that store their columns: fragmentation.py and the benchmarks of
kernels.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import BenchmarkError, cell, markdown, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GIB = 2**30
UNITS = {"GiB": 1, "MiB": 1024}  # units of a plan's peak, per GiB
PLANNED = re.compile(r"predicted peak (?P<peak>[\d.]+) (?P<unit>\w+), time (?P<seconds>[\d.e+]+) s")
DEFAULT_MEMORY_SHARE = 0.92  # share of a GPU's memory
NAMES_OF_FAMILIES = {
    "llada": "LLaDA-8B",
    "dream": "Dream-7B",
    "llada-moe": "LLaDA-MoE-7B-A1B",
    "llada2": "LLaDA2.0-mini (16B-A1.4B)",
    "sdar": "SDAR-8B",
    "sdar-moe": "SDAR-30B-A3B",
    "fast-dllm": "Fast-dLLM v2 7B",
}


class TableError(BenchmarkError):
    """A file is not a measurement; the message is one line for the user."""


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = harness.Parser("", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON of a benchmark")
    options = parser.parse_args(arguments)
    print("\n".join(line for path in options.files for line in section(path)))


def section(path: Path) -> list[str]:
    """Return the lines of a heading, its tables, and the conditions of the measurement.

    Raises:
        TableError: the file cannot be read as a measurement.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = kernel if "columns" in content else TABLES[content["kind"]]
        return [*tables(content), "", measured_on(content["run"]), ""]
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{path}: not a measurement: {error!r}") from error


def measured_on(run: dict[str, Any]) -> str:
    """Describe machine, software, commit and command in one sentence."""
    packages = [f"{name} {version}" for name, version in run["packages"].items() if version]
    if run.get("gpu"):
        driver = f", driver {run['driver']}" if run.get("driver") else ""
        machine = f"{run['gpu']} ({run['gpu_memory_gib']} GiB{driver})"
    else:
        machine = f"{run['num_cpus']} CPU cores ({run['machine']})"
    commit = f", commit {run['commit']}" if run.get("commit") else ""
    return (
        f"Measured {run['date'][:10]} on {machine} with {', '.join(packages)}{commit}: "
        f"`{run['command']}`"
    )


# --- one function per kind: lines of a heading and its tables ----------------------------------


def step_latency(content: dict[str, Any]) -> Iterator[str]:
    """Yield a table per family."""
    settings, ceilings = content["settings"], content["ceilings"]
    for family in dict.fromkeys(row["family"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["family"] == family]
        has_experts = any(row["touched_experts"] for row in rows)
        yield f"### Step of {NAMES_OF_FAMILIES[family]}{changes_of(settings)}"
        yield ""
        if ceilings:
            yield (
                f"Ceilings of this run: copy {ceilings['copy_tb_per_s']:.2f} TB/s, "
                f"matrix product {ceilings['matmul_tflop_per_s']:.0f} TFLOP/s, attention "
                f"{in_words(ceilings['attention_tflop_per_s'])} TFLOP/s."
            )
            yield ""
        header = ["requests", "T", "step, ms", "fastest", "step to step", "floor", "x floor"]
        header += ["plain PyTorch", "speed-up"]
        header += ["experts"] if has_experts else []
        body = []
        for row in rows:
            before = f"{row['context']:,} + " if row.get("context") else ""
            cells = [row["num_requests"], f"{before}{row['length']:,}"]
            cells += [row["step_ms"], row["step_min_ms"], row["interval_ms"], row["floor_ms"]]
            cells += [ratio(row["step_ms"], row["floor_ms"]), row["reference_ms"]]
            cells += [ratio(row["reference_ms"], row["step_ms"])]
            cells += [row["touched_experts"]] if has_experts else []
            body.append(cells)
        yield from markdown(header, body)
        yield ""


def throughput(content: dict[str, Any]) -> Iterator[str]:
    """Yield one table of all systems."""
    settings, rows = content["settings"], content["rows"]
    model = NAMES_OF_FAMILIES.get(settings["model"], settings["model"])
    plain = next((row["tokens_per_s"] for row in rows if row["system"] == "plain loop"), None)
    yield (
        f"### {model}{changes_of(settings)}: prompt {settings['prompt_length']}, "
        f"canvas {settings['gen_length']}, blocks of {settings['block_length']}, "
        f"{settings['steps']} steps"
    )
    yield ""
    yield from markdown(
        ["system", "cache", "clients", "tokens/s", "ms per forward", "x plain loop"],
        [
            [
                *(row["system"], row["cache"], row["num_clients"]),
                *(row["tokens_per_s"], row["ms_per_forward"]),
                ratio(row["tokens_per_s"], plain),
            ]
            for row in rows
        ],
    )


def context_length(content: dict[str, Any]) -> Iterator[str]:
    """Yield one table of all lengths that ran, and the failure of the shortest other length."""
    settings, points = content["settings"], content["points"]
    plural = "" if settings["steps"] == 1 else "s"
    yield (
        f"### {Path(settings['model_path']).name}: {settings['alpha']:.0%} prompt, "
        f"{settings['steps']} step{plural}{limits_of(content)}"
    )
    yield ""
    header = ["T", "first step, ms", "median", "last", "planned", "GPU, GiB", "host, GiB"]
    header += ["activations, GiB", "planned", "KiB per token", "peak / average"]
    body = []
    for point in points:
        if point["status"] != "ok":
            continue
        activation = point["activation_peak_bytes"]
        planned = PLANNED.search(point["plan"])
        cells = [f"{point['length']:,}", point["first_ms"], point["median_ms"], point["last_ms"]]
        cells += [1000 * float(planned["seconds"]) if planned else None]
        peaks = (point["gpu_peak_bytes"], point["host_peak_bytes"], activation)
        cells += [ratio(num_bytes, GIB) for num_bytes in peaks]
        cells += [float(planned["peak"]) / UNITS[planned["unit"]] if planned else None]
        cells += [ratio(activation, 1024 * point["length"])]
        body.append([*cells, ratio(activation, point["activation_average_bytes"])])
    yield from markdown(header, body)
    failed = next((point for point in points if point["status"] != "ok"), None)
    if failed is not None:
        yield ""
        yield f"{failed['length']:,} tokens: {failed['status']}."


def limits_of(content: dict[str, Any]) -> str:
    """Describe the limits of a server of `context_length` that are not the defaults."""
    settings, limits = content["settings"], []
    share, pool = settings["gpu_memory_utilization"], settings["activation_pool_size_bytes"]
    memory = content["run"].get("gpu_memory_gib")
    if memory and share != DEFAULT_MEMORY_SHARE:
        limits.append(f"{cell(share * memory)} GiB of the GPU")
    if pool is not None:
        limits.append(f"{cell(pool / GIB)} GiB of activations")
    if settings["environment"].get("VLLM_USE_HOST_RESIDUAL") == "0":
        limits.append("no rows in host memory")
    return f" ({', '.join(limits)})" if limits else ""


def kernel(content: dict[str, Any]) -> Iterator[str]:
    """Yield the table of a kernel's benchmark: title, columns, rows, perhaps a note."""
    yield f"### {content['title']}"
    yield ""
    if content.get("note"):
        yield content["note"]
        yield ""
    yield from markdown(content["columns"], content["rows"])


def speculation(content: dict[str, Any]) -> Iterator[str]:
    """Yield the table of draft states with a given chance of acceptance."""
    settings = content["settings"]
    quantised = f", {settings['quantization']}" if settings.get("quantization") else ""
    name = NAMES_OF_FAMILIES[settings["family"]]
    length = settings["block_length"]
    yield f"### Draft states: {name}{quantised}, blocks of {length}, one token per step"
    yield ""
    header = ("clients", "states", "chance", "steps/s", "gain", "steps/s between refreshes")
    header += ("gain", "steps per forward")
    names = ("clients", "states", "chance", "steps_per_s", "gain", "between", "gain_between")
    names += ("steps_per_forward",)
    yield from markdown(header, [[row[name] for name in names] for row in content["rows"]])


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "step_latency": step_latency,
    "throughput": throughput,
    "context_length": context_length,
    "speculation": speculation,
}


def changes_of(settings: dict[str, Any]) -> str:
    """Describe the differences from the released model or from the usual way to run it."""
    changes = []
    if settings.get("num_layers"):
        changes.append(f"{settings['num_layers']} layers")
    if settings.get("shrink", 1) != 1:
        changes.append(f"widths / {settings['shrink']}")
    if settings.get("enforce_eager"):
        changes.append("without CUDA graphs")
    if settings.get("dtype", "bfloat16") != "bfloat16":
        changes.append(settings["dtype"])
    return f" ({', '.join(changes)})" if changes else ""


def in_words(rates: dict[str, float]) -> str:
    """Format `{"2048 x 32 heads": 520.1}` as "520 (2048 x 32 heads)"."""
    return ", ".join(f"{rate:.0f} ({name})" for name, rate in rates.items())


if __name__ == "__main__":
    sys.exit(main())
