#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check trajectories of a server against a plain PyTorch network of the same checkpoint.

    scripts/replay_trajectory.py models/llada-tiny answers.jsonl

Each line of the file is {"prompt_token_ids": [...], "trajectory": {...}}. The state before every
step is rebuilt from the trajectory, and one plain forward of it runs in fp64. Its log probabilities
and entropies must agree with the trajectory to 1e-5, times the largest logit of the row, because
rounding grows with it. If a published loop supports the request's parameters, it runs too, and must
commit the same tokens in the same steps.

Exit status: 0 if everything agrees, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402 (behind the path of the reference)
from reference import block_loops, decode, dispatch, shaping  # noqa: E402
from reference.models import load_reference, shift_right  # noqa: E402
from reference.philox import uniform_matrix  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

TOLERANCE = 1e-5
_EDITS = {
    "repetition_penalty": 1.0,
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), 0),
    **{name: [] for name in ("allowed_token_ids", "bad_words")},
    "logit_bias": {},
}
# Defaults of options that the published loops take only if they differ, and options of one
# algorithm.
_OPTIONS: dict[str, Any] = {
    "temperature": 0.0,
    "cfg_scale": 0.0,
    "remasking": "low_confidence",
    "confidence_dtype": "float32",
    "logits_eos_inf": False,
    "confidence_eos_eot_inf": False,
}
_OWN = {
    "semi_ar": ("steps",),
    "threshold": ("threshold",),
    "factor": ("factor",),
    "local_leap": ("threshold", "relaxed_threshold", "radius"),
    "entropy_threshold": ("threshold",),
    "hierarchy": ("threshold", "low_threshold"),
    "credit": ("threshold",),
    "adablock": ("threshold", "delimiter_ids", "delimiter_threshold"),
    "dream": ("steps", "alg", "alg_temp", "eps", "top_p", "top_k"),
    "full_attn_multi_block": ("threshold", "block_add_threshold", "decoded_token_threshold"),
    "multi_block": ("threshold", "block_add_threshold", "decoded_token_threshold", "early_stop"),
    "low_confidence_dynamic": ("threshold", "steps_per_block"),
    "sequential": ("steps_per_block",),
    "entropy_bounded": ("threshold",),
    "joint_threshold": ("threshold", "editing_threshold", "max_post_steps", "num_to_transfer"),
    "hierarchy_block": ("threshold", "sub_block_length"),
}
_OF_GRIDS = (
    *("low_confidence_dynamic", "sequential", "entropy_bounded", "joint_threshold"),
    "hierarchy_block",
)


@dataclass(frozen=True)
class Replayed:
    """Result of a replay.

    Attributes:
        num_commits: commits with a log probability.
        logprob_error, entropy_error: largest differences from the plain forward, relative to the
            largest logit of their row if that is above 1.
        differences: canvas positions whose token or step differs from the published loop; None if
            no loop supports the parameters.
    """

    num_commits: int
    logprob_error: float
    entropy_error: float
    differences: list[int] | None

    @property
    def agrees(self) -> bool:
        largest = max(self.logprob_error, self.entropy_error)
        return largest <= TOLERANCE and not self.differences

    def __str__(self) -> str:
        loop = "no published loop was run"
        if self.differences is not None:
            loop = "tokens and steps are the published loop's"
        if self.differences:
            loop = f"tokens or steps differ from the published loop's at {self.differences}"
        return (
            f"{self.num_commits} commits; log probabilities within {self.logprob_error:.1e}, "
            f"entropies within {self.entropy_error:.1e}; {loop}"
        )


def replay(
    model: Any, prompt: Sequence[int], trajectory: dict[str, Any], *, runs_loop: bool = True
) -> Replayed:
    """Replay a trajectory on a plain network.

    Args:
        model: a network of `reference.models`.
        prompt: the prompt's token ids.
        trajectory: the trajectory.
        runs_loop: whether the published loop runs too.
    """
    commits = _commits(trajectory)
    rows, known = _states(prompt, trajectory, commits)
    distributions, scales = _distributions(model, rows, known, trajectory, commits)
    logprob_error = entropy_error = 0.0
    last_step = trajectory["commit_steps"]
    entropies = trajectory["entropies"] or []
    for step, position, token, logprob in commits:
        own = distributions[step - 1, position + len(prompt)]
        scale = float(scales[step - 1, position + len(prompt)])
        if logprob is not None:
            logprob_error = max(logprob_error, abs(float(own[token]) - logprob) / scale)
        is_last = 0 <= position < len(last_step) and last_step[position] == step
        if is_last and entropies and entropies[position] is not None:
            entropy = float(torch.special.entr(own.exp()).sum())
            entropy_error = max(entropy_error, abs(entropy - entropies[position]) / scale)
    return Replayed(
        sum(logprob is not None for *_, logprob in commits),
        logprob_error,
        entropy_error,
        differences(model, prompt, trajectory) if runs_loop else None,
    )


def _commits(trajectory: dict[str, Any]) -> list[tuple[int, int, int, float | None]]:
    """Return all commits in order: step, canvas position, token, log probability.

    Positions in the prompt are negative. If the rule fills positions after a step, these commits
    have the number of that step.
    """
    edits = trajectory["edits"]
    if edits is not None:
        names = ("steps", "positions", "token_ids", "logprobs")
        return list(zip(*(edits[name] for name in names), strict=True))
    names = ("commit_steps", "token_ids", "logprobs")
    steps, tokens, logprobs = (trajectory[name] for name in names)
    prompt = trajectory["prompt"]
    of_prompt = zip(
        prompt["commit_steps"],
        (position - trajectory["prompt_length"] for position in prompt["positions"]),
        prompt["token_ids"],
        prompt["logprobs"],
        strict=True,
    )
    on_canvas = zip(steps, range(len(steps)), tokens, logprobs, strict=True)
    return sorted((c for c in (*of_prompt, *on_canvas) if c[0] > 0), key=lambda c: c[0])


def _states(
    prompt: Sequence[int],
    trajectory: dict[str, Any],
    commits: Sequence[tuple[int, int, int, float | None]],
) -> tuple[Tensor, Tensor]:
    """Return the row before each of S steps, [S, T], and a mask [T] of tokens known at first."""
    parameters, start = trajectory["parameters"], len(prompt)
    # A draft may reach beyond the answer.
    last = max((place for _, place, *_ in commits), default=0)
    length = start + max(parameters["gen_length"], len(trajectory["token_ids"]), last + 1)
    row = torch.full((length,), parameters["mask_id"])
    row[:start] = torch.tensor(prompt)
    if parameters["suffix_ids"]:
        first = start + parameters["max_tokens"]
        row[first:] = parameters["eos_id"]
        row[first : first + len(parameters["suffix_ids"])] = torch.tensor(parameters["suffix_ids"])
    for position, step in enumerate(trajectory["commit_steps"]):
        if step == 0:
            row[start + position] = trajectory["token_ids"][position]
    known, rows = row != parameters["mask_id"], []
    number = 0
    for step in range(1, trajectory["num_steps"] + 1):
        while number < len(commits) and commits[number][0] < step:
            _, position, token, _ = commits[number]
            row[start + position] = token
            number += 1
        rows.append(row.clone())
    return torch.stack(rows), known


def _distributions(
    model: Any,
    rows: Tensor,
    known: Tensor,
    trajectory: dict[str, Any],
    commits: Sequence[tuple[int, int, int, float | None]],
) -> tuple[Tensor, Tensor]:
    """Return log probabilities [S, T, V] of every position in the row before each step.

    Also return the largest logit [S, T] of each position, at least 1.
    """
    parameters = trajectory["parameters"]
    is_grid = is_of_grid(parameters)
    block_length = trajectory["block_length"] if is_grid else None

    def logits_of(ids: Tensor) -> Tensor:
        if hasattr(model, "causal_logits"):
            # Append a block of masks, so that a whole block fits behind the last position of an
            # answer.
            room = (0, trajectory["block_length"])
            ids = torch.nn.functional.pad(ids, room, value=parameters["mask_id"])
            contexts = _contexts(ids, trajectory, commits)
            return torch.stack(
                [_behind(model, *context) for context in zip(ids, contexts, strict=True)]
            )
        raw = model.logits(ids, block_length)
        return shift_right(raw) if model.logit_shift else raw

    logits = logits_of(rows)
    if parameters["cfg_scale"] > 0:
        free = logits_of(torch.where(known, parameters["mask_id"], rows))
        logits = free + (parameters["cfg_scale"] + 1) * (logits - free)
    _edit(logits, rows, trajectory, {commit[0] for commit in commits})
    logits[..., parameters["forbidden_ids"]] = -torch.inf
    for step in trajectory["mask_forbidden"]:
        logits[step - 1, :, parameters["mask_id"]] = -torch.inf
    scales = logits.abs().nan_to_num(posinf=0.0).amax(dim=-1).clamp(min=1.0)
    return torch.log_softmax(logits, dim=-1), scales


def _edit(logits: Tensor, rows: Tensor, trajectory: dict[str, Any], steps: Collection[int]) -> None:
    """Apply the request's edits to the logits [S, T, V] of some steps, in place."""
    parameters = trajectory["parameters"]
    edits = {
        name: parameters[name] for name, neutral in _EDITS.items() if parameters[name] != neutral
    }
    if not edits:
        return
    start, mask_id = trajectory["prompt_length"], parameters["mask_id"]
    end = start + parameters["max_tokens" if parameters["suffix_ids"] else "gen_length"]
    edited = partial(
        shaping.edited,
        prompt_length=start,
        parameters=edits | {"ignore_eos": parameters["ignore_eos"]},
        mask=mask_id,
        ends=parameters["end_ids"] or parameters["stop_ids"],
        words=parameters["bad_words"],
    )
    for step in steps:
        row = rows[step - 1, :end].tolist()  # The tokens behind it are not part of the answer.
        own = logits[step - 1, start:]
        if parameters["algorithm"] != "introspective":
            own.copy_(edited(own, row))
            continue
        for place in range(len(own)):  # A row depends on the tokens before its position.
            before = row[: start + place] + [mask_id] * (end - start - place)
            own[place] = edited(own[: place + 1], before)[place]


def _contexts(
    rows: Tensor,
    trajectory: dict[str, Any],
    commits: Sequence[tuple[int, int, int, float | None]],
) -> list[range | None]:
    """Return the block with bidirectional attention in each step; None for a causal forward.

    This is for families with a causal context. A forward is causal if it predicts a seed, or
    confirms drafted tokens.
    """
    start, width = trajectory["prompt_length"], trajectory["block_length"]
    parameters, contexts = trajectory["parameters"], list[range | None]()
    following = start  # first position that is not confirmed
    for step, row in enumerate(rows, start=1):
        own = [(start + place, token) for when, place, token, _ in commits if when == step]
        if parameters["algorithm"] == "introspective":
            contexts.append(None)
            continue
        if parameters["algorithm"] == "self_speculation":
            block = range(following - 1, following - 1 + width)
            is_drafted = parameters["mask_id"] not in row[block.start : block.stop].tolist()
            if following > start and not is_drafted:
                contexts.append(block)
            else:
                contexts.append(None)
                following += sum(token != parameters["mask_id"] for _, token in own)
            continue
        places = [(position - start) % width for position, _ in own]
        first = own[0][0] - places[0] if own else start
        contexts.append(None if 0 in places else range(first, first + width))
    return contexts


def _behind(model: Any, row: Tensor, block: range | None) -> Tensor:
    """Return logits [T, V] of a row [T] after a causal context, by the predicted position."""
    if block is None:
        return shift_right(model.causal_logits(row[None], len(row)))[0]
    logits = model.causal_logits(row[None, : block.stop], block.start)[0]
    return torch.nn.functional.pad(logits, (0, 0, 0, len(row) - block.stop))


def is_of_grid(parameters: dict[str, Any]) -> bool:
    """Whether the parameters belong to a block-causal family."""
    return parameters["algorithm"] in _OF_GRIDS or "steps_per_block" in parameters


def differences(model: Any, prompt: Sequence[int], trajectory: dict[str, Any]) -> list[int] | None:
    """Run the published loop for the parameters of a trajectory.

    Returns:
        canvas positions with another token or step; None if no loop supports the parameters.
    """
    parameters = trajectory["parameters"]
    is_edited = any(parameters[name] != neutral for name, neutral in _EDITS.items())
    is_dream = parameters["algorithm"] == "dream"
    is_grid = is_of_grid(parameters)
    filters = (parameters["top_k"], parameters["top_p"], parameters["min_p"] or None)
    is_cut = parameters["min_p"] > 0 or (filters != (None,) * 3 and not (is_dream or is_grid))
    has_margin = parameters.get("frechet_margin") is not None
    if is_edited or is_cut or has_margin or parameters["suffix_ids"]:
        return None
    if trajectory["mask_forbidden"] and parameters["algorithm"] != "hierarchy_block":
        return None  # The published loops never forbid the mask token.
    run = _run_blocks if is_grid else _run_loop
    wanted = run(model, prompt, trajectory)
    filled, last = set(trajectory["filled"]), trajectory["num_steps"]
    tokens, steps = trajectory["token_ids"], trajectory["commit_steps"]
    differing = []
    for position, (token, step) in enumerate(zip(tokens, steps, strict=True)):
        if position in filled or position >= len(wanted):
            continue
        wanted_token, wanted_step = wanted[position]
        is_later = wanted_step > last
        if step != (-1 if is_later else wanted_step) or (not is_later and token != wanted_token):
            differing.append(position)
    return differing


def _run_loop(
    model: Any, prompt: Sequence[int], trajectory: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return token and step of every canvas position from the loop of a full-attention family."""
    parameters, algorithm = trajectory["parameters"], trajectory["parameters"]["algorithm"]
    ids = decode.SpecialIds(parameters["mask_id"], parameters["eos_id"], parameters["eot_id"])
    own = {name: parameters[name] for name in _OWN[algorithm] if parameters[name] not in (None, [])}
    own = {name: value for name, value in own.items() if value is not False}
    options = {
        name: parameters[name] for name, usual in _OPTIONS.items() if parameters[name] != usual
    }
    if algorithm != "dream":
        own["block_length"] = parameters["block_length"]
    decoded = dispatch.run(
        model,
        prompt,
        ids=ids,
        algorithm=algorithm,
        gen_length=parameters["gen_length"],
        seed=trajectory["seed"],
        **options,
        **own,
    )
    steps = [0] * len(decoded.ids)
    for step in decoded.trace:
        for position in step.committed:
            if position >= len(prompt):
                steps[position - len(prompt)] = step.index + 1
    return list(zip(decoded.ids, steps, strict=True))


def _run_blocks(
    model: Any, prompt: Sequence[int], trajectory: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return token and step of every canvas position from the loop of a block-causal family."""
    parameters, algorithm = trajectory["parameters"], trajectory["parameters"]["algorithm"]
    width, seed = parameters["block_length"], trajectory["seed"]

    def logits_of(tokens: Sequence[int]) -> Tensor:
        distributions: Tensor = model.logits(torch.tensor([list(tokens)]), width)[0]
        return distributions

    def uniform(forward: int, position: int) -> Tensor:
        return uniform_matrix(seed, dispatch.DREAM_TOKEN, forward, [position], num_columns)[0]

    kind = type(model).__name__.removesuffix("Reference")
    num_columns = logits_of(prompt[:1]).shape[-1]
    own = {name: parameters[name] for name in _OWN[algorithm] if name in parameters}
    if algorithm == "semi_ar":
        own = {"steps_per_block": parameters["steps_per_block"]}
    decoded = block_loops.run(
        logits_of,
        prompt,
        algorithm=algorithm,
        gen_length=parameters["gen_length"],
        block_length=width,
        mask_id=parameters["mask_id"],
        stop_ids=parameters["stop_ids"],
        scores_after_filters=kind not in ("SDAR", "SDARMoe", "StableDiffCoder"),
        counts_masks=kind == "StableDiffCoder",
        temperature=parameters["temperature"],
        top_k=parameters["top_k"],
        top_p=parameters["top_p"],
        uniform=uniform if parameters["temperature"] > 0 else None,
        **own,
    )
    distributions: list[tuple[int, int]] = []
    before = [parameters["mask_id"]] * parameters["gen_length"]
    steps = [0] * parameters["gen_length"]
    for number, canvas in enumerate(decoded.history, start=1):
        for position, token in enumerate(canvas):
            if token != before[position]:
                steps[position] = number
        before = canvas
    late = trajectory["num_steps"] + 1
    for token, step in zip(before, steps, strict=True):
        distributions.append((token, step if token != parameters["mask_id"] else late))
    return distributions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("answers", type=Path, help="file of answers, JSON lines")
    options = parser.parse_args()
    model, agrees = load_reference(options.model, torch.float64), True
    for number, line in enumerate(options.answers.read_text().splitlines()):
        answer = json.loads(line)
        if not answer["trajectory"]["replayable"]:
            print(f"answer {number}: its cache or its rule cannot be replayed")
            continue
        replayed = replay(model, answer["prompt_token_ids"], answer["trajectory"])
        agrees &= replayed.agrees
        print(f"answer {number}: {replayed}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
