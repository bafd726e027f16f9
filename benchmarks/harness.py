# SPDX-License-Identifier: Apache-2.0
"""What benchmarks in this process share: environment, options of the model, the written record.

Import this before anything imports vllm: `prepare` sets variables that vllm reads once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the released models state 4,096 and run any length
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
SIZE = ("num_layers", "shrink")


def prepare(**more: str) -> None:
    """Set what engines run with, unless the user has."""
    for name, value in {**ENVIRONMENT, **more}.items():
        os.environ.setdefault(name, value)


def parser_of(
    name: str, description: str, families: Sequence[str], family: str
) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark of a released model's shape.

    Args:
        name: of the folder of its results.
        families: that it can measure; `family` unless told otherwise.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--family", choices=families, default=family)
    parser.add_argument("--size", help="which released model of the family (default: its first)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-layers", type=int, help="instead of the released model's number")
    parser.add_argument("--shrink", type=int, default=1, help="divide all widths (for a test run)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "results" / name)
    return parser


def configuration_of(options: argparse.Namespace) -> dict[str, Any]:
    """config.json of the model that the options of `parser_of` name."""
    from make_dummy_checkpoint import configuration

    sizes = {key: getattr(options, key) for key in SIZE}
    return configuration(options.family, options.size, **sizes)


@contextmanager
def checkpoint_of(options: argparse.Namespace) -> Iterator[Path]:
    """A folder with that model's configuration and tokenizer, and no weights."""
    from make_dummy_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        sizes = {key: getattr(options, key) for key in SIZE}
        write_checkpoint(Path(folder), options.family, options.size, **sizes)
        yield Path(folder)


def write(kind: str, options: argparse.Namespace, **content: Any) -> None:
    """KIND.json in the folder of the results: the options, and what was found."""
    from benchmarks.gpu_timing import write_record

    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    record = {"kind": kind, "settings": settings, **content}
    write_record(options.output_dir / f"{kind}.json", record)
    print(f"written: {options.output_dir}")
