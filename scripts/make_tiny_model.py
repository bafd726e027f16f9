#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model on a few facts and write it as a checkpoint of a released model family.

    scripts/make_tiny_model.py [--family llada] [--output models/llada-tiny] [--force] [--seed N]
        [--wrong-share 0.1]
    scripts/make_tiny_model.py --family all  one of every family: llada, dream, llada-moe, llada2,
                                             sdar, fast-dllm, nemotron, llada21, llada22, idlm,
                                             diffusion-gemma
    scripts/make_tiny_model.py --check       only verify an existing one

The model answers small questions (capitals, sums, opposites, colours, days, months, greetings) in
many wordings, with or without the chat template, after a system message and in up to three turns.
To any other question it answers that it does not know. Families other than llada are taught less;
see `plan_for` in tiny_model/settings.py.

The model is trained on the CPU, even if there is a GPU. A directory is kept if it is complete and
was made by these sources, package versions, family and seed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_model.cache import foreign_files, read_manifest, recipe, write_manifest
from tiny_model.family import FAMILY_NAMES, load_family
from tiny_model.settings import plan_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiny_model.settings import Plan

SCRIPTS = Path(__file__).resolve().parent
REPOSITORY = SCRIPTS.parent
SOURCES = (Path(__file__).resolve(), *(SCRIPTS / "tiny_model").glob("*.py"))
ALL = "all"
MAX_SEED = 2**63 - 1


class TinyModelError(Exception):
    """The model cannot be made or is not good enough; the message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_arguments(arguments)
    # The variable is read later, when torch is loaded. It makes waiting threads spin for a short
    # time. With no spinning the training takes half as long again; with the default, milliseconds,
    # it is very slow on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        validate(options)
        for family in FAMILY_NAMES if options.family == ALL else (options.family,):
            plan = plan_for(family, options.wrong_share)
            output = (options.output or REPOSITORY / "models" / f"{family}-tiny").resolve()
            if options.check:
                check(output, family, plan)
            else:
                make(output, family, options.seed, force=options.force, plan=plan)
    except PackageNotFoundError as error:
        return fail(f"package {error.name} is not installed in {sys.prefix}")
    except (TinyModelError, OSError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return fail("interrupted; nothing was written")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train a tiny diffusion language model on a few facts."
    )
    families = ", ".join((*FAMILY_NAMES, ALL))
    parser.add_argument("--family", default="llada", help=f"model family: {families}")
    parser.add_argument(
        "--output", type=Path, help="checkpoint directory (default: models/FAMILY-tiny)"
    )
    parser.add_argument("--force", action="store_true", help="train even if it exists already")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and draws")
    parser.add_argument(
        "--wrong-share",
        type=float,
        help="share of an answer's tokens that are wrong in training, so that the model learns to "
        "replace them (default: the family's)",
    )
    parser.add_argument("--check", action="store_true", help="only verify an existing model")
    return parser.parse_args(arguments)


def validate(options: argparse.Namespace) -> None:
    """Raise TinyModelError for values that argparse accepts but the command does not support."""
    if options.family not in (*FAMILY_NAMES, ALL):
        wanted = " or ".join((*FAMILY_NAMES, ALL))
        raise TinyModelError(f"--family: wanted {wanted}, got {options.family}")
    if options.family == ALL and options.output:
        raise TinyModelError("--output: wanted one family with it, got --family all")
    if options.wrong_share is not None and not 0 <= options.wrong_share < 1:
        wanted = "wanted a number from 0 to below 1"
        raise TinyModelError(f"--wrong-share: {wanted}, got {options.wrong_share}")
    if not 0 <= options.seed <= MAX_SEED:
        raise TinyModelError(f"--seed: wanted 0 to {MAX_SEED}, got {options.seed}")


def make(
    output: Path, family_name: str, seed: int, *, force: bool = False, plan: Plan | None = None
) -> None:
    """Make the model at `output` unless it already exists.

    If it does not reach the plan's required share of right answers, it is trained once more from
    another start, because the same numbers round differently on other processors.

    Raises:
        TinyModelError: The second training did not reach the share either, or `output` holds files
            that do not belong to a tiny model. `output` is then unchanged.
    """
    plan = plan or plan_for(family_name)
    wanted = recipe(SOURCES, family_name, seed, plan)
    with work_directory(output) as draft:
        manifest = read_manifest(output)
        if manifest and manifest["recipe"] == wanted and not force:
            say(f"{output} is complete: {summary(manifest['results'][0])}")
            return
        refuse_foreign(output)
        started = time.monotonic()

        # Import late, because the answer above needs no torch.
        from tiny_model.making import verify, write_checkpoint

        family = load_family(family_name)
        for start in (seed, seed + 1):
            write_checkpoint(draft, family, plan.training, start)
            results = verify(draft, family, plan)
            report(results)
            if not shortfall(results, plan):
                break
        require(results, plan)
        write_manifest(draft, wanted, results)
        replace(draft, output)
        size_mb = sum(path.stat().st_size for path in output.iterdir()) / 1e6
        say(f"made {output} ({size_mb:.1f} MB) in {time.monotonic() - started:.0f} s")


def check(output: Path, family_name: str, plan: Plan | None = None) -> None:
    """Verify the model at `output`; raise TinyModelError if it is incomplete or not good enough."""
    plan = plan or plan_for(family_name)
    if read_manifest(output) is None:
        raise TinyModelError(f"{output} is missing, incomplete or changed: run without --check")

    from tiny_model.making import verify

    results = verify(output, load_family(family_name), plan)
    report(results)
    require(results, plan)


@contextmanager
def work_directory(output: Path) -> Iterator[Path]:
    """Return a new directory next to `output`, which is removed afterwards unless it was moved.

    Only one process at a time may be inside for the same `output`. A second process waits and then
    finds the model of the first. Directories that killed processes left behind are removed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prefix = f".{output.name}.draft-"
        for leaving in output.parent.glob(f"{prefix}*"):
            shutil.rmtree(leaving)
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
        try:
            draft.chmod(0o755)
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def refuse_foreign(output: Path) -> None:
    """Raise TinyModelError if `output` holds files of someone else that would be replaced."""
    if output.exists() and not output.is_dir():
        raise TinyModelError(f"--output: wanted a directory, got the file {output}")
    if foreign := foreign_files(output):
        raise TinyModelError(f"--output: {output} holds files not made here: {', '.join(foreign)}")


def replace(draft: Path, output: Path) -> None:
    """Move the finished `draft` to `output`.

    An existing directory is moved away as a whole first, and removed last.
    """
    if output.exists():
        old = draft.with_name(draft.name + "-old")
        output.rename(old)
        draft.rename(output)
        shutil.rmtree(old)
    else:
        draft.rename(output)


def report(results: Sequence[dict[str, Any]]) -> None:
    """Print one line per verification."""
    for result in results:
        say(summary(result))


def require(results: Sequence[dict[str, Any]], plan: Plan) -> None:
    """Raise TinyModelError if a group of the first verification is below the required share."""
    if missed := shortfall(results, plan):
        raise TinyModelError(f"not good enough: {missed}; {summary(results[0])}")


def shortfall(results: Sequence[dict[str, Any]], plan: Plan) -> str:
    """Describe the first group of the first verification below the required share.

    The text is empty if there is no such group.
    """
    for name, group in results[0]["groups"].items():
        share = plan.required(name)
        if group["right"] < share * group["total"]:
            return f"{name}: {group['right']} of {group['total']} answers right, {share:.0%} wanted"
    return ""


def summary(result: dict[str, Any]) -> str:
    """Return one verification in words."""
    groups = result["groups"]
    right, total = (sum(group[key] for group in groups.values()) for key in ("right", "total"))
    shares = (f"{name} {group['right'] / group['total']:.0%}" for name, group in groups.items())
    return (
        f"{right} of {total} answers right at canvas {result['canvas']}, {result['steps']} steps,"
        f" block {result['block_length']} ({', '.join(shares)})"
    )


def say(line: str) -> None:
    """Print one line of the command's result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fail(message: str) -> int:
    """Print the error as one line; return the exit status."""
    sys.stderr.write(f"make_tiny_model: {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
