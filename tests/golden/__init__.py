# SPDX-License-Identifier: Apache-2.0
"""Recorded runs of the published loops, in runs.jsonl, which parity tests read.

`pytest --write-golden` computes the runs that the selected tests need and records them, with a
digest of the code that produced them. While that code is unchanged, a test that computes a sample
again is skipped, unless `--references` is given.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reference import decode, dispatch

from tests.checkpoints import EOS_ID, EOT_ID, MASK_ID, random_prompt
from tests.digests import digest_of

FOLDER = Path(__file__).parent
RUNS = FOLDER / "runs.jsonl"
DIGEST = FOLDER / "runs.sha256"
IDS = decode.SpecialIds(mask=MASK_ID, eos=EOS_ID, eot=EOT_ID)
MAX_PROMPTS = 40


class Run(NamedTuple):
    """A canvas, the number of forward passes, and the pass that decided each token.

    filled: tokens of masks of the prompt, by position. is_clear: no decision is a near-tie and no
    mask is left, so that every difference from the run is an error.
    """

    ids: list[int]
    num_forwards: int
    decided_at: list[int]
    filled: dict[int, int]
    is_clear: bool


class Store:
    """The runs of the file by model and parameters, and the runs that were computed again."""

    def __init__(self, writes: bool = False) -> None:
        self.writes = writes
        self.written: dict[str, Any] = {}

    @property
    def runs(self) -> dict[str, Any]:
        return {**_runs_of_file(), **self.written}


STORE = Store()


@cache
def _runs_of_file() -> dict[str, Any]:
    lines = RUNS.read_text(encoding="utf-8").splitlines() if RUNS.exists() else []
    return dict(json.loads(line) for line in lines)


def run(model: decode.LogitModel, prompt: Sequence[int], **parameters: Any) -> Run:
    """Return the recorded run of a request, with its whole canvas.

    `parameters` are request parameters, including gen_length, block_length and, for semi_ar, steps.
    """
    key = {"prompt": list(prompt), **parameters}
    return _as_run(written(model, key, lambda: _computed(model, prompt, parameters)))


def clear_case(
    model: decode.LogitModel, prompt_length: int, first_seed: int = 0, **parameters: Any
) -> tuple[list[int], Run]:
    """Return the first of 40 prompts whose run is clear, and that run."""
    key = {"prompt_length": prompt_length, "first_seed": first_seed, **parameters}
    entry = written(model, key, lambda: _searched(model, prompt_length, first_seed, parameters))
    return random_prompt(prompt_length, entry["prompt_seed"]), _as_run(entry)


def reference(model: decode.LogitModel, prompt: Sequence[int], **parameters: Any) -> decode.Decoded:
    """Compute a run now, and return it with all of its steps."""
    options = dict(parameters)
    algorithm = options.pop("algorithm", "threshold" if "threshold" in options else "semi_ar")
    return dispatch.run(model, prompt, ids=IDS, algorithm=algorithm, **options)


def written(model: Any, parameters: dict[str, Any], compute: Any) -> dict[str, Any]:
    """Return the recorded JSON of these parameters and this model, or compute it to be written."""
    key = json.dumps({"model": name_of(model), **parameters}, sort_keys=True)
    if STORE.writes and key not in STORE.written:
        STORE.written[key] = compute()
    entry: dict[str, Any] | None = STORE.runs.get(key)
    assert entry is not None, f"{RUNS.name} has no run of {key}: pytest --write-golden writes it"
    return entry


def _searched(
    model: decode.LogitModel, prompt_length: int, first_seed: int, parameters: dict[str, Any]
) -> dict[str, Any]:
    for seed in range(first_seed, first_seed + MAX_PROMPTS):
        try:
            computed = _computed(model, random_prompt(prompt_length, seed), parameters)
        except RuntimeError:  # the threshold loop cannot end if the model predicts the mask
            continue
        if computed["is_clear"]:
            return {"prompt_seed": seed, **computed}
    raise AssertionError(f"all of {MAX_PROMPTS} prompts have near-ties for {parameters}")


def _computed(
    model: decode.LogitModel, prompt: Sequence[int], parameters: dict[str, Any]
) -> dict[str, Any]:
    decoded = reference(model, prompt, **parameters)
    decided_at, filled = [0] * len(decoded.ids), {}
    for step in decoded.trace:
        for position, token in step.committed.items():
            if position >= len(prompt):
                decided_at[position - len(prompt)] = step.index
            else:
                filled[position] = token
    is_clear = MASK_ID not in decoded.ids and not decode.near_ties(decoded.trace)
    return Run(decoded.ids, decoded.num_forwards, decided_at, filled, is_clear)._asdict()


def _as_run(entry: dict[str, Any]) -> Run:
    fields = {name: entry[name] for name in Run._fields}
    return Run(**{**fields, "filled": {int(k): v for k, v in entry["filled"].items()}})


def name_of(model: Any) -> str:
    """Return the class of a model and the sum of its weights, which depends on each of them."""
    if not hasattr(model, "golden_name"):
        size = sum(float(weight.double().abs().sum()) for weight in model.weights.values())
        model.golden_name = f"{type(model).__name__} {size:.7g}"
    name: str = model.golden_name
    return name


# ---- the file ----------------------------------------------------------------------------------


def digest() -> str:
    """Return a digest of the code that computes the runs."""
    loops = (FOLDER.parents[1] / "scripts" / "reference").glob("*.py")
    return digest_of([*loops, Path(__file__), FOLDER.parent / "checkpoints.py"])


def is_up_to_date() -> bool:
    return DIGEST.exists() and DIGEST.read_text(encoding="utf-8").strip() == digest()


def write() -> None:
    runs = STORE.runs
    lines = [json.dumps([key, runs[key]], separators=(",", ":")) for key in sorted(runs)]
    RUNS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    DIGEST.write_text(digest() + "\n", encoding="utf-8")
